import pytest
import torch

from rzero.collectors import (
    EngineError,
    WeightPublisher,
    load_weights,
    named_weights,
    rounded_weights,
    weight_digests,
)
from rzero.collectors.weights import rounded
from tests.collectors.conftest import llama


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
        (lambda w: w.update({"model.norm.weight": torch.ones(32).double()}), r"got torch.float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(spoil, message):
    model = llama(0)
    weights = named_weights(llama(1))
    spoil(weights)
    with pytest.raises(EngineError, match=message):
        load_weights(model, weights, weight_digests(weights))
    assert weight_digests(named_weights(model)) == weight_digests(named_weights(llama(0)))


def test_narrower_weights_arrive_as_the_rounded_values():
    learner, sampler = llama(0), llama(1)
    wire = rounded(named_weights(learner), torch.bfloat16)
    expected = {name: tensor.float() for name, tensor in wire.items()}
    load_weights(sampler, wire, weight_digests(expected))
    for name, tensor in named_weights(sampler).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, learner.get_parameter(name).detach().bfloat16().float()), name


def test_rounded_weights_are_what_arrives_and_leave_without_a_trace():
    model, sampler = llama(0), llama(1)
    before = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    prompt = torch.tensor([[1, 5, 7]])
    wire = rounded(before, torch.bfloat16)
    load_weights(sampler, wire, weight_digests({name: t.float() for name, t in wire.items()}))
    with pytest.raises(KeyError), rounded_weights(model, torch.bfloat16):
        logits = model(prompt).logits
        logits.sum().backward()  # the gradient at the rounded weights
        raise KeyError
    assert torch.equal(logits, sampler(prompt).logits)
    sampler(prompt).logits.sum().backward()
    for name, parameter in model.named_parameters():
        arrived = sampler.get_parameter(name).grad
        assert parameter.grad is not None and arrived is not None
        assert torch.equal(parameter.grad, arrived), name
        assert torch.equal(parameter.detach(), before[name]), name


def test_backward_after_rounded_weights_have_left_is_refused():
    model = llama(0)
    with rounded_weights(model, torch.bfloat16):
        logits = model(torch.tensor([[1, 5, 7]])).logits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()
