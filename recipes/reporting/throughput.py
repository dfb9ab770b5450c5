"""What ``recipes/throughput.py`` measured, in Markdown."""

from __future__ import annotations

from typing import Any

from recipes.reporting.table import table


def throughput_text(found: dict[str, Any]) -> str:
    """The 2x2, its ideal overlap and the simulator's figures.

    Args:
        found: What ``throughput.json`` holds.
    """
    start, rows, gains = found["start"], [], []
    for kernels, medians in found["medians"].items():
        for kind in ("synchronous", "asynchronous"):
            one = medians[kind]
            steps = [1e3 * row["step_seconds"] for row in found["rounds"][kernels][kind]]
            rows.append(
                [
                    kernels,
                    kind,
                    f"{1e3 * one['step_seconds']:.1f} ({min(steps):.1f} to {max(steps):.1f})",
                    f"{one['tokens']:.0f}",
                    f"{one['learner_idle']:.1%}",
                    f"{one['sampler_idle']:.1%}",
                    f"{one['lag']:.2f}",
                ]
            )
        gains.append(
            [
                kernels,
                _with_range(medians["speed_up"], medians["speed_ups"], "x"),
                _with_range(medians["ideal_speed_up"], medians["ideal_speed_ups"], "x"),
                _with_range(100 * medians["overlap"], [100 * one for one in medians["overlaps"]], "%"),
            ]
        )
    sync, both = (found["medians"][name]["synchronous"]["step_seconds"] for name in ("native", "exact"))
    asynchronous = found["medians"]["exact"]["asynchronous"]["step_seconds"]
    head = ["kernels", "run", "step, ms (range of rounds)", "tokens an update", "learner idle"]
    head += ["samplers idle", "lag"]
    number = len(found["rounds"]["native"]["synchronous"])
    parts = [
        "## What asynchrony buys",
        f"{found['responses']} responses an update, nominal lag {found['nominal_lag']}; {found['updates']} "
        f"updates of each run measured, {number} rounds in turns in the same {start['ranks']} processes; "
        "evaluation and the first updates excluded; the learning rate is 0, so that all do the same work. "
        "Medians over the rounds.",
        table(head, rows),
        table(["kernels", "speed-up over synchronous", "ideal", "ideal overlap reached"], gains),
        "The ideal step is the longer of the two parts of a synchronous one, waiting and learning. Messages "
        "on their way are a part of the waiting; asynchronously these ways overlap too, which can give more "
        "than the ideal.",
        f"Exact kernels cost a synchronous step {both / sync:.2f}x; asynchronous with exact kernels takes "
        f"{asynchronous / sync:.2f}x of a synchronous step with native ones.",
        f"    {start['command']}",
        f"{start['cpu']}, {start['cores']} cores, {start['threads_per_rank']} threads a rank, torch "
        f"{start['versions']['torch']}, revision {start['revision']}.",
    ]
    if found["simulated"] is None:
        return "\n\n".join(parts)
    return "\n\n".join([*parts, *_simulated(found["simulated"])])


def _simulated(found: dict[str, Any]) -> list[str]:
    crossings = [
        [f"{one['cv']:g}", str(one["nominal_lag"]), f"{one['learners']:.1f}"] for one in found["crossings"]
    ]
    ranges = []
    for cv, lag in dict.fromkeys((row["cv"], row["nominal"]) for row in found["splits"]):
        own = [row["speed_up"] for row in found["splits"] if (row["cv"], row["nominal"]) == (cv, lag)]
        ranges.append([f"{cv:g}", str(lag), f"{min(own):.2f} to {max(own):.2f}"])
    large = [
        [
            f"{row['responses']:,}",
            row["order"],
            str(row["nominal"]),
            f"{row['publish']:g}",
            "yes" if row["overlap"] else "no",
            f"{row['of_ideal']:.0%}",
            f"{row['trains']:.0%}",
        ]
        for row in found["large"]
    ]
    head = ["responses", "order", "nominal lag", "publish, s", "overlapped", "of the ideal speed"]
    head.append("learner trains")
    return [
        f"### Simulated: {found['small_gpus']} GPUs",
        "Speeds and lengths are assumptions (`recipes/simulation/cluster.py`), not measurements. The "
        f"published {found['published']:.2f}x over synchronous is met at these splits, by the spread of the "
        "lengths (cv: standard deviation over mean):",
        table(["cv of lengths", "nominal lag", f"GPUs of {found['small_gpus']} that learn"], crossings),
        "Over all splits the speed-up is",
        table(["cv of lengths", "nominal lag", "speed-up"], ranges),
        f"### Simulated: {found['large_gpus']:,} GPUs",
        table(head, large),
    ]


def _with_range(median: float, values: list[float], unit: str) -> str:
    digits = 1 if unit == "%" else 2
    return f"{median:.{digits}f}{unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"
