"""Rewards of whole groups by functions that may be plain or async, slow or hung.

completions --> workers (threads) --returned numbers--------------------> rewards
                   |                                                        ^
                   +--returned an awaitable--> one event loop --finished----+
watchdog: too late --> GroupFailed, and a new worker for the one that hangs
"""

from __future__ import annotations

import inspect
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch.distributed.checkpoint.stateful import Stateful

from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest
from rzero.collectors.failures import GroupFailed
from rzero.collectors.futures import settle
from rzero.collectors.interaction import Interaction
from rzero.collectors.loop_thread import LoopThread
from rzero.collectors.prompt import Prompt
from rzero.collectors.watchdog import Watchdog

RewardFunction = Callable[[Prompt, Sequence[Sequence[int]]], Sequence[float] | Awaitable[Sequence[float]]]
"""Rewards of a whole group: (prompt, token ids of each response, end token included) -> one finite float
each, at once or, from an ``async def``, when awaited."""


@dataclass(slots=True, eq=False)
class _Call:
    prompt: Prompt
    responses: list[list[int]]
    future: Future[list[float]] = field(default_factory=Future)
    returned: bool = False  # the function gave its thread back; the rewards may still be awaited
    replaced: bool = False  # another worker stands in for the one that this call holds


@final
class SingleTurn:
    """A response is what the engine samples for the prompt, and a function rewards each group.

    The function runs in threads of its own, so that it may be slow; ``async def`` functions share one event
    loop and wait side by side. An exception in the function ends the run with its traceback, except
    ``GroupFailed``. A call that takes longer than ``timeout`` fails its group: a coroutine is cancelled; a
    thread cannot be stopped and stays behind, but another takes its place.

    Args:
        reward_fn: Called with whole groups, from up to ``workers`` threads at once.
        timeout: Seconds for one call.
        workers: Threads.

    Raises:
        ValueError: If a number is not greater than 0.

    Example:
        >>> rewards = SingleTurn(lambda prompt, responses: [1.0] * len(responses), timeout=10.0)
        >>> rewards.close()
    """

    def __init__(self, reward_fn: RewardFunction, *, timeout: float = 60.0, workers: int = 4) -> None:
        if workers < 1:
            raise ValueError(f"SingleTurn: workers must be at least 1, got {workers}")
        self._reward_fn = reward_fn
        self._watchdog = Watchdog(timeout)
        self._lock = threading.Lock()  # guards the marks of calls, and making the loop
        self._loop: LoopThread | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = workers
        for _ in range(workers):
            self._start_worker()

    def respond(
        self, engine: GenerationEngine, prompt: Prompt, requests: Sequence[GenerationRequest]
    ) -> Future[list[Completion]]:
        """See ``Interaction.respond``."""
        return engine.submit_group(requests)

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[float]]:
        """See ``Interaction.rewards``."""
        call = _Call(prompt, [completion.response.tolist() for completion in completions])
        self._calls.put(call)
        return call.future

    def state_dict(self) -> dict[str, Any]:
        """What the function says of its state; nothing if it has no ``state_dict``."""
        return self._reward_fn.state_dict() if isinstance(self._reward_fn, Stateful) else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the function back what ``state_dict`` returned."""
        if isinstance(self._reward_fn, Stateful):
            self._reward_fn.load_state_dict(dict(state_dict))

    def close(self) -> None:
        """See ``Interaction.close``."""
        for _ in range(self._workers):
            self._calls.put(None)
        self._watchdog.close()
        if self._loop is not None:
            self._loop.close()

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, name="reward_fn", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            watch = self._watchdog.watch(partial(self._give_up, call))
            try:
                result = self._reward_fn(call.prompt, call.responses)
            except BaseException as error:
                result = error
            with self._lock:
                call.returned = True
            if inspect.isawaitable(result):
                call.future.add_done_callback(lambda _, watch=watch: watch.over())
                self._await(call, result)
            else:
                watch.over()
                _finish(call, result)
            if call.replaced:
                return

    def _await(self, call: _Call, result: Awaitable[Sequence[float]]) -> None:
        with self._lock:
            self._loop = self._loop or LoopThread("reward_fn-async")

        task = self._loop.start(result if inspect.iscoroutine(result) else _coroutine(result))
        task.add_done_callback(
            lambda task: None if task.cancelled() else _finish(call, task.exception() or task.result())
        )
        call.future.add_done_callback(lambda _: task.cancel())

    def _give_up(self, call: _Call) -> None:
        error = GroupFailed(
            "reward timeout",
            f"reward_fn returned nothing within {self._watchdog.seconds:g} s for prompt "
            f"{call.prompt.prompt_id}",
        )
        with self._lock:
            call.replaced = not call.returned
        if call.replaced:
            self._start_worker()
        settle(call.future, error)


def interaction_of(reward_fn: RewardFunction | Interaction | None) -> Interaction | None:
    """An interaction, or None, as it is; a function as ``SingleTurn``."""
    if reward_fn is None or isinstance(reward_fn, Interaction):
        return reward_fn
    return SingleTurn(reward_fn)


async def _coroutine(result: Awaitable[Sequence[float]]) -> Sequence[float]:
    return await result


def _finish(call: _Call, result: Any) -> None:
    if not isinstance(result, BaseException):
        try:
            result = _checked(result, len(call.responses))
        except Exception as error:
            result = error
    settle(call.future, result)


def _checked(rewards: Sequence[float], count: int) -> list[float]:
    numbers = [float(reward) for reward in rewards]
    if len(numbers) != count:
        raise ValueError(f"SingleTurn: reward_fn must return {count} rewards, got {len(numbers)}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"SingleTurn: reward_fn must return finite rewards, got {numbers}")
    return numbers
