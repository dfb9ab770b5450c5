"""The problems: verifiable reasoning tasks from ``reasoning-gym``, for training and held out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.errors import RecipeError

# What a model of 0.1M parameters can begin to learn; any other data set of reasoning-gym runs with its own
# defaults.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 3,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "number_sequence": {"max_complexity": 1},
    "gcd": {"max_value": 50},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}

HELD_OUT_OFFSET = 10**9  # Items are seeded by seed + index, and no training stream reaches this index.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    Attributes:
        prompt_id: Its index in the stream; with the seed and the tasks it names the problem for good.
        question: What the model reads.
        answer: The reference answer.
        entry: The whole item of reasoning-gym, which its verifier wants back.
    """

    prompt_id: int
    question: str
    answer: str
    entry: dict[str, Any] = field(repr=False)


class ReasoningTasks:
    """A mixture of reasoning-gym data sets with disjoint training and held-out problems.

    Training and held-out items come from disjoint seeds; since small tasks repeat themselves across seeds, a
    training item whose question also stands in the held-out set is skipped.

    Args:
        specs: Data sets, mixed in equal parts, each ``name`` or ``name:key=value,key=value``.
        seed: Seed of the training stream; a run with another seed sees other problems.
        held_out_size: Number of held-out problems. They do not depend on ``seed``, so that runs can be
            compared.

    Raises:
        RecipeError: If a data set or one of its options is not known, or the held-out set leaves nothing to
            train on.

    Example:
        >>> tasks = ReasoningTasks(["basic_arithmetic"], seed=0, held_out_size=20)
        >>> problem = next(tasks.stream(0))
        >>> tasks.score(problem, problem.answer)
        1.0
    """

    def __init__(self, specs: Sequence[str], *, seed: int, held_out_size: int) -> None:
        configs = [_parse(spec) for spec in specs]
        self._train = _composite(configs, seed=seed)
        held_out = _composite(configs, seed=HELD_OUT_OFFSET)
        self.held_out: list[Problem] = []
        seen: set[str] = set()
        for index in range(20 * held_out_size):
            problem = _problem(held_out, index)
            if problem.question not in seen:
                seen.add(problem.question)
                self.held_out.append(problem)
            if len(self.held_out) == held_out_size:
                break
        self._held_out_questions = seen
        if all(_problem(self._train, index).question in seen for index in range(1000)):
            raise RecipeError(
                f"ReasoningTasks: held_out_size must leave problems to train on, "
                f"got {held_out_size} for {list(specs)}"
            )

    def stream(self, cursor: int) -> Iterator[Problem]:
        """Training problems from index ``cursor`` on, without end."""
        for index in range(cursor, HELD_OUT_OFFSET):
            problem = _problem(self._train, index)
            if problem.question not in self._held_out_questions:
                yield problem

    def problem(self, prompt_id: int) -> Problem:
        """The training problem of an index."""
        return _problem(self._train, prompt_id)

    def score(self, problem: Problem, answer: str) -> float:
        """The verifier's score of an answer in [0, 1]; 1 is correct."""
        return float(self._train.score_answer(answer.strip(), problem.entry))


def _problem(dataset: Any, index: int) -> Problem:
    entry = dataset[index]
    return Problem(prompt_id=index, question=entry["question"], answer=str(entry["answer"]), entry=entry)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    name, _, options = spec.partition(":")
    config = dict(TINY_CONFIGS.get(name, {}))
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise RecipeError(f"ReasoningTasks: specs must be name:key=value,key=value, got {spec!r}")
        try:
            config[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            config[key] = value
    return name, config


def _composite(configs: Sequence[tuple[str, dict[str, Any]]], *, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(name=name, weight=1.0, config=config) for name, config in configs]
    try:
        return reasoning_gym.create_dataset("composite", datasets=specs, seed=seed, size=HELD_OUT_OFFSET)
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(
            f"ReasoningTasks: specs must name data sets of reasoning-gym and their options, "
            f"got {list(configs)}: {error}"
        ) from error
