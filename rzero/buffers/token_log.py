"""Flat token columns in fixed-size chunks, in memory or in memory-mapped files."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np


class TokenLog:
    """Append-only columns, one entry a token, cut into chunks of a fixed number of tokens.

    A response lies whole in one chunk. A chunk that cannot take the next response is sealed and takes no
    further one; when its last response is released, its memory or file goes. A response is copied in once
    and only ever copied out.

    Args:
        fields: column names and dtypes.
        chunk_tokens: tokens in a chunk, which bounds the longest response.
        directory: where the chunk files are; None keeps the chunks in memory.
    """

    def __init__(self, fields: Mapping[str, np.dtype], *, chunk_tokens: int, directory: Path | None = None):
        """Start empty; `attach` brings back chunks that a former process wrote."""
        self.fields = dict(fields)
        self.chunk_tokens = chunk_tokens
        self._directory = directory
        self._chunks: dict[int, dict[str, np.ndarray]] = {}
        self._live: dict[int, int] = {}
        self._open = -1
        self._cursor = chunk_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks that are held, filled or not."""
        return len(self._chunks) * self._chunk_bytes

    def append(
        self, columns: Mapping[str, np.ndarray], cu_seqlens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copy B responses in.

        Args:
            columns: each ``[N]``, in the dtypes of the log.
            cu_seqlens: int64 ``[B + 1]`` offsets; no response is longer than a chunk.

        Returns:
            Chunk, and first token within the chunk, of each response: int64 ``[B]`` each.

        Raises:
            OSError: if the disk has no room for another chunk; nothing is kept then.
        """
        count = len(cu_seqlens) - 1
        chunks, starts = np.empty(count, np.int64), np.empty(count, np.int64)
        row = 0
        try:
            while row < count:
                begin = int(cu_seqlens[row])
                room = self.chunk_tokens - self._cursor
                stop = int(np.searchsorted(cu_seqlens, begin + room, side="right")) - 1
                if stop <= row:
                    self._open_chunk()
                    continue
                size = int(cu_seqlens[stop]) - begin
                for name, column in self._chunks[self._open].items():
                    column[self._cursor : self._cursor + size] = columns[name][begin : begin + size]
                chunks[row:stop] = self._open
                starts[row:stop] = cu_seqlens[row:stop] - begin + self._cursor
                self._cursor += size
                self._live[self._open] += stop - row
                row = stop
        except BaseException:
            self.release(chunks[:row])
            raise
        return chunks, starts

    def views(
        self, chunks: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> dict[str, list[np.ndarray]]:
        """Look at responses in the log; neighbours come as one piece.

        Args:
            chunks: int64 ``[B]``, B >= 1.
            starts: int64 ``[B]``.
            lengths: int64 ``[B]``.

        Returns:
            For each column the pieces in order, not copied. They stay readable after the responses are
            released.
        """
        ends = starts + lengths
        breaks = np.flatnonzero((chunks[1:] != chunks[:-1]) | (starts[1:] != ends[:-1])) + 1
        first = np.concatenate(([0], breaks))
        last = np.concatenate((breaks, [len(chunks)])) - 1
        runs = list(zip(chunks[first].tolist(), starts[first].tolist(), ends[last].tolist(), strict=True))
        return {
            name: [self._chunks[chunk][name][start:stop] for chunk, start, stop in runs]
            for name in self.fields
        }

    def release(self, chunks: np.ndarray) -> None:
        """Give responses up, named by their chunks; a sealed chunk without responses goes."""
        numbers, counts = np.unique(chunks, return_counts=True)
        for chunk, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._live[chunk] -= count
            self._drop_if_done(chunk)

    def attach(self, chunks: np.ndarray) -> None:
        """Map the files that a former process wrote, and delete those without responses.

        Args:
            chunks: the chunk of every stored response.

        Raises:
            FileNotFoundError: if the file of a stored response is gone.
        """
        numbers, counts = np.unique(chunks, return_counts=True)
        self._live = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._chunks = {chunk: self._map(chunk, create=False) for chunk in self._live}
        for path in self._files():
            number = int(path.stem.removeprefix("chunk-"))
            self._open = max(self._open, number)
            if number not in self._live:
                path.unlink()
        self._cursor = self.chunk_tokens

    def columns(self, chunk: int) -> dict[str, np.ndarray]:
        """The columns of a chunk, not copied."""
        return self._chunks[chunk]

    def path(self, chunk: int) -> Path | None:
        """The file of a chunk; None in memory."""
        return None if self._directory is None else self._directory / f"chunk-{chunk:08d}.bin"

    def flush(self, chunks: np.ndarray) -> None:
        """Write chunk files through to the device."""
        for chunk in np.unique(chunks).tolist():
            path = self.path(chunk)
            if path is not None:
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.close(file)

    @property
    def _chunk_bytes(self) -> int:
        return self.chunk_tokens * sum(dtype.itemsize for dtype in self.fields.values())

    def _files(self) -> list[Path]:
        return [] if self._directory is None else sorted(self._directory.glob("chunk-*.bin"))

    def _open_chunk(self) -> None:
        sealed, number = self._open, self._open + 1
        self._chunks[number], self._live[number] = self._map(number, create=True), 0
        self._open, self._cursor = number, 0
        self._drop_if_done(sealed)

    def _drop_if_done(self, chunk: int) -> None:
        if self._live.get(chunk) == 0 and chunk != self._open:
            del self._chunks[chunk], self._live[chunk]
            path = self.path(chunk)
            if path is not None:
                path.unlink()

    def _map(self, chunk: int, *, create: bool) -> dict[str, np.ndarray]:
        path = self.path(chunk)
        # One piece of memory for all columns: numpy then asks for huge pages, which cost fewer page faults.
        memory = np.empty(self._chunk_bytes, np.uint8) if path is None else self._open_file(path, create)
        columns, offset = {}, 0
        for name, dtype in self.fields.items():
            columns[name] = np.frombuffer(memory, dtype, self.chunk_tokens, offset)
            offset += self.chunk_tokens * dtype.itemsize
        return columns

    def _open_file(self, path: Path, create: bool) -> mmap.mmap:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                # Reserved now, so that a full disk is an error here and not a fatal signal at a later write.
                os.posix_fallocate(file, 0, self._chunk_bytes)
            return mmap.mmap(file, self._chunk_bytes)
        except OSError:
            if create:
                path.unlink()
            raise
        finally:
            os.close(file)
