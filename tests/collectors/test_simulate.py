"""The simulator against closed forms, and what it must refuse."""

import json
import math

import numpy as np
import pytest

from rzero.collectors.lag import LagReport
from rzero.collectors.scheduler import CreditScheduler, SlotScheduler, finished_first, strict, windowed
from rzero.collectors.simulate import Workload, compare_with_synchronous, simulate
from rzero.collectors.simulate_laws import (
    constant_length,
    constant_rate,
    lognormal_length,
)

P = 32
TOKENS = 1000


def one_second_updates(*, response_updates: float, cv: float = 0.0, **others) -> Workload:
    """Updates of one second, and responses that last `response_updates` seconds on average."""
    lengths = lognormal_length(TOKENS, cv=cv) if cv else constant_length(TOKENS)
    rate = constant_rate(TOKENS / response_updates)
    return Workload(length_law=lengths, rate_law=rate, train_seconds=lambda tokens: 1.0, **others)


def statistics(run) -> dict:
    return run.lag.to_dict()


# Closed forms. All times in updates: train time 1, g = generation time / training time per batch, C / B = c.
#
# Slot queue, trainer-bound. At each take Q * P groups are released or about to be and C are in flight, so by
# Little's law a group starts Q + c takes before its own. In flight it is drawn for r = g * c on average: C
# groups at r updates each make P per g updates. Its tokens are drawn on average r / 2 after the start;
# versions are whole numbers while tokens are spread out, which gives back 1 / 2 unless r is short:
#     start = Q + c,   token-mean = Q + c * (1 - g / 2) + 1 / 2.
# Exactly, a group starts when the learner takes a batch, so a token drawn t after the start loses floor(t):
#     token-mean = Q + c - E[integral of floor(t) dt from 0 to r, over r].
# A response of r updates waits Q + c - g * c and is drawn for r, so its start lag is that sum. Per token,
# responses count by their length, E[r^2] / E[r] = g * c * (1 + cv^2), of which tokens lose half:
#     per token = Q + c * (1 - g + g * (1 + cv^2) / 2) + 1 / 2.


@pytest.mark.parametrize("cv", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(
    ("queue", "in_flight", "g"),
    [(8, 2, 0.9), (8, 4, 0.5), (8, 4, 0.9), (2, 2, 0.75), (2, 4, 0.9)],
)
def test_slot_queue_trainer_bound(queue, in_flight, g, cv):
    scheduler = SlotScheduler(queue=queue, in_flight=in_flight * P, groups_per_batch=P)
    workload = one_second_updates(response_updates=g * in_flight, cv=cv)
    # The queue fills by 1 / g - 1 batches per update before it is trainer-bound.
    warmup = 20 + math.ceil((queue + in_flight) / (1 / g - 1))
    run = simulate(scheduler, workload, updates=300, warmup=warmup)
    lag = statistics(run)
    assert lag["start"]["per_response"]["mean"] == pytest.approx(queue + in_flight, abs=0.05)
    expected = queue + in_flight * (1 - g / 2) + 0.5
    assert lag["token_mean"]["per_response"]["mean"] == pytest.approx(expected, abs=0.15)
    assert run.step_seconds == pytest.approx(1.0, abs=1e-3)
    assert run.learner["idle"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("queue", "cv"), [(8, 0.0), (8, 0.8), (2, 0.3)])
def test_slot_queue_near_balance(queue, cv):
    # g = 0.95, B = 128, C = 512: the published nominal 8 and its 10.5 (formula 10.6; nominal 2: 4.6).
    scheduler = SlotScheduler(queue=queue, in_flight=512, groups_per_batch=128)
    run = simulate(scheduler, one_second_updates(response_updates=3.8, cv=cv), updates=150, warmup=250)
    lag = statistics(run)
    assert lag["start"]["per_response"]["mean"] == pytest.approx(queue + 4, abs=0.05)
    assert lag["token_mean"]["per_response"]["mean"] == pytest.approx(queue + 2.6, abs=0.15)


@pytest.mark.parametrize("cv", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_slot_queue_exactly_when_every_start_is_a_take(in_flight, cv):
    scheduler = SlotScheduler(queue=4, in_flight=in_flight * P, groups_per_batch=P)
    workload = one_second_updates(response_updates=0.5 * in_flight, cv=cv)
    lag = statistics(simulate(scheduler, workload, updates=300))
    r = workload.length_law(np.random.default_rng(1), 200_000) / TOKENS * 0.5 * in_flight
    whole = np.floor(r)
    lost = (whole * (whole - 1) / 2 + whole * (r - whole)) / r
    assert lag["start"]["per_response"]["mean"] == pytest.approx(4 + in_flight, abs=0.05)
    expected = 4 + in_flight - lost.mean()
    assert lag["token_mean"]["per_response"]["mean"] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("cv", [0.3, 0.5])
def test_slot_queue_per_token_counts_long_responses_more(cv):
    scheduler = SlotScheduler(queue=8, in_flight=4 * P, groups_per_batch=P)
    run = simulate(scheduler, one_second_updates(response_updates=3.6, cv=cv), updates=400, warmup=150)
    expected = 8 + 4 * (1 - 0.9 + 0.9 * (1 + cv**2) / 2) + 0.5
    assert statistics(run)["token_mean"]["per_token"]["mean"] == pytest.approx(expected, abs=0.15)


def test_generation_bound_lag_ignores_the_queue():
    means = []
    for queue in (2, 8):
        scheduler = SlotScheduler(queue=queue, in_flight=4 * P, groups_per_batch=P)
        run = simulate(scheduler, one_second_updates(response_updates=6.0, cv=0.3), updates=200, warmup=100)
        means.append(run.lag.means()["start"])
        assert run.learner["idle"] == pytest.approx(1 - 1 / 1.5, abs=0.01)  # g = 6 / 4 = 1.5
    assert means[0] == pytest.approx(means[1], abs=0.02)
    assert 4.5 <= means[0] <= 4.9


@pytest.mark.parametrize("nominal_lag", [1, 2, 8])
@pytest.mark.parametrize(
    "order", [strict(), windowed(0.3), finished_first()], ids=["strict", "f0.3", "first"]
)
def test_credits_mean_start_lag_is_nominal_in_any_order(nominal_lag, order):
    # After each take S * P groups are left, so by Little's law the mean is S; only tail and speed differ.
    scheduler = CreditScheduler(nominal_lag=nominal_lag, groups_per_batch=P, order=order)
    run = simulate(scheduler, one_second_updates(response_updates=0.8, cv=0.8), updates=300)
    start = statistics(run)["start"]["per_response"]
    assert start["mean"] == pytest.approx(nominal_lag, abs=0.05)
    assert start["max"] <= scheduler.hard_bound


def test_a_hard_bound_is_paid_for_in_speed():
    # The design notes' table: B = 64, S = 8, responses of two updates, cv 0.8: 1.53, 1.28 (max 11), 1.00.
    def step_and_max(order):
        scheduler = CreditScheduler(nominal_lag=8, groups_per_batch=64, order=order)
        run = simulate(scheduler, one_second_updates(response_updates=2.0, cv=0.8), updates=200)
        return run.step_seconds, statistics(run)["start"]["per_response"]["max"]

    step, largest = step_and_max(strict())
    assert step == pytest.approx(1.53, rel=0.06) and largest == 8
    step, largest = step_and_max(windowed(0.3))
    assert step == pytest.approx(1.28, rel=0.06) and largest == 11
    step, largest = step_and_max(finished_first())
    assert step == pytest.approx(1.0, abs=1e-3) and largest > 15


@pytest.mark.parametrize("nominal_lag", [0, 1, 2])
def test_no_token_is_older_than_the_strict_bound(nominal_lag):
    """Fault 2 of the field notes, with everything switched on that could make a response older."""
    scheduler = CreditScheduler(nominal_lag=nominal_lag, groups_per_batch=4, order=strict())
    workload = one_second_updates(
        response_updates=2.0,
        cv=1.5,
        group_size=2,
        engines=3,
        publish_seconds=0.4,
        acknowledge_seconds=0.1,
        pause_seconds=0.1,
        overlap_publish=True,
        evaluate_every=7,
        evaluation_seconds=3.0,
        submit_seconds=0.2,
        reward_seconds=0.3,
        filter_probability=0.2,
        fail_probability=0.1,
        engine_failure_seconds=40.0,
        repair_seconds=5.0,
    )
    run = simulate(scheduler, workload, updates=150, warmup=0)
    assert statistics(run)["start"]["per_token"]["max"] <= nominal_lag


def test_synchronous_is_exactly_lag_zero_and_takes_the_sum():
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=P, order=finished_first())
    workload = one_second_updates(response_updates=2.5, publish_seconds=0.25)
    run = simulate(scheduler, workload, updates=20)
    lag = statistics(run)
    assert lag["start"]["per_token"]["histogram"] == [20 * P * TOKENS]
    assert lag["token_mean"]["per_token"]["histogram"] == [20 * P * TOKENS]
    assert run.step_seconds == pytest.approx(2.5 + 1.0 + 0.25)
    assert run.learner == pytest.approx({"train": 1 / 3.75, "publish": 0.25 / 3.75, "idle": 2.5 / 3.75})
    assert run.engines["busy"] == pytest.approx(2.5 / 3.75)
    assert run.tokens_per_second == pytest.approx(P * TOKENS / 3.75)


def test_speed_up_over_synchronous_of_the_same_inputs():
    # Sampling 0.8, training 1: the sum against the larger one.
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=P, order=strict())
    comparison = compare_with_synchronous(scheduler, one_second_updates(response_updates=0.8), updates=20)
    assert comparison.synchronous.step_seconds == pytest.approx(1.8)
    assert comparison.run.step_seconds == pytest.approx(1.0)
    assert comparison.speed_up == pytest.approx(1.8)


def test_prompts_on_their_way_are_sampled_with_newer_weights():
    # Updates end at 1, 2, ... s and let a batch start; it arrives 0.8 s later and is drawn for 0.4 s, half of
    # it before the next update ends. Synchronously nothing else goes on meanwhile: 0.8 + 0.4 + 1.
    workload = one_second_updates(response_updates=0.4, submit_seconds=0.8)
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=P, order=strict())
    run = simulate(scheduler, workload, updates=20)
    assert run.lag.means() == pytest.approx({"start": 2.0, "end": 1.0, "token_mean": 1.5}, abs=0.02)
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=P, order=strict())
    run = simulate(scheduler, workload, updates=20)
    assert run.step_seconds == pytest.approx(2.2) and run.lag.means()["token_mean"] == 0.0


@pytest.mark.parametrize(("acknowledge_seconds", "token_mean"), [(0.0, 2.0), (0.3, 1.5)])
def test_engines_have_the_weights_before_the_learner_knows(acknowledge_seconds, token_mean):
    # Weights are known to have arrived at 0.5, 1.5, ... s, and let a batch start; it is drawn from 1.0 to
    # 1.4 s, all of it before 1.5 s, but half of it after 1.2 s.
    workload = one_second_updates(
        response_updates=0.4,
        publish_seconds=0.5,
        acknowledge_seconds=acknowledge_seconds,
        overlap_publish=True,
        submit_seconds=0.5,
    )
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=P, order=strict())
    run = simulate(scheduler, workload, updates=20)
    assert run.lag.means()["start"] == pytest.approx(2.0)
    assert run.lag.means()["token_mean"] == pytest.approx(token_mean, abs=0.02)


@pytest.mark.parametrize(
    ("publish_seconds", "overlap", "step"), [(0.5, False, 1.5), (0.5, True, 1.0), (1.7, True, 1.0)]
)
def test_publishing_costs_the_learner_only_without_overlap(publish_seconds, overlap, step):
    scheduler = CreditScheduler(nominal_lag=8, groups_per_batch=P, order=strict())
    workload = one_second_updates(
        response_updates=1.0, publish_seconds=publish_seconds, overlap_publish=overlap
    )
    run = simulate(scheduler, workload, updates=40)
    assert run.step_seconds == pytest.approx(step)
    assert run.learner["publish"] == pytest.approx(0.0 if overlap else 1 / 3)


def test_overlapped_publishing_starts_again_at_once_with_the_newest_weights():
    # An update a second, 1.7 s on the way: one is always ready, so every 1.7 s the engines pause for 0.1 s.
    scheduler = CreditScheduler(nominal_lag=8, groups_per_batch=P, order=strict())
    workload = one_second_updates(
        response_updates=0.5, publish_seconds=1.7, pause_seconds=0.1, overlap_publish=True
    )
    run = simulate(scheduler, workload, updates=170)
    assert run.engines["held"] == pytest.approx(0.1 / 1.7, rel=0.01)


def test_engines_stand_still_for_swaps_and_evaluations():
    scheduler = CreditScheduler(nominal_lag=8, groups_per_batch=P, order=strict())
    workload = one_second_updates(
        response_updates=1.0,
        publish_seconds=0.5,
        pause_seconds=0.1,
        evaluate_every=5,
        evaluation_seconds=0.75,
    )
    run = simulate(scheduler, workload, updates=40)
    assert run.step_seconds == pytest.approx(1.5)
    # Per update 0.1 s of swapping, and every fifth time 0.75 s of evaluation.
    assert run.engines["held"] == pytest.approx((0.1 + 0.75 / 5) / 1.5)
    assert sum(run.engines[name] for name in ("busy", "idle", "held", "down")) == pytest.approx(1.0)


def test_failures_and_filters_lose_nothing():
    scheduler = CreditScheduler(nominal_lag=2, groups_per_batch=8, order=windowed(0.3))
    workload = one_second_updates(
        response_updates=0.5,
        cv=0.8,
        engines=4,
        group_size=4,
        filter_probability=0.3,
        fail_probability=0.1,
        engine_failure_seconds=30.0,
        repair_seconds=3.0,
    )
    run = simulate(scheduler, workload, updates=300, warmup=0)
    counts = run.counts
    left = counts["accepted"] + counts["filtered"] + counts["failed"] + counts["running"]
    assert counts["submitted"] == left
    assert counts["trained"] == 301 * 8  # the batch that ends the measurement included
    complete = counts["accepted"] + counts["filtered"] + counts["failed"]
    assert counts["filtered"] / complete == pytest.approx(0.3, abs=0.04)
    assert counts["failed"] / complete > 0.09
    assert run.engines["down"] == pytest.approx(3 / 33, abs=0.04)
    assert run.lag.responses == 300 * 8 * 4


def test_engine_slots_limit_the_concurrency_and_share_the_load():
    scheduler = CreditScheduler(nominal_lag=3, groups_per_batch=P, order=finished_first())
    workload = one_second_updates(response_updates=1.0, engines=4, group_size=2, engine_slots=6)
    run = simulate(scheduler, workload, updates=30)
    # 4 engines of 6 responses each: 12 groups per second, 32 / 12 seconds for a batch.
    assert run.engines["concurrency"] == pytest.approx(6.0, abs=0.01)
    assert run.step_seconds == pytest.approx(32 / 12, rel=0.01)


def test_training_time_may_depend_on_tokens():
    scheduler = CreditScheduler(nominal_lag=4, groups_per_batch=P, order=finished_first())
    workload = Workload(
        length_law=constant_length(10),
        rate_law=constant_rate(1000),
        train_seconds=lambda tokens: 0.5 + tokens / 640,
        group_size=2,
    )
    assert simulate(scheduler, workload, updates=10).step_seconds == pytest.approx(0.5 + 1.0)


def test_one_seed_one_run():
    def run(seed):
        scheduler = SlotScheduler(queue=2, in_flight=P, groups_per_batch=P)
        workload = one_second_updates(response_updates=0.9, cv=0.8, fail_probability=0.1)
        return simulate(scheduler, workload, updates=20, seed=seed).to_dict()

    assert run(0) == run(0) != run(1)
    assert json.loads(json.dumps(run(0))) == run(0)


def test_a_prediction_goes_beside_a_measurement():
    scheduler = CreditScheduler(nominal_lag=1, groups_per_batch=P, order=strict())
    run = simulate(scheduler, one_second_updates(response_updates=0.5), updates=20)
    measured = LagReport(nominal_lag=1, predicted=run.lag.means())
    assert measured.to_dict()["predicted"]["start"] == 1.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"publish_seconds": -1}, "publish_seconds must be at least 0, got -1"),
        ({"publish_seconds": math.nan}, "publish_seconds must be at least 0, got nan"),
        ({"pause_seconds": 1.0}, r".* must be at most publish_seconds = 0.0, got 1.0 \+ 0.0"),
        ({"acknowledge_seconds": -1}, "acknowledge_seconds must be at least 0, got -1"),
        ({"engine_slots": 0}, "engine_slots must be at least 1, got 0"),
        ({"filter_probability": 1.0}, r"filter_probability must lie in \[0, 1\), got 1.0"),
        ({"engine_failure_seconds": 0.0}, "engine_failure_seconds must be positive, got 0.0"),
    ],
)
def test_impossible_workloads_are_refused(setting, message):
    with pytest.raises(ValueError, match=f"Workload: {message}"):
        one_second_updates(response_updates=1.0, **setting)


def test_runs_that_cannot_be_are_refused():
    workload = one_second_updates(response_updates=1.0)
    used = CreditScheduler(nominal_lag=0, groups_per_batch=1, order=strict())
    used.admit()
    with pytest.raises(ValueError, match="simulate: scheduler must be fresh"):
        simulate(used, workload, updates=1)
    for arguments in ({"updates": 0}, {"updates": 1, "warmup": -1}):
        scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=1, order=strict())
        with pytest.raises(ValueError, match=r"simulate: (updates|warmup) must be at least"):
            simulate(scheduler, workload, **arguments)


def test_nobody_waits_for_ever():
    # Fewer groups in flight than a batch needs would be no problem; engines that never live long enough are.
    scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=1, order=strict())
    workload = one_second_updates(response_updates=1000.0, engine_failure_seconds=1.0)
    with pytest.raises(RuntimeError, match=r"every update must come to its turn, got none since \d+ events"):
        simulate(scheduler, workload, updates=1)
