"""Laws of lengths and rates."""

import math

import numpy as np
import pytest

from rzero.collectors.simulate_laws import (
    constant_length,
    constant_rate,
    empirical_length,
    exponential_length,
    lognormal_length,
    measured_rate,
    step_rate,
)


def test_lengths_are_whole_positive_and_cut():
    rng = np.random.default_rng(0)
    for law in (
        exponential_length(5, limit=9),
        lognormal_length(5, cv=2.0, limit=9),
        empirical_length([1, 9, 9]),
        constant_length(9),
    ):
        lengths = law(rng, 2000)
        assert lengths.dtype == np.int64 and lengths.shape == (2000,)
        assert lengths.min() >= 1 and lengths.max() == 9


def test_rates():
    rate = step_rate(step_seconds=0.01, sequence_seconds=0.001)
    assert [rate(1), rate(90)] == pytest.approx([1 / 0.011, 10.0])
    rate = measured_rate([2, 4], [100.0, 50.0])
    # Seconds per step: 0.01 at 2, 0.02 at 4, hence 0.015 at 3; held outside.
    assert [rate(1), rate(2), rate(3), rate(9)] == pytest.approx([100.0, 100.0, 1 / 0.015, 50.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant_length(0), "constant_length: tokens must be at least 1, got 0"),
        (lambda: lognormal_length(10, cv=-1), "lognormal_length: cv must be at least 0, got -1"),
        (lambda: exponential_length(math.nan), "exponential_length: mean must be at least 1, got nan"),
        (lambda: empirical_length([3, 0]), "empirical_length: lengths must be at least one positive number"),
        (lambda: empirical_length([]), "empirical_length: lengths must be at least one positive number"),
        (lambda: constant_rate(0), "constant_rate: tokens_per_second must be positive, got 0"),
        (lambda: step_rate(step_seconds=0, sequence_seconds=0), "nor both be 0, got 0 and 0"),
        (lambda: measured_rate([2, 1], [1, 1]), "concurrency must rise and rates be positive"),
        (lambda: measured_rate([1], [1, 1]), "must be lists of one length"),
    ],
)
def test_impossible_laws_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
