"""TorchRL's Storage over the store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from rzero.buffers.digest import PROVENANCE_FIELDS
from rzero.buffers.entry import entry_of_batch, entry_of_records, restore_batch
from rzero.buffers.faults import Fault
from rzero.buffers.packing import PackedBatch, unpack
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, Rollout
from rzero.buffers.state import from_tensors, read_state, to_tensors, write_state
from rzero.buffers.store import Store
from rzero.buffers.token_log import TokenLog
from rzero.buffers.torchrl_private import note_change, note_write

_TAKEN_NAMES = {*TOKEN_FIELDS, *ROW_FIELDS, "digest", "cu_seqlens", "extras", "book"}


class TokenLogStorage(Storage):
    """Write-once storage of responses of uneven length, without padding.

    Token fields lie in the chunks of a log, row fields in a table, and a ledger keeps count of whole
    groups. With ``path`` the chunks are memory-mapped files and every change is journaled before it is
    acknowledged: whatever instant the process is killed at, opening the path again finds each acknowledged
    response stored or accounted for, and no half-written one. One buffer serves one storage, and one
    process at a time may hold a path.

    Args:
        max_size: reported to TorchRL; what bounds a store is the buffer's capacity in updates.
        chunk_tokens: tokens in a chunk; no response may be longer.
        path: a directory, created or continued. None keeps everything in memory.
        extra_fields: token fields that are not evidence, and their dtypes, such as
            ``{"log_probs": torch.float32}`` for the learner's. They come with a response or are added later.
        sync: flush each change of a ``path``, and each dump, to the device, which also outlives power
            failures.
        clock: seconds, for the waiting times in messages.

    Raises:
        ValueError: if ``chunk_tokens`` is not positive or a name is taken.

    Example:
        >>> storage = TokenLogStorage(extra_fields={"log_probs": torch.float32})
        >>> len(storage)
        0
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        chunk_tokens: int = 1 << 19,
        path: str | Path | None = None,
        extra_fields: Mapping[str, torch.dtype] | None = None,
        sync: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Check the layout; `bind` makes the store."""
        super().__init__(torch.iinfo(torch.int64).max if max_size is None else max_size)
        if chunk_tokens < 1:
            raise ValueError(f"TokenLogStorage: chunk_tokens must be positive, got {chunk_tokens}")
        extra_fields = extra_fields or {}
        if taken := extra_fields.keys() & _TAKEN_NAMES:
            raise ValueError(f"TokenLogStorage: extra_fields must be new names, got {sorted(taken)}")
        self._chunk_tokens = chunk_tokens
        self._path = None if path is None else Path(path)
        self._extras = {name: _numpy_dtype(dtype) for name, dtype in extra_fields.items()}
        self.sync = sync
        self._clock = clock
        self._store: Store | None = None

    def bind(self, group_size: int) -> Store:
        """Make the store for a buffer with this group size; with a path, read back what it holds.

        Raises:
            RuntimeError: if the storage serves a buffer already, or the path is in use.
            ValueError: if the path holds a store of another layout.
            JournalError: if an acknowledged change can no longer be read.
        """
        if self._store is not None:
            raise RuntimeError("TokenLogStorage.bind: one storage serves one buffer, got a second")
        fields = {name: _numpy_dtype(dtype) for name, dtype in PROVENANCE_FIELDS.items()} | self._extras
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
        self._store = Store(
            group_size,
            log=TokenLog(fields, chunk_tokens=self._chunk_tokens, directory=self._path),
            extras=tuple(self._extras),
            directory=self._path,
            sync=self.sync,
            clock=self._clock,
            on_change=self._note,
        )
        return self._store

    @property
    def store(self) -> Store:
        """The store itself.

        Raises:
            RuntimeError: before `bind`.
        """
        if self._store is None:
            raise RuntimeError("TokenLogStorage: give the storage to a ProvenanceReplayBuffer first")
        return self._store

    def append(self, data: PackedBatch | Sequence[Rollout | Mapping[str, Any]]) -> Tensor:
        """Check responses, store all or none, and return their places, int64 ``[B]``."""
        entry_of = entry_of_batch if isinstance(data, PackedBatch) else entry_of_records
        # Checked before the lock is taken, so that writers hash at the same time.
        entry = entry_of(cast(Any, data), self._extras, chunk_tokens=self._chunk_tokens)
        return torch.from_numpy(self.store.admit(entry))

    def annotate(self, uids: Tensor, name: str, values: Tensor) -> None:
        """Add values of an extra field to stored responses; evidence cannot be written, here or anywhere.

        Args:
            uids: int64 ``[B]``, responses of groups that are not being sampled.
            name: one of ``extra_fields``.
            values: ``[N]``, the tokens of these responses end to end, prompts included.

        Raises:
            ValueError: if the name is not an extra field, a response is not stored, or the length is wrong.
            TypeError: if the dtype is not the field's.
        """
        if name not in self._extras:
            raise ValueError(
                f"annotate: name must be one of extra_fields {sorted(self._extras)}, got {name!r}"
            )
        flat = values.detach().cpu().contiguous().numpy()
        if flat.dtype != self._extras[name]:
            raise TypeError(f"annotate: values must have dtype {self._extras[name]}, got {flat.dtype}")
        self.store.annotate(_places(uids), name, flat)

    def verify(self, index: Any = None) -> list[Fault]:
        """Recompute every digest, and every checksum of extras, where they lie.

        Args:
            index: the places to check; None checks all.

        Returns:
            The responses whose bytes changed; empty if all is well.
        """
        return self.store.verify(None if index is None else _places(index))

    def get(self, index: Any) -> Rollout | PackedBatch:
        """Copy responses out; nothing done to the result reaches the store.

        Args:
            index: a place, or a list, array, tensor, range or slice of places; a slice counts the stored
                rows.

        Returns:
            A `Rollout` for one place, else a `PackedBatch`.

        Raises:
            IndexError: if nothing is stored at a place.
        """
        if isinstance(index, slice):
            return restore_batch(*self.store.read(self.store.places()[index]))
        places = _places(index)
        batch = restore_batch(*self.store.read(places))
        return unpack(batch)[0] if np.ndim(index) == 0 else batch

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Refuse: a stored response is never overwritten, and a new one finds its own place.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("TokenLogStorage.set: stored responses are write-once; extend the buffer instead")

    def register_save_hook(self, hook: Any) -> None:
        """Refuse: what is saved is what was stored.

        Raises:
            RuntimeError: always, as for `register_load_hook`.
        """
        raise RuntimeError(
            "TokenLogStorage: evidence is saved and loaded as it is; transform samples instead"
        )

    register_load_hook = register_save_hook

    def contains(self, item: Any) -> bool:
        """Whether every place holds a response."""
        return bool(self.store.has(_places(item)).all())

    def __len__(self) -> int:
        """How many responses are stored."""
        return 0 if self._store is None else len(self._store)

    def __iter__(self) -> Iterator[Rollout]:
        """Iterate over copies of the stored responses."""
        for place in self.store.places().tolist():
            yield unpack(restore_batch(*self.store.read(np.array([place]))))[0]

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that is stored, as plain tensors of their own."""
        return to_tensors(self.store.state())

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Put a state in the place of everything that is stored.

        Raises:
            ValueError: if it has another layout or a digest does not hold; nothing has changed then.
        """
        self.store.load(from_tensors(state_dict))

    def dumps(self, path: str | Path) -> None:
        """Write everything that is stored to one file, replaced atomically."""
        write_state(self.store.state(), Path(path), sync=self.sync)

    def loads(self, path: str | Path) -> None:
        """Put what `dumps` wrote in the place of everything that is stored."""
        self.store.load(read_state(Path(path))[0])

    def close(self) -> None:
        """Let go of the path."""
        if self._store is not None:
            self._store.close()

    def _empty(self) -> None:
        ledger = self.store.ledger
        for group_id in list(ledger.open):
            self.store.fail(group_id, "emptied")
        self.store.evict(list(ledger.ready), "emptied")

    def _note(self, places: np.ndarray) -> None:
        if len(places):
            note_write(self, int(places[-1]))
        else:
            note_change(self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: a copy in another process would have a ledger of its own."""
        raise RuntimeError("TokenLogStorage: one process owns the store; send batches to it")


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty((), dtype=dtype).numpy().dtype


def _places(index: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(index, dtype=np.int64)).reshape(-1)
