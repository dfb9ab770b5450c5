"""A folder of checkpoints that one run at a time writes: each is there whole, or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from rzero.checkpoint.errors import CheckpointError, DamagedCheckpoint
from rzero.checkpoint.manifest import read_manifest, verify_checkpoint

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"version-(\d+)")
_PARTIAL, _REMOVING = ".partial", ".removing-"


@final
class CheckpointFolder:
    """Checkpoints by version.

        .partial --rename--> version-000000120 --retention--> (gone)

    Args:
        path: Created if it is not there.
        writable: Take the folder's lock, to write; at most one process holds it.

    Raises:
        CheckpointError: If another run has the folder, or it cannot be written.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        self._lock = -1
        self._damaged: set[int] = set()
        if writable:
            self._take_lock()
            for left in (self.partial, *self.path.glob(f"{_REMOVING}*")):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)

    @property
    def partial(self) -> Path:
        """Where the next checkpoint is written."""
        return self.path / _PARTIAL

    def of(self, version: int) -> Path:
        """Where the checkpoint of a version is."""
        return self.path / f"version-{version:09d}"

    def versions(self) -> list[int]:
        """All that are there, ascending, damaged ones too."""
        if not self.path.is_dir():
            return []
        return sorted(int(m[1]) for m in map(_NAME.fullmatch, os.listdir(self.path)) if m)

    def newest_whole(self, *, at_most: int | None = None) -> int | None:
        """The newest version whose files hold their digests; damaged ones are named in a warning.

        Args:
            at_most: Look no further up than this version.

        Returns:
            None if there is none.

        Raises:
            CheckpointError: If a newer version of rzero wrote it.
        """
        for version in reversed(self.versions()):
            if at_most is not None and version > at_most:
                continue
            try:
                verify_checkpoint(self.of(version))
                return version
            except DamagedCheckpoint as error:
                self._damaged.add(version)
                _LOG.warning("%s; the one before it is used", error)
        return None

    def commit(self, version: int) -> None:
        """Make what was written to ``partial`` the checkpoint of a version, for good."""
        _flush(self.partial)
        target = self.of(version)
        if target.exists():  # damaged, or it would have been gone on from
            self.discard(target)
        self.partial.rename(target)
        self._damaged.discard(version)
        _flush(self.path)

    def retain(self, keep_last: int | None) -> None:
        """Remove all but the last so many and the one with the best score; None keeps all."""
        if keep_last is None:
            return
        whole = [version for version in self.versions() if version not in self._damaged]
        scores = {version: read_manifest(self.of(version)).get("score") for version in whole}
        scored = [version for version in whole if scores[version] is not None]
        best = max(scored, key=lambda version: (scores[version], version), default=None)
        for version in whole[:-keep_last]:
            if version != best:
                self.discard(self.of(version))

    def discard(self, folder: Path) -> None:
        """Remove a folder, under another name, lest half of it be taken for a whole one."""
        doomed = folder.with_name(_REMOVING + folder.name)
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Say of an error of the system what was being done, and that the other checkpoints are whole."""
        try:
            yield
        except OSError as error:
            kept = self.versions()
            whole = f"versions {kept} are kept" if kept else "there is no checkpoint yet"
            raise CheckpointError(f"{what} in {self.path} failed: {error}; {whole}") from error

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointError(
                f"the checkpoints in {self.path} belong to a run that still works"
            ) from None
        except OSError as error:
            self.close()
            raise CheckpointError(f"checkpoints must be written to {self.path}, but: {error}") from error


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
