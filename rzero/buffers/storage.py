"""The store behind the buffer: a token log, a row table and a book, in memory or on disk."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from rzero.buffers.codec import decode, encode
from rzero.buffers.context import ContextTable
from rzero.buffers.digest import PROVENANCE_FIELDS, digest_rows
from rzero.buffers.entry import Entry, extras_checksums, prepare
from rzero.buffers.journal import Journal, JournalError
from rzero.buffers.ledger import Ledger
from rzero.buffers.packing import PackedBatch, offsets, unpack
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, Rollout
from rzero.buffers.row_table import RowTable, row_lengths
from rzero.buffers.samplers import ReadyGroup
from rzero.buffers.token_log import TokenLog
from rzero.buffers.torchrl_private import note_change, note_write


class Fault(NamedTuple):
    """A stored response whose bytes are not those that were admitted."""

    uid: int
    group_id: int
    chunk: int
    file: Path | None
    start: int
    stop: int
    what: str


class TokenLogStorage(Storage):
    """Write-once storage of packed responses."""

    def __init__(
        self,
        max_size: int | None = None,
        *,
        chunk_tokens: int = 1 << 18,
        path: str | Path | None = None,
        extra_fields: Mapping[str, torch.dtype] | None = None,
        sync: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(torch.iinfo(torch.int64).max if max_size is None else max_size)
        self.lock = threading.RLock()
        self.group_size = 0
        self.chunk_tokens = chunk_tokens
        self._clock = clock
        self._extras = {
            name: torch.empty((), dtype=dtype).numpy().dtype for name, dtype in (extra_fields or {}).items()
        }
        taken = self._extras.keys() & {*TOKEN_FIELDS, *ROW_FIELDS, "digest", "cu_seqlens"}
        if taken:
            raise ValueError(f"TokenLogStorage: extra_fields must be new names, got {sorted(taken)}")
        self._provenance = {
            name: torch.empty((), dtype=dtype).numpy().dtype for name, dtype in PROVENANCE_FIELDS.items()
        }
        self.contexts = ContextTable()
        self._log = TokenLog({**self._provenance, **self._extras}, chunk_tokens=chunk_tokens)
        self._table = RowTable()
        self._journal: Journal | None = None

    def bind(self, group_size: int) -> None:
        if self.group_size not in (0, group_size):
            raise ValueError(f"TokenLogStorage: group_size must be {self.group_size}, got {group_size}")
        self.group_size = group_size
        self.ledger = Ledger(group_size)

    def prepare(self, batch: PackedBatch) -> Entry:
        return prepare(batch, self._extras, chunk_tokens=self.chunk_tokens)

    def admit(self, entry: Entry) -> tuple[Tensor, list[ReadyGroup]]:
        with self.lock:
            rows = entry.rows
            self.ledger.check_admit(rows)
            rows["chunk"], rows["start"] = self._log.append(entry.columns, entry.cu_seqlens)
            places = self._table.insert(rows)
            completed = self.ledger.admit(rows, places.tolist(), now=self._clock())
            index = torch.from_numpy(places)
            note_write(self, index)
            return index, completed

    def reserve(self, group_id: int, size: int) -> None:
        with self.lock:
            self.ledger.check_reserve(group_id, size)
            self.ledger.reserve(group_id, now=self._clock())

    def consume(self, group_ids: Sequence[int]) -> None:
        with self.lock:
            self._remove(self.ledger.consume(group_ids))

    def evict(self, group_ids: Sequence[int], reason: str) -> None:
        with self.lock:
            self._remove(self.ledger.evict(group_ids, reason))

    def fail(self, group_id: int, reason: str) -> None:
        with self.lock:
            self._remove(self.ledger.fail(group_id, reason))

    def now(self) -> float:
        return self._clock()

    def rows_of(self, group_ids: Iterable[int]) -> Tensor:
        places = [place for group_id in group_ids for place in self.ledger.ready[group_id].places]
        return torch.tensor(places, dtype=torch.int64)

    def get(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            return unpack(self.get([index]))[0]
        if isinstance(index, slice):
            places = self._table.places()[index]
        else:
            places = np.asarray(index, dtype=np.int64).reshape(-1)
        if not self._table.has(places).all() or len(places) == 0:
            raise IndexError(f"TokenLogStorage: index must name stored responses, got {places[:8].tolist()}")
        rows = self._table[places]
        columns = self._log.gather(rows["chunk"], rows["start"], row_lengths(rows))
        fields = {name: torch.from_numpy(columns[name]) for name in PROVENANCE_FIELDS}
        fields["response_mask"] = fields["policy_version"] >= 0
        count = len(columns["token_ids"])
        extras = {name: torch.from_numpy(columns[name]) for name in self._extras}
        return PackedBatch(
            **fields,
            **{name: torch.from_numpy(np.ascontiguousarray(rows[name])) for name in (*ROW_FIELDS, "digest")},
            cu_seqlens=offsets(row_lengths(rows)),
            extras=TensorDict(extras, batch_size=[count]) if extras else None,
        )

    def set(self, cursor, data, *, set_cursor: bool = True):
        raise RuntimeError("TokenLogStorage.set: stored responses are write-once; use extend")

    def contains(self, item):
        return bool(self._table.has(np.asarray(item).reshape(-1)).all())

    def __len__(self):
        return len(self._table)

    def _empty(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass

    def _remove(self, places: list[int]) -> None:
        if places:
            where = np.array(places)
            chunks = self._table[where]["chunk"]
            self._table.remove(where)
            self._log.release(chunks)
            note_change(self)
