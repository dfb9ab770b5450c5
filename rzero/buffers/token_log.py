"""Flat token columns in fixed-size chunks, in memory or in memory-mapped files."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

Columns = dict[str, np.ndarray]


class TokenLog:
    """Append-only columns, one entry a token, cut into chunks of a fixed number of tokens.

    A response lies whole in one chunk. A chunk that cannot take the next response is sealed and never written
    again; when its last response is released, its memory or file goes. A response is copied in once and only ever
    copied out.

    Args:
        fields: column names and dtypes.
        chunk_tokens: tokens in a chunk, which bounds the longest response.
        directory: where the chunk files are; None keeps the chunks in memory.
    """

    def __init__(self, fields: Mapping[str, np.dtype], *, chunk_tokens: int, directory: Path | None = None):
        """Start empty; `attach` brings back chunks that a former process wrote."""
        self._fields = {name: np.dtype(dtype) for name, dtype in fields.items()}
        self._chunk_tokens = chunk_tokens
        self._directory = directory
        self._chunks: dict[int, Columns] = {}
        self._live: dict[int, int] = {}
        self._open = -1
        self._cursor = chunk_tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all columns."""
        return sum(dtype.itemsize for dtype in self._fields.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks that are held, used or not."""
        return len(self._chunks) * self._chunk_tokens * self.bytes_per_token

    def append(
        self, columns: Mapping[str, np.ndarray], cu_seqlens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copy B responses in.

        Args:
            columns: each ``[N]``, in the dtypes of the log.
            cu_seqlens: int64 ``[B + 1]`` offsets; no response is longer than a chunk.

        Returns:
            chunk and first token in the chunk of each response, int64 ``[B]`` each.
        """
        count = len(cu_seqlens) - 1
        chunks, starts = np.empty(count, np.int64), np.empty(count, np.int64)
        row = 0
        while row < count:
            begin = int(cu_seqlens[row])
            room = self._chunk_tokens - self._cursor
            stop = int(np.searchsorted(cu_seqlens, begin + room, side="right")) - 1
            if stop <= row:
                self._open_chunk()
                continue
            size = int(cu_seqlens[stop]) - begin
            chunk = self._chunks[self._open]
            for name in self._fields:
                chunk[name][self._cursor : self._cursor + size] = columns[name][begin : begin + size]
            chunks[row:stop] = self._open
            starts[row:stop] = cu_seqlens[row:stop] - begin + self._cursor
            self._cursor += size
            self._live[self._open] += stop - row
            row = stop
        return chunks, starts

    def gather(self, chunks: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Columns:
        """Copy responses out, end to end; neighbours in the log are copied as one run.

        Args:
            chunks: int64 ``[B]``.
            starts: int64 ``[B]``.
            lengths: int64 ``[B]``.

        Returns:
            The columns, each ``[lengths.sum()]``, in memory of their own.
        """
        runs = self.runs(chunks, starts, lengths)
        return {
            name: np.concatenate([self._chunks[chunk][name][start:stop] for chunk, start, stop in runs])
            for name in self._fields
        }

    @staticmethod
    def runs(chunks: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int, int]]:
        """Join neighbouring responses: ``(chunk, start, stop)`` of each stretch that is contiguous in the log."""
        ends = starts + lengths
        breaks = np.flatnonzero((chunks[1:] != chunks[:-1]) | (starts[1:] != ends[:-1])) + 1
        first = np.concatenate(([0], breaks))
        last = np.concatenate((breaks - 1, [len(chunks) - 1]))
        return list(zip(chunks[first].tolist(), starts[first].tolist(), ends[last].tolist(), strict=True))

    def view(self, chunk: int, name: str) -> np.ndarray:
        """One column of one chunk, not copied."""
        return self._chunks[chunk][name]

    def release(self, chunks: np.ndarray) -> None:
        """Give responses up, named by their chunk; a sealed chunk without responses goes."""
        for chunk, count in zip(
            *(part.tolist() for part in np.unique(chunks, return_counts=True)), strict=True
        ):
            self._live[chunk] -= count
            self._drop_if_done(chunk)

    def attach(self, live: Mapping[int, int]) -> None:
        """Map the chunk files that a former process wrote; files without responses are deleted.

        Args:
            live: how many responses each chunk holds.
        """
        assert_directory = self._path(0).parent
        for path in assert_directory.glob("chunk-*.bin"):
            number = int(path.stem.removeprefix("chunk-"))
            self._open = max(self._open, number)
            if number not in live:
                path.unlink()
        for chunk, count in live.items():
            self._chunks[chunk] = self._map(chunk, create=False)
            self._live[chunk] = count

    def clear(self) -> None:
        """Release everything."""
        for chunk in list(self._chunks):
            self._live[chunk] = 0
            self._drop_if_done(chunk, sealed=True)
        self._cursor = self._chunk_tokens

    def path(self, chunk: int) -> Path | None:
        """The file of a chunk, or None in memory."""
        return None if self._directory is None else self._path(chunk)

    def _path(self, chunk: int) -> Path:
        assert self._directory is not None
        return self._directory / f"chunk-{chunk:08d}.bin"

    def _open_chunk(self) -> None:
        sealed, self._open, self._cursor = self._open, self._open + 1, 0
        if self._directory is None:
            chunk = {name: np.empty(self._chunk_tokens, dtype) for name, dtype in self._fields.items()}
        else:
            chunk = self._map(self._open, create=True)
        self._chunks[self._open], self._live[self._open] = chunk, 0
        self._drop_if_done(sealed)

    def _drop_if_done(self, chunk: int, *, sealed: bool = False) -> None:
        if self._live.get(chunk) == 0 and (sealed or chunk != self._open):
            del self._chunks[chunk], self._live[chunk]
            if self._directory is not None:
                self._path(chunk).unlink()

    def _map(self, chunk: int, *, create: bool) -> Columns:
        size = self._chunk_tokens * self.bytes_per_token
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(self._path(chunk), flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size)  # A full disk is an error here, not a SIGBUS later.
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        columns, offset = {}, 0
        for name, dtype in self._fields.items():
            columns[name] = np.frombuffer(mapped, dtype, self._chunk_tokens, offset)
            offset += self._chunk_tokens * dtype.itemsize
        return columns
