"""Problems as a model reads them, and its responses as their verifier does."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, final

from recipes.tasks.reasoning import Problem
from recipes.tasks.sources import Tasks
from recipes.tiny_model import encode_prompts
from rzero.collectors import Prompt

ENCODED_AT_ONCE = 64


def vocabulary_digest(tokenizer: Any) -> str:
    """Digest of the tokens and their ids."""
    return hashlib.blake2b(repr(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16).hexdigest()


def encoded(tokenizer: Any, problems: Sequence[Problem]) -> list[Prompt]:
    """Problems as prompts."""
    rows = encode_prompts(tokenizer, [problem.question for problem in problems])
    return [
        Prompt(prompt_id=problem.prompt_id, token_ids=tuple(token_ids), problem=problem)
        for problem, token_ids in zip(problems, rows, strict=True)
    ]


def task_rewards(tokenizer: Any, tasks: Tasks) -> Callable[[Prompt, Sequence[Sequence[int]]], list[float]]:
    """The tasks' own verifier, on the text of a group's responses."""

    def rewards(prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[float]:
        texts = tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True)
        return [tasks.score(prompt.problem, text) for text in texts]

    return rewards


@final
class TaskPrompts:
    """The training problems as a ``PromptStream``: it stands at an index of the tasks' own stream.

    Args:
        tokenizer: Encodes them.
        tasks: Where they come from.
    """

    def __init__(self, tokenizer: Any, tasks: Tasks) -> None:
        self._tokenizer, self._tasks = tokenizer, tasks
        self.load_state_dict({"cursor": 0})

    def __iter__(self) -> Iterator[Prompt]:
        """Itself."""
        return self

    def __next__(self) -> Prompt:
        """The next one."""
        if not self._encoded:
            self._encoded.extend(encoded(self._tokenizer, list(islice(self._problems, ENCODED_AT_ONCE))))
        prompt = self._encoded.popleft()
        self._cursor = prompt.prompt_id + 1
        return prompt

    def prompt(self, prompt_id: int) -> Prompt:
        """The one of an id."""
        return encoded(self._tokenizer, [self._tasks.problem(prompt_id)])[0]

    def state_dict(self) -> dict[str, Any]:
        """The index after the last one that was yielded."""
        return {"cursor": self._cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._cursor: int = state_dict["cursor"]
        self._problems = self._tasks.stream(self._cursor)
        self._encoded: deque[Prompt] = deque()
