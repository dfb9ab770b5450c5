"""Whatever happens in whatever order: nothing is lost, repeated, split or stuck."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rzero.buffers import FifoGroupSampler, OldestVersionFirstSampler, RandomGroupSampler, pack, unpack
from tests.buffers.responses import assert_same, make_buffer, rollout

SIZE, PER_BATCH, CAPACITY = 2, 2, 3
SAMPLERS = {
    "fifo": FifoGroupSampler,
    "oldest": OldestVersionFirstSampler,
    "random": lambda: RandomGroupSampler(seed=5),
}


def response(uid):
    return rollout(
        uid,
        group_id=uid // SIZE,
        prompt_id=uid // SIZE,
        sample_index=uid % SIZE,
        prompt=1 + uid % 2,
        versions=(uid % 5,) * (1 + uid % 4),
    )


class Model:
    """What a buffer must remember, in the plainest form."""

    def __init__(self):
        self.arrived = {}  # group -> uids that came, for groups that are open
        self.ready = []  # groups in the order of completion
        self.consumed, self.gone = [], []
        self.counts = Counter()

    def copy(self):
        other = Model()
        other.arrived = {group: list(uids) for group, uids in self.arrived.items()}
        other.ready, other.consumed, other.gone = list(self.ready), list(self.consumed), list(self.gone)
        other.counts = Counter(self.counts)
        return other

    def open(self, group):
        self.arrived[group] = []
        self.counts["submitted"] += SIZE

    def version(self, group):
        return min(
            int(response(uid).policy_version.max()) for uid in range(group * SIZE, group * SIZE + SIZE)
        )


class BufferMachine(RuleBasedStateMachine):
    """One buffer on disk, beside the model of it."""

    @initialize(name=st.sampled_from(sorted(SAMPLERS)), prefetch=st.sampled_from([0, 1]))
    def start(self, name, prefetch):
        self.folder = Path(tempfile.mkdtemp(prefix="rzero-machine-"))
        self.name, self.prefetch = name, prefetch
        self.model, self.saved, self.next_group, self.evicted_last = Model(), None, 0, []
        self.buffer = self.open_buffer()

    def open_buffer(self):
        return make_buffer(
            group_size=SIZE,
            groups_per_batch=PER_BATCH,
            capacity_updates=CAPACITY,
            chunk_tokens=12,
            path=self.folder / "store",
            sampler=SAMPLERS[self.name](),
            prefetch=self.prefetch,
        )

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.shutdown()
            shutil.rmtree(self.folder)

    # What producers do.

    @rule()
    def reserve(self):
        self.buffer.reserve(self.next_group, SIZE)
        self.model.open(self.next_group)
        self.next_group += 1

    @rule(data=st.data(), unreserved=st.booleans(), packed=st.booleans())
    def extend(self, data, unreserved, packed):
        missing = [
            uid
            for group, came in self.model.arrived.items()
            for uid in range(group * SIZE, group * SIZE + SIZE)
            if uid not in came
        ]
        if unreserved:
            missing += range(self.next_group * SIZE, self.next_group * SIZE + SIZE)
        if not missing:
            return
        uids = data.draw(st.lists(st.sampled_from(missing), min_size=1, max_size=6, unique=True))
        rollouts = [response(uid) for uid in uids]
        self.buffer.extend(pack(rollouts) if packed else rollouts)
        for uid in uids:
            group = uid // SIZE
            if group not in self.model.arrived:
                self.model.open(group)
                self.next_group = group + 1
            self.model.arrived[group].append(uid)
            if len(self.model.arrived[group]) == SIZE:
                del self.model.arrived[group]
                self.model.ready.append(group)
        self.take_evicted()

    def take_evicted(self):
        evictions = self.buffer.take_evicted()
        for eviction in evictions:
            assert eviction.reason == "capacity"
            self.leave(eviction.group_id, eviction.batch, "evicted")
        # As many as are too many; those in a prepared batch are no longer waiting.
        waiting = len(self.model.ready) - PER_BATCH * self.buffer.stats()["prefetch_queue_size"]
        assert waiting <= CAPACITY * PER_BATCH
        if evictions:
            left = [self.model.version(group) for group in self.model.ready]
            assert max(self.model.version(eviction.group_id) for eviction in evictions) <= max(left)

    def leave(self, group, batch, why):
        assert sorted(batch.uid.tolist()) == [group * SIZE + index for index in range(SIZE)]
        for row in unpack(batch):
            assert_same(row, response(int(row.uid)))
        self.model.ready.remove(group)
        self.model.gone.append(group)
        self.model.counts[why] += SIZE

    @rule(data=st.data())
    def extend_again(self, data):
        seen = [uid for uids in self.model.arrived.values() for uid in uids]
        seen += [group * SIZE for group in (*self.model.ready, *self.model.consumed, *self.model.gone)]
        if seen:
            uid = data.draw(st.sampled_from(seen))
            with pytest.raises(ValueError, match=r"extend: "):
                self.buffer.extend([response(uid)])

    @precondition(lambda self: self.model.arrived)
    @rule(data=st.data())
    def fail(self, data):
        group = data.draw(st.sampled_from(sorted(self.model.arrived)))
        came = self.model.arrived.pop(group)
        eviction = self.buffer.fail(group, "lost")
        assert (eviction is None) == (not came)
        assert came == [] or sorted(eviction.batch.uid.tolist()) == sorted(came)
        self.model.gone.append(group)
        self.model.counts["evicted"] += len(came)
        self.model.counts["failed"] += SIZE - len(came)

    # What the learner does.

    @rule()
    def sample(self):
        if not self.buffer.can_sample():
            assert len(self.model.ready) < PER_BATCH  # Liveness: what is complete can be had.
            with pytest.raises(TimeoutError):
                self.buffer.sample(timeout=0)
            return
        batch = self.buffer.sample(timeout=0)
        groups = batch.group_id[::SIZE].tolist()
        assert batch.num_responses == PER_BATCH * SIZE
        if self.prefetch == 0 and self.name == "fifo":
            assert groups == self.model.ready[:PER_BATCH]
        if self.prefetch == 0 and self.name == "oldest":
            rank = {group: (self.model.version(group), place) for place, group in enumerate(self.model.ready)}
            assert groups == sorted(rank, key=rank.__getitem__)[:PER_BATCH]
        rows = unpack(batch)
        assert sorted(int(row.uid) for row in rows) == sorted(
            group * SIZE + index for group in groups for index in range(SIZE)
        )
        for row in rows:
            assert_same(row, response(int(row.uid)))
        for group in groups:
            self.model.ready.remove(group)
        self.model.consumed += groups
        self.model.counts["consumed"] += PER_BATCH * SIZE

    @precondition(lambda self: self.model.ready)
    @rule(data=st.data())
    def evict(self, data):
        group = data.draw(st.sampled_from(self.model.ready))
        (eviction,) = self.buffer.evict([group], "stale")
        self.leave(group, eviction.batch, "evicted")

    # What happens to them.

    @rule()
    def checkpoint(self):
        self.saved = self.buffer.state_dict(), self.model.copy(), self.next_group

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self):
        state, model, next_group = self.saved
        self.buffer.load_state_dict(state)
        self.model, self.next_group = model.copy(), next_group

    @rule()
    def crash(self):
        # What a kill leaves: open files and leases are gone, nothing is written on the way out.
        self.buffer.storage.store._disk.close()
        self.buffer = self.open_buffer()
        # Prepared batches were leased, so that more than a capacity may wait now; the next write evicts.
        self.buffer.extend([response(self.next_group * SIZE)])
        self.model.open(self.next_group)
        self.model.arrived[self.next_group].append(self.next_group * SIZE)
        self.next_group += 1
        self.take_evicted()

    # What always holds.

    @invariant()
    def it_balances(self):
        if not hasattr(self, "buffer"):
            return
        stats, model = self.buffer.stats(), self.model
        parts = ("running", "stored", "consumed", "evicted", "failed")
        assert stats["submitted"] == sum(stats[part] for part in parts)
        for name in ("submitted", "consumed", "evicted", "failed"):
            assert stats[name] == model.counts[name], name
        assert stats["groups_ready"] == len(model.ready)
        assert {group: SIZE - len(came) for group, came in model.arrived.items()} == {
            group: len(indices) for group, indices in self.buffer.incomplete().items()
        }

    @invariant()
    def what_is_stored_is_what_came(self):
        if not hasattr(self, "buffer"):
            return
        expected = sorted(uid for uids in self.model.arrived.values() for uid in uids) + sorted(
            group * SIZE + index for group in self.model.ready for index in range(SIZE)
        )
        stored = self.buffer[:].uid.tolist() if len(self.buffer) else []
        assert sorted(stored) == sorted(expected)
        assert self.buffer.storage.verify() == []


torch.set_num_threads(1)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=40, stateful_step_count=40, **COMMON)


class LongBufferMachine(BufferMachine):
    """The same for longer."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestBufferForLong(LongBufferMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=60, **COMMON)
