"""log_softmax and linear_log_probs: values, gradients, and that both give one token one log-probability."""

import math

import pytest
import torch

from rzero.kernels import exact
from rzero.kernels import triton as ours
from rzero.kernels.triton import softmax
from rzero.kernels.triton.launch import Launch
from tests.kernels.bits import differing
from tests.kernels.triton.compare import DTYPES, assert_close, random


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles, splits and chunks in a small vocabulary."""
    for name, value in (("VOCAB_TILE", 16), ("VOCAB_SPLIT", 32), ("VOCAB_CHUNK", 48)):
        monkeypatch.setattr(softmax, name, value)


def tokens(rows, classes, seed):
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(seed))


def float64_log_probs(ids, temperature):
    def function(hidden, weight):
        log_p = torch.log_softmax(hidden @ weight.t() / temperature, -1)
        return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    return function


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 101])
def test_values_and_gradients_of_log_softmax(dtype, classes):
    logits = random(11, classes, seed=1, dtype=dtype) * 3
    assert_close(ours.log_softmax, exact.log_softmax, lambda x: torch.log_softmax(x, -1), (logits,))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes", "temperature"), [(1, 3, 1.0), (19, 101, 0.7), (33, 64, 1.0)])
def test_values_and_gradients_of_linear_log_probs(dtype, rows, classes, temperature):
    ids = tokens(rows, classes, seed=2)
    inputs = (random(rows, 40, seed=3, dtype=dtype), random(classes, 40, seed=4, dtype=dtype) / 6)

    def with_options(function):
        return lambda hidden, weight: function(hidden, weight, ids, temperature=temperature)

    assert_close(
        with_options(ours.linear_log_probs),
        with_options(exact.linear_log_probs),
        float64_log_probs(ids, temperature),
        inputs,
    )


def test_real_tiles_and_splits():
    hidden, weight, ids = random(2, 16, seed=5), random(1100, 16, seed=6), torch.tensor([1030, 4])
    for got, wanted in zip(
        ours.linear_log_probs(hidden, weight, ids),
        float64_log_probs(ids, 1.0)(hidden.double(), weight.double()),
        strict=True,
    ):
        assert torch.allclose(got.double(), wanted, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_materialised_logits_give_the_same_bits(dtype, temperature):
    hidden, weight = random(21, 40, seed=7, dtype=dtype), random(101, 40, seed=8, dtype=dtype)
    ids = tokens(21, 101, seed=9)
    logits = ours.linear(hidden, weight).float().div(torch.tensor(temperature))
    wanted = ours.log_softmax(logits).gather(-1, ids[:, None])[:, 0]
    got, _ = ours.linear_log_probs(hidden, weight, ids, temperature=temperature)
    assert differing(got, wanted) == 0


@pytest.mark.usefixtures("small_tiles")
def test_a_row_has_the_same_bits_in_any_batch_and_launch():
    hidden, weight, ids = random(33, 24, seed=10) * 3, random(70, 24, seed=11), tokens(33, 70, seed=12)
    whole = ours.linear_log_probs(hidden, weight, ids, temperature=0.9)
    logits = ours.linear(hidden, weight)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    for rows in (order, slice(17, 18), slice(3, 20)):
        part = ours.linear_log_probs(hidden[rows], weight, ids[rows], temperature=0.9)
        assert not any(differing(a, b[rows]) for a, b in zip(part, whole, strict=True))
        assert differing(ours.log_softmax(logits[rows]), ours.log_softmax(logits)[rows]) == 0
    for block_m in (16, 64):
        launch = Launch(block_m=block_m, block_n=0, warps=8, stages=1)
        other = softmax.launch_linear_log_probs(hidden, weight, ids, 0.9, launch=launch)
        assert not any(differing(a, b) for a, b in zip(other, whole, strict=False))


def test_another_tile_is_another_sum(monkeypatch, small_tiles):
    """The control: were the tile a launch parameter, bits would change."""
    logits = random(40, 101, seed=13) * 3
    before = ours.log_softmax(logits)
    monkeypatch.setattr(softmax, "VOCAB_TILE", 32)
    assert differing(ours.log_softmax(logits), before) > 50


@pytest.mark.usefixtures("small_tiles")
def test_neighbours_may_hold_anything_and_impossible_classes_count_nothing():
    hidden, weight, ids = random(9, 24, seed=14), random(70, 24, seed=15), tokens(9, 70, seed=16)
    clean = ours.linear_log_probs(hidden, weight, ids)[0]
    hidden[::2] = math.nan
    poisoned = ours.linear_log_probs(hidden, weight, ids)[0]
    assert differing(poisoned[1::2], clean[1::2]) == 0 and bool(poisoned[::2].isnan().all())
    logits = random(3, 70, seed=17)
    logits[:, 16:48] = -math.inf  # two whole tiles, across two splits
    wanted = torch.log_softmax(logits.double(), -1)
    got = ours.log_softmax(logits).double()
    assert torch.equal(got.isinf(), logits.isinf())
    assert torch.allclose(got[~logits.isinf()], wanted[~logits.isinf()], atol=1e-6)


def test_the_backward_repeats_itself_bit_for_bit():
    hidden, weight = random(20, 24, seed=18).requires_grad_(), random(70, 24, seed=19).requires_grad_()
    ids = tokens(20, 70, seed=20)

    def gradients():
        log_probs, entropies = ours.linear_log_probs(hidden, weight, ids)
        return torch.autograd.grad((log_probs + 0.1 * entropies).sum(), (hidden, weight))

    assert not any(differing(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_memory_is_a_few_numbers_a_token(monkeypatch):
    """What the launcher allocates, forward and backward, never holds a row of logits."""
    sizes = []
    classes, rows = 20_000, 8
    for name in ("run", "launch_product"):
        monkeypatch.setattr(softmax, name, lambda *args, **settings: None)
    new_empty = torch.Tensor.new_empty

    def counted(self, *size, **settings):
        out = new_empty(self, *size, **settings)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    hidden, weight = torch.zeros(rows, 4), torch.zeros(classes, 4)
    softmax.launch_linear_log_probs(hidden, weight, torch.zeros(rows, dtype=torch.int64), 1.0)
    assert max(sizes) == 3 * rows * math.ceil(classes / softmax.VOCAB_SPLIT) < rows * classes / 200
    row = torch.zeros(rows)
    torch.ops.rzero.linear_log_probs_backward(
        row, row, hidden, weight, torch.zeros(rows, dtype=torch.int64), row, row, row, 1.0
    )
    assert max(sizes) == rows * softmax.VOCAB_CHUNK < rows * classes / 4


def test_a_token_outside_the_vocabulary_is_not_a_number():
    log_probs, _ = ours.linear_log_probs(torch.ones(2, 4), torch.ones(5, 4), torch.tensor([5, 1]))
    assert bool(log_probs[0].isnan()) and math.isclose(float(log_probs[1]), -math.log(5), rel_tol=1e-6)


def test_refusals():
    hidden, weight, ids = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"hidden and weight must have shapes \[..., K\] and \[V, K\]"):
        ours.linear_log_probs(hidden, torch.zeros(5, 3), ids)
    with pytest.raises(ValueError, match=r"token_ids must have shape \[2\], got \[3\]"):
        ours.linear_log_probs(hidden, weight, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"token_ids must be integers, got torch.float32"):
        ours.linear_log_probs(hidden, weight, torch.zeros(2))
    with pytest.raises(ValueError, match=r"temperature must be positive, got 0"):
        ours.linear_log_probs(hidden, weight, ids, temperature=0.0)
    with pytest.raises(ValueError, match=r"logits must have shape \[..., V\], V > 0, got \[3, 0\]"):
        ours.log_softmax(torch.zeros(3, 0))
