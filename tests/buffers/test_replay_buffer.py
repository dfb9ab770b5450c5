"""Whole groups, each response once, nothing altered, nothing lost in silence."""

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Compose, Transform

from rzero.buffers import (
    ContextTable,
    FifoGroupSampler,
    OldestVersionFirstSampler,
    PackedBatch,
    ProvenanceReplayBuffer,
    RandomGroupSampler,
    TokenLogStorage,
    pack,
    to_torchrl,
    unpack,
    validate,
)
from tests.buffers.responses import (
    assert_balanced,
    assert_same,
    fields,
    finish_preparing,
    group,
    make_buffer,
    rollout,
)
from tests.buffers.test_context import LAW, SamplingContext


def test_a_batch_is_whole_groups_and_comes_once():
    buffer = make_buffer()
    index = buffer.extend(group(0) + group(1)[:3])
    assert index.dtype == torch.int64
    assert len(index.unique()) == 7
    with pytest.raises(TimeoutError):
        buffer.sample(timeout=0)
    buffer.extend(group(1)[3:])
    batch = buffer.sample(timeout=0)
    assert isinstance(batch, PackedBatch)
    assert batch.group_id.tolist() == [0] * 4 + [1] * 4
    for before, after in zip(group(0) + group(1), unpack(batch), strict=True):
        assert_same(before, after)
    with pytest.raises(TimeoutError):
        buffer.sample(timeout=0)
    assert assert_balanced(buffer)["consumed"] == 8


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(16)), cuts=st.lists(st.integers(0, 16), max_size=4), packed=st.booleans())
def test_responses_may_come_in_any_order_and_portion(order, cuts, packed):
    buffer, every = make_buffer(), [response for number in range(4) for response in group(number)]
    bounds = sorted({0, 16, *cuts})
    for start, stop in itertools.pairwise(bounds):
        portion = [every[place] for place in order[start:stop]]
        buffer.extend(pack(portion) if packed else portion)
    seen = []
    for _ in range(2):
        batch = buffer.sample(timeout=0)
        assert sorted(batch.group_id.unique().tolist() * 4) == sorted(batch.group_id.tolist())
        seen += unpack(batch)
    for response in seen:
        assert_same(response, every[response.uid])
    assert sorted(response.uid.item() for response in seen) == list(range(16))
    assert_balanced(buffer)


def test_plain_mappings_may_come_too():
    buffer = make_buffer()
    buffer.extend([fields(uid) for uid in range(8)])
    for uid, response in enumerate(unpack(buffer.sample(timeout=0))):
        assert_same(response, rollout(uid))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"uid": 1.0}, TypeError, "must be numbers of kind iu"),
        ({"finish_code": 256}, ValueError, "finish_code must fit torch.int8"),
        ({"reward": "1"}, TypeError, "reward must be numbers of kind iuf"),
        ({"uid": torch.tensor(0, dtype=torch.int32)}, TypeError, "uid must be a torch.int64 number"),
        (
            {"token_ids": torch.zeros(5, dtype=torch.int16)},
            TypeError,
            "token_ids must have dtype torch.int32",
        ),
        ({"token_ids": torch.zeros(4, dtype=torch.int32)}, ValueError, r"must have \[4\] tokens, got \[5\]"),
    ],
)
def test_a_mapping_is_not_cast(change, error, message):
    buffer = make_buffer()
    with pytest.raises(error, match=message):
        buffer.extend([fields(0) | change])
    assert assert_balanced(buffer)["submitted"] == 0


def test_all_or_none_are_stored():
    buffer = make_buffer()
    buffer.extend(group(0)[:2])
    before = buffer.stats()
    broken = dict(rollout(9).items())
    broken["behavior_log_probs"] = broken["behavior_log_probs"] - 1
    for bad in (
        [*group(0)[2:], rollout(0, group_id=5)],  # a uid that is stored
        [*group(0)[2:], group(0)[1]],
        [*group(0)[2:], rollout(99, group_id=0, sample_index=3, prompt_id=0)],  # one too many for its group
    ):
        with pytest.raises(ValueError, match=r"extend: "):
            buffer.extend(bad)
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        buffer.extend([*(dict(response.items()) for response in group(0)[2:]), broken])
    assert buffer.stats() == before
    buffer.extend(group(0)[2:])
    assert buffer.stats()["groups_ready"] == 1


def test_a_uid_is_refused_for_ever():
    buffer = make_buffer(groups_per_batch=1)
    buffer.extend(group(0))
    buffer.sample(timeout=0)
    with pytest.raises(ValueError, match="uid must be new, got 2 a second time"):
        buffer.extend([rollout(2, group_id=50, prompt_id=0)])


def test_a_response_longer_than_a_chunk_is_refused():
    buffer = make_buffer(chunk_tokens=5)
    buffer.extend([rollout(0, versions=(1, 1, 1))])
    with pytest.raises(ValueError, match="a response must fit into chunk_tokens 5, got 6 tokens"):
        buffer.extend([rollout(1, versions=(1, 1, 1, 1))])


# Waiting, and why nobody comes.


def test_the_timeout_says_what_is_missing():
    now = [100.0]
    buffer = make_buffer(groups_per_batch=8, clock=lambda: now[0])
    for number in range(7):
        buffer.extend(group(number))
    buffer.reserve(41, 4)
    now[0] = 105.0
    buffer.reserve(42, 4)
    buffer.extend(group(41)[:3])
    now[0] = 112.0
    with pytest.raises(TimeoutError) as error:
        buffer.sample(timeout=0)
    assert str(error.value) == (
        "sample: 7 of 8 groups; oldest incomplete group 41 has 3 of 4, waiting 12.0 s"
    )
    buffer.fail(41, "lost")
    with pytest.raises(
        TimeoutError, match=r"7 of 8 groups; oldest incomplete group 42 has 0 of 4, waiting 7.0 s"
    ):
        buffer.sample(timeout=0)
    buffer.fail(42, "lost")
    with pytest.raises(
        TimeoutError, match="no group is incomplete: nothing was reserved that could still come"
    ):
        buffer.sample(timeout=0)


def sample_in_thread(buffer, **options):
    """Start to sample, and wait until the thread really waits."""
    waiting, outcome = threading.Event(), []
    wait = buffer.storage.store.changed.wait

    def noticed(timeout=None):
        waiting.set()
        return wait(timeout)

    buffer.storage.store.changed.wait = noticed

    def run():
        try:
            outcome.append(buffer.sample(timeout=3600, **options))  # Longer than a test may take.
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert waiting.wait(60)
    return thread, outcome


def test_the_last_response_wakes_who_waits():
    buffer = make_buffer()
    buffer.extend(group(0) + group(1)[:3])
    thread, outcome = sample_in_thread(buffer)
    buffer.extend(group(1)[3:])
    thread.join(60)
    assert outcome[0].uid.tolist() == list(range(8))


def test_a_producers_exception_is_raised_where_the_learner_waits():
    def produce():
        raise ZeroDivisionError("in the reward function")

    buffer = make_buffer()
    thread, outcome = sample_in_thread(buffer)
    try:
        produce()
    except ZeroDivisionError as error:
        buffer.abort(error)
    thread.join(60)
    assert isinstance(outcome[0], ZeroDivisionError)
    frames, place = [], outcome[0].__traceback__
    while place is not None:
        frames.append(place.tb_frame.f_code.co_name)
        place = place.tb_next
    assert "produce" in frames
    buffer.abort(ValueError("a later one"))
    for call in (
        lambda: buffer.sample(timeout=0),
        lambda: buffer.extend(group(0)),
        lambda: buffer.reserve(5, 4),
    ):
        with pytest.raises(ZeroDivisionError):
            call()


def test_an_exception_counts_before_batches_that_are_ready():
    buffer = make_buffer(prefetch=1)
    buffer.extend(group(0) + group(1) + group(2) + group(3))
    buffer.abort(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        buffer.sample(timeout=0)


def test_closing_wakes_who_waits_and_lets_the_rest_be_drained():
    buffer = make_buffer()
    buffer.extend(group(0) + group(1) + group(2))
    buffer.close()
    with pytest.raises(RuntimeError, match="extend: the buffer is closed"):
        buffer.extend(group(3))
    with pytest.raises(RuntimeError, match="reserve: the buffer is closed"):
        buffer.reserve(3, 4)
    assert buffer.sample(timeout=0).num_responses == 8
    with pytest.raises(RuntimeError, match="the buffer is closed with 1 of 2 groups"):
        buffer.sample(timeout=60)

    waiting = make_buffer()
    thread, outcome = sample_in_thread(waiting)
    waiting.close()
    thread.join(60)
    assert isinstance(outcome[0], RuntimeError)


# Leaving unused.


def test_over_capacity_the_oldest_weights_leave_as_whole_groups():
    buffer = make_buffer(capacity_updates=1, sampler=FifoGroupSampler())
    buffer.extend(group(0, versions=(5, 5)))
    buffer.extend(group(1, versions=(5, 2)))
    buffer.extend(group(2, versions=(7, 7)))
    (eviction,) = buffer.take_evicted()
    assert (eviction.group_id, eviction.reason) == (1, "capacity")
    for before, after in zip(group(1, versions=(5, 2)), unpack(eviction.batch), strict=True):
        assert_same(before, after)
    assert buffer.take_evicted() == []
    assert buffer.sample(timeout=0).group_id.tolist() == [0] * 4 + [2] * 4
    stats = assert_balanced(buffer)
    assert stats["evicted"] == stats["evicted/capacity"] == 4


def test_incomplete_groups_are_never_evicted_for_capacity():
    buffer = make_buffer(capacity_updates=1)
    for number in range(5):
        buffer.extend(group(number, versions=(number,))[:3])
    assert buffer.take_evicted() == []
    assert len(buffer) == 15


def test_evictions_that_nobody_takes_stop_the_writer():
    buffer = make_buffer(capacity_updates=1)
    for number in range(5):
        buffer.extend(group(number))
    with pytest.raises(
        RuntimeError, match=r"extend: 3 evicted groups wait to be taken; call take_evicted\(\)"
    ):
        buffer.extend(group(5))
    assert [eviction.group_id for eviction in buffer.take_evicted()] == [0, 1, 2]
    buffer.extend(group(5))


def test_a_failed_group_gives_back_what_had_arrived():
    buffer = make_buffer()
    buffer.reserve(1, 4)
    assert buffer.fail(1, "engine died") is None
    buffer.reserve(2, 4)
    buffer.extend(group(2)[:3])
    eviction = buffer.fail(2, "reward raised")
    assert (eviction.group_id, eviction.reason) == (2, "reward raised")
    assert eviction.batch.uid.tolist() == [8, 9, 10]
    with pytest.raises(ValueError, match="group 2 was closed and takes no more"):
        buffer.extend(group(2)[3:])
    stats = assert_balanced(buffer)
    assert (stats["failed/engine died"], stats["failed/reward raised"], stats["evicted/reward raised"]) == (
        4,
        1,
        3,
    )
    assert stats["stored"] == stats["running"] == 0
    for group_id in (2, 77):
        with pytest.raises(ValueError, match=f"fail: group_id must name a group .* got {group_id}"):
            buffer.fail(group_id, "again")


def test_groups_of_old_weights_can_be_evicted():
    buffer = make_buffer()
    for number, version in enumerate((1, 4, 2, 3)):
        buffer.extend(group(number, versions=(9, version, -1, 9)))
    assert sorted(buffer.stale_groups(3)) == [0, 2]
    evictions = buffer.evict(buffer.stale_groups(3), "stale")
    assert [eviction.group_id for eviction in evictions] == [0, 2]
    assert buffer.take_evicted() == []  # returned once, not twice
    assert buffer.sample(timeout=0).group_id.tolist() == [1] * 4 + [3] * 4
    assert assert_balanced(buffer)["evicted/stale"] == 8
    with pytest.raises(ValueError, match="must be complete and waiting, got 1"):
        buffer.evict([1], "again")


def test_emptying_returns_everything():
    buffer = make_buffer()
    buffer.reserve(9, 4)
    buffer.extend(group(0) + group(1)[:2])
    assert [eviction.batch.num_responses for eviction in buffer.empty()] == [2, 4]
    stats = assert_balanced(buffer)
    assert (stats["stored"], stats["evicted/emptied"], stats["failed/emptied"]) == (0, 6, 6)


def test_what_is_missing_can_be_asked_for():
    buffer = make_buffer()
    buffer.reserve(5, 4)
    buffer.extend([group(6)[1], group(6)[3]])
    assert buffer.incomplete() == {5: [0, 1, 2, 3], 6: [0, 2]}


def test_a_reservation_is_for_a_whole_new_group():
    buffer = make_buffer()
    buffer.reserve(5, 4)
    with pytest.raises(ValueError, match="group_id must be new"):
        buffer.reserve(5, 4)
    with pytest.raises(ValueError, match="size must be group_size 4, got 3"):
        buffer.reserve(6, 3)
    assert assert_balanced(buffer)["running"] == 4


# Write-once.


def test_nothing_done_to_a_sample_or_a_source_reaches_the_store():
    buffer = make_buffer(groups_per_batch=1)
    sources = group(0)
    buffer.extend(sources)
    for source in sources:
        source.token_ids.fill_(0)
        source.behavior_log_probs.fill_(-9.0)
    for copy in (buffer[:], buffer[torch.arange(4)], buffer.storage[0], *buffer.storage):
        for value in copy.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                value.zero_()
    for before, after in zip(group(0), unpack(buffer.sample(timeout=0)), strict=True):
        assert_same(before, after)


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.__setitem__(0, buffer[0]),
        lambda buffer: buffer.__setitem__("reward", torch.zeros(4)),
        lambda buffer: buffer.set_("behavior_log_probs", torch.zeros(20)),
        lambda buffer: buffer.set_at_("behavior_log_probs", torch.zeros(5), 0),
        lambda buffer: buffer.update_({"token_ids": torch.zeros(20)}),
        lambda buffer: buffer.write_all(buffer[:]),
        lambda buffer: buffer.update_if_present(buffer[:]),
        lambda buffer: buffer.submit_update_if_present(buffer[:]),
        lambda buffer: buffer.set_storage(TokenLogStorage()),
        lambda buffer: buffer.set_writer(buffer.writer),
        lambda buffer: buffer.share(),
        lambda buffer: buffer.storage.set(0, buffer[:]),
        lambda buffer: buffer.storage.__setitem__(0, buffer[0]),
    ],
)
def test_every_public_way_to_overwrite_is_refused(write):
    buffer = make_buffer()
    buffer.extend(group(0))
    with pytest.raises(RuntimeError, match="write-once"):
        write(buffer)
    assert_same(buffer[:], pack(group(0)))


def test_the_learners_log_probs_are_added_under_their_own_name():
    buffer = make_buffer(extra_fields={"log_probs": torch.float32})
    buffer.extend(group(0) + group(1))
    assert buffer[:].extras["log_probs"].isnan().all()
    values = torch.arange(10.0)
    buffer.storage.annotate(torch.tensor([6, 1]), "log_probs", values)
    batch = buffer.sample(timeout=0)
    assert_same(
        PackedBatch(**{name: value for name, value in batch.items() if name != "extras"}),
        pack(group(0) + group(1)),
    )
    found = batch.extras["log_probs"].view(8, 5)
    assert found[6].tolist() == values[:5].tolist()
    assert found[1].tolist() == values[5:].tolist()
    assert found[[0, 2, 3, 4, 5, 7]].isnan().all()


@pytest.mark.parametrize(
    ("uids", "name", "values", "error", "message"),
    [
        (
            [0],
            "behavior_log_probs",
            torch.zeros(5),
            ValueError,
            r"name must be one of extra_fields \['log_probs'\]",
        ),
        ([0], "token_ids", torch.zeros(5), ValueError, "name must be one of"),
        ([0], "log_probs", torch.zeros(5).double(), TypeError, "values must have dtype float32, got float64"),
        ([0, 1], "log_probs", torch.zeros(9), ValueError, r"values must have shape \(10,\), got \(9,\)"),
        ([99], "log_probs", torch.zeros(5), ValueError, "uids must be stored, got 99"),
    ],
)
def test_an_annotation_must_fit(uids, name, values, error, message):
    buffer = make_buffer(extra_fields={"log_probs": torch.float32})
    buffer.extend(group(0))
    with pytest.raises(error, match=message):
        buffer.storage.annotate(torch.tensor(uids), name, values)
    assert buffer.storage.verify() == []


def test_extras_come_with_a_response_or_not_at_all():
    buffer = make_buffer(extra_fields={"log_probs": torch.float32, "turn": torch.int16})
    extras = {"log_probs": torch.ones(5), "turn": torch.ones(5, dtype=torch.int16)}
    buffer.extend([fields(0) | {"extras": extras}])
    assert buffer[:].extras["turn"].tolist() == [1] * 5
    with pytest.raises(ValueError, match="extras must hold 'turn', because int16 has no NaN"):
        buffer.extend([fields(1) | {"extras": {"log_probs": torch.ones(5)}}])
    with pytest.raises(TypeError, match=r"extras\['turn'\] must have dtype int16, got int32"):
        buffer.extend([fields(1) | {"extras": extras | {"turn": torch.ones(5, dtype=torch.int32)}}])
    with pytest.raises(ValueError, match=r"extras must be among \['log_probs', 'turn'\], got \['other'\]"):
        buffer.extend([fields(1) | {"extras": extras | {"other": torch.ones(5)}}])


@pytest.mark.parametrize("name", ["token_ids", "reward", "digest", "cu_seqlens"])
def test_an_extra_cannot_take_the_name_of_evidence(name):
    with pytest.raises(ValueError, match="extra_fields must be new names"):
        TokenLogStorage(extra_fields={name: torch.float32})


def test_an_unknown_law_is_refused_once_laws_are_known():
    buffer = make_buffer()
    assert isinstance(buffer.contexts, ContextTable)
    context = SamplingContext(**LAW)
    buffer.contexts.intern(context)
    with pytest.raises(ValueError, match="context_id must be interned in contexts, got 5"):
        buffer.extend(group(0))
    buffer.extend(group(0, context_id=context.context_id))


# As a replay buffer of TorchRL.


def test_it_is_a_torchrl_buffer():
    buffer = make_buffer()
    assert isinstance(buffer, ReplayBuffer)
    assert len(buffer) == 0
    assert not buffer.can_sample()
    index = buffer.extend(group(0))
    assert isinstance(buffer.add(group(1)[0]), int)
    assert len(buffer) == 5
    assert buffer.write_count == 5
    assert buffer.batch_size == 8
    assert index[2] in buffer.storage
    assert 99 not in buffer.storage
    assert buffer[int(index[2])].uid.item() == 2
    assert buffer[index[1:3]].uid.tolist() == [1, 2]
    assert buffer[:2].uid.tolist() == [0, 1]
    assert buffer["uid"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError, match="must name stored rows"):
        buffer[99]
    buffer.extend(group(1)[1:])
    assert buffer.can_sample()
    assert buffer.can_sample(4)
    assert not buffer.can_sample(12)
    batch, info = buffer.sample(return_info=True, timeout=0)
    assert info["group_id"].tolist() == [0, 1]
    assert sorted(info["index"].tolist()) == list(range(8))
    assert "ProvenanceReplayBuffer" in repr(buffer)
    assert batch.num_responses == 8
    with pytest.raises(ValueError, match="update_priority must be None"):
        buffer.extend(group(2), update_priority=True)


def test_what_torchrl_would_ignore_is_refused():
    buffer = make_buffer()
    for register in (buffer.register_save_hook, buffer.register_load_hook):
        with pytest.raises(RuntimeError, match="saved and loaded as it is"):
            register(lambda data: data)
    with pytest.raises(RuntimeError, match=r"set_rng: seed the order instead, RandomGroupSampler\(seed"):
        buffer.set_rng(torch.Generator())


def test_iteration_ends_when_the_buffer_is_closed_and_empty():
    buffer = make_buffer()
    for number in range(5):
        buffer.extend(group(number))
    buffer.close()
    assert buffer.next().group_id.unique().tolist() == [0, 1]
    assert [batch.group_id.unique().tolist() for batch in buffer] == [[2, 3]]
    assert buffer.next() is None


def test_transforms_run_on_both_sides_and_cannot_alter_evidence():
    read = make_buffer(transform=lambda batch: batch.reward.sum())
    read.extend(group(0) + group(1))
    assert read.sample(timeout=0).item() == pack(group(0) + group(1)).reward.sum().item()

    appended = make_buffer()

    def double(batch):
        batch.reward = batch.reward * 2
        return batch

    appended.append_transform(double)
    appended.append_transform(double, invert=True)
    appended.extend(group(0) + group(1))
    assert torch.equal(appended.sample(timeout=0).reward, 4 * pack(group(0) + group(1)).reward)

    def overwrite(batch):
        batch.behavior_log_probs = batch.behavior_log_probs.nan_to_num(0.0)
        return batch

    forging = make_buffer()
    forging.append_transform(overwrite, invert=True)
    with pytest.raises(ValueError, match=r"NaN elsewhere, got 0\.0"):
        forging.extend(group(0))

    withholding = make_buffer()
    withholding.append_transform(lambda batch: None, invert=True)
    assert withholding.extend(group(0)).tolist() == []
    assert len(withholding) == 0


class Shift(Transform):
    """A transform of TorchRL's own kind, with a side for writing and one for reading."""

    def forward(self, tensordict):
        return tensordict.set("reward", tensordict.get("reward") * 10)

    def _inv_call(self, tensordict):
        return tensordict.set("reward", tensordict.get("reward") + 1)


def test_torchrls_transforms_and_layouts_can_be_chained():
    buffer = make_buffer(transform=Compose(Shift()))
    buffer.append_transform(lambda batch: to_torchrl(batch, layout="jagged"))
    buffer.extend(group(0) + group(1))
    td = buffer.sample(timeout=0)
    assert td["next", "reward"][:, 0].tolist() == [(uid % 3 + 1) * 10 for uid in range(8)]
    assert td["tokens", "full"].is_nested


def test_a_transform_that_raises_loses_nothing():
    broken = [True]

    def transform(batch):
        if broken[0]:
            raise KeyError("in the transform")
        return batch

    for prefetch in (0, 1):
        broken[0] = True
        buffer = make_buffer(transform=transform, prefetch=prefetch)
        buffer.extend(group(0) + group(1))
        finish_preparing(buffer)
        assert buffer.stats()["stored"] == 8
        assert [ready.group_id for ready in buffer.storage.store.ledger.ready_groups()] == [0, 1]
        with pytest.raises(KeyError, match="in the transform"):
            buffer.sample(timeout=0)
        assert assert_balanced(buffer)["stored"] == 8
        broken[0] = False
        assert buffer.sample(timeout=0).group_id.tolist() == [0] * 4 + [1] * 4
        buffer.shutdown()


def test_prefetched_batches_are_stored_until_they_are_sampled():
    buffer = make_buffer(prefetch=2)
    for number in range(8):
        buffer.extend(group(number))
    stats = assert_balanced(buffer)
    assert (stats["prefetch_queue_size"], stats["stored"], stats["groups_ready"]) == (2, 32, 8)
    assert buffer.can_sample()
    assert buffer.can_sample(16)
    assert not buffer.can_sample(20)  # Four of the eight groups are in batches of another size.
    batch, info = buffer.sample(return_info=True, timeout=0)
    assert batch.group_id.unique().tolist() == info["group_id"].tolist() == [0, 1]
    assert assert_balanced(buffer)["stored"] == 24
    assert [eviction.group_id for eviction in buffer.evict([2], "stale")] == [
        2
    ]  # taken out of a prepared batch
    batches = [buffer.sample(timeout=0).group_id.unique().tolist() for _ in range(2)]
    assert batches == [[3, 4], [5, 6]]
    assert assert_balanced(buffer)["consumed"] == 24
    buffer.shutdown()


@pytest.mark.parametrize(
    "sampler", [FifoGroupSampler, OldestVersionFirstSampler, lambda: RandomGroupSampler(seed=1)]
)
def test_orders_can_be_changed_while_it_runs(sampler):
    buffer = make_buffer(prefetch=1)
    for number in range(6):
        buffer.extend(group(number, versions=(9 - number,)))
    former = buffer.set_sampler(sampler())
    assert isinstance(former, FifoGroupSampler)
    seen = [group_id for _ in range(3) for group_id in buffer.sample(timeout=0).group_id.unique().tolist()]
    assert sorted(seen) == list(range(6))
    if sampler is OldestVersionFirstSampler:
        assert [sorted(seen[place : place + 2]) for place in (0, 2, 4)] == [[4, 5], [2, 3], [0, 1]]
    buffer.shutdown()


def test_a_storage_serves_one_buffer():
    storage = TokenLogStorage()
    with pytest.raises(RuntimeError, match="give the storage to a ProvenanceReplayBuffer first"):
        storage.get(0)
    options = {"group_size": 1, "groups_per_batch": 1, "capacity_updates": 1}
    ProvenanceReplayBuffer(storage=storage, **options)
    with pytest.raises(RuntimeError, match="one storage serves one buffer"):
        ProvenanceReplayBuffer(storage=storage, **options)


@pytest.mark.parametrize("name", ["group_size", "groups_per_batch", "capacity_updates"])
def test_sizes_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_buffer(**{name: 0})
    with pytest.raises(ValueError, match="chunk_tokens must be positive"):
        make_buffer(chunk_tokens=0)


def test_sampled_batches_pass_every_check():
    buffer = make_buffer()
    buffer.extend(group(0) + group(1))
    validate(buffer.sample(timeout=0))
