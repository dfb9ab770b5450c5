import pytest
import torch

from rzero.collectors import EngineError, WeightPublisher, load_weights, named_weights, weight_digests
from tests.collectors.conftest import llama, request


def test_every_parameter_arrives(make_engine):
    """Fault 5 of the field: perturb each parameter in turn, publish, compare what the engine holds; twice."""
    learner, sampler = llama(0), llama(1)
    engine = make_engine(sampler, version=-1)
    publisher = WeightPublisher([engine])
    publisher.publish(named_weights(learner), 0)
    version = 0
    for _ in range(2):
        for name, parameter in learner.named_parameters():
            with torch.no_grad():
                parameter.view(-1)[version % parameter.numel()] += 0.5
            version += 1
            publisher.publish(named_weights(learner), version)
            assert weight_digests(named_weights(sampler)) == weight_digests(named_weights(learner)), name
            assert engine.version() == version
    prompt = torch.tensor([[1, 5, 7]])
    assert torch.equal(sampler(prompt).logits, learner(prompt).logits)


def test_tied_weights_travel_once_and_stay_tied():
    learner, sampler = (llama(seed, tie_word_embeddings=True) for seed in (0, 1))
    weights = named_weights(learner)
    assert "lm_head.weight" not in weights
    load_weights(sampler, weights, weight_digests(weights))
    assert sampler.lm_head.weight is sampler.model.embed_tokens.weight
    assert torch.equal(sampler.lm_head.weight, learner.model.embed_tokens.weight)


def test_a_load_keeps_the_tensors_and_tells_autograd():
    model = llama(0)
    parameter = model.lm_head.weight
    before = parameter._version
    weights = named_weights(llama(1))
    load_weights(model, weights, weight_digests(weights))
    assert model.lm_head.weight is parameter
    assert parameter._version > before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda w: w.pop("lm_head.weight"),
            r"name exactly the model's tensors, differing in \['lm_head.weight'\]",
        ),
        (lambda w: w.update(extra=torch.ones(1)), r"differing in \['extra'\]"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(31)}),
            r"must be torch.float32 \(32,\), got .* \(31,\)",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(32).half()}), r"got torch.float16"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(spoil, message):
    model = llama(0)
    weights = named_weights(llama(1))
    spoil(weights)
    with pytest.raises(EngineError, match=message):
        load_weights(model, weights, weight_digests(weights))
    assert weight_digests(named_weights(model)) == weight_digests(named_weights(llama(0)))


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
    publisher = WeightPublisher([engine])
    engine.pause()  # hold the publish back until the learner has moved on
    done = []
    future = publisher.publish_async(learner, 1, on_done=done.append)
    with torch.no_grad():
        learner.lm_head.weight.add_(1.0)
    engine.resume()
    assert future.result().engine_versions == (1,)
    assert done == [future]
    assert torch.equal(sampler.lm_head.weight, llama(0).lm_head.weight)


def test_a_failed_background_publish_is_in_its_future(make_engine):
    engine = make_engine()
    publisher = WeightPublisher([engine])
    future = publisher.publish_async(llama(0, attention_bias=True), 1, on_done=lambda f: None)
    assert "name exactly the model's tensors" in str(future.exception())
    assert len(engine.submit(request(0)).result().response) > 0  # it samples on with its old weights
