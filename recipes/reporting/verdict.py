"""Whether a run was stable, and which diagnostic moved first."""

from __future__ import annotations

from typing import Any

from recipes.reporting.data import Run, method_fields

OF_BEST, OF_SYNCHRONOUS, COLLAPSE = 2.0, 3.0, 10.0  # points of held-out accuracy
SLACK = 1e-9  # of a point: shares of responses do not add up to the last bit

DEFINITION = f"""\
A run is called *stable* if it did all of its updates; if it never collapsed: no loss or gradient that is not
finite, and no measured held-out accuracy more than {COLLAPSE:g} points below the best one before it; if its
last held-out accuracy lies at most {OF_BEST:g} points below the best one of the run; and if it lies at most
{OF_SYNCHRONOUS:g} points below that of the synchronous run at equal updates."""

# What to look at before the accuracy falls: name, what is said, and whether a window of updates alarms, given
# the windows before it.
ALARMS = {
    "ratio_second_moment": ("ratio second moment above 2", lambda now, before: now > 2),
    "ess_fraction": ("effective sample size below half", lambda now, before: now < 0.5),
    "grad_norm": ("gradient norm above 3x its median", lambda now, before: now > 3 * _median(before)),
    "entropy": ("entropy above 2x its median", lambda now, before: now > 2 * _median(before)),
    "reward": ("reward 0.1 below its best", lambda now, before: now < max(before) - 0.1),
}
SEEN_BEFORE = 5  # windows before the first that can alarm


def verdict(run: Run, runs: list[Run]) -> dict[str, Any]:
    """Judge a run by ``DEFINITION``.

    Args:
        run: The one to judge.
        runs: Among which a synchronous one is looked for.

    Returns:
        ``stable``: True, False, or None if it cannot be known; ``reasons`` for False, ``unknown`` for None;
        ``best``, ``best_version``, ``last``, ``last_version``; the ``reference`` and how far below it, in
        points, the run lies at ``compared_version``.
    """
    curve = curve_of(run)
    found: dict[str, Any] = {"stable": None, "reasons": [], "unknown": [], "reference": None}
    if not curve:
        found["unknown"].append("no held-out accuracy was measured")
        return found
    found["best_version"], found["best"] = max(curve, key=lambda point: (point[1], -point[0]))
    found["last_version"], found["last"] = curve[-1]
    found["reasons"] += _collapses(run, curve)
    behind = 100 * (found["best"] - found["last"])
    if behind > OF_BEST + SLACK:
        found["reasons"].append(f"ends {behind:.1f} points below its best")
    if not run["finished"]:
        found["unknown"].append(
            f"ended early, or still runs: {run['updates']} of {run['config']['updates']} updates"
        )
    _compare(found, run, runs)
    if found["reasons"]:
        found["stable"] = False
    elif not found["unknown"]:
        found["stable"] = True
    return found


def curve_of(run: Run) -> list[tuple[int, float]]:
    """Held-out accuracy by version, in order."""
    return sorted((int(version), accuracy) for version, accuracy in run["held_out"].items())


def alarms(run: Run) -> dict[str, int | None]:
    """For each of ``ALARMS``, the first update of the first window that alarms; None for never."""
    first: dict[str, int | None] = {}
    for name, (said, alarm) in ALARMS.items():
        values = run["series"].get(name, [])
        first[said] = next(
            (
                run["series"]["update"][index]
                for index in range(SEEN_BEFORE, len(values))
                if alarm(values[index], values[:index])
            ),
            None,
        )
    return first


def _collapses(run: Run, curve: list[tuple[int, float]]) -> list[str]:
    reasons = []
    if run["not_finite"]:
        reasons.append(f"{run['not_finite']} losses or gradients are not finite")
    best = 0.0
    for version, accuracy in curve:
        best = max(best, accuracy)
        if 100 * (best - accuracy) > COLLAPSE + SLACK:
            reasons.append(f"collapses: {100 * (best - accuracy):.1f} points below its best at {version}")
            break
    return reasons


def _compare(found: dict[str, Any], run: Run, runs: list[Run]) -> None:
    if run["config"]["nominal_lag"] == 0:
        return
    reference = synchronous_of(run, runs)
    if reference is None:
        found["unknown"].append("no synchronous run of the same setting was given")
        return
    own, other = dict(curve_of(run)), dict(curve_of(reference))
    common = max(own.keys() & other.keys(), default=None)
    found["reference"] = reference["name"]
    if common is None:
        found["unknown"].append(f"{reference['name']} was measured at other updates")
        return
    found["compared_version"], found["below"] = common, 100 * (other[common] - own[common])
    if found["below"] > OF_SYNCHRONOUS + SLACK:
        found["reasons"].append(f"{found['below']:.1f} points below the synchronous run at {common}")
    if common < found["last_version"]:
        found["unknown"].append(f"{reference['name']} was not measured after update {common}")


def synchronous_of(run: Run, runs: list[Run]) -> Run | None:
    """The synchronous run of the method that is nearest to a run, of the same seed if there is one.

    Task, model, lengths and responses an update must be the same; objective, kernels and learning rate may be
    what is studied.
    """
    studied = {"nominal_lag", "in_flight", "objective", "kernels", "lr", "deterministic", "group_size"}
    studied |= {"prompts_per_update", "wire_dtype"}
    same = [name for name in method_fields() if name not in studied]
    nearest = ("kernels", "lr", "seed")
    candidates = [
        other
        for other in runs
        if other["config"]["nominal_lag"] == 0
        and other["config"]["objective"] == "reinforce_zero"
        and _responses(other) == _responses(run)
        and all(other["config"][name] == run["config"][name] for name in same)
    ]
    return max(
        candidates,
        key=lambda other: [other["config"][name] == run["config"][name] for name in nearest],
        default=None,
    )


def _responses(run: Run) -> int:
    """Of an update."""
    return run["config"]["prompts_per_update"] * run["config"]["group_size"]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
