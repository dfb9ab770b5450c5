"""A store on disk goes on where it stopped, and belongs to one process at a time."""

import pytest
import torch

from rzero.buffers import FifoGroupSampler, JournalError, disk, pack
from tests.buffers.processes import CONTEXT
from tests.buffers.responses import assert_balanced, assert_same, full_disk, group, make_buffer, rollout
from tests.buffers.test_context import LAW, SamplingContext


def reopen(buffer, path, **options):
    buffer.shutdown()
    return make_buffer(path=path, **options)


def test_a_store_goes_on_where_it_stopped(tmp_path):
    extra = {"extra_fields": {"log_probs": torch.float32}}
    buffer = make_buffer(path=tmp_path, **extra)
    context = SamplingContext(**LAW)
    law = {"context_id": buffer.contexts.intern(context)}
    buffer.reserve(9, 4)
    buffer.extend(group(0, **law) + group(1, **law) + group(2, **law) + group(3, **law)[:2])
    buffer.storage.annotate(torch.tensor([9]), "log_probs", torch.arange(5.0))
    buffer.sample(4, timeout=0)
    buffer.evict([1], "stale")
    buffer.fail(9, "lost")
    stats = buffer.stats()

    again = reopen(buffer, tmp_path, **extra)
    assert {**again.stats(), "bytes": 0} == {**stats, "bytes": 0}
    assert again.contexts[context.context_id] == context
    assert again.incomplete() == {3: [2, 3]}
    batch = again[:]
    assert batch.uid.tolist() == [8, 9, 10, 11, 12, 13]
    assert batch.extras["log_probs"][5:10].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    again.extend(group(3, **law)[2:])
    sampled = again.sample(timeout=0)
    assert sampled.group_id.tolist() == [2] * 4 + [3] * 4
    for name, value in pack(group(2, **law) + group(3, **law)).items():
        assert value.numpy().tobytes() == sampled.get(name).numpy().tobytes()
    for uid in (0, 4, 8):
        with pytest.raises(ValueError, match="a second time"):
            again.extend(group(uid // 4, **law))
    assert_balanced(again)
    again.shutdown()
    assert len(list(tmp_path.glob("chunk-*.bin"))) <= 1


def test_a_closed_group_stays_closed(tmp_path):
    buffer = make_buffer(path=tmp_path / "store", groups_per_batch=1)
    buffer.extend(group(0) + group(1))
    buffer.sample(timeout=0)
    buffer.evict([1], "stale")
    buffer.reserve(2, 4)
    buffer.fail(2, "lost")
    restored = make_buffer()
    restored.load_state_dict(buffer.state_dict())
    again = reopen(
        reopen(buffer, tmp_path / "store"), tmp_path / "store"
    )  # from the journal, from a snapshot
    for other in (again, restored):
        for closed in (0, 1, 2):
            with pytest.raises(ValueError, match=f"group {closed} was closed and takes no more"):
                other.extend([rollout(1000 + closed, group_id=closed)])
            with pytest.raises(ValueError, match=f"group_id must be new and >= 0, got {closed}"):
                other.reserve(closed, 4)
    again.shutdown()


def test_a_lease_does_not_outlive_its_process(tmp_path):
    buffer = make_buffer(path=tmp_path, prefetch=1)
    buffer.extend(group(0) + group(1))
    assert buffer.stats()["prefetch_queue_size"] == 1
    again = reopen(buffer, tmp_path)
    assert again.sample(timeout=0).group_id.tolist() == [0] * 4 + [1] * 4
    again.shutdown()


def test_the_order_of_completion_is_kept(tmp_path):
    buffer = make_buffer(path=tmp_path, sampler=FifoGroupSampler())
    buffer.extend(group(5)[:3] + group(6) + group(7))
    buffer.extend(group(5)[3:])
    again = reopen(buffer, tmp_path)
    assert again.sample(timeout=0).group_id.tolist() == [6] * 4 + [7] * 4
    again.shutdown()


def test_rows_come_back_in_the_order_of_arrival(tmp_path):
    buffer = make_buffer(path=tmp_path, groups_per_batch=1)
    buffer.extend(group(0))
    buffer.sample(timeout=0)  # The places of its rows are used again, last first.
    for index in (2, 0, 3, 1):
        buffer.extend([group(1)[index]])
    again = reopen(buffer, tmp_path, groups_per_batch=1)
    assert again.sample(timeout=0).sample_index.tolist() == [2, 0, 3, 1]
    again.shutdown()


def test_space_is_given_back(tmp_path):
    buffer = make_buffer(path=tmp_path, chunk_tokens=40)
    for number in range(20):
        buffer.extend(group(number))
    assert len(list(tmp_path.glob("chunk-*.bin"))) == 10
    for _ in range(10):
        buffer.sample(timeout=0)
    assert len(list(tmp_path.glob("chunk-*.bin"))) == 1
    buffer.shutdown()


def test_the_journal_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_COMPACT_BYTES", 10_000)
    buffer = make_buffer(path=tmp_path, chunk_tokens=100)
    for number in range(200):
        buffer.extend(group(number))
        if number % 2:
            buffer.sample(timeout=0)
    assert (tmp_path / "journal.bin").stat().st_size < 20_000
    stats = buffer.stats()
    again = reopen(buffer, tmp_path, chunk_tokens=100)
    assert again.stats() == {**stats, "bytes": 0}
    with pytest.raises(ValueError, match="a second time"):
        again.extend([*group(150)])
    again.shutdown()


@pytest.mark.parametrize(
    "options", [{"group_size": 2}, {"chunk_tokens": 99}, {"extra_fields": {"log_probs": torch.float32}}]
)
def test_another_layout_is_refused(tmp_path, options):
    make_buffer(path=tmp_path).shutdown()
    with pytest.raises(ValueError, match=r"path must hold a store of .* got"):
        make_buffer(path=tmp_path, **options)
    make_buffer(path=tmp_path).shutdown()  # The refusal let go of the lock.


def test_damage_in_the_journal_is_an_error(tmp_path):
    buffer = make_buffer(path=tmp_path)
    buffer.extend(group(0))
    buffer.extend(group(1))
    buffer.shutdown()
    path = tmp_path / "journal.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"the record at byte \d+ of journal.bin is corrupt"):
        make_buffer(path=tmp_path)


def test_a_lost_chunk_is_an_error(tmp_path):
    buffer = make_buffer(path=tmp_path)
    buffer.extend(group(0))
    buffer.shutdown()
    (tmp_path / "chunk-00000000.bin").unlink()
    with pytest.raises(FileNotFoundError, match="chunk-00000000"):
        make_buffer(path=tmp_path)


def test_two_stores_cannot_hold_one_path(tmp_path):
    buffer = make_buffer(path=tmp_path)
    with pytest.raises(RuntimeError, match="is open in another process or store"):
        make_buffer(path=tmp_path)
    with CONTEXT.Pool(1) as pool, pytest.raises(RuntimeError, match="is open in another process or store"):
        pool.apply(_open_and_close, (tmp_path,))
    buffer.shutdown()
    make_buffer(path=tmp_path).shutdown()


def _open_and_close(path):
    make_buffer(path=path).shutdown()


def test_a_closed_store_refuses_changes(tmp_path):
    buffer = make_buffer(path=tmp_path)
    buffer.extend(group(0))
    buffer.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.extend(group(1))
    with pytest.raises(RuntimeError, match="the store is closed"):
        buffer.storage.store.reserve(77, 4)


def test_flushing_to_the_device_changes_nothing_else(tmp_path):
    buffer = make_buffer(path=tmp_path, sync=True, extra_fields={"log_probs": torch.float32})
    buffer.extend(group(0) + group(1))
    buffer.storage.annotate(torch.tensor([1]), "log_probs", torch.ones(5))
    buffer.dumps(tmp_path / "dump")
    batch = buffer[:]
    again = reopen(buffer, tmp_path, sync=True, extra_fields={"log_probs": torch.float32})
    assert_same(again[:], batch)
    again.shutdown()


def test_a_full_disk_refuses_whole_batches(tmp_path):
    buffer = make_buffer(path=tmp_path, chunk_tokens=100)
    buffer.extend(group(0))
    stats = buffer.stats()
    with full_disk((tmp_path / "journal.bin").stat().st_size + 50):
        for refused in (
            lambda: buffer.extend(group(1)),
            lambda: buffer.reserve(7, 4),
            lambda: buffer.evict([0], "stale"),
            lambda: buffer.sample(4, timeout=0),
        ):
            with pytest.raises(OSError, match="File too large"):
                refused()
            assert buffer.stats() == stats
    assert [ready.group_id for ready in buffer.storage.store.ledger.ready_groups()] == [0]
    buffer.extend(group(1))
    again = reopen(buffer, tmp_path, chunk_tokens=100)
    assert again.sample(timeout=0).group_id.tolist() == [0] * 4 + [1] * 4
    again.shutdown()


def test_what_a_full_disk_does_not_let_go_is_still_there(tmp_path):
    buffer = make_buffer(path=tmp_path, capacity_updates=1, chunk_tokens=10_000)
    buffer.extend(group(0) + group(1) + group(2)[:3])
    last = group(2)[3:]
    other, journal = make_buffer(path=tmp_path / "other"), tmp_path / "other" / "journal.bin"
    empty = journal.stat().st_size
    other.extend(last)
    room = journal.stat().st_size - empty  # for one response, and not a byte more
    with (
        full_disk((tmp_path / "journal.bin").stat().st_size + room),
        pytest.raises(OSError, match="File too large"),
    ):
        buffer.extend(last)  # stored, but the group that is too many cannot be evicted
    assert buffer.stats()["stored"] == 12
    assert buffer.take_evicted() == []
    buffer.extend(group(3))
    assert sorted(eviction.group_id for eviction in buffer.take_evicted()) == [0, 1]
    assert buffer.sample(timeout=0).group_id.tolist() == [2] * 4 + [3] * 4
    buffer.shutdown()


def test_the_laws_of_a_restored_checkpoint_are_on_the_disk_too(tmp_path):
    context = SamplingContext(**LAW)
    buffer = make_buffer()
    buffer.extend(group(0, context_id=buffer.contexts.intern(context)))
    other = make_buffer(path=tmp_path)
    other.load_state_dict(buffer.state_dict())
    again = reopen(other, tmp_path)
    assert list(again.contexts) == [context]
    again.shutdown()
