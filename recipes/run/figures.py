"""Figures of one run, from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def draw_run(folder: Path) -> None:
    """Draw reward, lag, ratio and idle shares as PNG from ``metrics.jsonl`` and ``summary.json``."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "update" in row]
    summary = json.loads((folder / "summary.json").read_text())
    for name, draw in (("reward", _reward), ("lag", _lag), ("ratio", _ratio), ("idle", _idle)):
        figure, axes = _new_figure()
        draw(axes, updates, summary)
        figure.savefig(folder / f"{name}.png", dpi=120)


def smooth(values: list[float]) -> np.ndarray:
    """Centred moving average over about a fortieth of the curve."""
    width = max(1, len(values) // 40)
    padded = np.pad(np.asarray(values, dtype=float), (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def _new_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()


def _column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows]


def _reward(axes: Any, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    x = _column(rows, "update")
    axes.plot(x, _column(rows, "reward"), color="C0", alpha=0.2, linewidth=0.5)
    axes.plot(x, smooth(_column(rows, "reward")), color="C0", label="training reward, moving average")
    accuracy = {int(version): value for version, value in summary["held_out_accuracy"].items()}
    axes.plot(list(accuracy), list(accuracy.values()), "o-", color="C1", label="held-out accuracy")
    axes.set(xlabel="update", ylabel="reward, accuracy", ylim=(0, 1))
    axes.legend()


def _lag(axes: Any, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    lag = summary["lag"]
    measured = lag["token_mean"]["per_token"]
    counts = np.asarray(measured["histogram"], dtype=float)
    axes.bar(range(len(counts)), counts / counts.sum(), color="C0", label="measured, per token")
    axes.axvline(measured["mean"], color="C0", linestyle="--", label=f"measured mean {measured['mean']:.2f}")
    axes.axvline(lag["nominal_lag"], color="C3", label=f"nominal {lag['nominal_lag']}")
    axes.set(xlabel="lag in updates", ylabel="share of tokens")
    axes.legend()


def _ratio(axes: Any, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    x = _column(rows, "update")
    axes.plot(x, smooth(_column(rows, "ess_fraction")), label="effective sample size / tokens")
    axes.plot(x, smooth(_column(rows, "ratio_mean")), label="ratio mean")
    axes.plot(x, smooth(_column(rows, "ratio_second_moment")), label="ratio second moment")
    axes.set(xlabel="update", ylabel="importance ratio (before anything is filtered)")
    axes.legend()


def _idle(axes: Any, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    wait, train = (smooth(_column(rows, name)) for name in ("wait_seconds", "train_seconds"))
    axes.plot(_column(rows, "update"), wait / (wait + train), label="learner idle")
    axes.plot(_column(rows, "update"), _column(rows, "sampler_idle"), label="samplers idle, since the start")
    axes.set(xlabel="update", ylabel="share of time", ylim=(0, 1))
    axes.legend()
