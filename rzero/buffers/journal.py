"""An append-only file of checksummed records, which survives being killed in the middle of one."""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAGIC = b"RZJ1"
_FRAME = struct.Struct("<4sIQI")


class JournalError(RuntimeError):
    """A record that was once acknowledged can no longer be read."""


class Journal:
    """Records in the order in which they were acknowledged.

    A record is written by appending, so a kill leaves a prefix of it at the end of the file; that prefix
    was never acknowledged and is cut off on opening. Anything else that is unreadable is corruption and is
    an error.

    Args:
        path: the file; its directory exists.
        sync: flush to the device before a record counts as written, which also outlives a power failure.
    """

    def __init__(self, path: Path, *, sync: bool = False):
        """Open or create the file and cut off an unfinished record."""
        self._path = path
        self._sync = sync
        self.torn_bytes = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.num_bytes = os.fstat(self._file).st_size

    def records(self) -> Iterator[memoryview]:
        """Read every record; a torn one at the end is cut off and counted in `torn_bytes`.

        Raises:
            JournalError: naming the place of the record that is corrupt.
        """
        content = memoryview(self._path.read_bytes())
        place = 0
        while place < len(content):
            if len(content) - place < _FRAME.size:
                break
            magic, crc, size, frame_crc = _FRAME.unpack_from(content, place)
            if magic != _MAGIC or frame_crc != zlib.crc32(content[place : place + _FRAME.size - 4]):
                raise JournalError(f"Journal: the record at byte {place} of {self._path.name} is corrupt")
            start = place + _FRAME.size
            if len(content) - start < size:
                break
            if zlib.crc32(content[start : start + size]) != crc:
                raise JournalError(f"Journal: the record at byte {place} of {self._path.name} is corrupt")
            yield content[start : start + size]
            place = start + size
        self.torn_bytes = len(content) - place
        if self.torn_bytes:
            os.ftruncate(self._file, place)
        self.num_bytes = place

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write one record; when this returns, the record is acknowledged.

        Raises:
            OSError: if the disk refuses it; the journal is as before then.
        """
        try:
            self.num_bytes += _write(self._file, pieces)
        except OSError:
            os.ftruncate(self._file, self.num_bytes)  # What follows a torn record would be unreadable.
            raise
        if self._sync:
            os.fsync(self._file)

    def replace(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Put one record in the place of all, atomically.

        Raises:
            OSError: if the disk refuses it; the journal is as before then.
        """
        partial = self._path.with_suffix(".partial")
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            size = _write(file, pieces)
            os.fsync(file)
            partial.replace(self._path)
        except OSError:
            os.close(file)
            partial.unlink()
            raise
        os.close(self._file)
        self._file, self.num_bytes = file, size

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write(file: int, pieces: Sequence[bytes | memoryview]) -> int:
    payload = b"".join(pieces)
    frame = _FRAME.pack(_MAGIC, zlib.crc32(payload), len(payload), 0)[:-4]
    record = frame + struct.pack("<I", zlib.crc32(frame)) + payload
    rest = memoryview(record)
    while rest:
        rest = rest[os.write(file, rest) :]
    return len(record)
