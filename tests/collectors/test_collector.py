import itertools
import traceback

import pytest
import torch

from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    LagReport,
    Prompt,
    finished_first,
    strict,
)
from tests.collectors.conftest import llama

GROUP, PROMPTS = 4, 3


def prompts():
    for index in itertools.count():
        yield Prompt(prompt_id=index, token_ids=(1, 3 + index % 20, 4), problem=index)


def length_reward(prompt, responses):
    return [len(response) + prompt.problem % 2 for response in responses]


def make_collector(engines, *, nominal_lag, order=None, reward_fn=length_reward, **settings):
    return AsyncRolloutCollector(
        engines,
        prompts(),
        reward_fn,
        scheduler=CreditScheduler(
            nominal_lag=nominal_lag, groups_per_batch=PROMPTS, order=order or finished_first()
        ),
        buffer=ProvenanceReplayBuffer(
            storage=TokenLogStorage(),
            group_size=GROUP,
            groups_per_batch=PROMPTS,
            capacity_updates=nominal_lag + 2,
        ),
        group_size=GROUP,
        seed=0,
        **{"max_new_tokens": 6, "timeout": 30.0, **settings},
    )


def train(collector, model, updates):
    """Updates that change the weights, as a learner's would; batches with the version each was trained at."""
    batches = []
    for version, batch in enumerate(itertools.islice(collector, updates)):
        assert collector.learner_version == version
        with torch.no_grad():
            model.lm_head.weight.add_(0.01)
        collector.update_policy_weights_(model)
        batches.append(batch)
    return batches


@pytest.mark.parametrize("nominal_lag", [0, 1, 3])
def test_lag_is_bounded_and_zero_when_synchronous(make_engine, nominal_lag):
    collector = make_collector([make_engine(llama(0), max_slots=5)], nominal_lag=nominal_lag, order=strict())
    report = LagReport(nominal_lag=nominal_lag)
    for version, batch in enumerate(train(collector, llama(0), 8)):
        report.update(batch.policy_version, batch.response_mask, batch.cu_seqlens, learner_version=version)
    collector.shutdown()
    lags = report.to_dict()["start"]["per_response"]
    assert min(1, nominal_lag) <= lags["max"] <= nominal_lag
    assert lags["mean"] <= nominal_lag


def test_groups_are_whole_and_each_response_is_used_once(make_engine):
    engines = [make_engine(llama(0), max_slots=3), make_engine(llama(0), max_slots=5)]
    collector = make_collector(engines, nominal_lag=2)
    batches = train(collector, llama(0), 10)
    collector.shutdown()
    for batch in batches:
        assert batch.num_responses == GROUP * PROMPTS
        groups, counts = batch.group_id.unique(return_counts=True)
        assert counts.tolist() == [GROUP] * PROMPTS
        for group in groups:
            rows = batch.group_id == group
            assert batch.sample_index[rows].tolist() == list(range(GROUP))
            assert len(batch.prompt_id[rows].unique()) == 1
        assert torch.equal(batch.reward, (batch.response_length + batch.prompt_id % 2).float())
    uids = torch.cat([batch.uid for batch in batches]).tolist()
    assert len(set(uids)) == len(uids)
    counts = collector.stats()
    assert (
        counts["submitted"] == counts["accepted"] + counts["filtered"] + counts["failed"] + counts["running"]
    )


def test_synchronous_runs_repeat_themselves(make_engine):
    runs = []
    for _ in range(2):
        collector = make_collector([make_engine(llama(0), max_slots=4)], nominal_lag=0)
        batches = train(collector, llama(0), 3)
        collector.shutdown()
        order = [batch.uid.argsort() for batch in batches]
        runs.append([batch.response_length[o].tolist() for batch, o in zip(batches, order, strict=True)])
    assert runs[0] == runs[1]


def explode(prompt, responses):
    if prompt.prompt_id == 4:
        raise ZeroDivisionError("the verifier broke down")
    return length_reward(prompt, responses)


def test_an_exception_in_the_reward_function_is_raised_with_its_traceback(make_engine):
    collector = make_collector([make_engine(llama(0))], nominal_lag=2, reward_fn=explode)
    with pytest.raises(ZeroDivisionError, match="the verifier broke down") as caught:
        train(collector, llama(0), 10)
    assert any(frame.name == "explode" for frame in traceback.extract_tb(caught.value.__traceback__))


def test_an_exception_in_an_engine_is_raised_with_its_traceback(make_engine):
    model, calls = llama(0), itertools.count()

    def break_down(module, args, kwargs):
        if next(calls) == 30:
            raise FloatingPointError("the model broke down")

    model.register_forward_pre_hook(break_down, with_kwargs=True)
    collector = make_collector([make_engine(model, max_slots=4)], nominal_lag=1)
    with pytest.raises(FloatingPointError, match="the model broke down") as caught:
        train(collector, llama(0), 30)
    assert any(frame.name == "break_down" for frame in traceback.extract_tb(caught.value.__traceback__))


def test_a_failed_publish_is_raised(make_engine):
    collector = make_collector([make_engine(llama(0))], nominal_lag=0)
    batches = iter(collector)
    next(batches)
    collector.update_policy_weights_(llama(0, attention_bias=True))
    with pytest.raises(RuntimeError, match="name exactly the model's tensors"):
        next(batches)


def test_waiting_ends_and_says_what_is_missing(make_engine):
    engine = make_engine(llama(0))
    engine.pause()
    collector = make_collector([engine], nominal_lag=0, timeout=0.2)
    with pytest.raises(TimeoutError, match="0 of 3 groups"):
        next(iter(collector))
    engine.resume()


def test_refusals(make_engine):
    with pytest.raises(ValueError, match=r"engines must all hold version 0, got \[0, 7\]"):
        make_collector([make_engine(llama(0)), make_engine(llama(0), version=7)], nominal_lag=0)
    collector = make_collector(
        [make_engine(llama(0))], nominal_lag=0, reward_fn=lambda prompt, responses: [1.0]
    )
    with pytest.raises(ValueError, match="reward_fn must return 4 rewards, got 1"):
        next(iter(collector))
    with pytest.raises(TypeError, match="policy must be a module or tensors by name, got int"):
        collector.update_policy_weights_(3)
