"""What happens between a prompt and its rewards, as far as a collector needs to know it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest
from rzero.collectors.prompt import Prompt


@runtime_checkable
class Interaction(Protocol):
    """How a group comes about: its responses, then its rewards."""

    def respond(
        self, engine: GenerationEngine, prompt: Prompt, requests: Sequence[GenerationRequest]
    ) -> Future[list[Completion]]:
        """Sample a group, one completion for each request; ``GroupFailed`` costs no more than the group."""
        ...

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[float]]:
        """One reward for each response of a group; the future raises ``GroupFailed`` likewise."""
        ...

    def close(self) -> None:
        """Begin nothing more, and do not wait for what hangs."""
        ...
