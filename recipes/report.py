"""Make a page, figures and a small JSON from the folders of runs, and from nothing else.

    python recipes/report.py runs/lag0-DATE-TIME runs/lag8-DATE-TIME --out docs/results/lag8

The JSON (``report.json``) keeps all that the page and the figures show: given in place of a folder, it makes
them again.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from recipes.errors import RecipeError
from recipes.machine import command
from recipes.reporting.data import label_runs, read_runs
from recipes.reporting.figures import draw_report
from recipes.reporting.page import page
from recipes.reporting.verdict import alarms, verdict


@dataclass(frozen=True, kw_only=True)
class Report:
    """Reports on runs from their folders alone."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or ``report.json`` files of former reports."""
    out: Path
    """Folder to write ``README.md``, ``report.json`` and the figures to."""
    throughput: Path | None = None
    """What ``recipes/throughput.py`` wrote, to be put on the page."""


def make_report(settings: Report) -> dict[str, Any]:
    """Write the report.

    Returns:
        What ``report.json`` holds.

    Raises:
        RecipeError: If a run's folder is damaged, or no run is given.
    """
    if not settings.runs:
        raise RecipeError("report: at least one folder of a run must be given")
    runs = read_runs(list(settings.runs))
    labels = label_runs(runs)
    report = {
        "command": command(),
        "throughput": _throughput(settings),
        "verdicts": {run["name"]: verdict(run, runs) for run in runs},
        "alarms": {run["name"]: alarms(run) for run in runs},
        "runs": runs,
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "report.json").write_text(_compact(report))
    draw_report(settings.out, runs, labels)
    (settings.out / "README.md").write_text(page(report, labels, title=settings.out.name))
    return report


def _throughput(settings: Report) -> dict[str, Any] | None:
    if settings.throughput is not None:
        return json.loads(settings.throughput.read_text())
    former = [path for path in settings.runs if path.suffix == ".json"]
    kept = [json.loads(path.read_text())["throughput"] for path in former]
    return next((one for one in kept if one is not None), None)


def _compact(report: dict[str, Any]) -> str:
    """JSON with a line for each run, so that a change of one shows as one."""
    runs = ",\n".join(json.dumps(run, default=str) for run in report["runs"])
    rest = json.dumps({name: value for name, value in report.items() if name != "runs"}, indent=1)
    return f'{rest[:-2]},\n "runs": [\n{runs}\n]\n}}\n'


def main() -> int:
    """Read the flags and write the report."""
    settings = tyro.cli(Report)
    try:
        report = make_report(settings)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, found in report["verdicts"].items():
        words = {True: "stable", False: "not stable", None: "not known to be stable"}[found["stable"]]
        print(f"{name}: {'; '.join([words, *found['reasons'], *found['unknown']])}")
    print(f"saved {shlex.quote(str(settings.out / 'README.md'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
