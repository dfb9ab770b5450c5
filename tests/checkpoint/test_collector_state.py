"""A collector that is stopped at any update goes on elsewhere: nothing lost, nothing twice."""

import copy
import itertools
import threading

import pytest
import torch

from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    GroupFailed,
    Prompt,
    SlotScheduler,
    finished_first,
    strict,
)
from tests.collectors.conftest import llama

GROUP, PROMPTS, UPDATES = 4, 3, 7


class Stream:
    """Every second number is a prompt, so that a prompt's id is not its place in the stream."""

    def __init__(self):
        self.cursor = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.cursor += 2
        return self.prompt(self.cursor - 2)

    def prompt(self, prompt_id):
        return Prompt(prompt_id=prompt_id, token_ids=(1, 3 + prompt_id % 20, 4), problem=prompt_id)

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state_dict):
        self.cursor = state_dict["cursor"]


class CountingReward:
    """A reward function that remembers something, and refuses every 8th prompt."""

    def __init__(self):
        self.state = {"calls": 0}

    @property
    def calls(self):
        return self.state["calls"]

    def __call__(self, prompt, responses):
        if prompt.prompt_id % 16 == 14:
            raise GroupFailed("refused", "this prompt is not rewarded")
        self.state["calls"] += 1
        return [float(len(response)) for response in responses]

    def state_dict(self):
        return self.state  # itself, so it goes on changing

    def load_state_dict(self, state_dict):
        self.state = dict(state_dict)


SCHEDULERS = {
    "synchronous": lambda v: CreditScheduler(
        nominal_lag=0, groups_per_batch=PROMPTS, order=strict(), version=v
    ),
    "credits": lambda v: CreditScheduler(
        nominal_lag=2, groups_per_batch=PROMPTS, order=finished_first(), version=v
    ),
    "strict": lambda v: CreditScheduler(nominal_lag=2, groups_per_batch=PROMPTS, order=strict(), version=v),
    "slots": lambda v: SlotScheduler(queue=1, in_flight=4, groups_per_batch=PROMPTS, version=v),
}


def model_of(version):
    model = llama(0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01 * version)
    return model


def make_collector(make_engine, scheduler, *, version=0, prompts=None, reward=None, timeout=30.0):
    return AsyncRolloutCollector(
        [make_engine(model_of(version), max_slots=5, version=version)],
        Stream() if prompts is None else prompts,
        reward or CountingReward(),
        scheduler=SCHEDULERS[scheduler](version),
        buffer=ProvenanceReplayBuffer(
            storage=TokenLogStorage(), group_size=GROUP, groups_per_batch=PROMPTS, capacity_updates=8
        ),
        group_size=GROUP,
        max_new_tokens=6,
        seed=0,
        timeout=timeout,
    )


def train(collector, version, updates, *, quiesce=False):
    """Batches of updates from a version on; the weights depend on the version alone."""
    batches = []
    for batch in itertools.islice(collector, updates):
        assert collector.learner_version == version
        version += 1
        batches.append(batch)
        if quiesce:
            collector.quiesce()
        collector.update_policy_weights_(model_of(version))
    return batches


def stop(collector):
    """What a kill leaves: nothing but the state that was saved before."""
    collector.shutdown()


def samples(batches):
    return sorted(
        (prompt, index)
        for batch in batches
        for prompt, index in zip(batch.prompt_id.tolist(), batch.sample_index.tolist(), strict=True)
    )


def train_and_save(collector, first, last, *, early):
    """The same, and the state at the end; ``early``: taken while the last batch is being trained on."""
    if not early:
        return train(collector, first, last - first), collector.state_dict()
    batches = train(collector, first, last - 1 - first)
    batches.append(next(iter(collector)))
    snapshot = collector.snapshot()
    collector.update_policy_weights_(model_of(last))
    state = snapshot.result(30)
    return batches, state


def interrupted(make_engine, scheduler, stops, *, early=False):
    collector, batches = make_collector(make_engine, scheduler), []
    for first, last in itertools.pairwise([0, *stops, UPDATES]):
        more, state = train_and_save(collector, first, last, early=early and last < UPDATES)
        batches += more
        if last == UPDATES:
            break
        kept = copy.deepcopy(state)
        train(collector, last, 1)  # lost by the kill, and done again
        stop(collector)
        assert str(state) == str(kept)  # whatever happened since
        collector = make_collector(make_engine, scheduler, version=last)
        collector.load_state_dict(state)
    final = collector.state_dict()
    stop(collector)
    return batches, final


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("scheduler", ["credits", "slots"])
def test_every_prompt_is_trained_on_once_or_still_in_work(make_engine, scheduler, early):
    batches, final = interrupted(make_engine, scheduler, stops=[1, 2, 5], early=early)
    trained = {batch_id for batch in batches for batch_id in batch.group_id.unique().tolist()}
    state = final["scheduler"]
    in_work = {*state["running"], *state["finished"], *state["released"]}
    failed = {k for k in range(state["counts"]["submitted"]) if k % 8 == 7} - in_work
    assert len(samples(batches)) == len(set(samples(batches))) == UPDATES * PROMPTS * GROUP
    assert not trained & in_work and not trained & failed
    assert trained | in_work | failed == set(range(state["counts"]["submitted"]))
    assert final["failures"]["by_reason"].get("refused", 0) == len(failed) == state["counts"]["failed"]
    for batch in batches:  # The t-th ticket got the t-th prompt.
        assert torch.equal(batch.prompt_id, 2 * batch.group_id)
        assert (batch.uid == batch.group_id * GROUP + batch.sample_index).all()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("scheduler", ["synchronous", "strict"])
def test_an_interrupted_run_trains_on_the_same_samples(make_engine, scheduler, early):
    collector = make_collector(make_engine, scheduler)
    whole = train(collector, 0, UPDATES)
    stop(collector)
    batches, _ = interrupted(make_engine, scheduler, stops=[2, 3], early=early)
    assert samples(batches) == samples(whole)


def test_groups_that_wait_keep_their_evidence(make_engine):
    collector = make_collector(make_engine, "strict")
    train(collector, 0, 1)
    collector.quiesce()
    state = collector.state_dict()
    assert state["finished"] and not state["in_flight"]
    kept = {k: v.clone() for k, v in state["finished"].items()}
    stop(collector)
    other = make_collector(make_engine, "strict", version=1)
    other.load_state_dict(state)
    again = other.state_dict()
    assert all(torch.equal(again["finished"][name].nan_to_num(), kept[name].nan_to_num()) for name in kept)
    assert again["buffer"]["storage"].keys() == state["buffer"]["storage"].keys()
    stop(other)


def test_quiescing_leaves_no_choice_to_time(make_engine):
    """Every group is the work of the version that let it start: with lag 2, of two updates before."""
    collector = make_collector(make_engine, "strict")
    batches = train(collector, 0, 6, quiesce=True)
    stop(collector)
    for update, batch in enumerate(batches):
        versions = batch.policy_version[batch.response_mask].unique().tolist()
        assert versions == [max(0, update - 2)], update
        assert batch.group_id.unique_consecutive().tolist() == sorted(batch.group_id.unique().tolist())


def test_the_state_of_the_reward_function_comes_along(make_engine):
    reward = CountingReward()
    collector = make_collector(make_engine, "synchronous", reward=reward)
    train(collector, 0, 2)
    state = collector.state_dict()
    stop(collector)
    other = CountingReward()
    restored = make_collector(make_engine, "synchronous", version=2, reward=other)
    restored.load_state_dict(state)
    assert other.calls == state["interaction"]["calls"] >= 2 * PROMPTS
    stop(restored)


class SlowStream(Stream):
    """Tells its state only when it is let."""

    def __init__(self):
        super().__init__()
        self.asked, self.let = threading.Event(), threading.Event()

    def state_dict(self):
        self.asked.set()
        assert self.let.wait(30)
        return super().state_dict()


def test_no_batch_is_taken_before_the_state_is(make_engine):
    prompts = SlowStream()
    collector, batches = make_collector(make_engine, "credits", prompts=prompts), []
    train(collector, 0, 1)
    snapshot = collector.snapshot()
    learner = threading.Thread(target=lambda: batches.append(next(iter(collector))))
    learner.start()
    assert prompts.asked.wait(30)
    learner.join(0.3)
    assert learner.is_alive() and not snapshot.done() and not batches
    prompts.let.set()
    learner.join(30)
    assert snapshot.result(0)["batches"] == 1 and len(batches) == 1
    stop(collector)


def test_a_state_that_does_not_come_is_an_error(make_engine):
    prompts = SlowStream()
    collector = make_collector(make_engine, "credits", prompts=prompts, timeout=3.0)
    train(collector, 0, 1)
    collector.snapshot()
    with pytest.raises(TimeoutError, match="its state must be copied within 3 s, got none"):
        next(iter(collector))
    prompts.let.set()
    stop(collector)


def test_a_state_is_there_without_a_thread_and_after_it(make_engine):
    collector = make_collector(make_engine, "credits")
    assert collector.snapshot().result(0)["batches"] == 0
    train(collector, 0, 2)
    stop(collector)
    assert collector.snapshot().result(0)["batches"] == 2
    plain = make_collector(make_engine, "credits", prompts=itertools.cycle([Stream().prompt(0)]))
    train(plain, 0, 1)
    with pytest.raises(TypeError, match="prompts must be a PromptStream"):
        plain.snapshot().result(30)
    train(plain, 1, 1)  # the run goes on
    stop(plain)


def test_the_end_of_the_thread_leaves_no_state_behind(make_engine):
    """It is asked for, then the thread is told to stop: one of both orders, 50 times."""
    for _ in range(50):
        collector = make_collector(make_engine, "credits")
        collector.start()
        stopping = threading.Thread(target=collector.shutdown)
        stopping.start()
        assert collector.snapshot().result(10)["batches"] == 0
        stopping.join()


def test_refusals(make_engine):
    plain = make_collector(make_engine, "credits", prompts=iter([]))
    with pytest.raises(TypeError, match="prompts must be a PromptStream, to be found again"):
        plain.state_dict()
    collector = make_collector(make_engine, "credits")
    train(collector, 0, 2)
    state = collector.state_dict()
    with pytest.raises(RuntimeError, match="must come before the first batch"):
        collector.load_state_dict(state)
    stop(collector)
    with pytest.raises(ValueError, match="engines must hold version 2, got 0"):
        make_collector(make_engine, "credits").load_state_dict(state)
    with pytest.raises(ValueError, match="settings must be"):
        make_collector(make_engine, "slots", version=2).load_state_dict(state)
