"""Whole groups, from a prompt to completions with rewards, on engines that may be lost meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from rzero.collectors.engine import Completion, EngineLost, GenerationRequest
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.failures import GroupFailed
from rzero.collectors.hashing import stream_seed
from rzero.collectors.interaction import Interaction
from rzero.collectors.prompt import Prompt

Event = Callable[[], None]


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    missing: int
    completions: list[Completion | None]


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

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Have the engine with the least to do sample a group."""
        size = self._group_size
        self._groups[ticket] = _Group(prompt, size, [None] * size)
        engine = self._pool.take(size)
        for index in range(size):
            uid = ticket * size + index
            request = GenerationRequest(
                uid=uid,
                group_id=ticket,
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt=prompt.token_ids,
                max_new_tokens=self._max_new_tokens,
                seed=stream_seed(self.seed, uid),
            )
            self._respond(engine, request)

    def _respond(self, engine: int, request: GenerationRequest) -> None:
        prompt = self._groups[request.group_id].prompt
        future = self._pool.watch(
            engine, lambda: self._interaction.respond(self._pool[engine], prompt, request)
        )

        def lost(error: EngineLost) -> None:
            self._pool.lose(engine, error)
            if request.group_id in self._groups:
                self._respond(self._pool.take(1), request)

        self._when_done(future, self._collect, request.group_id, lost=lost)

    def _collect(self, completion: Completion) -> None:
        """Note a completion; the last of its group asks for the rewards."""
        ticket = completion.request.group_id
        group = self._groups.get(ticket)
        if group is None:
            return  # it failed by another of its responses
        group.completions[completion.request.sample_index] = completion
        group.missing -= 1
        if group.missing:
            return
        completions = [c for c in group.completions if c is not None]

        def handle(rewards: list[float]) -> None:
            del self._groups[ticket]
            self._accept(ticket, completions, rewards)

        self._when_done(self._interaction.rewards(group.prompt, completions), handle, ticket)

    def _when_done(
        self,
        future: Future[Any],
        handle: Callable[[Any], None],
        ticket: int,
        *,
        lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        """In the owner's thread, handle the future's result, its group's failure or its engine's loss."""

        def event() -> None:
            try:
                result = future.result()
            except GroupFailed as error:
                if self._groups.pop(ticket, None) is not None:
                    self._fail(ticket, error)
            except EngineLost as error:
                if lost is None:
                    raise
                lost(error)
            else:
                handle(result)

        future.add_done_callback(lambda _: self._events.put(event))
