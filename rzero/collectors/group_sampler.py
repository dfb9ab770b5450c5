"""Whole groups, from a prompt to packed responses with rewards, on engines that may be lost meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from rzero.collectors.engine import Clock, EngineLost
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.failures import GroupFailed
from rzero.collectors.interaction import GroupPlayer, GroupRequest
from rzero.collectors.pack_completions import Fields
from rzero.collectors.prompt import Prompt


@dataclass(slots=True)
class _Group:
    request: GroupRequest
    started_ns: int


@final
class GroupSampler:
    """Samples groups, each on one engine, and says once of each whether it is complete or has failed.

    Everything happens in the thread that calls ``start`` and runs the events.

    Args:
        pool: The engines.
        play: Has an engine sample a group and get its rewards.
        events: Gets calls to be made in the owner's thread.
        accept: Called there with (ticket, packed responses) of a complete group.
        fail: Called there with (ticket, error) of a failed one.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
    """

    def __init__(
        self,
        pool: EnginePool,
        play: GroupPlayer,
        *,
        events: queue.SimpleQueue[Any],
        accept: Callable[[int, Fields], None],
        fail: Callable[[int, GroupFailed], None],
        group_size: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._pool, self._play, self._events = pool, play, events
        self._accept, self._fail = accept, fail
        self._group_size, self._max_new_tokens, self.seed = group_size, max_new_tokens, seed
        self._groups: dict[int, _Group] = {}
        self._clock = Clock()
        self._before_ns = self._after_ns = self._accepted = 0

    @property
    def prompt_ids(self) -> dict[int, int]:
        """The prompts of the groups that are being sampled or rewarded, by ticket."""
        return {ticket: group.request.prompt.prompt_id for ticket, group in self._groups.items()}

    def seconds_outside(self) -> tuple[float, float]:
        """Mean time that a complete group spent on the way to its engine, and after it until it was here."""
        accepted = 1e9 * max(1, self._accepted)
        return self._before_ns / accepted, self._after_ns / accepted

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Have the engine with the least to do sample a group."""
        request = GroupRequest(
            group_id=ticket,
            prompt=prompt,
            size=self._group_size,
            max_new_tokens=self._max_new_tokens,
            seed=self.seed,
        )
        self._groups[ticket] = _Group(request, self._clock.now_ns())
        self._sample(request)

    def _sample(self, request: GroupRequest) -> None:
        engine = self._pool.take(request.size)
        try:
            future = self._play(self._pool[engine], request)
        except EngineLost as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(
            lambda future: self._events.put(partial(self._played, future, request, engine))
        )

    def _played(self, future: Future[Fields], request: GroupRequest, engine: int) -> None:
        self._pool.give_back(engine, request.size)
        ticket = request.group_id
        try:
            fields = future.result()
        except GroupFailed as error:
            del self._groups[ticket]
            return self._fail(ticket, error)
        except EngineLost as error:
            self._pool.lose(engine, error)
            return self._sample(request)
        started_ns, now_ns = self._groups.pop(ticket).started_ns, self._clock.now_ns()
        submit_ns, done_ns = int(fields["t_submit_ns"].min()), int(fields["t_done_ns"].max())
        # The engine's clock may be another machine's: only the sum of both ways is sure.
        outside_ns = now_ns - started_ns - (done_ns - submit_ns)
        before_ns = min(max(0, submit_ns - started_ns), outside_ns)
        self._before_ns += before_ns
        self._after_ns += outside_ns - before_ns
        self._accepted += 1
        self._accept(ticket, fields)
