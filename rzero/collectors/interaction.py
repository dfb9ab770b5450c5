"""From a prompt to a group of responses with rewards, as far as a collector needs to know it.

GroupRequest --respond--> completions --rewards--> numbers
     |                                               |
     +--------------------- play --------------------+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest
from rzero.collectors.futures import outcome, settle, then
from rzero.collectors.hashing import stream_seed
from rzero.collectors.pack_completions import Fields, group_fields
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """A group to be sampled and rewarded.

    Attributes:
        group_id: Names the group for good.
        prompt: What all of it answers.
        size: Responses.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
    """

    group_id: int
    prompt: Prompt
    size: int
    max_new_tokens: int
    seed: int

    def requests(self) -> list[GenerationRequest]:
        """One for each response; the uids of successive groups of one size follow each other."""
        return [
            GenerationRequest(
                uid=uid,
                group_id=self.group_id,
                prompt_id=self.prompt.prompt_id,
                sample_index=index,
                prompt=self.prompt.token_ids,
                max_new_tokens=self.max_new_tokens,
                seed=stream_seed(self.seed, uid),
            )
            for index, uid in enumerate(range(self.group_id * self.size, (self.group_id + 1) * self.size))
        ]


PlayedGroup = tuple[list[Completion], list[float]]
"""The responses of a group and their rewards."""


def play(interaction: Interaction, engine: GenerationEngine, group: GroupRequest) -> Future[PlayedGroup]:
    """Sample a group and have it rewarded; the future raises what either of them raises."""
    played: Future[PlayedGroup] = Future()

    def reward(responded: Future[list[Completion]]) -> None:
        completions = outcome(responded)
        if isinstance(completions, BaseException):
            settle(played, completions)
            return
        try:
            rewards = interaction.rewards(group.prompt, completions)
        except BaseException as error:
            settle(played, error)
            return
        both = then(rewards, lambda numbers: (completions, numbers))
        both.add_done_callback(lambda _: settle(played, outcome(both)))

    interaction.respond(engine, group.prompt, group.requests()).add_done_callback(reward)
    return played


@runtime_checkable
class GroupEngine(GenerationEngine, Protocol):
    """An engine with an interaction at its side, which plays whole groups where it is."""

    def play_group(self, group: GroupRequest) -> Future[Fields]:
        """Sample a group and have it rewarded; ``GroupFailed`` costs no more than the group."""
        ...


GroupPlayer = Callable[[GenerationEngine, GroupRequest], Future[Fields]]
"""Has an engine sample a group and get its rewards."""


def group_player(interaction: Interaction | None, engines: Sequence[GenerationEngine]) -> GroupPlayer:
    """Play groups here by an interaction, or, without one, where the engines are.

    Raises:
        TypeError: If there is neither an interaction nor a ``GroupEngine``.
    """
    if interaction is not None:
        here = interaction
        return lambda engine, group: then(play(here, engine, group), lambda played: group_fields(*played))
    for engine in engines:
        if not isinstance(engine, GroupEngine):
            raise TypeError(
                f"AsyncRolloutCollector: reward_fn must be given, as {type(engine).__name__} plays no groups"
            )
    return lambda engine, group: cast(GroupEngine, engine).play_group(group)
