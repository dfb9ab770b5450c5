"""The store itself: its content behind a lock, and on a disk behind a journal."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rzero.buffers.content import Content
from rzero.buffers.context import ContextTable
from rzero.buffers.disk import Disk
from rzero.buffers.entry import Entry
from rzero.buffers.faults import Fault
from rzero.buffers.ledger import Ledger
from rzero.buffers.row_table import row_lengths
from rzero.buffers.samplers import ReadyGroup
from rzero.buffers.state import State
from rzero.buffers.token_log import TokenLog


class Store:
    """Responses in whole groups, written once; every change is all or nothing, and journaled on a disk.

    A change is checked, then its tokens are copied into the log, then it is journaled, then it becomes
    visible. A kill before the journal record leaves no trace; a kill after it leaves the whole change.

    Args:
        group_size: responses in each group.
        log: an empty token log.
        extras: names of the log's columns that are not evidence.
        directory: of the log's files; None in memory.
        sync: flush every change to the device.
        clock: seconds, for waiting times.
        on_change: called, under the lock, with the places that were written; empty after a removal.

    Raises:
        RuntimeError: if another process or store has the directory open.
        ValueError: if the directory holds a store of another layout.
        JournalError: if an acknowledged change can no longer be read.
    """

    def __init__(
        self,
        group_size: int,
        *,
        log: TokenLog,
        extras: Sequence[str] = (),
        directory: Path | None = None,
        sync: bool = False,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[np.ndarray], None] = lambda places: None,
    ):
        """Open the directory, if any, and read back what it holds."""
        self.changed = threading.Condition(threading.RLock())
        self.contexts = ContextTable(None if directory is None else directory / "contexts.json")
        self.content = Content(group_size, log=log, extras=extras, clock=clock)
        self._sync = sync
        self._on_change = on_change
        self._disk: Disk | None = None
        self._closed = False
        if directory is not None:
            layout = {"columns": self._columns(), "chunk_tokens": log.chunk_tokens, "group_size": group_size}
            disk = Disk(directory, layout=layout, sync=sync)
            try:
                self.content.replay(disk.replay())
            except BaseException:
                disk.close()
                raise
            self._disk = disk
            self._snapshot()

    @property
    def ledger(self) -> Ledger:
        """The book of groups."""
        return self.content.ledger

    def clock(self) -> float:
        """The time by which groups wait, in seconds."""
        return self.content.clock()

    def __len__(self) -> int:
        """How many responses are stored."""
        return len(self.content.table)

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks that are held."""
        return self.content.log.num_bytes

    def close(self) -> None:
        """Let go of the directory; every change is refused from here on."""
        with self.changed:
            self._closed = True
            if self._disk is not None:
                self._disk.close()

    def admit(self, entry: Entry) -> np.ndarray:
        """Store all responses of an entry or none; they are acknowledged when this returns.

        Returns:
            Their places, int64 ``[B]``.

        Raises:
            ValueError: if a uid is not new, a group takes no more, or a context is unknown.
        """
        rows = entry.rows
        with self.changed:
            self.ledger.check_admit(rows)
            self._check_contexts(rows)
            self._compact_if_large()
            log = self.content.log
            rows["chunk"], rows["start"] = log.append(entry.columns, entry.cu_seqlens)
            try:
                if self._sync:
                    log.flush(rows["chunk"])
                self._record("admit", {"rows": rows})
            except BaseException:
                log.release(rows["chunk"])
                raise
            places = self.content.admit(rows)
            self._on_change(places)
            self.changed.notify_all()
            return places

    def reserve(self, group_id: int, size: int) -> None:
        """Open a group. Raises ValueError if its id is not new or its size is not the group size."""
        with self.changed:
            self.ledger.check_reserve(group_id, size)
            self._record("reserve", {"groups": np.array([group_id], np.int64)})
            self.content.reserve(group_id)

    def lease(self, group_ids: Sequence[int]) -> torch.Tensor:
        """Take ready groups aside for a batch, and return the places of their rows, int64. Not journaled."""
        with self.changed:
            return torch.tensor(self.ledger.lease(group_ids), dtype=torch.int64)

    def give_back(self, group_ids: Sequence[int]) -> list[ReadyGroup]:
        """Make leased groups ready again."""
        with self.changed:
            return self.ledger.give_back(group_ids)

    def consume(self, group_ids: Sequence[int]) -> None:
        """Close leased groups as used."""
        self._close("consume", group_ids, "")

    def evict(self, group_ids: Sequence[int], reason: str) -> None:
        """Close ready or leased groups unused."""
        self._close("evict", group_ids, reason)

    def fail(self, group_id: int, reason: str) -> None:
        """Close an incomplete group."""
        self._close("fail", [group_id], reason)

    def annotate(self, uids: np.ndarray, name: str, values: np.ndarray) -> None:
        """Write an extra column of stored responses, end to end; see `TokenLogStorage.annotate`."""
        with self.changed:
            places, known = self.content.places_of(uids)
            if not known.all():
                raise ValueError(f"annotate: uids must be stored, got {int(uids[~known][0])}")
            rows = self.content.table[places]
            if busy := self.ledger.leased.keys() & set(rows["group_id"].tolist()):
                raise ValueError(
                    f"annotate: uids must not be in a batch, got group {min(busy)}, which is sampled"
                )
            lengths = row_lengths(rows)
            if values.shape != (lengths.sum(),):
                raise ValueError(
                    f"annotate: values must have shape {(int(lengths.sum()),)}, got {values.shape}"
                )
            self._compact_if_large()
            self._record(
                "annotate", {"uids": rows["uid"].copy(), "lengths": lengths, "values": values}, name=name
            )
            self.content.annotate(places, name, values)

    def take_completed(self) -> list[ReadyGroup]:
        """The groups that became ready since the last call."""
        with self.changed:
            taken, self.content.completed = self.content.completed, []
            return taken

    def places(self) -> np.ndarray:
        """Where all stored rows are, int64, rising."""
        with self.changed:
            return self.content.table.places()

    def has(self, places: np.ndarray) -> np.ndarray:
        """Which places hold a row, bool."""
        with self.changed:
            return self.content.table.has(places)

    def read(self, places: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Copy the token columns, end to end, and the rows at these places.

        Raises:
            IndexError: if nothing is stored at a place, or no place is asked for.
        """
        with self.changed:
            if len(places) == 0 or not self.content.table.has(places).all():
                raise IndexError(f"TokenLogStorage: index must name stored rows, got {places[:8].tolist()}")
            rows = self.content.table[places]
            views = self.content.views(rows)
        # Copied without the lock: what was written once stays as it is, also if it is released meanwhile.
        return {name: np.concatenate(pieces) for name, pieces in views.items()}, rows

    def verify(self, places: np.ndarray | None = None) -> list[Fault]:
        """Check rows, or all, against their checksums, one chunk at a time so that nobody waits long."""
        places = self.places() if places is None else places
        with self.changed:
            chunks = np.unique(self.content.rows_at(places)["chunk"]).tolist()
        faults = []
        for chunk in chunks:
            with self.changed:
                rows = self.content.rows_at(places)  # Some may have left meanwhile.
                faults += self.content.faults(rows[rows["chunk"] == chunk])
        return faults

    def state(self) -> State:
        """Everything that is stored. Evidence, which cannot change, is shared; extras are copied."""
        with self.changed:
            content = self.content
            book, counts = content.book()
            columns = {name: [np.empty(0, dtype)] for name, dtype in content.log.fields.items()}
            if len(book["rows"]):
                columns = content.views(book["rows"])
                columns |= {name: [np.concatenate(columns[name])] for name in content.extras}
            note = {"ledger": counts, "layout": self._state_layout(), "contexts": self.contexts.to_json()}
            return State(columns, book, note)

    def load(self, state: State) -> None:
        """Put a state in the place of everything that is stored.

        Raises:
            ValueError: if the layout differs or a digest does not hold; nothing has changed then.
        """
        if state.note["layout"] != self._state_layout():
            raise ValueError(
                f"load: state must have layout {self._state_layout()}, got {state.note['layout']}"
            )
        log, rows = self.content.log, state.arrays["rows"].copy()
        lengths = row_lengths(rows)
        if lengths.max(initial=0) > log.chunk_tokens:
            raise ValueError(
                f"load: responses must fit into chunk_tokens {log.chunk_tokens}, got {lengths.max()}"
            )
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
        with self.changed:
            columns = {name: np.concatenate(pieces) for name, pieces in state.columns.items()}
            rows["chunk"], rows["start"] = log.append(columns, cu_seqlens)
            try:
                if faults := self.content.faults(rows):
                    raise ValueError(f"load: every response must match its checksums, got {faults[0]}")
                self.contexts.update(state.note["contexts"])
            except BaseException:
                log.release(rows["chunk"])
                raise
            old = self.content.rows()["chunk"]
            self.content.restore({**state.arrays, "rows": rows}, state.note["ledger"])
            self._snapshot()
            log.release(old)
            self._on_change(self.content.table.places())
            self.changed.notify_all()

    def _columns(self) -> dict[str, str]:
        return {name: dtype.str for name, dtype in self.content.log.fields.items()}

    def _state_layout(self) -> dict[str, Any]:
        return {"columns": self._columns(), "group_size": self.ledger.group_size}

    def _check_contexts(self, rows: np.ndarray) -> None:
        for context_id in set(rows["context_id"].tolist()) if len(self.contexts) else ():
            if context_id not in self.contexts:
                raise ValueError(f"extend: context_id must be interned in contexts, got {context_id}")

    def _record(self, kind: str, arrays: Mapping[str, np.ndarray], **note: Any) -> None:
        if self._closed:
            raise RuntimeError("TokenLogStorage: the store is closed")
        if self._disk is not None:
            self._disk.record(kind, arrays, note)

    def _close(self, kind: str, group_ids: Sequence[int], reason: str) -> None:
        with self.changed:
            self.ledger.check_close(kind, group_ids)
            self._compact_if_large()
            self._record(kind, {"groups": np.array(group_ids, np.int64)}, reason=reason)
            self.content.log.release(self.content.settle(kind, group_ids, reason))
            self._on_change(np.empty(0, np.int64))

    def _snapshot(self) -> None:
        if self._disk is not None:
            book, counts = self.content.book()
            if self._sync:
                self.content.log.flush(book["rows"]["chunk"])
            self._disk.snapshot(book, {"ledger": counts})

    def _compact_if_large(self) -> None:
        if self._disk is not None and self._disk.wants_snapshot():
            self._snapshot()
