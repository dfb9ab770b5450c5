"""What users of TorchRL's collectors expect of ``AsyncRolloutCollector``."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import BaseCollector
from torchrl.trainers.trainers import UpdateWeights

from rzero.buffers import PackedBatch
from rzero.collectors import named_weights, weight_digests
from tests.collectors.conftest import llama
from tests.collectors.test_collector import GROUP, PROMPTS, make_collector


def changed(model):
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    return model


def next_batch(collector) -> PackedBatch:
    batch = collector.next()
    assert isinstance(batch, PackedBatch)
    return batch


def test_hooks_and_postproc_see_every_batch(make_engine):
    seen = []
    collector = make_collector(
        [make_engine(llama(0))],
        nominal_lag=1,
        postproc=lambda batch: TensorDict({"reward": batch.reward}),
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=seen.append,
    )
    learner = llama(0)
    for out in itertools.islice(collector, 2):
        collector.update_policy_weights_(changed(learner))
        assert out["reward"].shape == (PROMPTS * GROUP,)
        assert seen[-2] == "before" and seen[-1] is out
    collector.set_post_collect_hook(lambda out: seen.append("replaced"))
    collector.next()
    assert seen[-1] == "replaced"
    collector.shutdown()


def test_next_counts_and_shutdown(make_engine):
    collector = make_collector([make_engine(llama(0))], nominal_lag=1)
    assert isinstance(collector, BaseCollector)
    assert not collector.is_running()
    collector.start()
    assert collector.is_running()
    first, second = next_batch(collector), next_batch(collector)
    stats = collector.stats()
    assert stats["batches"] == 2
    assert stats["frames"] == int(first.response_mask.sum() + second.response_mask.sum())
    assert stats["submitted"] == sum(stats[k] for k in ("accepted", "filtered", "failed", "running"))
    assert all(isinstance(value, (int, float)) for value in stats.values())
    with pytest.raises(RuntimeError, match="do not have a length"):
        len(collector)
    collector.async_shutdown(timeout=10.0)
    assert not collector.is_running()


def test_nothing_is_sampled_within_a_pause(make_engine):
    engine = make_engine(llama(0), eos_token_ids=())
    collector = make_collector([engine], nominal_lag=1)
    collector.start()
    with collector.pause():
        busy = engine.busy_seconds()
        with pytest.raises(TimeoutError):
            collector._loop._buffer.sample(timeout=0.3)
        assert engine.busy_seconds() == busy
    assert next_batch(collector).num_responses == PROMPTS * GROUP
    collector.shutdown()


@pytest.mark.parametrize(
    "update",
    [
        lambda collector, model: collector.update_policy_weights_(model),
        lambda collector, model: collector.update_policy_weights_(policy=model),
        lambda collector, model: collector.update_policy_weights_(named_weights(model)),
        lambda collector, model: collector.update_policy_weights_(weights=named_weights(model)),
        lambda collector, model: collector.update_policy_weights_(
            TensorDict(model.state_dict()).unflatten_keys(".")
        ),
        lambda collector, model: collector.update_policy_weights_(weights_dict={"policy": model}),
        lambda collector, model: collector.update_policy_weights_(model, model_id="policy"),
        lambda collector, model: UpdateWeights(
            collector, 1, policy_weights_getter=lambda _=None: named_weights(model)
        )(),
    ],
)
def test_weights_can_be_passed_as_torchrl_passes_them(make_engine, update):
    sampler, learner = llama(0, tie_word_embeddings=True), llama(1, tie_word_embeddings=True)
    collector = make_collector([make_engine(sampler)], nominal_lag=1)
    collector.next()
    update(collector, learner)
    collector.publisher.wait()
    assert (collector.policy_version, collector.get_policy_version()) == (1, 1)
    assert weight_digests(named_weights(sampler)) == weight_digests(named_weights(learner))
    collector.shutdown()


def test_a_trainer_may_send_by_the_publisher(make_engine):
    collector, learner = make_collector([make_engine(llama(0))], nominal_lag=1), llama(0)
    collector.publisher.register_model(learner)
    send = UpdateWeights(sender=collector.publisher)
    for version in range(4):  # more than may be in work without a publish
        assert next_batch(collector).policy_version.max() <= version
        changed(learner)
        send()
    collector.publisher.wait()
    assert collector.stats()["learner_version"] == collector.policy_version == 4
    collector.shutdown()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"worker_ids": [0]}, ValueError, r"all engines get the one policy, got worker_ids=\[0\]"),
        ({"model_id": "critic"}, ValueError, "model_id='critic'"),
        ({"policy_or_weights": {}, "weights": {}}, TypeError, "one policy must be given, got 2 values"),
        ({"weights_dict": {"critic": {}}}, TypeError, r"weights_dict of \['critic'\]"),
        ({"policy_or_weights": {"x": 3}}, TypeError, "must be a module or tensors by name, got dict"),
        ({}, RuntimeError, r"register_model\(model\) must come first"),
    ],
)
def test_weights_that_cannot_be_published_are_refused(make_engine, arguments, error, message):
    collector = make_collector([make_engine(llama(0))], nominal_lag=1)
    collector.next()
    with pytest.raises(error, match=message):
        collector.update_policy_weights_(**arguments)
    collector.shutdown()
