import gc
import threading
import traceback

import pytest
import torch
from torchrl.trainers.trainers import UpdateWeights

from rzero.collectors import (
    EngineError,
    EngineLost,
    WeightPublisher,
    named_weights,
    rounded_weights,
    weight_digests,
)
from rzero.collectors.engine import origin
from tests.collectors.conftest import llama, request


def test_the_common_version_waits_for_an_engine_that_failed(make_engine):
    """Fault 4 of the field: one of three engines cannot load, and the version must not advance."""
    sizes = [llama(0), llama(0), llama(0)]
    engines = [make_engine(model) for model in sizes]
    publisher = WeightPublisher(engines)
    publisher.publish(named_weights(llama(1)), 1)
    del sizes[1].model.layers[1].mlp  # the second engine's model lost a part
    with pytest.raises(EngineError, match=r"version 2 reached not every engine: engine 1 keeps version 1"):
        publisher.publish(named_weights(llama(2)), 2)
    assert [engine.version() for engine in engines] == [2, 1, 2]
    assert publisher.common_version() == 1


def test_versions_only_increase(make_engine):
    publisher = WeightPublisher([make_engine()])
    publisher.publish(named_weights(llama(1)), 1)
    with pytest.raises(ValueError, match="version must be greater than 1, got 1"):
        publisher.publish(named_weights(llama(1)), 1)


def test_a_background_publish_sends_the_weights_of_the_moment(make_engine):
    learner, sampler = llama(0), llama(1)
    engine = make_engine(sampler)
    done = []
    publisher = WeightPublisher([engine])
    publisher.add_done_callback(done.append)
    with engine._boundary.hold("test"), torch.no_grad():  # no engine takes weights meanwhile
        future = publisher.publish_async(learner, 1)
        learner.lm_head.weight.add_(1.0)
        assert not future.done()
    assert future.result().engine_versions == (1,)
    assert done == [future]
    assert torch.equal(sampler.lm_head.weight, llama(0).lm_head.weight)


def test_a_publish_may_wait_for_another_and_a_third_call_for_it(make_engine):
    engine, learner = make_engine(llama(0)), llama(1)
    publisher = WeightPublisher([engine])
    order, third = [], []
    publisher.add_done_callback(lambda future: order.append(future.result().version))
    caller = threading.Thread(target=lambda: third.append(publisher.publish_async(learner, 3)))
    with engine._boundary.hold("test"):  # no engine takes weights meanwhile
        futures = [publisher.publish_async(learner, version) for version in (1, 2)]
        caller.start()
        caller.join(0.3)
        assert caller.is_alive() and not any(future.done() for future in futures)
    caller.join(10)
    assert third[0].result(10).version == 3 and order == [1, 2, 3]


def test_the_thread_of_a_publisher_ends_with_it(make_engine):
    publisher = WeightPublisher([make_engine(llama(0))])
    publisher.publish_async(llama(1), 1).result(10)
    (thread,) = (t for t in threading.enumerate() if t.name == "publish")
    del publisher
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_failed_background_publish_is_in_its_future(make_engine):
    engine = make_engine()
    publisher = WeightPublisher([engine])
    future = publisher.publish_async(llama(0, attention_bias=True), 1)
    assert "name exactly the model's tensors" in str(future.exception())
    assert len(engine.submit(request(0)).result().response) > 0  # it samples on with its old weights


def test_half_the_bytes_travel_and_the_learner_can_use_the_same_weights(make_engine):
    learner, sampler = llama(0), llama(1)
    publisher = WeightPublisher([make_engine(sampler)], wire_dtype=torch.bfloat16)
    publisher.publish(named_weights(learner), 1)
    with rounded_weights(learner, torch.bfloat16):
        assert weight_digests(named_weights(learner)) == weight_digests(named_weights(sampler))
    assert weight_digests(named_weights(learner)) != weight_digests(named_weights(sampler))


def lose(engine):
    """Makes an engine answer like one whose process has ended."""

    def swap(*_):
        raise EngineLost("the connection to rank 7 was lost")

    engine.swap = swap
    return engine


def test_a_lost_engine_stops_the_run_unless_that_is_tolerated(make_engine):
    with pytest.raises(EngineError, match="engine 1 keeps version 0: the connection to rank 7 was lost"):
        WeightPublisher([make_engine(), lose(make_engine())]).publish(named_weights(llama(1)), 1)
    publisher = WeightPublisher([make_engine(), lose(make_engine())], tolerate_lost=True)
    report = publisher.publish(named_weights(llama(1)), 1)
    assert (report.engine_versions, publisher.common_version()) == ((1, 0), 1)
    assert report.errors == {1: "the connection to rank 7 was lost"}
    assert publisher.publish(named_weights(llama(2)), 2).errors == {}  # it is not asked again


def test_the_last_engine_is_never_tolerated_away(make_engine):
    publisher = WeightPublisher([lose(make_engine()), lose(make_engine())], tolerate_lost=True)
    with pytest.raises(EngineError, match="reached not every engine: engine 0 keeps version 0"):
        publisher.publish(named_weights(llama(1)), 1)


def test_an_engine_that_does_not_acknowledge_is_named(make_engine):
    engine = make_engine(llama(0))
    publisher = WeightPublisher([engine], timeout=0.2)
    refusal = pytest.raises(EngineError, match=r"engine 0 keeps version 0: no acknowledgement within 0.2 s")
    with engine._boundary.hold("test"), refusal:
        publisher.publish(named_weights(llama(1)), 1)


def test_torchrl_trainers_can_send_by_it(make_engine):
    learner, sampler = llama(0), llama(1)
    publisher = WeightPublisher([make_engine(sampler)])
    with pytest.raises(RuntimeError, match=r"register_model\(model\) must come first"):
        publisher.update_weights()
    publisher.register_model(learner)
    hook = UpdateWeights(sender=publisher, update_weights_interval=1)
    hook()
    hook()
    report = publisher.wait()
    assert report is not None
    assert (report.version, publisher.common_version()) == (2, 2)
    assert weight_digests(named_weights(learner)) == weight_digests(named_weights(sampler))


def test_a_publish_to_a_failed_engine_names_what_it_failed_of(make_engine):
    def break_down(module, args, kwargs):
        raise FloatingPointError("the model broke down")

    model = llama(0)
    model.register_forward_pre_hook(break_down, with_kwargs=True)
    engine = make_engine(model, version=0)
    assert isinstance(engine.submit(request(0)).exception(timeout=60), FloatingPointError)
    with pytest.raises(EngineError, match="the engine has failed: the model broke down") as caught:
        WeightPublisher([engine]).publish(named_weights(llama(1)), 1)
    cause = origin(caught.value)
    assert isinstance(cause, FloatingPointError)
    assert any(frame.name == "break_down" for frame in traceback.extract_tb(cause.__traceback__))
