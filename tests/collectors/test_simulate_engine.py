"""The virtual engine against hand-made traces and an independent processor-sharing loop."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.collectors.simulate_engine import VirtualEngine
from rzero.collectors.simulate_laws import constant_rate, step_rate


def test_a_swap_after_token_two_of_five():
    """Fault 1 of the field notes: engine at 3, swap to 4 after token 2 of 5."""
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=3)
    engine.start(0, 5)
    engine.advance(0.2)
    engine.swap(4)
    assert engine.next_end() == pytest.approx(0.5)
    engine.advance(0.5)
    assert engine.pop_ended() == [(0, [3, 4], [2, 3])]


def test_a_swap_between_tokens_and_versions_that_draw_nothing():
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=0)
    engine.start(7, 4)
    # Token 2 is under way at 0.15 s: it is drawn by version 2. Version 1 draws nothing.
    engine.advance(0.15)
    engine.swap(1)
    engine.swap(2)
    engine.advance(0.4)
    engine.swap(3)
    assert engine.pop_ended() == [(7, [0, 2], [1, 3])]


def test_a_held_engine_stands_still_until_every_hold_is_gone():
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=0)
    engine.start(0, 10)
    engine.hold()
    engine.hold()
    engine.advance(5.0)
    engine.let_go()
    assert engine.next_end() == math.inf
    engine.advance(6.0)
    engine.let_go()
    assert engine.next_end() == 7.0
    assert engine.seconds["held"] == 6.0


def test_responses_beyond_the_slots_wait_for_their_turn():
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=0, slots=2)
    for ticket, length in enumerate([5, 10, 5, 5]):
        engine.start(ticket, length)
    ends = {}
    while engine.load:
        engine.advance(engine.next_end())
        if engine.now == 0.5:
            engine.swap(1)  # Response 2 begins at this very moment, under the new weights.
        for ticket, versions, counts in engine.pop_ended():
            ends[ticket] = (engine.now, versions, counts)
    # 0 and 1 begin at 0.0 s, 2 when 0 ends at 0.5 s, 3 when 1 and 2 end at 1.0 s.
    assert ends == {
        0: (0.5, [0], [5]),
        1: (1.0, [0, 1], [5, 5]),
        2: (1.0, [1], [5]),
        3: (1.5, [1], [5]),
    }


def test_a_failed_engine_names_what_it_lost_once():
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=0, slots=2)
    for ticket in (4, 4, 4, 9):
        engine.start(ticket, 5)
    assert engine.fail() == [4, 9]
    assert engine.load == 0 and engine.next_end() == math.inf


def test_what_is_on_its_way_is_work_to_do_and_lost_with_the_engine():
    engine = VirtualEngine(rate_law=constant_rate(10.0), version=0)
    engine.announce(3, [5, 7])
    assert engine.load == 2 and engine.next_end() == math.inf
    engine.receive(3)
    assert engine.load == 2 and engine.next_end() == 0.5
    engine.announce(8, [5])
    assert engine.fail() == [3, 8]
    engine.receive(8)
    assert engine.load == 0 and engine.next_end() == math.inf


ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(1, 40)),
    min_size=1,
    max_size=12,
    unique_by=lambda pair: pair[0],
)


@settings(max_examples=80, deadline=None)
@given(ARRIVALS, st.floats(0.0, 0.1))
def test_processor_sharing_equals_a_naive_loop(arrivals, sequence_seconds):
    law = step_rate(step_seconds=0.1, sequence_seconds=sequence_seconds)
    arrivals = sorted(arrivals)
    engine, ends = VirtualEngine(rate_law=law, version=0), {}
    waiting = list(enumerate(arrivals))
    while waiting or engine.load:
        arrival = waiting[0][1][0] if waiting else math.inf
        if arrival <= engine.next_end():
            ticket, (time, length) = waiting.pop(0)
            engine.advance(time)
            engine.start(ticket, length)
            continue
        engine.advance(engine.next_end())
        for ticket, versions, counts in engine.pop_ended():
            assert (versions, counts) == ([0], [arrivals[ticket][1]])
            ends[ticket] = engine.now
    assert ends == pytest.approx(naive_ends(arrivals, law), abs=1e-4)


def naive_ends(arrivals: list[tuple[float, int]], law) -> dict[int, float]:
    """Keeps the remaining tokens of every sequence and subtracts them piece by piece."""
    now, remaining, ends = 0.0, {}, {}
    waiting = dict(enumerate(arrivals))
    while waiting or remaining:
        until_arrival = min((time for time, _ in waiting.values()), default=math.inf) - now
        rate = law(len(remaining)) if remaining else 0.0
        until_end = min(remaining.values()) / rate if remaining else math.inf
        passed = min(until_arrival, until_end)
        now += passed
        remaining = {ticket: tokens - passed * rate for ticket, tokens in remaining.items()}
        for ticket in [ticket for ticket, tokens in remaining.items() if tokens < 1e-7]:
            ends[ticket] = now
            del remaining[ticket]
        for ticket in [ticket for ticket, (time, _) in waiting.items() if time <= now + 1e-12]:
            remaining[ticket] = float(waiting.pop(ticket)[1])
    return ends
