"""The directory of a memory-mapped store: its lock, its journal and what can be read back from it."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rzero.buffers.codec import decode, encode
from rzero.buffers.journal import Journal

_COMPACT_BYTES = 1 << 24


class Disk:
    """One process's hold on a directory, in which every change is journaled before it is acknowledged.

    Args:
        directory: created if it is not there.
        layout: what a store must agree with to read the directory, for JSON.
        sync: outlive power failures too.

    Raises:
        RuntimeError: if another process has the directory open.
    """

    def __init__(self, directory: Path, *, layout: Mapping[str, Any], sync: bool):
        """Lock the directory and open its journal."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RuntimeError(f"TokenLogStorage: {directory} is open in another process or store") from None
        self.sync = sync
        self._layout = dict(layout)
        self._journal = Journal(directory / "journal.bin", sync=sync)
        self._base_bytes = 0

    def replay(self) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, Any]]]:
        """Read every acknowledged change: its kind, arrays and note.

        Raises:
            ValueError: if the directory was written with another layout.
            JournalError: if an acknowledged change can no longer be read.
        """
        for record in self._journal.records():
            arrays, note = decode(record)
            if note["kind"] == "snapshot" and note["layout"] != self._layout:
                raise ValueError(
                    f"TokenLogStorage: path must hold a store of {self._layout}, got {note['layout']}"
                )
            yield note["kind"], arrays, note

    @property
    def torn_bytes(self) -> int:
        """Bytes of an unfinished, never acknowledged change that opening cut off."""
        return self._journal.torn_bytes

    def record(self, kind: str, arrays: Mapping[str, np.ndarray], note: Mapping[str, Any]) -> None:
        """Acknowledge a change."""
        self._journal.append(encode(arrays, {"kind": kind, **note}))

    def wants_snapshot(self) -> bool:
        """Whether the journal has outgrown what a snapshot would take."""
        return self._journal.num_bytes > _COMPACT_BYTES + 4 * self._base_bytes

    def snapshot(self, arrays: Mapping[str, np.ndarray], note: Mapping[str, Any]) -> None:
        """Put one state in the place of all changes, atomically."""
        self._journal.replace(encode(arrays, {"kind": "snapshot", "layout": self._layout, **note}))
        self._base_bytes = self._journal.num_bytes

    def close(self) -> None:
        """Let go of the directory."""
        self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
