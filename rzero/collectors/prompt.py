"""What a group of responses answers."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt_id: Names the problem for good, >= 0.
        token_ids: What the model reads, at least one token.
        problem: What the reward function or the environment needs to know of it.
    """

    prompt_id: int
    token_ids: tuple[int, ...]
    problem: Any = field(repr=False)
