"""Mathematical problems from a local file, in the format in which they are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from recipes.errors import RecipeError
from recipes.tasks.math_verifier import MathVerifier
from recipes.tasks.reasoning import HELD_OUT_OFFSET, Problem


def read_problems(path: Path) -> list[Problem]:
    """Read a file of problems.

    A row has ``prompt``, a list of one message ``{"role": "user", "content": ...}``, and ``reward_model``
    with the reference answer as ``ground_truth``; other fields are kept unread. That is the format of
    ``sail/Sanity-Test-R1D-1.5B``, the sanity set of "Defeating the Training-Inference Mismatch via FP16"
    (https://arxiv.org/abs/2510.26788): 1,460 problems of MATH of which DeepSeek-R1-Distill-Qwen-1.5B solves
    between a fifth and four fifths, and AIME 2024 and 2025 as its test split. It comes from verl, and
    DAPO-Math-17k has it too.

    Args:
        path: JSON lines (``.jsonl``) or Parquet (``.parquet``, which needs pyarrow).

    Returns:
        The problems in the order of the file; ``prompt_id`` is the row.

    Raises:
        RecipeError: If the file cannot be read, or a row is not as it must be; the message names it.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise RecipeError(f"a file of problems must be .jsonl or .parquet, got {path}")
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} must be a file of problems: {error}") from error
    if not rows:
        raise RecipeError(f"{path} must hold problems, got none")
    return [_problem(path, index, row) for index, row in enumerate(rows)]


@final
class MathTasks:
    """Mathematical problems for training and held out; ``ReasoningTasks`` for a file.

    Training passes over the file again and again, each time in another order: the problem of index i is
    place i mod n of pass i div n.

    Args:
        path: Of the problems to train on.
        held_out_path: Of the held-out ones; None holds out the last ones of ``path``.
        seed: Of the orders.
        held_out_size: At most so many held-out problems.

    Raises:
        RecipeError: See ``read_problems``; if nothing is left to train on; if math-verify is missing.
    """

    def __init__(self, path: Path, held_out_path: Path | None, *, seed: int, held_out_size: int) -> None:
        problems = read_problems(path)
        if held_out_path is None:
            self._train, self.held_out = problems[:-held_out_size], problems[-held_out_size:]
        else:
            self._train, self.held_out = problems, read_problems(held_out_path)[:held_out_size]
        if not self._train:
            raise RecipeError(
                f"--held-out must leave problems to train on, got {held_out_size} "
                f"of {len(problems)} in {path}"
            )
        self._verifier = MathVerifier()
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self._train))
        )

    def stream(self, cursor: int) -> Iterator[Problem]:
        """Training problems from index ``cursor`` on, without end."""
        return map(self.problem, range(cursor, HELD_OUT_OFFSET))

    def problem(self, prompt_id: int) -> Problem:
        """The training problem of an index."""
        epoch, place = divmod(prompt_id, len(self._train))
        found = self._train[self._order(epoch)[place]]
        return replace(found, prompt_id=prompt_id)

    def score(self, problem: Problem, answer: str) -> float:
        """1.0 if the answer is right, else 0.0; see ``MathVerifier``."""
        return self._verifier.score(answer, problem.answer)


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise RecipeError(f"{path} needs pyarrow, got none installed; pip install 'rzero[math]'") from error
    return parquet.read_table(path).to_pylist()


def _problem(path: Path, index: int, row: Any) -> Problem:
    try:
        (message,) = row["prompt"]
        if message["role"] != "user":
            raise ValueError(f"a message of {message['role']}")
        question, answer = message["content"], row["reward_model"]["ground_truth"]
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ValueError("content and ground_truth that are not both text")
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{path}: row {index} must have prompt, a list of one user message with content, and "
            f"reward_model with ground_truth, got {type(error).__name__}: {error}"
        ) from error
    return Problem(prompt_id=index, question=question, answer=answer, entry=row)
