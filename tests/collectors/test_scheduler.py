"""Schedulers under random and adversarial events: nothing is lost, no bound is broken, nobody waits."""

import json
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.collectors.scheduler import (
    CreditScheduler,
    Order,
    Scheduler,
    SlotScheduler,
    finished_first,
    strict,
    windowed,
)

ORDERS = st.one_of(
    st.just(strict()),
    st.floats(0.0, 1.0).map(windowed),
    st.just(finished_first()),
)
BOUNDED = st.one_of(st.just(strict()), st.floats(0.0, 1.0).map(windowed))


def credit_schedulers(orders=ORDERS):
    return st.builds(
        CreditScheduler,
        nominal_lag=st.integers(0, 3),
        groups_per_batch=st.integers(1, 4),
        order=orders,
        version=st.integers(0, 5),
    )


SLOTS = st.builds(
    SlotScheduler,
    queue=st.integers(1, 3),
    in_flight=st.integers(1, 8),
    groups_per_batch=st.integers(1, 4),
)


class Driver:
    """Plays the collector and the learner for one scheduler, one random event at a time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.buffer = deque(scheduler.released)
        self.start_version = {}
        self.start_lags = []
        self.passes = {}  # running ticket -> younger tickets that were released before it
        self.settle()

    def settle(self) -> None:
        """What a caller owes the scheduler after every event."""
        for ticket in self.scheduler.release():
            self.buffer.append(ticket)
            for older in self.scheduler.running:
                if older < ticket:
                    self.passes.setdefault(older, []).append(ticket)
        while (ticket := self.scheduler.admit()) is not None:
            self.start_version[ticket] = self.scheduler.version
        check_invariants(self.scheduler)

    def accept(self, ticket: int) -> None:
        self.scheduler.accept(ticket)
        self.settle()

    def lose(self, ticket: int, *, by_choice: bool) -> None:
        (self.scheduler.filter if by_choice else self.scheduler.fail)(ticket)
        if ticket in self.buffer:
            self.buffer.remove(ticket)
        self.settle()

    def train(self) -> bool:
        size = self.scheduler.groups_per_batch
        if len(self.buffer) < size:
            return False
        batch = [self.buffer.popleft() for _ in range(size)]
        learner_version = self.scheduler.learner_version
        self.scheduler.train(batch)
        known = [self.start_version[ticket] for ticket in batch if ticket in self.start_version]
        self.start_lags += [learner_version - version for version in known]
        self.settle()
        return True

    def publish(self, version: int) -> None:
        self.scheduler.publish(version)
        self.settle()

    def random_event(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(["accept", "accept", "filter", "fail", "train", "publish"]))
        scheduler = self.scheduler
        if event == "accept" and scheduler.running:
            self.accept(data.draw(st.sampled_from(scheduler.running)))
        elif event in ("filter", "fail"):
            untrained = scheduler.running + scheduler.finished + scheduler.released
            if untrained:
                self.lose(data.draw(st.sampled_from(untrained)), by_choice=event == "filter")
        elif event == "train":
            self.train()
        elif event == "publish":
            self.publish(data.draw(st.integers(scheduler.version, scheduler.learner_version)))


def check_invariants(scheduler: Scheduler) -> None:
    """The written invariants, counted from the public tickets instead of from the scheduler's own sums."""
    counts = scheduler.counts
    running, finished, released = scheduler.running, scheduler.finished, scheduler.released
    assert counts["submitted"] == counts["accepted"] + counts["filtered"] + counts["failed"] + len(running)
    assert counts["accepted"] == len(finished) + len(released) + counts["trained"]
    assert len({*running, *finished, *released}) == len(running) + len(finished) + len(released)
    unpublished = scheduler.learner_version - scheduler.version
    if isinstance(scheduler, CreditScheduler):
        held = len(running) + len(finished) + len(released) + unpublished * scheduler.groups_per_batch
        # Asked until None, it is always exactly full: capacity is neither exceeded nor lost.
        assert held == (scheduler.nominal_lag + 1) * scheduler.groups_per_batch
    if isinstance(scheduler, SlotScheduler):
        assert len(running) + len(finished) == scheduler.in_flight
        assert len(released) <= scheduler.queue * scheduler.groups_per_batch


@settings(max_examples=150, deadline=None)
@given(st.one_of(credit_schedulers(), SLOTS), st.data())
def test_capacity_is_never_lost(scheduler, data):
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 60))):
        driver.random_event(data)


@settings(max_examples=150, deadline=None)
@given(credit_schedulers(BOUNDED), st.data())
def test_no_start_lag_exceeds_the_hard_bound(scheduler, data):
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 80))):
        driver.random_event(data)
    assert max(driver.start_lags, default=0) <= scheduler.hard_bound < math.inf


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([0, 1, 2]), st.integers(1, 4), st.data())
def test_strict_never_exceeds_the_nominal_lag(nominal_lag, groups_per_batch, data):
    scheduler = CreditScheduler(nominal_lag=nominal_lag, groups_per_batch=groups_per_batch, order=strict())
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 80))):
        driver.random_event(data)
    assert scheduler.hard_bound == nominal_lag
    assert max(driver.start_lags, default=0) <= nominal_lag
    assert not driver.passes


@settings(max_examples=80, deadline=None)
@given(ORDERS, st.integers(1, 4), st.data())
def test_lag_zero_is_drained_and_exact(order, groups_per_batch, data):
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=groups_per_batch, order=order)
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 60))):
        driver.random_event(data)
        if scheduler.version < scheduler.learner_version:
            assert scheduler.admit() is None
    assert scheduler.hard_bound == 0
    assert set(driver.start_lags) <= {0}


def adversary(scheduler: CreditScheduler, *, updates: int) -> list[int]:
    """Holds the newest group back as long as the learner can go on without it; returns the start lags."""
    driver = Driver(scheduler)
    victim = scheduler.running[-1]
    while scheduler.learner_version < updates:
        for ticket in scheduler.running:
            if ticket != victim:
                driver.accept(ticket)
        while driver.train():
            driver.publish(scheduler.learner_version)
        if scheduler.running == (victim,):
            driver.accept(victim)
            assert driver.train()
            driver.publish(scheduler.learner_version)
            victim = scheduler.running[-1]
    return driver.start_lags


@pytest.mark.parametrize("nominal_lag", [1, 2, 8])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 1.0])
def test_the_adversary_reaches_the_bound_and_stops_there(nominal_lag, fraction):
    # P = 4. S + ceil((W - 1) / P) with W = floor(fraction * (S + 1) * P): S = 8, 0.3 gives W = 10 and 8 + 3.
    scheduler = CreditScheduler(nominal_lag=nominal_lag, groups_per_batch=4, order=windowed(fraction))
    window = max(1, math.floor(fraction * (nominal_lag + 1) * 4))
    assert scheduler.hard_bound == nominal_lag + math.ceil((window - 1) / 4)
    assert max(adversary(scheduler, updates=60)) == scheduler.hard_bound


def test_without_a_window_the_adversary_waits_for_ever():
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=4, order=finished_first())
    driver = Driver(scheduler)
    for _ in range(50):
        for ticket in scheduler.running[1:]:
            driver.accept(ticket)
        assert driver.train()
        driver.publish(scheduler.learner_version)
    assert scheduler.running[0] == 0 and scheduler.hard_bound == math.inf


def test_bounds_of_titan():
    # ((S + 1) * P + W - 2) // P of the design notes, P = 64, S = 8, f = 0.3: W = 172, (576 + 170) // 64 = 11.
    scheduler = CreditScheduler(nominal_lag=8, groups_per_batch=64, order=windowed(0.3))
    assert scheduler.order.window(scheduler.capacity) == 172
    assert scheduler.hard_bound == (9 * 64 + 172 - 2) // 64 == 11


@settings(max_examples=150, deadline=None)
@given(st.one_of(credit_schedulers(), SLOTS), st.data())
def test_whatever_happened_the_learner_gets_its_next_batches(scheduler, data):
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 60))):
        driver.random_event(data)
    driver.publish(scheduler.learner_version)
    for _ in range(5):
        # At most all groups of one batch and of the queue have to finish before the learner can go on.
        for _ in range(100):
            if len(driver.buffer) >= scheduler.groups_per_batch:
                break
            driver.accept(scheduler.running[0])
        assert driver.train()
        driver.publish(scheduler.learner_version)


@pytest.mark.parametrize("order", [strict(), windowed(0.3), finished_first()])
def test_a_thousand_failures_do_not_stop_anyone(order):
    scheduler = CreditScheduler(nominal_lag=1, groups_per_batch=3, order=order)
    driver = Driver(scheduler)
    for round_number in range(1000):
        driver.lose(scheduler.running[round_number % 6], by_choice=round_number % 2 == 0)
    assert scheduler.counts["failed"] == scheduler.counts["filtered"] == 500
    for ticket in scheduler.running[:3]:
        driver.accept(ticket)
    assert driver.train()


@settings(max_examples=60, deadline=None)
@given(st.one_of(credit_schedulers(), SLOTS), st.data())
def test_a_restored_scheduler_goes_on_as_the_saved_one(scheduler, data):
    driver = Driver(scheduler)
    for _ in range(data.draw(st.integers(0, 40))):
        driver.random_event(data)
    state = json.loads(json.dumps(scheduler.state_dict()))
    restored = fresh_like(scheduler)
    restored.load_state_dict(state)
    assert restored.state_dict() == scheduler.state_dict()
    assert restored.admit() is None and restored.release() == []
    # The same future on both.
    twin = Driver(restored)
    for ticket in scheduler.running[:2]:
        driver.accept(ticket)
        twin.accept(ticket)
    assert driver.train() == twin.train()
    assert list(driver.buffer) == list(twin.buffer)
    assert restored.state_dict() == scheduler.state_dict()


def fresh_like(scheduler: Scheduler, *, version: int = 0) -> Scheduler:
    if isinstance(scheduler, CreditScheduler):
        return CreditScheduler(
            nominal_lag=scheduler.nominal_lag,
            groups_per_batch=scheduler.groups_per_batch,
            order=scheduler.order,
            version=version,
        )
    assert isinstance(scheduler, SlotScheduler)
    return SlotScheduler(
        queue=scheduler.queue,
        in_flight=scheduler.in_flight,
        groups_per_batch=scheduler.groups_per_batch,
        version=version,
    )


def admitted(scheduler: Scheduler) -> int:
    count = 0
    while scheduler.admit() is not None:
        count += 1
    return count


@pytest.mark.parametrize(
    "scheduler",
    [
        CreditScheduler(nominal_lag=2, groups_per_batch=4, order=windowed(0.3)),
        SlotScheduler(queue=2, in_flight=12, groups_per_batch=4),
    ],
    ids=["credit", "slot"],
)
def test_restoring_at_version_100_admits_no_more_than_a_fresh_one(scheduler):
    driver = Driver(scheduler)
    while scheduler.learner_version < 100:
        driver.accept(scheduler.running[0])
        driver.train()
        driver.publish(scheduler.learner_version)
    restored = fresh_like(scheduler)
    restored.load_state_dict(scheduler.state_dict())
    fresh = admitted(fresh_like(scheduler))
    assert restored.version == 100 and admitted(restored) == 0
    # Even if everything in flight was lost, only the ordinary capacity comes back.
    for ticket in restored.running + restored.finished + restored.released:
        restored.fail(ticket)
    assert admitted(restored) == fresh == 12
    # And a run that starts from the weights of version 100 alone is a fresh one too, with lags from 100.
    assert admitted(fresh_like(scheduler, version=100)) == fresh


def test_a_start_beyond_the_bound_is_an_error():
    scheduler = CreditScheduler(nominal_lag=1, groups_per_batch=1, order=strict(), version=7)
    scheduler.accept(scheduler.admit())
    state = scheduler.state_dict()
    state["start"] = [[0, 5]]
    scheduler.load_state_dict(state)
    (ticket,) = scheduler.release()
    with pytest.raises(
        RuntimeError, match=r"start lag must be at most 1, got 2 \(ticket 0 started at version 5"
    ):
        scheduler.train([ticket])
    assert scheduler.learner_version == 7 and scheduler.released == (0,)


def test_orders_decide_what_passes():
    def released(order):
        scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=4, order=order)
        while scheduler.admit() is not None:
            pass
        for ticket in (9, 3, 1, 2):
            scheduler.accept(ticket)
        return scheduler.release()

    assert released(strict()) == []
    # floor(0.3 * 12) = 3: tickets 0, 1 and 2.
    assert released(windowed(0.3)) == [1, 2]
    assert released(finished_first()) == [1, 2, 3, 9]


def test_at_most_one_batch_waits_in_front_of_the_learner():
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=2, order=finished_first())
    driver = Driver(scheduler)
    for ticket in (5, 4, 3):
        driver.accept(ticket)
    assert scheduler.released == (5, 4) and scheduler.finished == (3,)
    driver.accept(0)
    driver.train()
    # The slow group 0 goes before 3, which finished earlier.
    assert scheduler.released == (0, 3)


def test_slots_give_a_place_back_when_the_learner_takes_a_batch():
    scheduler = SlotScheduler(queue=1, in_flight=2, groups_per_batch=2)
    driver = Driver(scheduler)
    for ticket in (0, 1, 2):
        driver.accept(ticket)
    assert scheduler.released == (0, 1) and scheduler.finished == (2,) and scheduler.running == (3,)
    driver.train()
    assert scheduler.version == 0  # nothing was published, and yet:
    assert scheduler.released == (2,) and scheduler.running == (3, 4)


def test_drained():
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=1, order=strict())
    assert scheduler.drained
    ticket = scheduler.admit()
    assert not scheduler.drained
    scheduler.accept(ticket)
    scheduler.train(scheduler.release())
    assert not scheduler.drained
    scheduler.publish(1)
    assert scheduler.drained


def test_wrong_calls_are_errors_and_change_nothing():
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=2, order=strict())
    tickets = [scheduler.admit(), scheduler.admit()]
    before = scheduler.state_dict()
    with pytest.raises(RuntimeError, match=r"CreditScheduler\.accept: ticket must be running, got 7"):
        scheduler.accept(7)
    with pytest.raises(
        RuntimeError, match=r"CreditScheduler\.fail: ticket must be in flight and untrained, got 7"
    ):
        scheduler.fail(7)
    with pytest.raises(RuntimeError, match="every ticket must be released, got 0"):
        scheduler.train(tickets)
    with pytest.raises(ValueError, match=r"must be 2 different ones, got \[0, 0\]"):
        scheduler.train([0, 0])
    with pytest.raises(ValueError, match=r"must be 2 different ones, got \[0\]"):
        scheduler.train([0])
    with pytest.raises(RuntimeError, match="between the published 0 and the learner's 0, got 1"):
        scheduler.publish(1)
    assert scheduler.state_dict() == before
    for ticket in tickets:
        scheduler.accept(ticket)
    scheduler.train(scheduler.release())
    scheduler.publish(1)
    with pytest.raises(RuntimeError, match="between the published 1 and the learner's 1, got 0"):
        scheduler.publish(0)
    with pytest.raises(RuntimeError, match=r"filter: ticket must be in flight and untrained, got 0"):
        scheduler.filter(0)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="nominal_lag must be at least 0, got -1"):
        CreditScheduler(nominal_lag=-1, groups_per_batch=1, order=strict())
    with pytest.raises(TypeError, match=r"groups_per_batch must be an int, got float"):
        CreditScheduler(nominal_lag=1, groups_per_batch=2.0, order=strict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="order must be an Order, got str"):
        CreditScheduler(nominal_lag=1, groups_per_batch=1, order="strict")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="queue must be at least 1, got 0"):
        SlotScheduler(queue=0, in_flight=1, groups_per_batch=1)
    for fraction in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"fraction must lie in \[0, 1\] or be infinite"):
            Order(fraction=fraction)


def test_a_state_of_other_settings_is_refused():
    state = CreditScheduler(nominal_lag=2, groups_per_batch=1, order=strict()).state_dict()
    other = CreditScheduler(nominal_lag=1, groups_per_batch=1, order=strict())
    with pytest.raises(ValueError, match=r"CreditScheduler\.load_state_dict: settings must be"):
        other.load_state_dict(state)


def test_a_state_that_does_not_add_up_is_refused():
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=1, order=strict())
    scheduler.admit()
    state = scheduler.state_dict()
    state["counts"]["submitted"] = 5
    with pytest.raises(RuntimeError, match="submitted must equal accepted"):
        fresh_like(scheduler).load_state_dict(state)
