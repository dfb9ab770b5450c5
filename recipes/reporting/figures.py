"""The figures of a report, from what it keeps of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recipes.reporting.data import Run
from recipes.reporting.verdict import curve_of

PANELS = {
    "reward": "training reward",
    "entropy": "entropy, nats a token",
    "ratio_second_moment": "importance ratio, second moment",
    "ess_fraction": "effective sample size / tokens",
    "grad_norm": "gradient norm before clipping",
    "lag_mean": "mean lag of the update's tokens",
}
FIGURES = {
    "accuracy": "Held-out accuracy",
    "training": "Training diagnostics, means of windows",
    "lag": "Lag of every trained token",
    "idle": "Idle shares and speed",
}


def draw_report(out: Path, runs: list[Run], labels: dict[str, str]) -> None:
    """Save one PNG for each of ``FIGURES``; runs that differ in nothing but the seed share a color.

    Args:
        out: Folder that exists.
        runs: At least one.
        labels: By run name.
    """
    distinct = list(dict.fromkeys(labels[run["name"]] for run in runs))
    styles = [
        {"color": f"C{distinct.index(label) % 10}", "linestyle": "-" if distinct.index(label) < 10 else "--"}
        | {"label": label if label not in [labels[other["name"]] for other in runs[:index]] else None}
        for index, run in enumerate(runs)
        for label in [labels[run["name"]]]
    ]
    for name, draw in (
        ("accuracy", _accuracy),
        ("training", _training),
        ("lag", _lag),
        ("idle", _idle),
    ):
        figure = draw(list(zip(runs, styles, strict=True)))
        figure.savefig(out / f"{name}.png", dpi=110)


def _new_figure(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, list(np.ravel(figure.subplots(rows, columns)))


def _accuracy(runs: list[tuple[Run, dict[str, Any]]]) -> Any:
    figure, (axes,) = _new_figure(1, 1, size=(9, 5))
    for run, style in runs:
        points = curve_of(run)
        axes.plot([v for v, _ in points], [a for _, a in points], marker=".", linewidth=1, **style)
    axes.set(xlabel="update", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _training(runs: list[tuple[Run, dict[str, Any]]]) -> Any:
    figure, panels = _new_figure(2, 3, size=(14, 7.5))
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        for run, style in runs:
            if run["series"]:
                axes.plot(run["series"]["update"], run["series"][name], linewidth=1, **style)
        axes.set(title=title, xlabel="update")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    return figure


def _lag(runs: list[tuple[Run, dict[str, Any]]]) -> Any:
    figure, (axes,) = _new_figure(1, 1, size=(9, 5))
    for run, style in runs:
        if run["lag"] is None or "histogram" not in run["lag"]:  # broke off
            continue
        counts = np.asarray(run["lag"]["histogram"], dtype=float)
        label = style["label"] and f"{style['label']}: mean {run['lag']['mean']:.2f}"
        edges = np.arange(len(counts) + 1) - 0.5
        axes.stairs(counts / counts.sum(), edges, linewidth=1.5, **{**style, "label": label})
    axes.set(xlabel="lag of a token in updates", ylabel="share of tokens")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure


def _idle(runs: list[tuple[Run, dict[str, Any]]]) -> Any:
    figure, panels = _new_figure(1, 3, size=(14, 4))
    for run, style in runs:
        if not run["series"]:
            continue
        series = {name: np.asarray(values) for name, values in run["series"].items()}
        step = series["wait_seconds"] + series["train_seconds"]
        panels[0].plot(series["update"], series["wait_seconds"] / step, linewidth=1, **style)
        panels[1].plot(series["update"], series["sampler_idle"], linewidth=1, **style)
        panels[2].plot(series["update"], 1 / step, linewidth=1, **style)
    panels[0].set(title="learner idle, share of time", ylim=(0, 1))
    panels[1].set(title="samplers idle, share of time since the start", ylim=(0, 1))
    panels[2].set(title="updates a second, evaluation excluded", ylim=(0, None))
    for axes in panels:
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
    panels[2].legend(fontsize=7)
    return figure
