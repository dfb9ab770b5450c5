"""Grids and scales are functions of a row's values, whatever the order of its sum."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import rounding
from rzero.kernels.exact.rounding import (
    MAGIC,
    THRESHOLD,
    max_scale,
    norm_scale,
    power_above_sum,
    round_to_grid,
    row_norm,
    settle,
)
from tests.kernels.bits import differing, wide_rows


def test_rounding_to_a_grid_is_to_nearest_even():
    x = torch.tensor([0.24, 0.25, 0.26, 0.75, -0.25, -0.75, 5.0], dtype=torch.float64)
    # Multiples of 1/2; halfway cases go to the even multiple: 0.25 -> 0, 0.75 -> 1.
    assert round_to_grid(x.clone(), MAGIC / 2).tolist() == [0.0, 0.0, 0.5, 1.0, 0.0, -1.0, 5.0]
    assert round_to_grid(x.clone(), 0.0).tolist() == x.tolist()


@given(st.integers(0, 10**6), st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_scales_do_not_depend_on_the_order_of_the_columns(seed, columns):
    x = wide_rows(20, columns, seed).double()
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    for scale in (row_norm, norm_scale, max_scale):
        assert differing(scale(x), scale(x[:, order].contiguous())) == 0
    assert differing(power_above_sum(x.abs()), power_above_sum(x.abs()[:, order].contiguous())) == 0


@given(st.integers(0, 10**6), st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_scales_bound_what_they_must(seed, columns):
    x = wide_rows(20, columns, seed).double()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm_scale(x)
    assert bool((norm <= 1.389 * scale).all()) and bool((scale * 0.69 <= norm).all())
    assert bool((torch.frexp(scale[scale > 0]).mantissa == 0.5).all())
    assert bool(((row_norm(x) - norm).abs() <= 2.0**-27 * norm).all())
    assert bool((x.abs().amax(-1, keepdim=True) < max_scale(x)).all())
    total = x.abs().sum(-1, keepdim=True)
    assert bool((total <= 1.389 * power_above_sum(x.abs())).all())


def test_a_doubtful_value_is_decided_by_the_exact_sum():
    """Values one ulp on either side of the tipping point, as two orders of a sum might give: one result."""
    exact = torch.tensor([1.389], dtype=torch.float64)
    below, above = (torch.nextafter(exact, torch.tensor(x, dtype=torch.float64)) for x in (0.0, 2.0))

    def settled(value: torch.Tensor, slack: int) -> float:
        found = settle(
            value.clone(), lambda rows: exact.clone(), drop=52, offset=rounding.EXPONENT_OFFSET, slack=slack
        )
        return float(found)

    assert settled(below, 4) == settled(above, 4)
    assert settled(below, 0) != settled(above, 0)  # without the slack the two fall apart


def test_rows_whose_norm_lies_at_the_tipping_point_are_decided_by_their_exact_sum(monkeypatch):
    """Two elements of each row absorb what is missing to a norm of 1.389, down to a few ulps of float64."""
    decided = []
    exact_norms = rounding._exact_norms
    monkeypatch.setattr(rounding, "_exact_norms", lambda rows: decided.append(len(rows)) or exact_norms(rows))
    generator = torch.Generator().manual_seed(0)
    target, scales = Fraction(1.389) ** 2, set()
    for _ in range(100):
        x = torch.randn(64, generator=generator).mul_(1e-2).double()
        x[:3] = 0.0
        x = x.float().double()
        for place in range(3):
            missing = target - sum(Fraction(value) ** 2 for value in x.tolist())
            x[place] = float(torch.tensor(math.sqrt(missing)).float()) * (1 - 2.0**-23 if place < 2 else 1)
            x = x.float().double()
        x[2] *= float(torch.rand(1, generator=generator)) * 2  # a few ulps of the sum to either side
        x = x.float().double()
        orders = torch.stack([x[torch.randperm(64, generator=generator)] for _ in range(5)])
        found = norm_scale(orders).unique()
        assert len(found) == 1
        scales.add(float(found))
    assert sum(decided) > 100
    assert scales == {1.0, 2.0}  # both sides of the point occur


# Rows at the tipping point: the norm is sqrt(1 + 2**-26), in float64 1 + 2**-27, half of row_norm's last
# place; the sum is 1.389.
HIGH = float(torch.tensor(THRESHOLD, dtype=torch.float32))
TIPPING = [
    (row_norm, torch.linalg, "vector_norm", [1.0, 2.0**-13]),
    (power_above_sum, torch.Tensor, "sum", [HIGH - 2.0**-10, 2.0**-10 + THRESHOLD - HIGH]),
]


@pytest.mark.parametrize(("scale", "owner", "native", "row"), TIPPING, ids=["row_norm", "power_above_sum"])
def test_another_order_of_a_sum_changes_no_scale(monkeypatch, scale, owner, native, row):
    """The native sum is replaced by one that is off by some ulps, either way: as on another host."""
    rows, original, found = torch.tensor([row], dtype=torch.float64), getattr(owner, native), []
    for ulps in range(-15, 16):

        def off(*args, ulps=ulps, **kwargs):
            return (original(*args, **kwargs).view(torch.int64) + ulps).view(torch.float64)

        with monkeypatch.context() as patch:
            patch.setattr(owner, native, off)
            found.append(scale(rows.clone()))
    assert all(differing(other, found[0]) == 0 for other in found)


def test_a_row_norm_matches_a_correctly_rounded_sum():
    x = wide_rows(50, 300, 3).double()
    exact = torch.tensor(
        [math.sqrt(math.fsum(v * v for v in row)) for row in x.tolist()], dtype=torch.float64
    )
    assert torch.allclose(row_norm(x)[:, 0], exact, rtol=2.0**-27, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_make_their_own_row_nan_and_no_other(bad):
    x = torch.ones(3, 4, dtype=torch.float64)
    x[1, 2] = bad
    rounded = round_to_grid(x.clone(), norm_scale(x.clone()).mul_(MAGIC * 2.0**-26))
    assert bool(rounded[1].isnan().any()) and bool((rounded[[0, 2]] == 1).all())


def test_rounding_to_the_maximum_twice_is_rounding_once():
    x = wide_rows(500, 37, 5).double()
    once = round_to_grid(x.clone(), max_scale(x).mul_(MAGIC * 2.0**-24))
    twice = round_to_grid(once.clone(), max_scale(once).mul_(MAGIC * 2.0**-24))
    assert differing(once, twice) == 0
    assert torch.equal(once.float().double(), once)
