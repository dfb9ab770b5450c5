"""Importance weights: exact, detached, promoted, never clipped."""

import math

import pytest
import torch

from rzero.losses import importance_weights
from tests.losses.batches import LAYOUTS, random_rows, split_rows


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_drawn_at_a_fifth_now_three_tenths():
    # 0.3 / 0.2 = 1.5
    weights = importance_weights(torch.tensor([[0.3]]).log(), torch.tensor([[0.2]]).log(), ones(1, 1))
    torch.testing.assert_close(weights, torch.tensor([[1.5]]))


@pytest.mark.parametrize("log_ratio", [40.0, 88.0, -40.0])
def test_no_hidden_guard(log_ratio):
    # e^40 = 2.3538526683702e17 is what it is; no clamp at 20 or 30 nats, no clip.
    weights = importance_weights(
        torch.tensor([[min(log_ratio, 0.0)]]), torch.tensor([[-max(log_ratio, 0.0)]]), ones(1, 1)
    )
    assert weights.item() == pytest.approx(math.exp(log_ratio), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_promoted_before_the_subtraction(dtype):
    # -2^-7 + 8 = 7.9921875 takes 10 bits: bfloat16 makes it 8. float16 holds it but overflows in exp at 11.1.
    log_probs, behavior = (
        torch.tensor([-(2.0**-7), 0.0], dtype=dtype),
        torch.tensor([-8.0, -12.0], dtype=dtype),
    )
    weights = importance_weights(log_probs, behavior, ones(2))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([7.9921875, 12.0]).exp())


def test_the_wider_dtype_wins():
    weights = importance_weights(torch.zeros(2, dtype=torch.float64), torch.zeros(2), ones(2))
    assert weights.dtype == torch.float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_and_masked_places_are_zero(layout):
    rows = random_rows(3)
    tokens = LAYOUTS[layout](rows)
    weights = importance_weights(**tokens)
    assert weights.is_nested == tokens["log_probs"].is_nested
    assert not weights.requires_grad
    for weight, learner, sampler, mask in zip(
        split_rows(weights, layout, rows), rows.log_probs, rows.behavior_log_probs, rows.masks, strict=True
    ):
        assert torch.equal(weight[~mask], torch.zeros_like(weight[~mask]))
        torch.testing.assert_close(weight[mask], (learner - sampler).exp()[mask])


def test_detached():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(log_probs, torch.zeros(1, 2), ones(1, 2)).requires_grad


def test_packed_tokens_without_offsets_are_one_row():
    with pytest.raises(ValueError, match="got nan at row 0, token 2"):
        importance_weights(torch.zeros(3), torch.tensor([0.0, 0.0, math.nan]), ones(3))


def test_empty():
    assert importance_weights(torch.zeros(0), torch.zeros(0), ones(0)).shape == (0,)
    assert importance_weights(torch.zeros(2, 0), torch.zeros(2, 0), ones(2, 0)).shape == (2, 0)
