"""Fixed bins whose counts add up to quantiles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.losses.histogram import NUM_BINS, bin_index, bin_values, quantile
from tests.losses.batches import unhurried


def counts_of(values):
    return torch.bincount(bin_index(torch.tensor(values, dtype=torch.float64)), minlength=NUM_BINS)


@unhurried
@given(st.floats(1e-9, 900), st.sampled_from([-1, 1]))
def test_a_bin_value_is_within_its_promise(magnitude, sign):
    value = torch.tensor(sign * magnitude, dtype=torch.float64)
    assert bin_values()[bin_index(value)].item() == pytest.approx(value.item(), rel=0.012)


def test_zero_alone_is_in_the_zero_bin():
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-12, -1e-12], dtype=torch.float64)
    represented = bin_values()[bin_index(values)]
    assert represented[:2].tolist() == [0.0, 0.0]
    assert (represented[2:] != 0).all()
    assert torch.equal(represented[2:].sign(), values[2:].sign())


def test_bins_are_ordered_and_the_ends_collect_the_rest():
    assert (bin_values().diff() > 0).all()
    assert bin_index(torch.tensor([-1e9, 1e9], dtype=torch.float64)).tolist() == [0, NUM_BINS - 1]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("q", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_quantiles_agree_with_numpy(q, absolute):
    values = np.random.default_rng(0).normal(scale=0.1, size=4001)
    # NumPy's inverted distribution function is the same definition of a quantile.
    expected = np.quantile(np.abs(values) if absolute else values, q, method="inverted_cdf")
    assert quantile(counts_of(values), q, absolute=absolute) == pytest.approx(expected, rel=0.012)


def test_quantile_of_nothing():
    assert math.isnan(quantile(torch.zeros(NUM_BINS), 0.5))
