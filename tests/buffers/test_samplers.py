"""Three orders over whole groups, each group drawn at most once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers import FifoGroupSampler, OldestVersionFirstSampler, RandomGroupSampler
from rzero.buffers.samplers import ReadyGroup
from tests.buffers.responses import group, make_buffer

GROUPS = [ReadyGroup(30, 5, 0), ReadyGroup(10, 2, 1), ReadyGroup(20, 5, 2), ReadyGroup(40, 2, 3)]
SAMPLERS = {
    "fifo": FifoGroupSampler,
    "oldest": OldestVersionFirstSampler,
    "random": lambda: RandomGroupSampler(seed=1),
}


def filled(name):
    sampler = SAMPLERS[name]()
    for ready in GROUPS:
        sampler.admit(ready)
    return sampler


def test_fifo_follows_completion():
    assert filled("fifo").take(4) == [30, 10, 20, 40]


def test_oldest_version_first_breaks_ties_by_completion():
    assert filled("oldest").take(4) == [10, 40, 30, 20]


def test_a_group_that_comes_back_takes_its_old_place():
    for name, order in (("fifo", [30, 10, 20, 40]), ("oldest", [10, 40, 30, 20])):
        sampler = filled(name)
        first = sampler.take(2)
        for ready in reversed(GROUPS):
            if ready.group_id in first:
                sampler.admit(ready)
        assert sampler.take(4) == order


def test_random_is_uniform():
    # Each of the 12 ordered pairs is expected 250 times of 3,000, with a standard deviation of 15.
    sampler, pairs = RandomGroupSampler(seed=3), Counter()
    for _ in range(3000):
        sampler.rebuild(GROUPS)
        pairs[tuple(sampler.take(2))] += 1
    assert len(pairs) == 12
    assert all(abs(count - 250) < 5 * 15 for count in pairs.values())


def test_random_follows_its_seed():
    def draw(seed):
        sampler = RandomGroupSampler(seed=seed)
        sampler.rebuild(ReadyGroup(number, 0, number) for number in range(50))
        return sampler.take(50)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert sorted(draw(1)) == list(range(50))


def test_random_goes_on_where_it_was_saved():
    sampler = RandomGroupSampler(seed=1)
    sampler.rebuild(ReadyGroup(number, 0, number) for number in range(50))
    sampler.take(20)
    state = {name: value.clone() for name, value in sampler.state_dict().items()}
    remaining = [ReadyGroup(number, 0, number) for number in sorted(state["order"].tolist())]
    again = RandomGroupSampler(seed=2)
    again.load_state_dict(state)
    again.rebuild(remaining)
    assert again.take(30) == sampler.take(30)


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(0, 9)),
            st.tuples(st.just("discard"), st.integers(0, 30)),
            st.tuples(st.just("take"), st.integers(0, 4)),
        ),
        max_size=40,
    )
)
def test_every_order_draws_each_group_once(name, steps):
    sampler, waiting, sequence = SAMPLERS[name](), {}, 0
    for action, number in steps:
        if action == "admit":
            waiting[sequence] = ReadyGroup(sequence, number, sequence)
            sampler.admit(waiting[sequence])
            sequence += 1
        elif action == "discard":
            sampler.discard(number)
            waiting.pop(number, None)
        elif number <= len(sampler):
            taken = sampler.take(number)
            expected = {
                "fifo": sorted(waiting),
                "oldest": sorted(waiting, key=lambda key: (waiting[key].version, key)),
            }
            if name in expected:
                assert taken == expected[name][:number]
            assert len(set(taken)) == number
            for group_id in taken:
                del waiting[group_id]
        assert len(sampler) == len(waiting)


def test_discarded_groups_do_not_pile_up():
    sampler = FifoGroupSampler()
    for number in range(10_000):
        sampler.admit(ReadyGroup(number, 0, number))
        if number:
            sampler.discard(number)
    assert len(sampler._heap) < 200
    assert sampler.take(1) == [0]


def test_only_whole_groups_are_drawn():
    buffer = make_buffer()
    for number in range(3):
        buffer.extend(group(number))
    with pytest.raises(ValueError, match="batch_size must be a positive multiple of group_size 4, got 6"):
        buffer.sample(6, timeout=0)
    with pytest.raises(ValueError, match="got 0"):
        buffer.sample(0, timeout=0)
    assert buffer.sample(4, timeout=0).group_id.tolist() == [0] * 4
    assert buffer.sample(timeout=0).group_id.tolist() == [1] * 4 + [2] * 4
    with pytest.raises(RuntimeError, match="needs 1 whole groups, got 0"):
        buffer.sampler.sample(buffer.storage, 4)
