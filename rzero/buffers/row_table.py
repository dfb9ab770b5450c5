"""The table of stored responses: one fixed-size record each, in reusable places."""

import numpy as np

from rzero.buffers.records import ROW_FIELDS

_DTYPES = {name: str(dtype).removeprefix("torch.") for name, dtype in ROW_FIELDS.items()}

ROW_DTYPE = np.dtype(
    [
        *_DTYPES.items(),
        ("digest", np.int64, (2,)),
        ("version", np.int32),  # The oldest weights in the response; the largest int32 if it sampled nothing.
        ("extras_checksum", np.uint64),
        ("chunk", np.int64),
        ("start", np.int64),
    ]
)
"""The row fields, and where the tokens lie."""


def row_lengths(rows: np.ndarray) -> np.ndarray:
    """Tokens of each row, prompt included, int64 ``[B]``."""
    return rows["prompt_length"].astype(np.int64) + rows["response_length"]


class RowTable:
    """Rows in numbered places; the place of a removed row is used again."""

    def __init__(self):
        """Start empty."""
        self._rows = np.empty(0, ROW_DTYPE)
        self._used = np.empty(0, dtype=bool)
        self._free: list[int] = []
        self._top = 0

    def __len__(self) -> int:
        """How many rows there are."""
        return self._top - len(self._free)

    def next_places(self, count: int) -> np.ndarray:
        """Where the next ``count`` rows will go, int64 ``[count]``."""
        if not self._free:
            return np.arange(self._top, self._top + count)
        reused = self._free[: -count - 1 : -1]
        return np.array([*reused, *range(self._top, self._top + count - len(reused))], dtype=np.int64)

    def insert(self, rows: np.ndarray) -> np.ndarray:
        """Add rows at `next_places`, and return these."""
        places = self.next_places(len(rows))
        reused = min(len(rows), len(self._free))
        del self._free[len(self._free) - reused :]
        self._top += len(rows) - reused
        if self._top > len(self._rows):
            size = max(1024, 2 * len(self._rows), self._top)
            self._rows = np.concatenate((self._rows, np.empty(size - len(self._rows), ROW_DTYPE)))
            self._used = np.concatenate((self._used, np.zeros(size - len(self._used), dtype=bool)))
        where = places if reused else slice(self._top - len(rows), self._top)
        self._rows[where] = rows
        self._used[where] = True
        return places

    def remove(self, places: np.ndarray) -> None:
        """Remove rows."""
        self._used[places] = False
        self._free.extend(places.tolist())

    def has(self, places: np.ndarray) -> np.ndarray:
        """Which places hold a row, bool ``[n]``."""
        inside = (places >= 0) & (places < self._top)
        inside[inside] = self._used[places[inside]]
        return inside

    def places(self) -> np.ndarray:
        """All places that hold a row, int64, rising."""
        return np.flatnonzero(self._used)

    def __getitem__(self, places: int | np.ndarray) -> np.ndarray:
        """The rows at these places, copied."""
        return self._rows[places]

    def set_extras_checksum(self, place: int, checksum: np.uint64) -> None:
        """Note the checksum of a row's extras: the one entry that may change."""
        self._rows["extras_checksum"][place] = checksum
