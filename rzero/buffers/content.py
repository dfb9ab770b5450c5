"""What a store holds: a token log, a row table and a ledger that change together."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rzero.buffers.entry import extras_checksums
from rzero.buffers.faults import Fault, find_faults
from rzero.buffers.ledger import Ledger
from rzero.buffers.row_table import RowTable, row_lengths
from rzero.buffers.samplers import ReadyGroup
from rzero.buffers.token_log import TokenLog

Change = tuple[str, Mapping[str, np.ndarray], Mapping[str, Any]]
"""A change as it is journaled: its kind, its arrays and its note."""


class Content:
    """Responses in whole groups, and the changes that a store makes to them once these are certain.

    It neither locks nor journals nor refuses: `Store` does, and then calls it. Reading a journal back calls
    the same methods.

    Args:
        group_size: responses in each group.
        log: an empty token log.
        extras: names of the log's columns that are not evidence.
        clock: seconds, for waiting times.
    """

    def __init__(
        self,
        group_size: int,
        *,
        log: TokenLog,
        extras: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start empty."""
        self.log = log
        self.table = RowTable()
        self.ledger = Ledger(group_size)
        self.extras = tuple(extras)
        self.clock = clock
        self.completed: list[ReadyGroup] = []

    def reserve(self, group_id: int) -> None:
        """Open a group."""
        self.ledger.reserve(group_id, now=self.clock())

    def admit(self, rows: np.ndarray) -> np.ndarray:
        """Enter rows whose tokens are in the log, and return their places, int64 ``[B]``."""
        places = self.table.insert(rows)
        self.completed += self.ledger.admit(rows, places.tolist(), now=self.clock())
        return places

    def settle(self, kind: str, group_ids: Sequence[int], reason: str) -> np.ndarray:
        """Close groups: ``consume``, ``evict`` or ``fail``. Returns the chunks of the rows that leave."""
        if kind == "consume":
            places = self.ledger.consume(group_ids)
        elif kind == "evict":
            places = self.ledger.evict(group_ids, reason)
        else:
            places = self.ledger.fail(group_ids[0], reason)
        where = np.array(places, np.int64)
        chunks = self.table[where]["chunk"]
        self.table.remove(where)
        return chunks

    def annotate(self, places: np.ndarray, name: str, values: np.ndarray) -> None:
        """Write an extra column of rows, given end to end."""
        lengths = row_lengths(self.table[places])
        for place, part in zip(places.tolist(), np.split(values, np.cumsum(lengths)[:-1]), strict=True):
            row = self.table[place]
            start, stop = int(row["start"]), int(row["start"]) + len(part)
            columns = self.log.columns(int(row["chunk"]))
            columns[name][start:stop] = part
            checksums = extras_checksums([columns[extra] for extra in self.extras], [start], [stop])
            self.table.set_extras_checksum(place, checksums[0])

    def rows(self) -> np.ndarray:
        """Every row, in the order of arrival."""
        rows = self.table[self.table.places()]
        return rows[np.lexsort((rows["start"], rows["chunk"]))]

    def rows_at(self, places: np.ndarray) -> np.ndarray:
        """The rows at those of the places that hold one."""
        return self.table[places[self.table.has(places)]]

    def places_of(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where responses are, int64, and which of the uids are stored, bool ``[n]``."""
        places = self.table.places()
        stored = self.table[places]["uid"]
        order = np.argsort(stored)
        found = np.searchsorted(stored, uids, sorter=order)
        known = found < len(stored)
        known[known] = stored[order[found[known]]] == uids[known]
        return places[order[found[known]]], known

    def views(self, rows: np.ndarray) -> dict[str, list[np.ndarray]]:
        """Look at the token columns of at least one row; see `TokenLog.views`."""
        return self.log.views(rows["chunk"], rows["start"], row_lengths(rows))

    def faults(self, rows: np.ndarray) -> list[Fault]:
        """The faults of rows, whatever chunks they lie in."""
        chunks = np.unique(rows["chunk"]).tolist()
        return [
            fault for chunk in chunks for fault in find_faults(self.log, chunk, rows[rows["chunk"] == chunk])
        ]

    def book(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything but the tokens: rows and the ledger's arrays, and its counts for JSON."""
        arrays, counts = self.ledger.to_arrays()
        return {"rows": self.rows(), **arrays}, counts

    def restore(self, arrays: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
        """Put the book of `book` in the place of this one; the tokens of its rows are in the log."""
        self.table, ledger = RowTable(), Ledger(self.ledger.group_size)
        places = self.table.insert(arrays["rows"])
        ledger.restore(arrays, counts, arrays["rows"], places.tolist(), now=self.clock())
        self.ledger, self.completed = ledger, []

    def replay(self, changes: Iterable[Change]) -> None:
        """Make the changes of a journal again, over the chunk files that a former process wrote."""
        annotations = []
        for kind, arrays, note in changes:
            if kind == "snapshot":
                self.restore(arrays, note["ledger"])
            elif kind == "reserve":
                self.reserve(int(arrays["groups"][0]))
            elif kind == "admit":
                self.admit(arrays["rows"])
            elif kind == "annotate":
                annotations.append((arrays, note["name"]))
            else:
                groups = arrays["groups"].tolist()
                if kind == "consume":
                    self.ledger.lease(groups)
                self.settle(kind, groups, note["reason"])
        self.completed = []
        self.log.attach(self.table[self.table.places()]["chunk"])
        for arrays, name in annotations:
            places, known = self.places_of(arrays["uids"])
            if known.any():
                self.annotate(places, name, arrays["values"][np.repeat(known, arrays["lengths"])])
