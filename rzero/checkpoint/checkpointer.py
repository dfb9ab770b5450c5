"""Saving in the background, loading on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.stateful import Stateful

from rzero.checkpoint.errors import CheckpointError
from rzero.checkpoint.folder import CheckpointFolder
from rzero.checkpoint.manifest import read_manifest, write_manifest
from rzero.checkpoint.shards import read_tensors, stored_tensors, write_tensors
from rzero.checkpoint.staging import Staged, stage, staged_tensors
from rzero.checkpoint.tree import from_tensors, to_tensors

_LOG = logging.getLogger(__name__)
_TIMEOUT = 600  # seconds for the future of a state

Savable: TypeAlias = Stateful | Future[Any]


@final
class Checkpointer:
    """Saves and loads objects that have ``state_dict`` and ``load_state_dict``.

        save(): copy | in a thread: write, flush --> digests, manifest, flush --> rename, flush --> retention

    ``save`` returns after the copy. Whatever happens at any instant, each checkpoint in the folder is whole.

    Args:
        folder: For the checkpoints of one run.
        keep_last: How many to keep, beside the one with the best score; None keeps all.
        config: The run's settings, for the manifest.
        group: The ranks that save and load together; no other collective may use it. None: this process
            alone. Every rank of the group makes the same calls in the same order.
        read_only: Load only; take no lock and remove nothing.

    Raises:
        CheckpointError: If another run has the folder, or it cannot be written.

    Example:
        See ``docs/checkpoint.md``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = 2,
        config: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        read_only: bool = False,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"Checkpointer: keep_last must be at least 1 or None, got {keep_last}")
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._folder = CheckpointFolder(Path(folder), writable=self._rank == 0 and not read_only)
        self._keep_last, self._config = keep_last, dict(config or {})
        # One thread for all saves: a new one would run first, while the learner waits for it to start.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._thread.submit(int)
        self._saving: Future[None] | None = None

    def save(
        self,
        version: int,
        state: Mapping[str, Savable],
        *,
        rank_state: Mapping[str, Savable] | None = None,
        score: float | None = None,
    ) -> None:
        """Copy the states now and write the copy in the background, once the save before is done.

        A future of a state dict is copied by nobody and awaited in the background; nothing may change its
        result, as that of ``AsyncRolloutCollector.snapshot``.

        Args:
            version: Of the weights; names the checkpoint.
            state: What all ranks hold together: sharded tensors in parts, anything else in equal copies.
            rank_state: What is this rank's own.
            score: Of these weights, the greater the better.

        Raises:
            CheckpointError: If this save, or the one before, failed, or a future did not end in 10 minutes.
            TypeError: If a state holds something else than tensors and what JSON can tell; of a future, the
                next save or ``wait`` raises it.
        """
        staged = _staged("all", state) | _staged(f"rank{self._rank}", rank_state or {})
        self.wait()
        self._saving = self._thread.submit(self._write, version, staged, score)

    def wait(self) -> None:
        """Return when the last save is on the device.

        Raises:
            CheckpointError: If it failed.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def latest(self, *, at_most: int | None = None) -> int | None:
        """The newest version that is whole, the same on all ranks; None if there is none.

        Every file is compared with its digest. A damaged checkpoint is named in a warning, and the one before
        it is taken.

        Args:
            at_most: Look no further up than this version.

        Raises:
            CheckpointError: If a later version of rzero wrote it.
        """
        found, error = None, None
        if self._rank == 0:
            try:
                found = self._folder.newest_whole(at_most=at_most)
            except CheckpointError as caught:
                error = caught
        if self._group is not None:
            answer = torch.tensor([-2 if error else -1 if found is None else found])
            dist.broadcast(answer, group_src=0, group=self._group)
            found = None if int(answer) < 0 else int(answer)
            if int(answer) == -2 and error is None:
                error = CheckpointError(f"the first rank cannot use the checkpoints in {self._folder.path}")
        if error is not None:
            raise error
        return found

    def load(
        self,
        version: int,
        state: Mapping[str, Stateful],
        *,
        rank_state: Mapping[str, Stateful] | None = None,
    ) -> dict[str, Any]:
        """Give objects the states that were saved under their names; others in the checkpoint stay unread.

        Args:
            version: As ``latest`` returned it.
            state: As in ``save``. The number of ranks may be another one: tensors are sharded as those that
                the objects hold now.
            rank_state: As in ``save``; each rank reads its own without the others. A rank that did not save
                keeps what it has, with a warning.

        Returns:
            The manifest.

        Raises:
            CheckpointError: If the checkpoint does not hold one of the names.
        """
        folder = self._folder.of(version)
        manifest, names = read_manifest(folder), list(stored_tensors(folder))
        if state:
            self._load(folder, "all", state, names, self._group)
        if rank_state:
            place = f"rank{self._rank}"
            if any(name.startswith(f"{place}/") for name in names):
                self._load(folder, place, rank_state, names, None)
            else:
                _LOG.warning("%s was not saved by %s, which keeps its own %s", folder, place, [*rank_state])
        return manifest

    def versions(self) -> list[int]:
        """All that are in the folder, ascending, damaged ones too."""
        return self._folder.versions()

    def close(self) -> None:
        """Wait for the last save and let another run have the folder."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._folder.close()

    def _write(self, version: int, staged: Mapping[str, Staged | Future[Any]], score: float | None) -> None:
        partial = self._folder.partial
        with self._folder.errors(f"saving checkpoint {version}"):
            tensors = {
                f"{name}/{path}": tensor
                for name in staged
                for path, tensor in _tensors(name, staged[name]).items()
            }
            try:
                write_tensors(tensors, partial, self._group)
                if self._rank == 0:
                    ranks = 1 if self._group is None else dist.get_world_size(self._group)
                    content = {"version": version, "score": score, "ranks": ranks, "config": self._config}
                    write_manifest(partial, content)
                    self._folder.commit(version)
                    self._folder.retain(self._keep_last)
            except BaseException:
                if self._rank == 0:
                    self._folder.discard(partial)
                raise

    def _load(
        self,
        folder: Path,
        place: str,
        objects: Mapping[str, Stateful],
        stored: list[str],
        group: ProcessGroup | None,
    ) -> None:
        held: dict[str, Tensor | None] = {}
        for name, stateful in objects.items():
            prefix = f"{place}/{name}/"
            if f"{prefix}json" not in stored:
                there = sorted({key.split("/")[1] for key in stored if key.startswith(f"{place}/")})
                raise CheckpointError(f"checkpoint {folder}: must hold {name!r}, got {there}")
            now = {} if group is None else to_tensors(stateful.state_dict())
            held |= {k: now.get(k.removeprefix(prefix)) for k in stored if k.startswith(prefix)}
        tensors = read_tensors(held, folder, group)
        for name, stateful in objects.items():
            prefix = f"{place}/{name}/"
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            stateful.load_state_dict(from_tensors(own))


def _staged(place: str, objects: Mapping[str, Savable]) -> dict[str, Staged | Future[Any]]:
    """Copies of all states, under names of their own."""
    return {
        f"{place}/{name}": state if isinstance(state, Future) else stage(state.state_dict())
        for name, state in objects.items()
    }


def _tensors(name: str, state: Staged | Future[Any]) -> dict[str, Tensor]:
    if not isinstance(state, Future):
        return staged_tensors(state)
    try:
        return to_tensors(state.result(_TIMEOUT))
    except TimeoutError as error:
        raise CheckpointError(f"the state of {name} must be there within {_TIMEOUT} s, got none") from error
