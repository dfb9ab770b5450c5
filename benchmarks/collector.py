"""Does asynchronous collection overlap sampling and learning as well as it could, and what is publishing?

    torchrun --standalone --nproc-per-node=2 benchmarks/collector.py

Runs the default recipe synchronously and at nominal lag 2, in turns, in the same two processes. In a
synchronous run either the sampler works or the learner: the learner's waiting is the time of sampling (with
rewards and messages), the rest of its step the time of learning. The ideal overlap is the longer of the two;
reported is its share of the asynchronous step, which is more than all of it where messages on their way
overlap too. The second share is stricter: of the longer of the times in which sampler and learner compute.
Evaluation is left out of all times.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.config import Config
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.reinforce_zero import learn
from recipes.samplers import run_sampler
from rzero.collectors import AsyncRolloutCollector

START = 10  # publishes that are not counted: the first ones wait for engines that make their first calls


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """How well sampling and learning overlap, and what publishing costs."""

    updates: int = 150
    """Updates of each run."""
    rounds: int = 3
    """Runs of each kind, in turns."""
    eval_every: int = 1_000_000
    """Updates between measurements of held-out accuracy, which is not the subject."""
    held_out: int = 8
    """Held-out problems."""


@contextmanager
def timed_publishing(seconds: list[float]) -> Iterator[None]:
    """Note how long the learner itself stands still for each publish."""
    publish = AsyncRolloutCollector.update_policy_weights_

    def timed(self: AsyncRolloutCollector, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        publish(self, *args, **kwargs)
        seconds.append(time.perf_counter() - started)

    AsyncRolloutCollector.update_policy_weights_ = timed
    try:
        yield
    finally:
        AsyncRolloutCollector.update_policy_weights_ = publish


def measure(config: BenchmarkConfig, learners: Learners, channels: Channels) -> dict[str, float]:
    """One run, in milliseconds per update."""
    publishing: list[float] = []
    with timed_publishing(publishing), contextlib.redirect_stdout(io.StringIO()):
        summary = learn(config, learners, channels)
    assert summary is not None
    step = 1000 / summary["updates_per_second"]
    return {
        "step": step,
        "wait": summary["learner_idle_share"] * step,
        "publish": 1000 * statistics.mean(publishing[START:]),
        "learner idle": summary["learner_idle_share"],
        "sampler idle": summary["sampler_idle_share"],
        "lag": summary["lag"]["token_mean"]["per_token"]["mean"],
    }


def main() -> None:
    """Both kinds in turns, and a table."""
    config = parse(BenchmarkConfig, default=BenchmarkConfig(), description=BenchmarkConfig.__doc__ or "")

    def benchmark(learners: Learners, channels: Channels) -> None:
        runs: dict[int, list[dict[str, float]]] = {0: [], config.nominal_lag: []}
        for _ in range(config.rounds):
            for lag, measured in runs.items():
                measured.append(measure(replace(config, nominal_lag=lag), learners, channels))
        report(config, *runs.values())

    run(benchmark, run_sampler)


def report(
    config: BenchmarkConfig, sync: list[dict[str, float]], asynchronous: list[dict[str, float]]
) -> None:
    """Print the table; medians over the rounds, with all values behind."""
    print(f"\n  {config.prompts_per_update} x {config.group_size} responses, kernels {config.kernels}\n")
    for name, rows in (("synchronous", sync), (f"nominal lag {config.nominal_lag}", asynchronous)):
        for key in rows[0]:
            values = [row[key] for row in rows]
            unit, scale = ("%", 100) if "idle" in key else ("", 1) if key == "lag" else ("ms", 1)
            listed = " ".join(f"{scale * value:.1f}" for value in values)
            print(f"  {name:16}{key:14}{scale * statistics.median(values):8.1f} {unit:3} ({listed})")
    overlaps, of_work = [], []
    for one, other in zip(sync, asynchronous, strict=True):
        learning = one["step"] - one["wait"]
        overlaps.append(max(one["wait"], learning) / other["step"])
        of_work.append(max((1 - one["sampler idle"]) * one["step"], learning) / other["step"])
    publish = statistics.median(row["publish"] / row["step"] for row in asynchronous)
    speed_up = statistics.median(
        one["step"] / other["step"] for one, other in zip(sync, asynchronous, strict=True)
    )
    print(f"\n  ideal overlap reached   {statistics.median(overlaps):.1%} of max(sampling, learning)")
    print(f"  without messages        {statistics.median(of_work):.1%}")
    print(f"  speed-up                {speed_up:.2f}x over synchronous")
    print(f"  publishing              {publish:.2%} of the learner's step")
    path = Path(config.runs) / "collector_benchmark.json"
    path.write_text(json.dumps({"synchronous": sync, "asynchronous": asynchronous}, indent=2) + "\n")
    print(f"  {path}", flush=True)


if __name__ == "__main__":
    main()
