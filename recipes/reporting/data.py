"""What a report keeps of a run: read from its folder, checked, thinned to windows of updates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from recipes.config import MAY_CHANGE, Config
from recipes.errors import RecipeError
from recipes.machine import without_runs_folder

Run = dict[str, Any]

POINTS = 200  # of a curve, so that 20,000 updates are thinned to windows of 100
MEANS = (
    "reward",
    "entropy",
    "ratio_mean",
    "ratio_second_moment",
    "ess_fraction",
    "grad_norm",
    "kl_k3",
    "lag_mean",
)
MEANS += ("response_length", "zero_variance_groups", "wait_seconds", "train_seconds", "sampler_idle")
MAXIMA = ("ratio_max", "grad_norm", "lag_max")
SUMMARY = ("ratio_mean", "ratio_second_moment", "ratio_max", "ess_fraction", "learner_idle_share")
SUMMARY += ("sampler_idle_share", "updates_per_second", "tokens_per_second", "seconds", "evaluation_seconds")
SUMMARY += ("engines",)


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs of some folders, and those that former reports (``report.json``) kept.

    Raises:
        RecipeError: If one of them is damaged, or two have the same name.
    """
    runs: list[Run] = []
    for path in paths:
        runs += _read_json(path)["runs"] if path.suffix == ".json" else [read_run(path)]
    names = [run["name"] for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"report: every run must be given once, got {sorted(twice)} more than once")
    return runs


def read_run(folder: Path) -> Run:
    """One run as plain values; a run without ``summary.json`` has ended early, or goes on.

    Raises:
        RecipeError: If a file is missing or damaged, naming it.
    """
    config, notes = _read_config(folder)
    summary = _read_json(folder / "summary.json") if (folder / "summary.json").exists() else None
    rows = _read_rows(folder / "metrics.jsonl", finished=summary is not None, notes=notes)
    updates = [row for row in rows if "update" in row]
    if [row["update"] for row in updates] != list(range(len(updates))):
        raise RecipeError(f"{folder / 'metrics.jsonl'}: updates must follow one another from 0")
    if summary is not None and summary["updates"] != len(updates):
        raise RecipeError(
            f"{folder}: metrics.jsonl must have the {summary['updates']} updates of summary.json, "
            f"got {len(updates)}"
        )
    starts = _read_starts(folder, notes)
    window = max(1, len(updates) // POINTS)
    return {
        "name": folder.resolve().name,
        "config": config,
        "starts": starts,
        "finished": summary is not None,
        "updates": len(updates),
        "window": window,
        "series": _series(folder, updates, window) if updates else {},
        "not_finite": sum(not math.isfinite(row[name]) for row in updates for name in ("loss", "grad_norm")),
        "held_out": {row["version"]: row["held_out_accuracy"] for row in rows if "held_out_accuracy" in row},
        "lag": _lag_so_far(updates) if summary is None else summary["lag"]["token_mean"]["per_token"],
        "predicted_lag": None if summary is None else (summary["lag"]["predicted"] or {}).get("token_mean"),
        "totals": _totals_so_far(updates) if summary is None else {name: summary[name] for name in SUMMARY},
        "admitted": _admitted(updates),
        "notes": notes,
    }


def label_runs(runs: list[Run]) -> dict[str, str]:
    """Names by which people tell the runs apart: the lag, and the settings in which they differ."""
    differing = [
        name
        for name in method_fields()
        if name not in ("nominal_lag", "in_flight") and len({str(run["config"][name]) for run in runs}) > 1
    ]
    return {run["name"]: _label(run["config"], differing) for run in runs}


def method_fields() -> list[str]:
    """The settings that make two runs different methods; the seed is none."""
    return [field.name for field in fields(Config) if field.name not in {*MAY_CHANGE, "seed"}]


def thinned(values: list[float], window: int, reduce: Callable[..., Any] = np.mean) -> list[float]:
    """Reduce windows of ``window`` values each, the last one maybe shorter; six digits are kept."""
    chunks = [values[start : start + window] for start in range(0, len(values), window)]
    return [float(f"{reduce(chunk):.6g}") for chunk in chunks]


def _totals_so_far(updates: list[dict[str, Any]]) -> dict[str, float]:
    """What a summary would say of a run that broke off, as far as its updates tell it."""
    if not updates:
        return {}
    mean, second = (_over_tokens(updates, name) for name in ("ratio_mean", "ratio_second_moment"))
    wait, train = (sum(row[name] for row in updates) for name in ("wait_seconds", "train_seconds"))
    return {
        "ratio_mean": mean,
        "ratio_second_moment": second,
        "ratio_max": max(row["ratio_max"] for row in updates),
        "ess_fraction": mean**2 / second,
        "learner_idle_share": wait / (wait + train),
        "sampler_idle_share": updates[-1]["sampler_idle"],
        "updates_per_second": len(updates) / (wait + train),
    }


def _lag_so_far(updates: list[dict[str, Any]]) -> dict[str, float] | None:
    if not updates:
        return None
    return {"mean": _over_tokens(updates, "lag_mean"), "max": max(row["lag_max"] for row in updates)}


def _admitted(updates: list[dict[str, Any]]) -> float | None:
    """The share of responses that the loss counted; None of a run that did not write it down."""
    shares = [row["admitted_fraction"] for row in updates if "admitted_fraction" in row]
    return float(np.mean(shares)) if shares else None


def _over_tokens(updates: list[dict[str, Any]], name: str) -> float:
    """Mean over all tokens from the means of updates, each of as many responses."""
    tokens = [row["response_length"] for row in updates]
    return float(np.average([row[name] for row in updates], weights=tokens))


def _series(folder: Path, updates: list[dict[str, Any]], window: int) -> dict[str, list[float]]:
    missing = [name for name in {*MEANS, *MAXIMA} if name not in updates[0]]
    if missing:
        raise RecipeError(f"{folder / 'metrics.jsonl'}: an update must tell {sorted(missing)}, got none")
    series: dict[str, list[float]] = {"update": [row["update"] for row in updates[::window]]}
    for names, reduce, suffix in ((MEANS, np.mean, ""), (MAXIMA, np.max, "_peak")):
        for name in names:
            series[name + suffix] = thinned([row[name] for row in updates], window, reduce)
    return series


def _read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    config, unnamed = _read_json(folder / "config.json"), {}
    for field in fields(Config):
        if field.name not in config:
            unnamed[field.name] = config[field.name] = field.default
    notes = []
    if unnamed:
        taken = ", ".join(f"`{name} = {value}`" for name, value in unnamed.items())
        notes.append(f"config.json does not name all settings; taken were {taken}")
    kept = {name: value for name, value in config.items() if name not in ("runs", "resume")}
    return kept, notes


def _read_starts(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    path = folder / "starts.jsonl"
    if not path.exists():
        notes.append("command, hardware, versions and revision were not written down (no starts.jsonl)")
        return []
    try:
        starts = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise RecipeError(f"{path} must be JSON lines: {error}") from error
    for start in starts:
        start["command"] = without_runs_folder(start["command"])
    if any(start["modified"] for start in starts):
        notes.append("tracked files were changed and not committed when it started")
    if len({start["revision"] for start in starts}) > 1:
        notes.append("it went on with another revision than it began with")
    return starts


def _read_rows(path: Path, *, finished: bool, notes: list[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RecipeError(f"report: a run must have {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if finished or number < len(lines):
                raise RecipeError(f"{path}: line {number} must be JSON: {error}") from error
            notes.append("the last line of metrics.jsonl is cut off and was left out")
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise RecipeError(f"report: a run must have {path}: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{path} must be JSON: {error}") from error


def _label(config: dict[str, Any], differing: list[str]) -> str:
    lag = config["nominal_lag"]
    parts = [f"lag {lag}" if lag else "sync"]
    if config["in_flight"]:
        parts.append(f"queue, {config['in_flight']} in flight")
    for name in differing:
        value = config[name]
        if name in ("kernels", "engine"):
            parts.append(value)
        elif name != "objective":
            parts.append(f"{name} {value}")
        elif value != Config.objective:
            parts.append(value)
    return ", ".join(parts)
