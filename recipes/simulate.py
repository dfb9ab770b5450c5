"""Predict lag, idle time and speed-up before renting a cluster.

    python recipes/simulate.py

Why a nominal lag of 8 measures about 10.5, what 16 GPUs gain over synchronous training, and what 10,000 GPUs
would need: the schedulers of a real run under a virtual clock. One CPU core, a minute, no GPU. Speeds of GPUs
and lengths of responses are assumptions, not measurements; every one has a flag.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from recipes.simulation.cluster import LARGE, SMALL, Cluster, Split, balance
from recipes.simulation.figure import PUBLISHED_LAG, PUBLISHED_SPEED_UP, draw
from recipes.simulation.studies import Row, compare_splits, explain_lag, plan


@dataclass(frozen=True, kw_only=True)
class Config:
    """Predict lag, idle time and speed-up with the schedulers of a real run."""

    out: Path = Path("runs/simulate")
    """Folder for ``simulate.json`` and ``simulate.png``."""
    updates: int = 150
    """Simulated updates per point of the first question; the other two take a tenth and a fifth."""
    seed: int = 0
    """Seed of the lengths."""
    small: Cluster = field(default_factory=lambda: SMALL)
    """The 16 GPUs."""
    large: Cluster = field(default_factory=lambda: LARGE)
    """The 10,000 GPUs."""


def main(config: Config) -> dict[str, Any]:
    """Answers the three questions; prints tables, saves them as JSON, and draws."""
    lag = explain_lag(updates=config.updates, seed=config.seed)
    print(lag_text(lag))
    splits = compare_splits(config.small, updates=max(4, config.updates // 10), seed=config.seed)
    print(splits_text(splits, config.small))
    split = balance(config.large)
    large = plan(config.large, split, updates=max(4, config.updates // 5), seed=config.seed)
    print(large_text(large, config.large, split))
    draw(
        config.out / "simulate.png",
        lag,
        splits,
        large,
        machines={"small": config.small, "large": config.large},
    )
    answers = {"lag": lag, "splits": splits, "large": large, "balance": asdict(split)}
    (config.out / "simulate.json").write_text(json.dumps(answers))
    print(f"saved {config.out / 'simulate.png'} and {config.out / 'simulate.json'}")
    return answers


def lag_text(rows: list[Row]) -> str:
    """The first question in words and numbers."""
    eight, two = (
        next(row for row in rows if (row["name"], row["nominal"], row["g"]) == ("slot queue", nominal, 0.95))
        for nominal in (8, 2)
    )
    columns = {"name": "arrangement", "nominal": "nominal", "g": "gen/train", "start": "start"}
    columns |= {"token_mean": "token-mean", "per_token": "per token", "p95": "p95", "start_max": "max start"}
    columns |= {"step": "step", "learner_idle": "idle"}
    return answer(
        f"1. Why nominal 8 measures about {PUBLISHED_LAG}",
        "A queue of Q batches with C groups in flight keeps Q + C/B batches in work, so that the lag at "
        f"the start is Q + C/B = {eight['start']:.1f} for Q = 8 and C = 4 B, as long as training is the "
        "slower side. While a response is drawn, newer weights arrive under it: the mean over its tokens "
        f"is {eight['token_mean']:.1f} when generation takes 0.95 of the training time. The same run at "
        f"nominal 2 must then read {two['token_mean']:.1f}. Where sampling is the slower side the queue is "
        "empty, and its length tells nothing. Credits hold the nominal lag in the mean; the order decides "
        "the tail and the price.",
        table(rows, columns),
    )


def splits_text(rows: list[Row], cluster: Cluster) -> str:
    """The second question in words and numbers."""
    columns = {"cv": "cv", "learners": "learners", "nominal": "nominal", "step": "step s"}
    columns |= {"synchronous": "sync s", "speed_up": "speed-up", "colocated": "colocated s"}
    columns |= {"over_colocated": "over it", "learner_idle": "idle", "start": "start lag"}
    columns |= {"per_token": "token lag"}
    found = "; ".join(
        f"{learners:.1f} of {cluster.gpus} GPUs learning at cv {cv}, nominal lag {nominal}"
        for cv, nominal, learners in crossings(rows, PUBLISHED_SPEED_UP)
    )
    speed_ups = [row["speed_up"] for row in rows]
    return answer(
        f"2. What {cluster.gpus} GPUs gain over synchronous",
        f"Assumed: {cluster.responses} responses of {cluster.mean_length:.0f} tokens (log-normal, cut at "
        f"{cluster.limit}), {cluster.parameters / 1e9:.1f}B parameters, {cluster.train_teraflops:.0f} "
        f"Tflop/s in training, {1e3 * cluster.step_seconds:.0f} ms per decoding step. A synchronous run "
        "waits for its longest response, so the gain is a matter of tail, split and lag: "
        f"{min(speed_ups):.1f} to {max(speed_ups):.1f} here. The published {PUBLISHED_SPEED_UP:.2f} lies at "
        f"{found or 'no split'}. Colocated is a synchronous run that uses all GPUs for both "
        "and switches for free.",
        table(rows, columns),
    )


def crossings(rows: list[Row], speed_up: float) -> list[tuple[float, int, float]]:
    """Where each curve of speed-up over learning GPUs passes a value: cv, nominal lag, GPUs."""
    found = []
    for cv, nominal in dict.fromkeys((row["cv"], row["nominal"]) for row in rows):
        curve = [row for row in rows if (row["cv"], row["nominal"]) == (cv, nominal)]
        for before, after in pairwise(curve):
            low, high = before["speed_up"] - speed_up, after["speed_up"] - speed_up
            if low * high <= 0 and low != high:
                part = low / (low - high)
                learners = before["learners"] + part * (after["learners"] - before["learners"])
                found.append((cv, nominal, learners))
    return found


def large_text(rows: list[Row], cluster: Cluster, split: Split) -> str:
    """The third question in words and numbers."""
    columns = {"responses": "responses", "order": "order", "nominal": "nominal", "publish": "publish s"}
    columns |= {"overlap": "overlapped", "ideal_step": "ideal s", "step": "step s"}
    columns |= {"learner_trains": "trains", "learner_idle": "bubble", "concurrency": "per engine"}
    columns |= {"start": "start lag", "per_token": "token lag"}
    blocking, hidden = 0.03 * split.step_seconds, split.step_seconds
    size, engines = cluster.weight_gigabytes, split.engines
    return answer(
        f"3. What {cluster.gpus:,} GPUs would need",
        f"Balanced, {split.learners:,} GPUs learn and {engines:,} engines of {cluster.gpus_per_engine} "
        f"sample: a step of {split.step_seconds:.1f} s for {cluster.responses:,} responses. Full engines "
        f"hold {split.batches_in_flight:.1f} batches, and a response lasts {split.response_updates:.1f} "
        "updates: no scheduler keeps them full at a smaller lag, and waiting for the slowest of a group "
        f"adds to it. A batch k times larger divides that by k. Publishing {size:.0f} GB in 3% of a step "
        f"({blocking:.2f} s) takes {size / blocking:.0f} GB/s into every engine, "
        f"{size * engines / blocking / 1e3:.0f} TB/s in all; overlapped with the next update, "
        f"{size / hidden:.0f} GB/s and {size * engines / hidden / 1e3:.0f} TB/s. "
        "No single sender does that: engines must pass the weights on.",
        table(rows, columns),
    )


def answer(title: str, text: str, rows: str) -> str:
    """A title, a paragraph and a table."""
    return "\n".join([title, textwrap.fill(text, 100), rows])


def table(rows: list[Row], columns: dict[str, str]) -> str:
    """Rows as text; `columns` maps keys to headings."""

    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [list(columns.values()), *([cell(row[key]) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Config))
