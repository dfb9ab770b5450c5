"""The summary of a run as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def summary_text(summary: dict[str, Any], folder: Path) -> str:
    """The summary as a person reads it."""
    lag = summary["lag"]["token_mean"]["per_token"]
    before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
    return "\n".join(
        [
            "",
            f"  updates              {summary['updates']} in {summary['seconds']:.0f} s, "
            f"{summary['updates_per_second']:.2f} a second (evaluation, "
            f"{summary['evaluation_seconds']:.0f} s, excluded)",
            f"  held-out accuracy    {before:.3f} before, {after:.3f} after "
            f"({100 * (after - before):+.1f} points)",
            f"  lag per token        nominal {summary['lag']['nominal_lag']}; "
            f"measured mean {lag['mean']:.2f}, p50 {lag['p50']:.0f}, "
            f"p95 {lag['p95']:.0f}, max {lag['max']:.0f}; "
            f"predicted mean {summary['lag']['predicted']['token_mean']:.2f}",
            f"  importance ratio     mean {summary['ratio_mean']:.4f}, second moment "
            f"{summary['ratio_second_moment']:.4f}, max {summary['ratio_max']:.2f}, "
            f"effective sample size {summary['ess_fraction']:.3f}",
            f"  idle                 learner {summary['learner_idle_share']:.1%}, "
            f"samplers {summary['sampler_idle_share']:.1%}",
            f"  sampled tokens       {summary['tokens_per_second']:.0f} a second",
            f"  run folder           {folder}",
        ]
    )
