"""The log gives back what it took, over chunk borders, and lets go of what is no longer needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers.token_log import TokenLog
from tests.buffers.responses import full_disk

FIELDS = {"a": np.dtype(np.int32), "b": np.dtype(np.int16)}


def columns(lengths, first=0):
    size = sum(lengths)
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return {
        "a": np.arange(first, first + size, dtype=np.int32),
        "b": np.arange(size, dtype=np.int16),
    }, cu_seqlens


def gather(log, chunks, starts, lengths):
    views = log.views(np.array(chunks), np.array(starts), np.array(lengths))
    return {name: np.concatenate(pieces) for name, pieces in views.items()}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(10, 40),
    st.randoms(use_true_random=False),
)
def test_what_goes_in_comes_out(batches, chunk_tokens, random):
    log, stored, first = TokenLog(FIELDS, chunk_tokens=chunk_tokens), [], 0
    for lengths in batches:
        content, cu_seqlens = columns(lengths, first)
        chunks, starts = log.append(content, cu_seqlens)
        first += sum(lengths)
        for row, length in enumerate(lengths):
            expected = {
                name: column[cu_seqlens[row] : cu_seqlens[row + 1]] for name, column in content.items()
            }
            stored.append((int(chunks[row]), int(starts[row]), length, expected))
    picked = random.choices(stored, k=7)
    found = gather(log, *([row[part] for row in picked] for part in range(3)))
    for name in FIELDS:
        assert found[name].tolist() == [value for row in picked for value in row[3][name].tolist()]
        assert found[name].dtype == FIELDS[name]


def test_neighbours_come_as_one_piece():
    log = TokenLog(FIELDS, chunk_tokens=100)
    chunks, starts = log.append(*columns([10, 20, 30]))
    lengths = np.array([10, 20, 30])
    assert [len(piece) for piece in log.views(chunks, starts, lengths)["a"]] == [60]
    order = np.array([1, 2, 0])
    assert [len(piece) for piece in log.views(chunks[order], starts[order], lengths[order])["a"]] == [50, 10]


def test_a_chunk_goes_with_its_last_response():
    log = TokenLog(FIELDS, chunk_tokens=10)
    chunks, _ = log.append(*columns([6, 4, 6, 4, 6]))
    assert chunks.tolist() == [0, 0, 1, 1, 2]
    assert log.num_bytes == 3 * 10 * 6
    log.release(chunks[:1])
    assert log.num_bytes == 3 * 10 * 6
    log.release(chunks[1:4])
    assert log.num_bytes == 10 * 6
    log.release(chunks[4:])  # The open chunk stays, for the next response.
    assert log.append(*columns([4]))[0].tolist() == [2]
    assert log.append(*columns([4]))[0].tolist() == [3]
    log.release(np.array([2]))
    assert log.num_bytes == 10 * 6


def test_views_outlive_the_response():
    log = TokenLog(FIELDS, chunk_tokens=10)
    chunks, starts = log.append(*columns([10, 10], first=5))
    views = log.views(chunks[:1], starts[:1], np.array([10]))
    log.release(chunks[:1])
    log.append(*columns([10], first=100))
    assert views["a"][0].tolist() == list(range(5, 15))


def test_files_come_and_go_with_their_chunks(tmp_path):
    log = TokenLog(FIELDS, chunk_tokens=10, directory=tmp_path)
    chunks, starts = log.append(*columns([10, 10, 5]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chunk-00000000.bin",
        "chunk-00000001.bin",
        "chunk-00000002.bin",
    ]
    assert log.path(1).stat().st_size == 10 * 6
    log.release(chunks[:1])
    assert not log.path(0).exists()

    (
        tmp_path / "chunk-00000007.bin"
    ).touch()  # made by a process that was killed before it acknowledged a row
    again = TokenLog(FIELDS, chunk_tokens=10, directory=tmp_path)
    again.attach(chunks[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk-00000001.bin", "chunk-00000002.bin"]
    assert gather(again, chunks[1:], starts[1:], [10, 5])["a"].tolist() == list(range(10, 25))
    assert again.append(*columns([1]))[0].tolist() == [8]  # A number is never used twice.


def test_a_full_disk_keeps_nothing_of_an_append(tmp_path):
    log = TokenLog(FIELDS, chunk_tokens=10, directory=tmp_path)
    first, starts = log.append(*columns([6]))
    with full_disk(50), pytest.raises(OSError, match="File too large"):
        log.append(*columns([4, 6]))  # The first fits into the open chunk, the second needs another.
    assert [path.name for path in tmp_path.iterdir()] == ["chunk-00000000.bin"]
    assert log.append(*columns([10], first=50))[0].tolist() == [1]
    assert gather(log, first, starts, [6])["a"].tolist() == list(range(6))
    log.release(first)
    assert [path.name for path in tmp_path.iterdir()] == ["chunk-00000001.bin"]


def test_a_lost_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="chunk-00000003"):
        TokenLog(FIELDS, chunk_tokens=10, directory=tmp_path).attach(np.array([3]))
