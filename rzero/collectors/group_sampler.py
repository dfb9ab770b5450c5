"""Whole groups, from a prompt to completions with rewards, on engines that may be lost meanwhile."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from rzero.collectors.engine import Completion, EngineLost, GenerationRequest
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.failures import GroupFailed
from rzero.collectors.hashing import stream_seed
from rzero.collectors.interaction import Interaction
from rzero.collectors.prompt import Prompt


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    started_ns: int


@final
class GroupSampler:
    """Samples groups, each on one engine, and says once of each whether it is complete or has failed.

    Everything happens in the thread that calls ``start`` and runs the events.

    Args:
        pool: The engines.
        interaction: How a response and its rewards come about.
        events: Gets calls to be made in the owner's thread.
        accept: Called there with (ticket, completions, rewards) of a complete group.
        fail: Called there with (ticket, error) of a failed one.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
    """

    def __init__(
        self,
        pool: EnginePool,
        interaction: Interaction,
        *,
        events: queue.SimpleQueue[Any],
        accept: Callable[[int, list[Completion], list[float]], None],
        fail: Callable[[int, GroupFailed], None],
        group_size: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._pool, self._interaction, self._events = pool, interaction, events
        self._accept, self._fail = accept, fail
        self._group_size, self._max_new_tokens, self.seed = group_size, max_new_tokens, seed
        self._groups: dict[int, _Group] = {}
        self._outside_ns = self._accepted = 0

    @property
    def prompt_ids(self) -> dict[int, int]:
        """The prompts of the groups that are being sampled or rewarded, by ticket."""
        return {ticket: group.prompt.prompt_id for ticket, group in self._groups.items()}

    def seconds_outside(self) -> float:
        """Mean time that a complete group spent outside of its engine, on the way and for rewards."""
        return self._outside_ns * 1e-9 / max(1, self._accepted)

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Have the engine with the least to do sample a group."""
        self._groups[ticket] = _Group(prompt, time.monotonic_ns())
        uids = range(ticket * self._group_size, (ticket + 1) * self._group_size)
        requests = [
            GenerationRequest(
                uid=uid,
                group_id=ticket,
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt=prompt.token_ids,
                max_new_tokens=self._max_new_tokens,
                seed=stream_seed(self.seed, uid),
            )
            for index, uid in enumerate(uids)
        ]
        self._sample(ticket, requests)

    def _sample(self, ticket: int, requests: list[GenerationRequest]) -> None:
        engine = self._pool.take(len(requests))
        try:
            future = self._interaction.respond(self._pool[engine], self._groups[ticket].prompt, requests)
        except EngineLost as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(
            lambda future: self._events.put(partial(self._sampled, future, ticket, requests, engine))
        )

    def _sampled(
        self, future: Future[list[Completion]], ticket: int, requests: list[GenerationRequest], engine: int
    ) -> None:
        """Ask for the rewards."""
        self._pool.give_back(engine, len(requests))
        try:
            completions = future.result()
        except GroupFailed as error:
            return self._give_up(ticket, error)
        except EngineLost as error:
            self._pool.lose(engine, error)
            return self._sample(ticket, requests)
        self._interaction.rewards(self._groups[ticket].prompt, completions).add_done_callback(
            lambda future: self._events.put(partial(self._rewarded, future, ticket, completions))
        )

    def _rewarded(self, future: Future[list[float]], ticket: int, completions: list[Completion]) -> None:
        try:
            rewards = future.result()
        except GroupFailed as error:
            return self._give_up(ticket, error)
        group = self._groups.pop(ticket)
        sampling_ns = max(c.t_done_ns for c in completions) - min(c.t_submit_ns for c in completions)
        self._outside_ns += time.monotonic_ns() - group.started_ns - sampling_ns
        self._accepted += 1
        self._accept(ticket, completions, rewards)

    def _give_up(self, ticket: int, error: GroupFailed) -> None:
        del self._groups[ticket]
        self._fail(ticket, error)
