"""Where problems come from: what every source of them does, and which one a run has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from recipes.tasks.math_problems import MathTasks
from recipes.tasks.reasoning import Problem, ReasoningTasks


class Tasks(Protocol):
    """Problems with a verifier.

    Attributes:
        held_out: Problems that are never trained on.
    """

    held_out: list[Problem]

    def stream(self, cursor: int) -> Iterator[Problem]:
        """Training problems from an index on, in the same order every time."""
        ...

    def problem(self, prompt_id: int) -> Problem:
        """The training problem of an index."""
        ...

    def score(self, problem: Problem, answer: str) -> float:
        """The score of an answer in [0, 1]; 1 is correct."""
        ...


def task_flags(config: Any) -> dict[str, Any]:
    """The settings of a run that say which problems it has, as ``load_tasks`` takes them and JSON can."""
    files = {name: getattr(config, name) for name in ("problems", "held_out_problems")}
    return {
        "specs": list(config.tasks),
        **{name: None if path is None else str(path) for name, path in files.items()},
        "seed": config.seed,
        "held_out": config.held_out,
    }


def load_tasks(
    *,
    specs: Sequence[str],
    problems: Path | str | None,
    held_out_problems: Path | str | None,
    seed: int,
    held_out: int,
) -> Tasks:
    """The problems of a file if one is given, else those of reasoning-gym.

    Raises:
        RecipeError: See the two sources.
    """
    if problems is None:
        return ReasoningTasks(specs, seed=seed, held_out_size=held_out)
    held_out_path = None if held_out_problems is None else Path(held_out_problems)
    return MathTasks(Path(problems), held_out_path, seed=seed, held_out_size=held_out)
