"""What the audit found, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = {1: "equal weights", 2: "while training"}
COLUMNS = "{:>8} {:>10} {:>9} {:>9} {:>8} {:>12} {:>9}  {}"


def audit_table(rows: Sequence[dict[str, Any]]) -> str:
    """The audits line by line, and what they say for each kind of kernels.

    Args:
        rows: Of each audit its ``step``, ``kernels``, ``version`` and the fields of its ``AuditReport``.

    Example:
        >>> row = {"step": 1, "kernels": "exact", "version": 0, "tokens": 9, "mismatching": 0}
        >>> row |= {"max_abs": 0.0, "left_out": 0, "first_difference": None}
        >>> print(audit_table([row]).splitlines()[-1].strip())
        exact kernels: 0 of 9 tokens differ; at equal weights every importance ratio is exactly 1
    """
    lines = ["Does a sampled token have the same log-probability in sampler and learner, bit for bit?"]
    header = (
        "kernels",
        "weights",
        "tokens",
        "differ",
        "share",
        "max |delta|",
        "left out",
        "first difference",
    )
    for step, name in STEPS.items():
        found = [row for row in rows if row["step"] == step]
        if found:
            lines += ["", f"step {step}, {name}", COLUMNS.format(*header)]
        lines += [
            COLUMNS.format(
                row["kernels"],
                f"version {row['version']}",
                row["tokens"],
                row["mismatching"],
                f"{_share(row):.1%}",
                f"{row['max_abs']:.1e}" if row["max_abs"] else "0",
                row["left_out"],
                row["first_difference"] or "-",
            )
            for row in found
        ]
    lines.append("")
    for kernels in dict.fromkeys(row["kernels"] for row in rows):
        found = [row for row in rows if row["kernels"] == kernels]
        differ, tokens = (sum(row[name] for row in found) for name in ("mismatching", "tokens"))
        meaning = "at equal weights every importance ratio is exactly 1"
        if differ or any(row["first_difference"] for row in found):
            meaning = "execution mismatch, which no lag explains"
        lines.append(f"{kernels} kernels: {differ} of {tokens} tokens differ; {meaning}")
    return "\n".join("  " + line if line else "" for line in lines)


def draw_audit(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the share of tokens that differ, audit by audit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.5 + 1.3 * len(rows)), 4.2), layout="constrained")
    axes = figure.subplots()
    shares = [100 * _share(row) for row in rows]
    axes.bar(range(len(rows)), shares, width=0.6, color="C3")
    for place, (row, share) in enumerate(zip(rows, shares, strict=True)):
        right = not row["mismatching"]
        text = f"{row['mismatching']} of {row['tokens']:,}\n" + (
            "bit for bit equal" if right else f"up to {row['max_abs']:.0e} nats"
        )
        axes.text(place, share + 1.5, text, ha="center", va="bottom", color="C2" if right else "C3")
        if right:
            axes.plot(place, 0, "o", color="C2", markersize=9, clip_on=False)
    axes.set_xticks(range(len(rows)), [f"{row['kernels']} kernels\nweights {row['version']}" for row in rows])
    training = [place for place, row in enumerate(rows) if row["step"] == 2]
    if training:
        axes.axvspan(training[0] - 0.5, training[-1] + 0.5, color="0.94", zorder=0)
        axes.text(training[0] - 0.4, 122, f"step 2: {STEPS[2]}, after updates", va="top")
    axes.text(-0.4, 122, f"step 1: {STEPS[1]}", va="top")
    axes.set(
        ylabel="tokens that differ, %", ylim=(0, 125), xlim=(-0.5, len(rows) - 0.5), yticks=range(0, 101, 20)
    )
    axes.set_title("Log-probability of a sampled token, sampler against learner:\nsame weights, same history")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def _share(row: dict[str, Any]) -> float:
    return row["mismatching"] / max(1, row["tokens"])
