import asyncio
import dataclasses
import logging
import math
import threading
import time
import traceback
from concurrent.futures import Future

import pytest
import torch

from rzero.buffers import FinishCode, ProvenanceError, provenance_digest, segments, unpack
from rzero.collectors import (
    EngineError,
    Environment,
    GroupFailed,
    LagReport,
    MultiTurn,
    Prompt,
    Step,
    named_weights,
    strict,
    weight_digests,
)
from rzero.collectors.hashing import stream_seed
from rzero.collectors.pack_completions import group_fields, pack_groups
from rzero.kernels.causal_lm import causal_lm_log_probs
from rzero.losses import group_mean_advantages, reinforce_loss
from tests.collectors.conftest import EOS, VOCABULARY, llama, request
from tests.collectors.test_collector import GROUP, make_collector, train

SAID = (11, 12, 13)  # what the environment answers
ENDS = tuple(range(2, VOCABULARY, 4))  # many tokens end a turn, so that turns are short
FAULTY = 4  # the prompt in whose trajectories something goes wrong


class Counting(Environment):
    """Answers the same tokens, and is over after so many turns; counts its objects and their ends."""

    def __init__(self, turns=3, said=SAID):
        self.turns, self.said, self.actions, self.closed = turns, said, [], 0

    async def reset(self, prompt, *, seed):
        self.prompt, self.seed = prompt, seed
        return (*prompt.token_ids, 3)

    async def step(self, action):
        self.actions.append(list(action))
        over = len(self.actions) == self.turns
        return Step(self.said, 0.25 * len(action), over, False, {"turn": len(self.actions)})

    async def close(self):
        self.closed += 1


def play(engine, environment, *, requests=None, prompt_id=0, **settings):
    """Trajectories in the environments that ``environment`` makes, and those."""
    made = []

    def make():
        made.append(environment())
        return made[-1]

    interaction = MultiTurn(make, **{"max_turns": 5, "timeout": 30.0, **settings})
    prompt = Prompt(prompt_id=prompt_id, token_ids=(1, 5, 7), problem=None)
    futures = [interaction.play(engine, prompt, r) for r in requests or [request(0, max_new_tokens=60)]]
    try:
        return [future.result(timeout=60) for future in futures], made
    finally:
        interaction.close()


def test_a_trajectory_is_one_row_with_evidence_where_the_model_spoke(make_engine):
    model = llama(0)
    [row], [environment] = play(make_engine(llama(0), version=7, eos_token_ids=ENDS), Counting)
    first, second, third = environment.actions
    assert row.request.prompt == (1, 5, 7, 3)
    assert row.response.tolist() == [*first, *SAID, *second, *SAID, *third]
    sampled = [*[True] * len(first), *[False] * 3, *[True] * len(second), *[False] * 3, *[True] * len(third)]
    sampled = torch.tensor(sampled)
    assert row.policy_version.tolist() == [7 if s else -1 for s in sampled]
    assert row.behavior_log_probs.isnan().tolist() == (~sampled).tolist()
    # One forward over the whole row gives every sampled token the probability it was drawn with.
    ids = torch.tensor([[*row.request.prompt, *row.response.tolist()]])
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits[0].double().log_softmax(-1)[3:-1]
    recomputed = log_probs.gather(-1, row.response.long()[:, None])[:, 0]
    assert (recomputed[sampled] - row.behavior_log_probs[sampled]).abs().max() < 1e-5
    nan, none = torch.full((4,), torch.nan), torch.full((4,), -1, dtype=torch.int32)
    digest = provenance_digest(
        ids[0].int(), torch.cat([nan, row.behavior_log_probs]), torch.cat([none, row.policy_version])
    )
    assert torch.equal(row.digest, digest)
    assert row.finish_code is FinishCode.STOP
    assert row.reward == pytest.approx(0.25 * int(sampled.sum()))
    assert [info["turn"] for info in row.infos] == [1, 2, 3]
    assert row.t_submit_ns <= row.t_first_ns < row.t_done_ns
    assert environment.closed == 1


def end_turns(model, *at):
    """Make the model end its turn with exactly these of the tokens it draws, counted from 1."""
    drawn = []

    def force(module, args, kwargs, output):
        if kwargs["input_ids"].shape[1] == 1:  # not a prefill
            drawn.append(1)
            output.logits[..., EOS] = 1e4 if len(drawn) in at else -1e4
        return output

    model.register_forward_hook(force, with_kwargs=True)
    return drawn


def test_weights_may_change_between_turns_and_within_one(make_engine):
    model = llama(0)
    engine = make_engine(model, version=3)
    drawn, swapping = end_turns(model, 2, 5), []

    def swap(version):
        weights = named_weights(llama(version))
        engine.swap(version, weights, weight_digests(weights))

    def swap_at_the_fourth(module, args, kwargs):
        if len(drawn) == 3 and kwargs["input_ids"].shape[1] == 1:
            swapping.append(threading.Thread(target=swap, args=(5,)))
            swapping[0].start()
            with (
                engine._boundary.condition
            ):  # go on once the swap has been asked for; it is granted after this token
                engine._boundary.condition.wait_for(lambda: engine._boundary.wanted)

    class Swapping(Counting):
        async def step(self, action):
            if not self.actions:
                await asyncio.to_thread(swap, 4)
            return await super().step(action)

    model.register_forward_pre_hook(swap_at_the_fourth, with_kwargs=True)
    [row], _ = play(engine, lambda: Swapping(turns=2))
    swapping[0].join()
    assert row.policy_version.tolist() == [3, 3, -1, -1, -1, 4, 4, 5]
    [rollout] = unpack(pack_groups([group_fields([row], [row.reward])]))
    assert segments(rollout) == [(0, 2, 3), (5, 7, 4), (7, 8, 5)]
    # Three versions and eight tokens, of which five were sampled: lags 3, 3, 2, 2, 1 at learner version 6.
    report = LagReport(nominal_lag=2)
    batch = pack_groups([group_fields([row], [row.reward])])
    report.update(batch.policy_version, batch.response_mask, batch.cu_seqlens, learner_version=6)
    assert report.tokens == 5
    assert report.means() == {"start": 3.0, "end": 1.0, "token_mean": 11 / 5}


def trajectories(make_engine):
    requests = [request(uid, max_new_tokens=60) for uid in range(GROUP)]
    rows, _ = play(make_engine(llama(0), eos_token_ids=ENDS), Counting, requests=requests)
    return pack_groups([group_fields(rows, [1.0, 0.0, 2.0, 0.5])])


def gradient(batch, log_probs):
    log_probs = log_probs.clone().requires_grad_()
    advantages = group_mean_advantages(batch.reward, batch.group_id, group_size=GROUP)
    mask, offsets = batch.response_mask, batch.cu_seqlens
    loss = reinforce_loss(log_probs, batch.behavior_log_probs, advantages, mask, cu_seqlens=offsets)
    loss.backward()
    return loss.detach(), log_probs.grad


def test_the_loss_weighs_sampled_tokens_alone(make_engine):
    batch = trajectories(make_engine)
    mask, offsets = batch.response_mask, batch.cu_seqlens
    within = torch.arange(len(mask)) - offsets[:-1].repeat_interleave(offsets.diff())
    said = ~mask & (within >= batch.prompt_length.repeat_interleave(offsets.diff()))
    assert said.sum() == GROUP * 2 * len(SAID)
    log_probs = torch.where(mask, batch.behavior_log_probs, -1.0)
    loss, grad = gradient(batch, log_probs)
    # By hand, at ratios of 1: -A_i log p / (B T_i), with T_i the sampled tokens of row i.
    row = torch.arange(GROUP).repeat_interleave(offsets.diff())
    counts = torch.stack([mask[row == i].sum() for i in range(GROUP)])
    advantages = torch.tensor([0.125, -0.875, 1.125, -0.375])
    expected = torch.where(mask, -advantages[row] / (GROUP * counts[row]), 0.0)
    torch.testing.assert_close(grad, expected)
    for other in (-7.0, 0.0, math.nan, math.inf):
        changed = gradient(batch, torch.where(said, other, log_probs))
        assert torch.equal(changed[0], loss)
        assert torch.equal(changed[1], grad)
    assert not torch.equal(gradient(batch, log_probs - 0.5 * mask)[1], grad)


def test_the_learner_scores_what_was_sampled_in_the_context_of_what_was_said(make_engine):
    batch = trajectories(make_engine)
    for prompt_length in (None, batch.prompt_length):
        log_probs, _ = causal_lm_log_probs(
            llama(0),
            batch.token_ids,
            batch.cu_seqlens,
            batch.response_mask,
            temperature=1.0,
            prompt_length=prompt_length,
        )
        delta = (log_probs - batch.behavior_log_probs)[batch.response_mask]
        assert delta.abs().max() < 1e-5
        assert not log_probs[~batch.response_mask].any()


def test_limits_end_a_trajectory_whole_and_say_so(make_engine):
    class Truncating(Counting):
        async def step(self, action):
            return Step(SAID, 1.0, False, True, {})

    model = llama(0)
    drawn = end_turns(model, *range(2, 1000, 2))
    engine = make_engine(model)

    def lengths(environment, **settings):
        drawn.clear()
        limit = settings.pop("limit", 60)
        [row], [made] = play(engine, environment, requests=[request(0, max_new_tokens=limit)], **settings)
        assert row.policy_version[-1] == 0  # the last token was sampled
        return row.finish_code, len(row.response), len(made.actions)

    # Turns of two tokens, and three said between them.
    assert lengths(Counting) == (FinishCode.STOP, 2 + 3 + 2 + 3 + 2, 3)
    assert lengths(Counting, max_turns=2) == (FinishCode.LENGTH, 2 + 3 + 2, 2)
    assert lengths(Truncating) == (FinishCode.LENGTH, 2, 0)
    assert lengths(Counting, limit=8) == (FinishCode.LENGTH, 2 + 3 + 2, 2)  # no room beyond 10 tokens
    assert lengths(Counting, limit=6) == (FinishCode.LENGTH, 2 + 3 + 1, 2)  # the second turn is cut
    assert lengths(Counting, limit=5) == (FinishCode.LENGTH, 2, 1)
    assert lengths(lambda: Counting(said=())) == (FinishCode.STOP, 2 + 2 + 2, 3)


def test_trajectories_repeat_themselves_whoever_plays_beside(make_engine):
    requests = [request(uid, max_new_tokens=60) for uid in range(6)]
    together, environments = play(make_engine(llama(0), eos_token_ids=ENDS), Counting, requests=requests)
    [alone], [environment] = play(make_engine(llama(0), eos_token_ids=ENDS), Counting, requests=requests[3:4])
    assert alone.response.tolist() == together[3].response.tolist()
    assert environment.seed == environments[3].seed != environments[2].seed


def test_every_turn_draws_random_numbers_of_its_own(make_engine):
    engine = make_engine(llama(0), eos_token_ids=ENDS)
    [row], [environment] = play(engine, Counting)
    first, second, _ = environment.actions
    prompt = (*row.request.prompt, *first, *SAID)
    seeds = [row.request.seed, *(stream_seed(row.request.seed, turn) for turn in range(3))]
    again = [engine.submit(request(9, prompt=prompt, seed=s, max_new_tokens=50)).result() for s in seeds]
    assert [turn.response.tolist() == second for turn in again] == [False, False, True, False]


@pytest.mark.parametrize("end", ["timeout", "close"])
def test_a_trajectory_that_is_not_waited_for_any_more_is_closed(make_engine, end):
    began, closed = threading.Event(), threading.Event()

    class Hanging(Counting):
        async def step(self, action):
            began.set()
            await asyncio.sleep(3600)

        async def close(self):
            closed.set()

    interaction = MultiTurn(Hanging, max_turns=3, timeout=0.2 if end == "timeout" else 600)
    prompt = Prompt(prompt_id=0, token_ids=(1, 5, 7), problem=None)
    future = interaction.play(make_engine(llama(0)), prompt, request(0))
    assert began.wait(30)
    if end == "timeout":
        assert "no answer within 0.2 s from step for prompt 0" in str(future.exception(timeout=30))
    else:
        interaction.close()
        assert "MultiTurn was closed" in str(future.exception(timeout=30))
    assert closed.wait(30)
    interaction.close()


def test_a_changed_turn_is_not_taken(make_engine):
    class Altering:
        def __init__(self, engine):
            self.engine = engine

        def submit(self, request):
            turn = self.engine.submit(request).result()
            altered: Future = Future()
            log_probs = turn.behavior_log_probs - torch.tensor(1e-6)
            altered.set_result(dataclasses.replace(turn, behavior_log_probs=log_probs))
            return altered

    with pytest.raises(ProvenanceError, match="the digest of a turn of uid 0 must hold, got another"):
        play(Altering(make_engine(llama(0))), Counting)


# ---------------------------------------------------------------------------------- in the collector


def collect(make_engine, environment, *, updates=6, timeout=30.0):
    """Batches of a run in strict order, where no group is passed by others, and its statistics."""
    engines = [make_engine(llama(0), max_slots=slots, eos_token_ids=ENDS) for slots in (7, 5)]
    interaction = MultiTurn(environment, max_turns=4, timeout=timeout)
    collector = make_collector(
        engines, nominal_lag=1, order=strict(), reward_fn=interaction, max_new_tokens=40
    )
    try:
        return train(collector, llama(0), updates), collector.stats()
    finally:
        collector.shutdown()


def whole(counts):
    return (
        counts["submitted"] == counts["accepted"] + counts["filtered"] + counts["failed"] + counts["running"]
    )


def test_a_run_of_trajectories(make_engine):
    made = []

    def make():
        made.append(Counting(turns=2, said=(9,)))
        return made[-1]

    batches, stats = collect(make_engine, make)
    report = LagReport(nominal_lag=1)
    for version, batch in enumerate(batches):
        report.update(batch.policy_version, batch.response_mask, batch.cu_seqlens, learner_version=version)
        assert batch.group_id.unique(return_counts=True)[1].tolist() == [GROUP] * 3
        sampled = torch.stack([row.response_mask.sum() for row in unpack(batch)])
        torch.testing.assert_close(batch.reward, 0.25 * sampled)
    assert report.to_dict()["start"]["per_response"]["max"] == 1
    assert report.tokens == sum(int(batch.response_mask.sum()) for batch in batches)
    assert stats["failed"] == 0
    assert whole(stats)
    assert all(environment.closed <= 1 for environment in made)


class Faulty(Counting):
    """Something goes wrong in one trajectory of one group."""

    when = "step"

    async def reset(self, prompt, *, seed):
        tokens = await super().reset(prompt, seed=seed)
        await self.fault("reset")
        return tokens

    async def step(self, action):
        await self.fault("step")
        return await super().step(action)

    async def close(self):
        await super().close()
        await self.fault("close")

    async def fault(self, where):
        if where == self.when and self.prompt.prompt_id == FAULTY and self.is_chosen():
            await self.go_wrong()

    def is_chosen(self):
        chosen.setdefault("one", self)
        return chosen["one"] is self


chosen = {}


@pytest.fixture(autouse=True)
def nobody_chosen():
    chosen.clear()


class Hanging(Faulty):
    async def go_wrong(self):
        await asyncio.sleep(3600)


class Failing(Faulty):
    async def go_wrong(self):
        raise ConnectionError("the sandbox went away")


class Declaring(Faulty):
    async def go_wrong(self):
        raise GroupFailed("sandbox full", "no container for it")


@pytest.mark.parametrize(
    ("kind", "reason", "when"),
    [
        *((Hanging, "environment timeout", when) for when in ("reset", "step", "close")),
        *((Failing, "environment error", when) for when in ("reset", "step", "close")),
        (Declaring, "sandbox full", "step"),
    ],
)
def test_a_fault_in_one_trajectory_costs_its_group_and_no_other(make_engine, caplog, kind, reason, when):
    faulty = type(kind.__name__, (kind,), {"when": when})
    with caplog.at_level(logging.WARNING):
        batches, stats = collect(make_engine, faulty, timeout=1.5)
    trained = {prompt for batch in batches for prompt in batch.prompt_id.tolist()}
    assert FAULTY not in trained
    assert set(range(FAULTY)) | {FAULTY + 1} <= trained
    assert all(row.response_mask[-1] for batch in batches for row in unpack(batch))  # no row is a part of one
    assert stats["failed"] == stats[f"failed/{reason}"] == 1
    assert whole(stats)
    [record] = caplog.records
    failure = record.exc_info[1]
    if kind is not Declaring:
        assert f" {when} for prompt {FAULTY}" in str(failure)
    if kind is Failing:
        assert "ConnectionError" in str(failure) and "the sandbox went away" in str(failure)
        assert any(f.name == "go_wrong" for f in traceback.extract_tb(failure.__cause__.__traceback__))
    assert chosen["one"].closed == 1


@pytest.mark.parametrize("fault", ["constructor", "reward", "not async", "blocks"])
def test_the_run_ends_when_every_group_fails(make_engine, fault):
    release = threading.Event()

    class Broken(Counting):
        def __init__(self):
            super().__init__()
            if fault == "constructor":
                raise OSError("no sandbox")

        async def reset(self, prompt, *, seed):
            if fault == "blocks":
                release.wait(60)
            return await super().reset(prompt, seed=seed)

        async def step(self, action):
            return Step(SAID, math.nan, True, False, {})

    if fault == "not async":
        Broken.step = lambda self, action: Step(SAID, 1.0, True, False, {})
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="6 groups in a row failed, the last by environment") as caught:
        try:
            collect(make_engine, Broken, timeout=0.5)
        finally:
            release.set()
    assert time.monotonic() - began < 20
    assert isinstance(caught.value.__cause__, GroupFailed)
    said = {"constructor": "no sandbox", "reward": "reward must be finite, got nan"}
    said |= {"not async": "await", "blocks": "no answer within 0.5 s"}
    assert said[fault] in str(caught.value)


def test_an_exception_in_an_engine_is_no_failure_of_a_group(make_engine):
    def break_down(module, args, kwargs):
        raise FloatingPointError("the model broke down")

    model = llama(0)
    model.register_forward_pre_hook(break_down, with_kwargs=True)
    reward_fn = MultiTurn(Counting, max_turns=3)
    collector = make_collector([make_engine(model)], nominal_lag=1, reward_fn=reward_fn)
    with pytest.raises((FloatingPointError, EngineError), match="the model broke down") as caught:
        next(iter(collector))
    collector.shutdown()
    # A turn that was asked for after the engine had failed says so, with the original exception behind it.
    error = caught.value.__cause__ or caught.value
    assert any(frame.name == "break_down" for frame in traceback.extract_tb(error.__traceback__))


def test_refusals():
    with pytest.raises(ValueError, match="max_turns must be at least 1, got 0"):
        MultiTurn(Counting, max_turns=0)
    with pytest.raises(ValueError, match="seconds must be greater than 0, got -1"):
        MultiTurn(Counting, max_turns=1, timeout=-1)
