"""The figure of `simulate.py`: one panel per question, and the lag distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recipes.simulation.cluster import Cluster
from recipes.simulation.studies import Row

PUBLISHED_LAG = 10.5
PUBLISHED_SPEED_UP = 2.40


def draw(
    path: Path, lag: list[Row], splits: list[Row], large: list[Row], *, machines: dict[str, Cluster]
) -> None:
    """Saves the figure as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_lag(axes[0, 0], [row for row in lag if row["name"] == "slot queue"])
    _draw_histograms(axes[0, 1], [row for row in lag if row["nominal"] == 8 and row["g"] == 0.95])
    _draw_splits(axes[1, 0], splits, machines["small"])
    _draw_large(axes[1, 1], large, machines["large"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_lag(axes: Any, rows: list[Row]) -> None:
    for color, nominal in (("C0", 8), ("C1", 2)):
        chosen = [row for row in rows if row["nominal"] == nominal]
        balance = [row["g"] for row in chosen]
        axes.plot(
            balance, [row["start"] for row in chosen], "s:", color=color, label=f"nominal {nominal}: start"
        )
        mean = [row["token_mean"] for row in chosen]
        axes.plot(balance, mean, "o-", color=color, label=f"nominal {nominal}: mean over a response")
        bound = np.linspace(0.5, 1.0, 20)
        label = "Q + (C/B)(1 - g/2) + 1/2" if nominal == 8 else None
        axes.plot(bound, nominal + 4 * (1 - bound / 2) + 0.5, color="black", linewidth=0.8, label=label)
    axes.axhline(PUBLISHED_LAG, color="C3", linestyle="--", linewidth=0.8, label="published for nominal 8")
    axes.set(
        title="Why nominal 8 measures 10.5: the slot queue, C = 4 B in flight",
        xlabel="generation time / training time of a batch",
        ylabel="lag in updates",
        ylim=(0, 13),
    )
    axes.legend(fontsize=8)


def _draw_histograms(axes: Any, rows: list[Row]) -> None:
    for row, style in zip(rows, ("-", "-", "--", ":"), strict=False):
        counts = np.asarray(row["histogram"], dtype=float)
        text = f"{row['name']}: mean {row['per_token']:.1f}, max at start {row['start_max']:.0f}, "
        text += f"step {row['step']:.2f}"
        axes.stairs(
            counts / counts.sum(), np.arange(len(counts) + 1) - 0.5, label=text, linestyle=style, linewidth=2
        )
    axes.set(
        title="Nominal 8, generation 0.95 of training: who pays for the bound",
        xlabel="lag of a token in updates",
        ylabel="share of tokens",
        xlim=(-0.5, 20.5),
        xticks=range(0, 21, 2),
    )
    axes.legend(fontsize=8, loc="upper left")
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])


def _draw_splits(axes: Any, rows: list[Row], cluster: Cluster) -> None:
    for color, cv in zip(("C0", "C1", "C2"), sorted({row["cv"] for row in rows}), strict=False):
        for style, nominal in (("o-", 8), ("o:", 2)):
            chosen = [row for row in rows if row["cv"] == cv and row["nominal"] == nominal]
            x, y = [row["learners"] for row in chosen], [row["speed_up"] for row in chosen]
            axes.plot(x, y, style, color=color, label=f"cv of lengths {cv}, nominal lag {nominal}")
        chosen = [row for row in rows if row["cv"] == cv and row["nominal"] == 8]
        axes.plot(
            [row["learners"] for row in chosen],
            [row["over_colocated"] for row in chosen],
            color=color,
            lw=0.7,
        )
    axes.plot([], [], color="black", lw=0.7, label="thin: over all GPUs sampling, then training; lag 8")
    axes.axhline(PUBLISHED_SPEED_UP, color="C3", linestyle="--", linewidth=0.8, label="published 2.40")
    axes.set(
        title=f"What {cluster.gpus} GPUs gain over synchronous",
        xlabel="GPUs that learn; the others sample",
        ylabel="speed-up of a step",
    )
    axes.set_ylim(0, 1.6 * axes.get_ylim()[1])
    axes.legend(fontsize=8, ncols=2)


def _draw_large(axes: Any, rows: list[Row], cluster: Cluster) -> None:
    rows = [row for row in rows if row["overlap"] and row["publish"] == cluster.publish_seconds]
    for name, responses in dict.fromkeys((row["order"], row["responses"]) for row in rows):
        chosen = [row for row in rows if (row["order"], row["responses"]) == (name, responses)]
        unique = {row["nominal"]: row["learner_trains"] for row in chosen}
        axes.plot(
            list(unique), list(unique.values()), "o-", label=f"{responses:,} responses per update, {name}"
        )
    axes.set(
        title=f"What {cluster.gpus:,} GPUs need: lag, or a larger batch",
        xlabel="nominal lag",
        ylabel="share of its time that the learner trains",
        ylim=(0, 1.02),
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32, 48], ["2", "4", "8", "16", "32", "48"])
    axes.legend(fontsize=8)
