"""Killed at any instant: what was acknowledged is there or accounted for, nothing twice, nothing half."""

import os
import random
import signal
from collections import defaultdict

import pytest
import torch

from rzero.buffers import journal, pack_fields, unpack
from tests.buffers.crash_worker import SIZE, annotation, open_store, response, work
from tests.buffers.processes import CONTEXT
from tests.buffers.responses import assert_balanced, assert_same, make_buffer, rollout


def kill_at_random(folder, seed, first_group):
    """Let a worker run for a random number of steps, and kill it wherever it then is."""
    chance = random.Random(seed)
    reader, writer = CONTEXT.Pipe(duplex=False)
    worker = CONTEXT.Process(target=work, args=(folder, seed, first_group, writer), daemon=True)
    worker.start()
    writer.close()
    for _ in range(chance.randint(1, 80)):
        reader.recv_bytes()
    for _ in range(int(10 ** chance.uniform(0, 5.3))):  # From the first microsecond of a step to its end.
        pass
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    reader.close()


def read_diary(path):
    """What was promised, and what the killed worker tried last without an answer."""
    promised, tried = defaultdict(list), ("nothing", [])
    for line in path.read_text().splitlines():
        word, *numbers = line.split(" ")
        numbers = [int(number) for number in numbers if number]
        if word.startswith("try-"):
            tried = (word.removeprefix("try-"), numbers)
        else:
            promised[word] += numbers
            tried = ("nothing", []) if word in (tried[0], "killed") else tried
    return promised, tried


def check(folder, happened):
    """Hold the store against the diary.

    ``happened`` remembers what unanswered steps of earlier workers turned out to have done.
    """
    promised, tried = read_diary(folder / "diary.txt")
    buffer = open_store(folder / "store")
    assert_balanced(buffer)
    assert buffer.storage.verify() == []

    stored = {} if len(buffer) == 0 else {int(row.uid): row for row in unpack(buffer[:])}
    assert len(stored) == len(buffer)
    for uid, row in stored.items():
        assert_same(row, unpack(pack_fields([response(uid)]))[0])

    used = promised["sample"]
    assert len(used) == len(set(used))
    gone = {group for word in ("sample", "evict", "expel", "fail") for group in promised[word]}
    assert not {uid // SIZE for uid in stored} & gone, "a group that was closed came back"

    # An acknowledged response is stored or its group was closed; the unanswered step may have closed more.
    present = {uid // SIZE for uid in stored} | set(buffer.incomplete())
    lost = {uid // SIZE for uid in promised["extend"] if uid not in stored}
    lost = (lost | (set(promised["reserve"]) - present)) - gone - happened["closed"]
    assert len(lost) <= {"sample": 2, "expel": 1, "fail": 1, "extend": 9}.get(tried[0], 0), (lost, tried)
    happened["closed"] |= lost

    # The unanswered step happened whole or not at all; whole may mean that a group of it was evicted at once.
    extra = set(stored) - set(promised["extend"]) - happened["stored"]
    if extra:
        assert tried[0] == "extend"
        assert extra <= set(tried[1])
        assert not {uid // SIZE for uid in set(tried[1]) - extra} & present
    happened["stored"] |= extra

    # Acknowledged notes of the learner are there too.
    if stored:
        batch, bounds = buffer[:], buffer[:].cu_seqlens.tolist()
        for row, uid in enumerate(batch.uid.tolist()):
            if uid in promised["annotate"]:
                values = batch.extras["log_probs"][bounds[row] : bounds[row + 1]]
                assert torch.equal(values, annotation(uid, len(values)))
    if (folder / "dump" / "buffer.bin").exists():
        copy = make_buffer(chunk_tokens=64, extra_fields={"log_probs": torch.float32})
        copy.loads(folder / "dump")
        assert copy.storage.verify() == []
        assert_balanced(copy)
    buffer.shutdown()
    with open(folder / "diary.txt", "a") as file:
        file.write("killed \n")
    return 1 + max([*promised["reserve"], *(tried[1] if tried[0] == "reserve" else [])], default=-1)


def survive(folder, kills, seed):
    next_group, happened = 0, defaultdict(set)
    for number in range(kills):
        kill_at_random(folder, seed + number, next_group)
        next_group = check(folder, happened)

    # To the end: every group that is left comes out once, whole, and as it was drawn.
    promised, _ = read_diary(folder / "diary.txt")
    buffer = open_store(folder / "store")
    for group_id, indices in buffer.incomplete().items():
        buffer.extend([response(group_id * SIZE + index) for index in indices])
        buffer.take_evicted()
    seen = []
    while buffer.can_sample(SIZE):
        batch = buffer.sample(SIZE, timeout=0)
        assert sorted(batch.uid.tolist()) == [int(batch.group_id[0]) * SIZE + index for index in range(SIZE)]
        seen.append(int(batch.group_id[0]))
    assert len(seen) == len(set(seen))
    assert not set(seen) & set(promised["sample"])
    stats = assert_balanced(buffer)
    assert stats["stored"] == stats["running"] == 0
    for uid in promised["extend"][-20:]:
        with pytest.raises(ValueError, match="a second time"):
            buffer.extend([rollout(uid, group_id=2**40 + uid)])
    buffer.shutdown()


# Killed at one exact instant: around the write that acknowledges a change.

STEPS = {
    "reserve": lambda buffer: buffer.reserve(50, SIZE),
    "extend": lambda buffer: buffer.extend([response(uid) for uid in range(18, 24)]),
    "annotate": lambda buffer: buffer.storage.annotate(
        torch.tensor([2]), "log_probs", annotation(2, len(response(2)["token_ids"]))
    ),
    "sample": lambda buffer: buffer.sample(timeout=0),
    "evict": lambda buffer: buffer.evict([1], "stale"),
    "fail": lambda buffer: buffer.fail(4, "lost"),
    "snapshot": lambda buffer: buffer.storage.store._snapshot(),
}


def fill(buffer):
    """Four complete groups and half of one; chunks of a group each, so that closing one deletes a file."""
    for number in range(4):
        buffer.extend([response(number * SIZE + index) for index in range(SIZE)])
    buffer.extend([response(4 * SIZE + index) for index in range(2)])
    return buffer


def die_around_a_write(folder, step, moment):
    options = {"extra_fields": {"log_probs": torch.float32}, "chunk_tokens": 40}
    buffer, write = fill(make_buffer(path=folder, **options)), journal._write

    def deadly_write(file, pieces):
        if moment == "after":
            write(file, pieces)
        elif moment == "halfway":
            record = b"".join(pieces)
            write(file, [record])
            os.ftruncate(file, os.fstat(file).st_size - len(record) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    journal._write = deadly_write
    STEPS[step](buffer)


@pytest.mark.parametrize("moment", ["before", "halfway", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_change_is_made_by_the_write_that_acknowledges_it(tmp_path, step, moment):
    worker = CONTEXT.Process(target=die_around_a_write, args=(tmp_path, step, moment))
    worker.start()
    worker.join(120)
    assert worker.exitcode == -signal.SIGKILL

    options = {"extra_fields": {"log_probs": torch.float32}, "chunk_tokens": 40}
    found, expected = make_buffer(path=tmp_path, **options), fill(make_buffer(**options))
    if moment == "after":
        STEPS.get(step, lambda buffer: None)(expected)
    assert found.storage.verify() == []
    assert {**assert_balanced(found), "bytes": 0} == {**assert_balanced(expected), "bytes": 0}
    assert found.incomplete() == expected.incomplete()
    assert_same(found[:], expected[:])
    found.shutdown()


# Killed anywhere.


def test_twenty_kills(tmp_path):
    survive(tmp_path, 20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1000, 2000])
def test_two_hundred_kills(tmp_path, seed):
    survive(tmp_path, 200, seed=seed)
