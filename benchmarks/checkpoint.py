"""How long the learner stands still for a checkpoint, against its step.

    torchrun --standalone --nproc-per-node=2 benchmarks/checkpoint.py

Runs the default recipe with a checkpoint after every few updates and times each call that saves, which copies
the state and waits for the checkpoint before, if that is still being written. The collector's state is copied
by its own thread; what the next batch waits for that is added. Steps are timed as the recipe's log does.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import Config
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.reinforce_zero import learn
from recipes.samplers import run_sampler
from rzero.checkpoint import Checkpointer
from rzero.collectors.rollout_loop import RolloutLoop


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """What a checkpoint costs the learner."""

    updates: int = 200
    """Updates."""
    checkpoint_every: int = 10
    """Updates between checkpoints."""
    eval_every: int = 1_000_000
    """Updates between measurements of held-out accuracy, which is not the subject."""


@contextmanager
def timed_saving(seconds: list[float], computing: list[float]) -> Iterator[None]:
    """Note how long each save keeps its caller, and how long it computes; the rest it waits for the lock."""
    save, await_snapshot = Checkpointer.save, RolloutLoop._await_snapshot

    def timed(self: Checkpointer, *args: Any, **kwargs: Any) -> None:
        started, computed = time.perf_counter(), time.thread_time()
        save(self, *args, **kwargs)
        seconds.append(time.perf_counter() - started)
        computing.append(time.thread_time() - computed)

    def timed_await(self: RolloutLoop) -> None:
        started = time.perf_counter()
        await_snapshot(self)
        if seconds:
            seconds[-1] += time.perf_counter() - started

    Checkpointer.save, RolloutLoop._await_snapshot = timed, timed_await
    try:
        yield
    finally:
        Checkpointer.save, RolloutLoop._await_snapshot = save, await_snapshot


def main() -> None:
    """Run, and print both times."""
    config = parse(BenchmarkConfig, default=BenchmarkConfig(), description=BenchmarkConfig.__doc__ or "")

    def benchmark(learners: Learners, channels: Channels) -> None:
        saving: list[float] = []
        computing: list[float] = []
        with timed_saving(saving, computing):
            summary = learn(config, learners, channels)
        assert summary is not None
        step = 1 / summary["updates_per_second"]
        median, most = statistics.median(saving), max(saving)
        print(f"\n  step                 {1000 * step:8.1f} ms, mean of {summary['updates']}")
        print(f"  learner waits        {1000 * median:8.2f} ms a checkpoint, median of {len(saving)}")
        print(f"                       {1000 * most:8.2f} ms at most")
        print(f"  of which it computes {1000 * statistics.median(computing):8.2f} ms")
        print(f"  share of a step      {median / step:8.2%}")
        path = Path(config.runs) / "checkpoint_benchmark.json"
        measured = {"step_seconds": step, "save_seconds": saving, "save_cpu_seconds": computing}
        path.write_text(json.dumps(measured, indent=2) + "\n")
        print(f"  {path}", flush=True)

    run(benchmark, run_sampler)


if __name__ == "__main__":
    main()
