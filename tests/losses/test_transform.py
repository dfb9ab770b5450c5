"""The write transform: groups pass whole or not at all."""

import copy
import math
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer

from rzero.losses import GroupMeanAdvantage, group_mean_advantages
from tests.losses.batches import unhurried


def rows_of(group_id, rewards, **more):
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    return TensorDict(
        {
            "group_id": torch.as_tensor(group_id),
            ("next", "reward"): rewards[:, None],
            "uid": torch.arange(len(rewards)),
            **more,
        },
        batch_size=[len(rewards)],
    )


def test_golden():
    # 1, 0, 0, 0 in group 7 arrive around 1, 1 of group 9, which stay behind.
    transform = GroupMeanAdvantage(4)
    assert transform.inv(rows_of([7, 9, 7], [1.0, 1.0, 0.0])) is None
    out = transform.inv(rows_of([7, 9, 7], [0.0, 1.0, 0.0]))
    assert out["advantage"].tolist() == [[0.75], [-0.25], [-0.25], [-0.25]]
    assert out["group_id"].tolist() == [7, 7, 7, 7]
    assert transform.waiting() == {9: 2}


@unhurried
@given(data=st.data(), group_size=st.integers(2, 4), groups=st.integers(1, 4))
def test_whole_groups_in_any_order_and_any_portions(data, group_size, groups):
    group_id = data.draw(st.permutations([group for group in range(groups) for _ in range(group_size)]))
    arriving = data.draw(st.integers(0, len(group_id)))
    rewards = torch.randn(len(group_id), generator=torch.Generator().manual_seed(arriving))
    rows = rows_of(group_id, rewards)
    transform = GroupMeanAdvantage(group_size)
    passed = []
    for portion in rows[:arriving].split(data.draw(st.integers(1, 5))) if arriving else ():
        out = transform.inv(portion)
        passed += [] if out is None else list(out.unbind(0))
    seen = group_id[:arriving]
    complete = [group for group in range(groups) if seen.count(group) == group_size]
    assert sorted(row["group_id"].item() for row in passed) == sorted(complete * group_size)
    assert transform.waiting() == {g: seen.count(g) for g in range(groups) if 0 < seen.count(g) < group_size}
    expected = group_mean_advantages(rewards, torch.tensor(group_id))
    for row in passed:
        torch.testing.assert_close(row["advantage"], expected[row["uid"]][None])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_in_a_replay_buffer(storage):
    buffer = ReplayBuffer(storage=storage(16), transform=GroupMeanAdvantage(2), batch_size=4)
    assert len(buffer.extend(rows_of([1, 2, 3], [1.0, 1.0, 1.0]))) == 0
    buffer.extend(rows_of([2, 1], [0.0, 0.0]))
    assert len(buffer) == 4
    assert sorted(buffer[:]["group_id"].tolist()) == [1, 1, 2, 2]
    assert buffer.sample()["advantage"].abs().eq(0.5).all()


def test_keys_can_be_renamed_and_nested():
    transform = GroupMeanAdvantage(2, group_key=("a", "g"), reward_key="r", advantage_key=("b", "adv"))
    data = TensorDict({("a", "g"): torch.tensor([1, 1]), "r": torch.tensor([1.0, 0.0])}, batch_size=[2])
    assert transform.inv(data)["b", "adv"].tolist() == [0.5, -0.5]
    assert ("b", "adv") not in data.keys(True)


def test_ragged_rows_pass():
    first, second = (
        TensorDict(
            {
                "group_id": torch.tensor(4),
                ("next", "reward"): torch.tensor([reward]),
                "tokens": torch.arange(length),
            }
        )
        for reward, length in ((1.0, 3), (0.0, 5))
    )
    transform = GroupMeanAdvantage(2)
    assert transform.inv(first[None]) is None
    out = transform.inv(second[None])
    assert [len(row["tokens"]) for row in out.unbind(0)] == [3, 5]


def test_what_waits_is_a_copy():
    transform = GroupMeanAdvantage(2)
    rows = rows_of([4], [1.0])
    transform.inv(rows)
    rows["next", "reward"].fill_(100.0)
    assert transform.inv(rows_of([4], [0.0]))["advantage"].tolist() == [[0.5], [-0.5]]


def test_lazy_stacks_and_more_batch_dimensions_are_rows():
    singles = list(rows_of([1, 2, 1, 2], [1.0, 0.0, 0.0, 1.0]).unbind(0))
    out = GroupMeanAdvantage(2).inv(lazy_stack(singles))
    assert out["group_id"].tolist() == [1, 1, 2, 2]
    assert torch.equal(GroupMeanAdvantage(2).inv(torch.stack(singles).reshape(2, 2))["uid"], out["uid"])


def test_taking_hands_back_what_waits():
    transform = GroupMeanAdvantage(2)
    transform.inv(rows_of([7], [1.0]))
    (row,) = transform.take(7)
    assert row["group_id"] == 7
    assert transform.waiting() == {}
    with pytest.raises(KeyError):
        transform.take(7)


def test_a_finished_group_starts_anew():
    transform = GroupMeanAdvantage(2)
    assert transform.inv(rows_of([7, 7, 7], [1.0, 0.0, 5.0]))["advantage"].tolist() == [[0.5], [-0.5]]
    assert transform.waiting() == {7: 1}


def test_reading_changes_nothing():
    rows = rows_of([1, 2], [1.0, 0.0])
    assert GroupMeanAdvantage(2)(rows) is rows


@pytest.mark.parametrize("reward", [[[math.nan]], [[math.inf]], [[1.0, 2.0]]])
def test_a_row_without_one_finite_reward_is_refused_and_not_kept(reward):
    transform = GroupMeanAdvantage(2)
    rows = TensorDict(
        {"group_id": torch.tensor([3]), ("next", "reward"): torch.tensor(reward)}, batch_size=[1]
    )
    with pytest.raises(ValueError, match=r"must hold one finite reward for each response, got .* in group 3"):
        transform.inv(rows)
    assert transform.waiting() == {}


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group_size must be at least 2, got 1"):
        GroupMeanAdvantage(1)


def test_data_without_rows_is_refused():
    with pytest.raises(ValueError, match="must have a batch dimension"):
        GroupMeanAdvantage(2).inv(rows_of([3], [1.0])[0])


def test_threads_fill_one_group_together():
    transform = GroupMeanAdvantage(8)
    passed = []
    patience = sys.getswitchinterval()

    class Guarded(dict):
        """Sees a missing lock even when the threads happen not to collide."""

        def setdefault(self, *args):
            assert transform._lock.locked()
            return super().setdefault(*args)

    transform._waiting = Guarded()

    def write(thread):
        for group in range(20):
            out = transform.inv(rows_of([group] * 2, [float(thread), 0.0]))
            passed.extend([] if out is None else out["group_id"].tolist())

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    sys.setswitchinterval(1e-6)  # so that threads meet inside of the transform
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(patience)
    assert sorted(passed) == sorted(list(range(20)) * 8)
    assert transform.waiting() == {}


def test_a_buffer_shared_by_processes_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=GroupMeanAdvantage(2), batch_size=2)
    with pytest.raises(RuntimeError, match="GroupMeanAdvantage keeps replay-buffer write state"):
        buffer.share()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda transform: pickle.loads(pickle.dumps(transform))]
)
def test_copies_do_not_share_what_waits(duplicate):
    transform = GroupMeanAdvantage(2)
    transform.inv(rows_of([7], [1.0]))
    other = duplicate(transform)
    assert other.inv(rows_of([7], [0.0])) is not None
    assert transform.waiting() == {7: 1}
