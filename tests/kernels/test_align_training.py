"""align in training: accuracy, gradients, checkpointing, steps that change the weights, and FSDP2."""

import copy
import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache

from rzero.kernels import align
from tests.kernels.bits import differing
from tests.kernels.models import batch, make, padded, real

FAMILIES = ["llama", "qwen2", "qwen3"]


def test_logits_are_as_accurate_as_torchs():
    for family in FAMILIES:
        model = make(family)
        ids, lengths = batch(4, 6, 30)
        kept = real(lengths, 30)
        with torch.no_grad():
            exact = padded(copy.deepcopy(model).double(), ids, lengths)[kept]
            native = padded(model, ids, lengths)[kept]
            with align(model):
                ours = padded(model, ids, lengths)[kept]
        assert float((ours - exact).norm()) < 1.5 * float((native - exact).norm())


def gradients(model, ids, lengths):
    model.zero_grad()
    scores = torch.log_softmax(padded(model, ids, lengths).float(), -1)[:, :-1]
    chosen = scores.gather(-1, ids[:, 1:, None])[..., 0]
    chosen[real(lengths, ids.shape[1])[:, 1:]].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def worst(got, want):
    return max(float((got[k].double() - want[k].double()).norm() / want[k].double().norm()) for k in want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_as_accurate_as_torchs_and_repeatable(family, tied):
    model = make(family, tie_word_embeddings=tied)
    ids, lengths = batch(5, 6, 20)
    exact = gradients(copy.deepcopy(model).double(), ids, lengths)
    native = gradients(model, ids, lengths)
    with align(model):
        ours, again = gradients(model, ids, lengths), gradients(model, ids, lengths)
    assert set(ours) == set(native) and worst(ours, exact) < 1.5 * worst(native, exact) + 1e-7
    assert all(differing(ours[k], again[k]) == 0 for k in ours)


def test_gradients_through_a_shared_prefix():
    """Keys and values of a cache carry gradients: as a learner that computes prompts once."""
    model = make("llama")
    ids, _ = batch(6, 3, 12)

    def through(cut):
        model.zero_grad()
        cache = DynamicCache() if cut else None
        start = model(input_ids=ids[:, :cut], past_key_values=cache, use_cache=True).logits if cut else None
        end = model(input_ids=ids[:, cut:], past_key_values=cache, use_cache=bool(cut)).logits
        logits = end if start is None else torch.cat([start, end], 1)
        torch.log_softmax(logits, -1).gather(-1, ids[:, :, None]).sum().backward()
        return logits, {name: p.grad.clone() for name, p in model.named_parameters()}

    with align(model):
        (whole, expected), (cached, got) = through(0), through(7)
    assert differing(whole, cached) == 0
    assert worst(got, expected) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant):
    model = make("qwen2")
    ids, lengths = batch(7, 4, 16)
    with align(model):
        plain = gradients(model.train(), ids, lengths)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        checkpointed = gradients(model, ids, lengths)
    assert all(differing(plain[k], checkpointed[k]) == 0 for k in plain)


@pytest.mark.parametrize("fused", [False, True])
def test_no_stale_weights_after_training_steps_and_loads(fused):
    model = make("llama")
    ids, lengths = batch(9, 2, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    with align(model):
        for _ in range(3):
            gradients(model, ids, lengths)
            optimizer.step()
            with torch.no_grad():
                twin = make("llama", seed=99)
                twin.load_state_dict(model.state_dict())
                with align(twin):
                    assert differing(padded(model, ids, lengths), padded(twin, ids, lengths)) == 0
        other = make("llama", seed=5)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        with align(other), torch.no_grad():
            assert differing(padded(model, ids, lengths), padded(other, ids, lengths)) == 0


def fsdp_rank(rank: int, world: int, store: str, align_first: bool) -> None:
    """Three steps of a sharded model beside an unsharded one with the same weights: equal bits each time."""
    warnings.simplefilter("error", UserWarning)
    file = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=file, rank=rank, world_size=world)
    model, plain = (make("llama", tie_word_embeddings=True) for _ in range(2))
    align(plain)
    if align_first:
        align(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if not align_first:
        align(model)
    ids, lengths = batch(18, 3, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits = padded(model, ids, lengths)
        with torch.no_grad():
            assert differing(logits, padded(plain, ids, lengths)) == 0
            # Few rows: the sharded weights are gathered anew, behind the version counter's back.
            assert differing(padded(model, ids[:1], lengths[:1]), logits[:1]) == 0
        logits.log_softmax(-1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("align_first", [True, False])
def test_a_fully_sharded_model_of_one_rank(tmp_path, align_first):
    fsdp_rank(0, 1, str(tmp_path / "store"), align_first)


@pytest.mark.slow
def test_a_fully_sharded_model_of_two_ranks(tmp_path):
    torch.multiprocessing.spawn(fsdp_rank, args=(2, str(tmp_path / "store"), True), nprocs=2)
