"""What a group of responses answers, and where prompts come from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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


@runtime_checkable
class PromptStream(Protocol):
    """Endless prompts that can be found again after a restart; a collector that is saved needs one."""

    def __iter__(self) -> Iterator[Prompt]:
        """Itself."""
        ...

    def __next__(self) -> Prompt:
        """The next prompt."""
        ...

    def prompt(self, prompt_id: int) -> Prompt:
        """The prompt of an id that the stream has yielded; it does not move the stream."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: after the last prompt that was yielded."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        ...
