"""A set of whole numbers that stays small when the numbers are dense."""

from collections.abc import Iterable

import numpy as np

_FEWEST_PENDING, _MOST_PENDING = 256, 4096


class IntervalSet:
    """Whole numbers that were seen, kept as disjoint intervals.

    Ids that were handed out one after another cost nothing to remember, however long the run; scattered
    ones cost 16 bytes each, against about 60 in a Python set.

    Example:
        >>> seen = IntervalSet()
        >>> seen.add([3, 4, 5, 9])
        >>> 4 in seen, 6 in seen, len(seen)
        (True, False, 4)
    """

    def __init__(self, intervals: np.ndarray | None = None):
        """Start from `to_array`'s intervals, or empty."""
        self._bounds = (
            np.empty((0, 2), dtype=np.int64) if intervals is None else intervals.reshape(-1, 2).copy()
        )
        self._pending: set[int] = set()

    def add(self, numbers: Iterable[int]) -> None:
        """Add numbers; those that are there already change nothing."""
        self._pending.update(numbers)
        # Often while that is cheap, so that `to_array` finds little left to do.
        if len(self._pending) > min(max(_FEWEST_PENDING, len(self._bounds)), _MOST_PENDING):
            self._merge()

    def __contains__(self, number: int) -> bool:
        """Whether the number was added."""
        if number in self._pending:
            return True
        place = int(np.searchsorted(self._bounds[:, 0], number, side="right")) - 1
        return place >= 0 and number < self._bounds[place, 1]

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Which of the numbers were added, bool ``[n]``."""
        place = np.searchsorted(self._bounds[:, 0], numbers, side="right") - 1
        found = np.zeros(len(numbers), dtype=bool)
        inside = place >= 0
        found[inside] = numbers[inside] < self._bounds[place[inside], 1]
        if self._pending:
            found |= np.fromiter((number in self._pending for number in numbers.tolist()), bool, len(numbers))
        return found

    def to_array(self) -> np.ndarray:
        """The intervals as int64 ``[k, 2]``, first number and one past the last, in rising order."""
        self._merge()
        return self._bounds.copy()

    def __len__(self) -> int:
        """How many different numbers were added."""
        self._merge()
        return int((self._bounds[:, 1] - self._bounds[:, 0]).sum())

    def _merge(self) -> None:
        if not self._pending:
            return
        fresh = np.fromiter(self._pending, np.int64, len(self._pending))
        bounds = np.concatenate((self._bounds, np.stack((fresh, fresh + 1), axis=1)))
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        reach = np.maximum.accumulate(bounds[:, 1])
        opens = np.concatenate(([True], bounds[1:, 0] > reach[:-1]))
        last = np.concatenate((np.flatnonzero(opens)[1:] - 1, [len(bounds) - 1]))
        self._bounds = np.stack((bounds[opens, 0], reach[last]), axis=1)
        self._pending.clear()
