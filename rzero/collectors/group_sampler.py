"""Whole groups, from a prompt to completions with rewards, on engines that may be lost meanwhile."""

from __future__ import annotations

import queue
import threading
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
    missing: int
    completions: list[Completion | None]
    started_ns: int


@final
class GroupSampler:
    """Samples groups, each on one engine, and says once of each whether it is complete or has failed.

    Everything happens in the thread that calls ``start`` and runs the events, but for completions, which the
    engines' threads put down.

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
        self._lock = threading.Lock()  # guards what is missing of a group
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
        size = self._group_size
        self._groups[ticket] = _Group(prompt, size, [None] * size, time.monotonic_ns())
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
        try:
            future = self._interaction.respond(self._pool[engine], prompt, request)
        except EngineLost as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(self._responded, engine, request))

    def _responded(self, engine: int, request: GenerationRequest, future: Future[Completion]) -> None:
        """Put a completion down, in the engine's thread; the last of its group is an event, as any error."""
        self._pool.give_back(engine)
        if future.cancelled() or future.exception() is not None:
            self._events.put(partial(self._broken, future, engine, request))
            return
        group = self._groups.get(request.group_id)
        if group is None:
            return  # it failed by another of its responses
        with self._lock:
            group.completions[request.sample_index] = future.result()
            group.missing -= 1
            complete = group.missing == 0
        if complete:
            self._events.put(partial(self._sampled, request.group_id))

    def _broken(self, future: Future[Completion], engine: int, request: GenerationRequest) -> None:
        try:
            future.result()
        except GroupFailed as error:
            self._give_up(request.group_id, error)
        except EngineLost as error:
            self._pool.lose(engine, error)
            if request.group_id in self._groups:
                self._respond(self._pool.take(1), request)

    def _sampled(self, ticket: int) -> None:
        """Ask for the rewards of a group of which every response is there."""
        group = self._groups[ticket]
        completions = [c for c in group.completions if c is not None]
        self._interaction.rewards(group.prompt, completions).add_done_callback(
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
        if self._groups.pop(ticket, None) is not None:
            self._fail(ticket, error)
