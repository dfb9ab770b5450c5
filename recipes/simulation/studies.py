"""The three questions of `simulate.py`, each a list of simulated runs as plain rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.simulation.cluster import Cluster, Split
from rzero.collectors.scheduler import (
    CreditScheduler,
    Scheduler,
    SlotScheduler,
    finished_first,
    strict,
    windowed,
)
from rzero.collectors.simulate import Simulation, Workload, simulate
from rzero.collectors.simulate_laws import constant_rate, lognormal_length

Row = dict[str, Any]

ORDERS = {"finished first": finished_first(), "window 0.3": windowed(0.3), "strict": strict()}
BALANCES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.2, 1.5)
LAGS = (2, 4, 8, 16, 32, 48)
PUBLISH_SECONDS = (0.0, 10.0, 40.0)


def summary(run: Simulation) -> Row:
    """The numbers by which runs are compared."""
    lag = run.lag.to_dict()
    return {
        "start": lag["start"]["per_response"]["mean"],
        "start_max": lag["start"]["per_response"]["max"],
        "token_mean": lag["token_mean"]["per_response"]["mean"],
        "per_token": lag["token_mean"]["per_token"]["mean"],
        "p95": lag["token_mean"]["per_token"]["p95"],
        "histogram": lag["token_mean"]["per_token"]["histogram"],
        "step": run.step_seconds,
        "learner_idle": run.learner["idle"],
        "learner_trains": run.learner["train"],
        "concurrency": run.engines["concurrency"],
    }


def explain_lag(*, updates: int, seed: int) -> list[Row]:
    """C = 4 B groups in flight as published, updates of one second; g: generation over training time."""
    rows = []

    def add(name: str, scheduler: Scheduler, balance: float) -> None:
        workload = Workload(
            length_law=lognormal_length(1000, cv=0.3),
            rate_law=constant_rate(1000 / (4 * balance)),
            train_seconds=lambda tokens: 1.0,
        )
        # The queue fills by 1 / g - 1 batches per update: near balance that takes a while.
        warmup = (2 if 0.9 < balance < 1.1 else 1) * max(updates, 20)
        run = simulate(scheduler, workload, updates=updates, warmup=warmup, seed=seed)
        rows.append({"name": name, "nominal": scheduler.nominal_lag, "g": balance, **summary(run)})

    for queue in (2, 8):
        for balance in BALANCES:
            add("slot queue", SlotScheduler(queue=queue, in_flight=128, groups_per_batch=32), balance)
    for name, order in ORDERS.items():
        add(f"credits, {name}", CreditScheduler(nominal_lag=8, groups_per_batch=32, order=order), 0.95)
    return rows


def compare_splits(cluster: Cluster, *, updates: int, seed: int) -> list[Row]:
    """Every split of the cluster by three length laws, against synchronous runs of two kinds."""
    rows = []
    for cv in sorted({0.1, cluster.cv, 0.8}):
        machine = replace(cluster, cv=cv)
        baseline = {"updates": updates, "warmup": 1, "seed": seed}
        colocated = simulate(machine.credits(0, strict()), machine.colocated(), **baseline)
        for learners in range(2, cluster.gpus - 1, 2):
            workload = machine.workload(learners)
            apart = simulate(machine.credits(0, strict()), workload, **baseline)
            for nominal_lag in (2, 8):
                scheduler = machine.credits(nominal_lag, finished_first())
                run = simulate(scheduler, workload, updates=updates, seed=seed)
                rows.append(
                    {
                        "cv": cv,
                        "learners": learners,
                        "nominal": nominal_lag,
                        **summary(run),
                        "synchronous": apart.step_seconds,
                        "colocated": colocated.step_seconds,
                        "speed_up": apart.step_seconds / run.step_seconds,
                        "over_colocated": colocated.step_seconds / run.step_seconds,
                    }
                )
    return rows


def plan(cluster: Cluster, split: Split, *, updates: int, seed: int) -> list[Row]:
    """A large cluster as a model with about 32 engines: lag by order and batch size, then publishing time.

    A larger batch multiplies the work of sampling and learning alike, so the split stays and the step grows.
    """
    scale = max(1, split.engines // 32)
    rows = []

    def add(nominal_lag: int, name: str, factor: int, publish: float, *, overlap: bool) -> None:
        machine = replace(cluster, publish_seconds=publish, responses=factor * cluster.responses)
        workload = replace(machine.workload(split.learners, scale=scale), overlap_publish=overlap)
        scheduler = machine.credits(nominal_lag, ORDERS[name], scale=scale)
        run = simulate(scheduler, workload, updates=updates, warmup=10 + 2 * nominal_lag, seed=seed)
        rows.append(
            {"nominal": nominal_lag, "order": name, "responses": machine.responses, "publish": publish}
            | {"overlap": overlap, "ideal_step": factor * split.step_seconds, **summary(run)}
        )

    for name, factor in (("finished first", 1), ("strict", 1), ("finished first", 4)):
        for nominal_lag in LAGS:
            add(nominal_lag, name, factor, cluster.publish_seconds, overlap=True)
    for publish in PUBLISH_SECONDS:
        for overlap in (False, True):
            add(16, "finished first", 4, publish, overlap=overlap)
    return rows
