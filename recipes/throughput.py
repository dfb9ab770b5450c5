"""What asynchrony buys: synchronous and asynchronous steps, by native and by exact kernels.

    torchrun --standalone --nproc-per-node=2 recipes/throughput.py

Four kinds of runs in turns, in the same processes. The learning rate is 0, so that every kind samples and
learns from the same policy to the end: the tokens of an update differ by chance only. Evaluation and the
first updates are left out. In a synchronous run either the samplers work or the learner; the ideal overlap of
the two takes the longer of their times. Beside it, what the simulator says of 16 and of 10,000 GPUs.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.config import Config
from recipes.errors import RecipeError, require_least
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.machine import describe_start, without_runs_folder
from recipes.reinforce_zero import learn
from recipes.reporting.throughput import throughput_text
from recipes.samplers import run_sampler
from recipes.simulate import crossings
from recipes.simulation.cluster import LARGE, SMALL, balance
from recipes.simulation.figure import PUBLISHED_SPEED_UP
from recipes.simulation.studies import compare_splits, plan

KERNELS = ("native", "exact")


@dataclass(frozen=True, kw_only=True)
class Throughput(Config):
    """The step of synchronous and asynchronous runs, by native and exact kernels."""

    updates: int = 150
    """Updates of each run."""
    left_out: int = 20
    """First updates of each run, which fill the pipeline and are not measured."""
    rounds: int = 3
    """Runs of each kind, in turns."""
    lr: float = 0.0
    """Learning rate of AdamW; with 0 the policy stays, and each kind does the same work."""
    simulated_updates: int = 150
    """Updates that the simulator does for 16 and for 10,000 GPUs; 0 to leave it out."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0 for none."""
    eval_every: int = 1_000_000
    """Updates between measurements of held-out accuracy, which is not the subject."""
    held_out: int = 8
    """Held-out problems."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        super().__post_init__()
        require_least(self, {"nominal_lag": 1, "rounds": 1, "left_out": 1, "simulated_updates": 0})
        if self.updates <= self.left_out:
            raise RecipeError(f"--updates must be more than --left-out {self.left_out}, got {self.updates}")


def measure(config: Config, learners: Learners, channels: Channels, *, left_out: int) -> dict[str, float]:
    """Make one run and sum up its updates but the first.

    Args:
        config: Of the run; ``runs`` must be a folder of its own.
        learners: This rank.
        channels: To the samplers.
        left_out: So many first updates are not measured.

    Returns:
        ``step_seconds`` and of it ``wait_seconds``, means; ``tokens`` per update; ``learner_idle`` and
        ``sampler_idle`` shares; ``lag``, the mean over the tokens of the whole run.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        summary = learn(config, learners, channels)
    assert summary is not None
    (folder,) = config.runs.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "update" in row]
    clock = [0.0]
    for row in rows:
        clock.append(clock[-1] + row["wait_seconds"] + row["train_seconds"])
    measured = rows[left_out:]
    seconds = clock[-1] - clock[left_out]
    # Each row tells the share since the start of the run.
    idle = rows[-1]["sampler_idle"] * clock[-1] - rows[left_out - 1]["sampler_idle"] * clock[left_out]
    wait = sum(row["wait_seconds"] for row in measured)
    responses = config.prompts_per_update * config.group_size
    return {
        "step_seconds": seconds / len(measured),
        "wait_seconds": wait / len(measured),
        "tokens": responses * statistics.mean(row["response_length"] for row in measured),
        "learner_idle": wait / seconds,
        "sampler_idle": min(1.0, max(0.0, idle / seconds)),
        "lag": summary["lag"]["token_mean"]["per_token"]["mean"],
    }


def sum_up(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Speed-ups, and how near the asynchronous step comes to the ideal overlap; medians over the rounds.

    Args:
        rounds: By kernels, then ``synchronous`` and ``asynchronous``: what ``measure`` returned, by round.
    """
    found: dict[str, Any] = {}
    for kernels, runs in rounds.items():
        pairs = list(zip(runs["synchronous"], runs["asynchronous"], strict=True))
        ideal = [max(one["wait_seconds"], one["step_seconds"] - one["wait_seconds"]) for one, _ in pairs]
        found[kernels] = {
            "speed_ups": [one["step_seconds"] / other["step_seconds"] for one, other in pairs],
            "ideal_speed_ups": [
                one["step_seconds"] / best for (one, _), best in zip(pairs, ideal, strict=True)
            ],
            "overlaps": [best / other["step_seconds"] for (_, other), best in zip(pairs, ideal, strict=True)],
        }
        for name in ("speed_up", "ideal_speed_up", "overlap"):
            found[kernels][name] = statistics.median(found[kernels][f"{name}s"])
        for kind, rows in runs.items():
            found[kernels][kind] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return found


def simulated(updates: int) -> dict[str, Any]:
    """What the simulator says: where 16 GPUs reach the published speed-up, and how 10,000 GPUs fare."""
    splits = compare_splits(SMALL, updates=max(4, updates // 10), seed=0)
    split = balance(LARGE)
    rows = plan(LARGE, split, updates=max(4, updates // 5), seed=0)
    return {
        "published": PUBLISHED_SPEED_UP,
        "small_gpus": SMALL.gpus,
        "crossings": [
            {"cv": cv, "nominal_lag": lag, "learners": learners}
            for cv, lag, learners in crossings(splits, PUBLISHED_SPEED_UP)
        ],
        "splits": [
            {key: row[key] for key in ("cv", "nominal", "learners", "speed_up", "over_colocated")}
            for row in splits
        ],
        "large_gpus": LARGE.gpus,
        "large": [
            {key: row[key] for key in ("responses", "order", "nominal", "publish", "overlap")}
            | {"of_ideal": row["ideal_step"] / row["step"], "trains": row["learner_trains"]}
            for row in rows
        ],
    }


def main() -> None:
    """Measure all kinds in turns; write ``throughput.json`` and print it as text."""
    config = parse(Throughput, default=Throughput(), description=Throughput.__doc__ or "")

    def measure_all(learners: Learners, channels: Channels) -> None:
        start = describe_start()
        start["command"] = without_runs_folder(start["command"])
        settings = {field.name: getattr(config, field.name) for field in fields(Config)}
        lags = {"synchronous": 0, "asynchronous": config.nominal_lag}
        rounds: dict[str, dict[str, list[dict[str, float]]]] = {
            kernels: {kind: [] for kind in lags} for kernels in KERNELS
        }
        folder = Path(config.runs) / f"throughput-{start['started'].replace(':', '')}"
        for number in range(config.rounds):
            for kernels in KERNELS:
                for kind, lag in lags.items():
                    runs = folder / f"{number}-{kernels}-{kind}"
                    one = Config(**{**settings, "kernels": kernels, "nominal_lag": lag, "runs": runs})
                    measured = measure(one, learners, channels, left_out=config.left_out)
                    rounds[kernels][kind].append(measured)
                    tqdm.write(f"round {number}, {kernels}, {kind}: {1e3 * measured['step_seconds']:.1f} ms")
        found: dict[str, Any] = {
            "start": start,
            "nominal_lag": config.nominal_lag,
            "responses": config.prompts_per_update * config.group_size,
            "updates": config.updates - config.left_out,
            "rounds": rounds,
            "medians": sum_up(rounds),
            "simulated": simulated(config.simulated_updates) if config.simulated_updates else None,
        }
        (folder / "throughput.json").write_text(json.dumps(found, indent=1) + "\n")
        print(throughput_text(found))
        print(f"saved {folder / 'throughput.json'}", flush=True)

    run(measure_all, run_sampler)


if __name__ == "__main__":
    main()
