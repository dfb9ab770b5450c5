"""A calculator for language models: an environment in which an expression that ends with "=" gets its value.

Calculate 58 - 17 + 90.       the question
58 - 17 + 90=                 sampled: a call of the tool
131                           what the tool says, a line of its own; never trained on
131<eos>                      sampled: the answer, which the task's verifier scores
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.tasks.reasoning import Problem
from recipes.tasks.sources import Tasks
from rzero.collectors import Prompt, Step

CALL = "="  # The token that ends a turn and asks for the value.
ERROR = "?"
_CHARACTERS = re.compile(r"[0-9 +*()-]*")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """The value of sums, differences and products of integers, with parentheses and signs; nothing else.

    Raises:
        ValueError: If the text is anything else.

    Example:
        >>> calculate("2 * (3 - 10) + -1")
        -15
    """
    try:
        if not _CHARACTERS.fullmatch(expression):
            raise SyntaxError
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"calculate: expression must be integer arithmetic, got {expression!r}") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise SyntaxError


def reply(call: str) -> str:
    """What the tool says to a turn that ends with ``CALL``: the value, or ``ERROR``, on a line of its own."""
    try:
        return f"\n{calculate(call.removesuffix(CALL))}\n"
    except ValueError:
        return f"\n{ERROR}\n"


def now_and_then(problem: Problem) -> list[tuple[str, bool]]:
    """A worked example in which the tool is used for every second problem; what it says is not learned."""
    if problem.prompt_id % 2:
        return [(problem.answer, True)]
    call = problem.entry["metadata"]["expression"] + CALL
    return [(call, True), (reply(call), False), (problem.answer, True)]


class Calculator:
    """One trajectory: calls of the tool, as many as there are turns for, then an answer. See ``Environment``.

    Args:
        tokenizer: One token a character.
        tasks: Whose verifier scores the answer.
    """

    def __init__(self, tokenizer: Any, tasks: Tasks) -> None:
        self._tokenizer, self._tasks = tokenizer, tasks

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """The question."""
        self._problem = prompt.problem
        return prompt.token_ids

    async def step(self, action: Sequence[int]) -> Step:
        """A value to a call; a score to all else."""
        text = self._tokenizer.decode(action, skip_special_tokens=True)
        if text.endswith(CALL):
            said = self._tokenizer.encode(reply(text), add_special_tokens=False)
            return Step(said, 0.0, False, False, {"call": text})
        return Step((), self._tasks.score(self._problem, text), True, False, {"answer": text})

    async def close(self) -> None:
        """Nothing is held."""
