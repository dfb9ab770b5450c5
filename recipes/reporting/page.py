"""The page of a report, in Markdown."""

from __future__ import annotations

import math
from typing import Any

from recipes.reporting.data import Run
from recipes.reporting.figures import FIGURES
from recipes.reporting.table import UNKNOWN, number, table
from recipes.reporting.throughput import throughput_text
from recipes.reporting.verdict import ALARMS, DEFINITION


def page(report: dict[str, Any], labels: dict[str, str], *, title: str) -> str:
    """The whole page.

    Args:
        report: What ``report.json`` holds.
        labels: By run name.
        title: Of the page.
    """
    runs, verdicts = report["runs"], report["verdicts"]
    parts = [
        f"# {title}",
        "Made from the folders of the runs alone, by",
        f"    {report['command']}",
        "## Did they learn, and were they stable?",
        _outcomes(runs, labels, verdicts),
        DEFINITION,
        _noise(runs),
        "## What was measured",
        _measurements(runs, labels),
        "Over all updates, and of a run that broke off over those that it did; the gradient norm is the "
        "median of windows, and the entropy the mean of the first and of the last window. Runs that were not "
        "made in turns on an idle machine cannot be compared in speed.",
        *(f"## {text}\n\n![{text}]({name}.png)" for name, text in FIGURES.items()),
        "## What moved first",
        _alarms(runs, labels, report["alarms"]),
    ]
    if report["throughput"]:
        parts.append(throughput_text(report["throughput"]))
    parts += ["## What is not known", _unknown(runs, labels, verdicts)]
    parts += ["## Commands, hardware, versions", _origins(runs, labels)]
    return "\n\n".join(parts) + "\n"


def _outcomes(runs: list[Run], labels: dict[str, str], verdicts: dict[str, Any]) -> str:
    rows = []
    for run in runs:
        found, before = verdicts[run["name"]], _at(run, 0)
        best = f"{number(found.get('best'))} at {found['best_version']}" if "best" in found else UNKNOWN
        below = number(found.get("below"), 1)
        rows.append(
            [
                labels[run["name"]],
                str(run["config"]["seed"]),
                f"{run['updates']:,} of {run['config']['updates']:,}",
                number(before),
                number(found.get("last")),
                best,
                below,
                _words(found),
            ]
        )
    head = ["run", "seed", "updates", "before", "last", "best", "points below synchronous", "stable"]
    return table(head, rows)


def _words(found: dict[str, Any]) -> str:
    if found["stable"]:
        return "yes"
    return f"no: {'; '.join(found['reasons'])}" if found["stable"] is False else "not known"


def _noise(runs: list[Run]) -> str:
    errors = []
    for run in runs:
        size = run["config"]["held_out"] * run["config"]["held_out_samples"]
        errors += [100 * math.sqrt(a * (1 - a) / size) for a in list(run["held_out"].values())[-1:]]
    if not errors:
        return ""
    return (
        "A measured accuracy is a mean over sampled responses: if they were independent, its standard error "
        f"would be up to {max(errors):.1f} points. The best of many measurements is therefore above the "
        "true one."
    )


def _measurements(runs: list[Run], labels: dict[str, str]) -> str:
    rows, gated = [], any(run.get("admitted", 1.0) not in (None, 1.0) for run in runs)
    for run in runs:
        lag, totals, series = run["lag"] or {}, run["totals"], run["series"]
        idle = [totals.get(name) for name in ("learner_idle_share", "sampler_idle_share")]
        rows.append(
            [
                labels[run["name"]],
                str(run["config"]["seed"]),
                number(lag.get("mean"), 2),
                " / ".join(number(lag.get(name), 0) for name in ("p50", "p95", "max")),
                number(run["predicted_lag"], 2),
                number(totals.get("ratio_second_moment"), 4),
                number(totals.get("ratio_max"), 1),
                number(totals.get("ess_fraction")),
                number(sorted(series["grad_norm"])[len(series["grad_norm"]) // 2] if series else None, 2),
                f"{number(series['entropy'][0])} → {number(series['entropy'][-1])}" if series else UNKNOWN,
                " / ".join(UNKNOWN if share is None else f"{share:.1%}" for share in idle),
                number(totals.get("updates_per_second"), 2),
                *([number(run.get("admitted"))] if gated else []),
            ]
        )
    head = ["run", "seed", "lag mean", "p50 / p95 / max", "predicted", "ratio 2nd moment", "ratio max"]
    head += ["ESS", "grad norm", "entropy", "idle learner / samplers", "updates/s"]
    head += ["responses that count"] if gated else []
    return table(head, rows)


def _alarms(runs: list[Run], labels: dict[str, str], found: dict[str, dict[str, Any]]) -> str:
    names = [said for said, _ in ALARMS.values()]
    rows = [
        [labels[run["name"]], str(run["config"]["seed"])]
        + [UNKNOWN if found[run["name"]][name] is None else str(found[run["name"]][name]) for name in names]
        for run in runs
    ]
    windows = sorted({run["window"] for run in runs})
    return (
        f"The first update of the first window (of {', '.join(map(str, windows))} updates) in which a "
        f"diagnostic left its usual range; {UNKNOWN} where it never did.\n\n"
        + table(["run", "seed", *names], rows)
    )


def _unknown(runs: list[Run], labels: dict[str, str], verdicts: dict[str, Any]) -> str:
    lines = [
        f"* {labels[run['name']]}, seed {run['config']['seed']} (`{run['name']}`): {note}."
        for run in runs
        for note in (*verdicts[run["name"]]["unknown"], *run["notes"])
    ]
    seeds = {
        label: {r["config"]["seed"] for r in runs if labels[r["name"]] == label} for label in labels.values()
    }
    lines += [f"* {label}: how far other seeds differ." for label, own in seeds.items() if len(own) == 1]
    return "\n".join(lines) or "Nothing that the page speaks of."


def _origins(runs: list[Run], labels: dict[str, str]) -> str:
    commands = []
    for run in runs:
        commands.append(f"# {labels[run['name']]}, seed {run['config']['seed']}: {run['name']}")
        commands += [start["command"] for start in run["starts"]] or ["# not written down"]
    lines = ["```sh", *commands, "```"]
    machines: dict[str, list[str]] = {}
    for run in runs:
        for start in run["starts"]:
            machines.setdefault(_machine(start), []).append(run["name"])
    for machine, names in machines.items():
        lines += ["", f"* {machine}: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}"]
    return "\n".join(lines)


def _machine(start: dict[str, Any]) -> str:
    gpus = f", {len(start['gpus'])} x {start['gpus'][0]}" if start["gpus"] else ""
    versions = ", ".join(f"{name} {value}" for name, value in start["versions"].items() if value)
    revision = start["revision"] or "unknown"
    changed = ", with changes" if start["modified"] else ""
    return (
        f"{start['cpu']}, {start['cores']} cores, {start['memory_gib']} GiB{gpus}; {start['ranks']} ranks, "
        f"threads a rank: {start['threads_per_rank']}; Python {start['python']}, {versions}; "
        f"revision {revision}{changed}"
    )


def _at(run: Run, version: int) -> float | None:
    found: dict[int, float] = {int(key): value for key, value in run["held_out"].items()}
    return found.get(version)
