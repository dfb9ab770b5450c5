"""An IntervalSet is a set, whatever the order of the numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers import interval_set
from rzero.buffers.interval_set import IntervalSet

numbers = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**62)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, max_size=6), numbers, st.integers(0, 5))
def test_it_behaves_like_a_set(batches, probes, pending):
    seen, model = IntervalSet(), set()
    limits = interval_set._FEWEST_PENDING, interval_set._MOST_PENDING
    interval_set._FEWEST_PENDING = interval_set._MOST_PENDING = pending
    try:
        for batch in batches:
            seen.add(batch)
            model |= set(batch)
            assert [number in seen for number in probes] == [number in model for number in probes]
            found = seen.find(np.array(probes, dtype=np.int64))
            assert found.tolist() == [number in model for number in probes]
    finally:
        interval_set._FEWEST_PENDING, interval_set._MOST_PENDING = limits
    assert len(seen) == len(model)
    bounds = seen.to_array()
    assert [number for start, stop in bounds[:, :].tolist() for number in (start, stop - 1)] == sorted(
        number for start, stop in bounds.tolist() for number in (start, stop - 1)
    )
    assert (bounds[1:, 0] > bounds[:-1, 1]).all()  # Neighbours are joined.
    again = IntervalSet(bounds)
    assert all(number in again for number in model)
    assert len(again) == len(model)


def test_dense_numbers_take_one_interval():
    seen = IntervalSet()
    for start in range(0, 100_000, 1000):
        seen.add(range(start, start + 1000))
    assert seen.to_array().tolist() == [[0, 100_000]]
