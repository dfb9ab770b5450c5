"""Many writers and readers at once: each response is stored once and sampled once."""

import threading
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from rzero.buffers import ProvenanceError, RandomGroupSampler, pack, unpack
from tests.buffers.processes import CONTEXT
from tests.buffers.responses import assert_balanced, assert_same, group, make_buffer

GROUPS = 80


def run(*jobs):
    """Run all jobs in threads; an exception in one is raised here."""
    failures = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def response(uid):
    return group(uid // 4, versions=(uid % 7,) * (1 + uid % 5))[uid % 4]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_write_and_read_at_once(tmp_path, on_disk, prefetch):
    buffer = make_buffer(
        path=tmp_path if on_disk else None,
        chunk_tokens=64,
        prefetch=prefetch,
        sampler=RandomGroupSampler(seed=0),
        capacity_updates=GROUPS,
    )
    batches, lock = [], threading.Lock()
    left = iter(range(GROUPS // 2))

    def write(worker):
        # Each writer brings one response of every group, so that groups are completed by any of them.
        for number in range(GROUPS):
            buffer.extend([response(4 * ((number + 37 * worker) % GROUPS) + worker)])

    def read():
        while True:
            with lock:
                if next(left, None) is None:
                    return
            batch = buffer.sample(timeout=60)
            with lock:
                batches.append(batch)

    def look():
        while len(batches) < GROUPS // 2:
            assert buffer.storage.verify() == []
            assert_balanced_while_running(buffer)
            buffer.state_dict()

    run(*(lambda worker=worker: write(worker) for worker in range(4)), read, read, read, look)
    rows = [row for batch in batches for row in unpack(batch)]
    assert Counter(int(row.uid) for row in rows) == Counter(range(4 * GROUPS))
    for row in rows:
        assert_same(row, response(int(row.uid)))
    for batch in batches:
        assert sorted(Counter(batch.group_id.tolist()).values()) == [4, 4]
    stats = assert_balanced(buffer)
    assert stats["consumed"] == 4 * GROUPS
    assert stats["stored"] == stats["running"] == 0
    buffer.shutdown()


def assert_balanced_while_running(buffer):
    stats = buffer.stats()
    parts = ("running", "stored", "consumed", "evicted", "failed")
    assert stats["submitted"] == sum(stats[part] for part in parts)


def test_a_uid_is_stored_once_however_many_bring_it():
    buffer, stored = make_buffer(), []

    def write():
        for number in range(40):
            try:
                buffer.extend(group(number))
                stored.append(number)
            except ValueError as error:
                assert "takes no more" in str(error) or "a second time" in str(error)

    run(*[write] * 4)
    assert sorted(stored) == list(range(40))
    assert len(buffer) == 160


def test_everybody_who_waits_hears_of_a_failure():
    buffer, heard = make_buffer(), []
    waiting = threading.Barrier(4)

    def wait_for_batch():
        waiting.wait(60)
        try:
            buffer.sample(timeout=120)
        except ZeroDivisionError as error:
            heard.append(error)

    def fail():
        waiting.wait(60)
        buffer.abort(ZeroDivisionError("engine"))

    run(wait_for_batch, wait_for_batch, wait_for_batch, fail)
    assert len(heard) == 3


def test_a_corrupt_group_is_reported_once_and_the_rest_is_sampled():
    buffer = make_buffer(groups_per_batch=1)
    for number in range(30):
        buffer.extend(group(number))
    buffer.storage.store.content.log.columns(0)["token_ids"][5 * (4 * 7 + 2)] += 1
    seen, errors = [], []

    def read():
        while buffer.can_sample():
            try:
                seen.append(int(buffer.sample(timeout=0).group_id[0]))
            except ProvenanceError as error:
                errors.append(str(error))
            except TimeoutError:
                return

    run(read, read, read)
    assert sorted(seen) == [number for number in range(30) if number != 7]
    assert len(errors) == 1
    assert assert_balanced(buffer)["evicted/corrupt"] == 4


def _write_from_process(worker, queue, received):
    torch.set_num_threads(1)
    for number in range(10):
        batch = pack([response(4 * (10 * worker + number) + index) for index in range(4)])
        # A plain TensorDict in one piece of memory: no class of ours is unpickled where it arrives.
        queue.put(batch.to_tensordict().consolidate())
    queue.put(None)
    received.wait(280)  # A tensor's memory is handed over by its process, which must be there to do it.


def test_processes_write_with_tensordict_messages():
    buffer = make_buffer(groups_per_batch=4, sampler=RandomGroupSampler(seed=0))
    queue, received = CONTEXT.Queue(), CONTEXT.Event()
    writers = [
        CONTEXT.Process(target=_write_from_process, args=(worker, queue, received)) for worker in range(3)
    ]
    for writer in writers:
        writer.start()

    def receive():
        try:
            open_ends = len(writers)
            while open_ends:
                message = queue.get(timeout=240)
                if message is None:
                    open_ends -= 1
                else:
                    assert isinstance(message, TensorDict)
                    buffer.extend(message)
            buffer.close()
        except BaseException as error:
            buffer.abort(error)
            raise
        finally:
            received.set()

    batches = []
    run(receive, lambda: batches.extend(buffer))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    rows = [row for batch in batches for row in unpack(batch)]
    assert len(rows) == 4 * 4 * 7
    for row in rows:
        assert_same(row, response(int(row.uid)))
    assert assert_balanced(buffer)["stored"] == 8


def test_a_message_that_lost_something_is_refused():
    buffer = make_buffer()
    message = pack(group(0)).to_tensordict()
    with pytest.raises(TypeError, match="behavior_log_probs"):
        buffer.extend(message.exclude("behavior_log_probs"))
    message["behavior_log_probs"] = message["behavior_log_probs"].half().float()
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        buffer.extend(message)
    with pytest.raises(RuntimeError, match="send batches to its process"):
        CONTEXT.reducer.ForkingPickler.dumps(buffer)
    with pytest.raises(RuntimeError, match="one process owns the store"):
        CONTEXT.reducer.ForkingPickler.dumps(buffer.storage)
