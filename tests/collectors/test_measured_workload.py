"""What the meter reads is compared with a brute-force engine, one decoding step at a time."""

import numpy as np
import pytest
import torch

from rzero.buffers import PackedBatch, pack
from rzero.collectors import CreditScheduler, WorkloadMeter, finished_first, simulate
from tests.buffers.responses import rollout

GROUP = 4
STEP, PER_SEQUENCE = 0.004, 0.0002  # seconds of a decoding step with n sequences: STEP + n * PER_SEQUENCE


def played(batches: list[list[int]], *, start: list[float], slots: int = 10**6) -> list[PackedBatch]:
    """Batches of responses of given lengths, each submitted at a given second, as an engine times them."""
    clock, waiting = 0.0, sorted(range(len(batches)), key=start.__getitem__)
    queued: list[tuple[int, int]] = []  # for a slot
    alive: dict[tuple[int, int], int] = {}
    submit: dict[tuple[int, int], float] = {}
    done: dict[tuple[int, int], float] = {}
    while waiting or queued or alive:
        if not alive and not queued:
            clock = max(clock, start[waiting[0]])
        while waiting and start[waiting[0]] <= clock:
            batch = waiting.pop(0)
            queued += [(batch, row) for row in range(len(batches[batch]))]
            submit |= {(batch, row): clock for row in range(len(batches[batch]))}
        while queued and len(alive) < slots:
            batch, row = queued.pop(0)
            alive[batch, row] = batches[batch][row]
        clock += STEP + len(alive) * PER_SEQUENCE
        alive = {key: left - 1 for key, left in alive.items()}
        done |= {key: clock for key, left in alive.items() if left == 0}
        alive = {key: left for key, left in alive.items() if left}
    return [
        pack(
            [
                rollout(
                    batch * 1000 + row,
                    group_id=batch * 100 + row // GROUP,
                    versions=(0,) * lengths[row],
                    t_submit_ns=int(1e9 * submit[batch, row]),
                    t_first_ns=int(1e9 * submit[batch, row]),
                    t_done_ns=int(1e9 * done[batch, row]),
                )
                for row in range(len(lengths))
            ]
        )
        for batch, lengths in enumerate(batches)
    ]


def test_the_rates_of_an_engine_are_read_from_the_times_of_its_responses():
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 30, size=(90, 16)).tolist()
    start = np.cumsum(rng.exponential(0.16, size=90)).tolist()  # between 0 and some 60 sequences at once
    meter = WorkloadMeter(batches=90)
    for batch in played(lengths, start=start):
        meter.update(batch, train_seconds=0.3)
    workload = meter.workload(engines=1, publish_seconds=0.05)
    for concurrency in (24, 36, 48):
        expected = 1 / (STEP + concurrency * PER_SEQUENCE)
        assert workload.rate_law(concurrency) == pytest.approx(expected, rel=0.08), concurrency
    assert workload.rate_law(24) > 1.3 * workload.rate_law(48)
    drawn = workload.length_law(np.random.default_rng(1), 20_000)
    assert drawn.mean() == pytest.approx(np.mean(lengths), rel=0.03)
    assert (workload.group_size, workload.engines, workload.publish_seconds) == (GROUP, 1, 0.05)
    assert workload.train_seconds(123) == pytest.approx(0.3)


def test_waiting_for_a_slot_is_no_slow_sampling():
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 30, size=(60, 16)).tolist()
    meter = WorkloadMeter(batches=60)
    for batch in played(lengths, start=np.arange(0.0, 6.0, 0.1).tolist(), slots=32):  # more than it can do
        meter.update(batch, train_seconds=0.3)
    expected = 1 / (STEP + 32 * PER_SEQUENCE)
    workload = meter.workload(engines=1, publish_seconds=0.0, engine_slots=32)
    assert workload.rate_law(32) == pytest.approx(expected, rel=0.05) and workload.engine_slots == 32
    endless = meter.workload(engines=1, publish_seconds=0.0)
    assert endless.rate_law(32) < 0.5 * expected


def test_only_the_newest_batches_count():
    meter = WorkloadMeter(batches=2)
    for lengths, seconds in (([50] * 8, 9.0), ([3] * 8, 0.1), ([3] * 8, 0.3)):
        meter.update(played([lengths], start=[0.0])[0], train_seconds=seconds)
    workload = meter.workload(engines=1, publish_seconds=0.0)
    assert [workload.train_seconds(0) for _ in range(3)] == [0.1, 0.3, 0.1]
    assert set(workload.length_law(np.random.default_rng(0), 100).tolist()) == {3}


def test_what_was_measured_can_be_simulated():
    meter = WorkloadMeter()
    for batch in played([[5] * 8] * 20, start=[0.05 * k for k in range(20)]):
        meter.update(batch, train_seconds=1.0)  # far slower than sampling: the credits are all in use
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=2, order=finished_first())
    run = simulate(scheduler, meter.workload(engines=1, publish_seconds=0.0), updates=50)
    assert run.step_seconds == pytest.approx(1.0)
    assert run.lag.means()["start"] == pytest.approx(2.0, abs=0.05)


def test_a_restored_meter_measures_on():
    whole, first, rest = WorkloadMeter(batches=3), WorkloadMeter(batches=3), WorkloadMeter(batches=3)
    rest.load_state_dict(first.state_dict())  # an empty one
    batches = played([[3, 4, 5, 6], [5] * 8, [2, 9, 4, 4], [7] * 4], start=[0.0, 0.01, 0.02, 0.03])
    for number, batch in enumerate(batches):
        whole.update(batch, train_seconds=0.1 * number)
        meter = first if number < 3 else rest
        meter.update(batch, train_seconds=0.1 * number)
        if number == 2:
            rest.load_state_dict(first.state_dict())
    assert torch.equal(rest.state_dict()["times"], whole.state_dict()["times"])
    assert rest.state_dict()["sizes"] == whole.state_dict()["sizes"] == [8, 4, 4]
    one, other = (meter.workload(engines=1, publish_seconds=0.0) for meter in (rest, whole))
    assert one.train_seconds(1) == other.train_seconds(1) == pytest.approx(0.1)
    assert one.rate_law(4) == other.rate_law(4)


def test_nothing_measured_and_nothing_kept_are_refused():
    with pytest.raises(RuntimeError, match="at least one update must be measured first, got none"):
        WorkloadMeter().workload(engines=1, publish_seconds=0.0)
    with pytest.raises(ValueError, match="batches must be at least 1, got 0"):
        WorkloadMeter(batches=0)
