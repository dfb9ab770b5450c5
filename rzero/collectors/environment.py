"""Responses of several turns: the model acts, an environment answers, and one row holds it all.

    reset --> prompt | action | observation | action | observation | action
    sampled            yes      no            yes      no            yes
    version   -1       3 3 3    -1            3 4 4    -1            5 5

Only sampled tokens carry evidence and count in the loss; what the environment said is context to them, like
the prompt. Weights may change between turns and within one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor

from rzero.buffers import FinishCode, ProvenanceError
from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest, packed_rows, row_digests
from rzero.collectors.failures import GroupFailed
from rzero.collectors.futures import gathered, settle
from rzero.collectors.hashing import stream_seed
from rzero.collectors.loop_thread import LoopThread
from rzero.collectors.prompt import Prompt
from rzero.collectors.watchdog import Watch, Watchdog

ResultT = TypeVar("ResultT")


class Step(NamedTuple):
    """An environment's answer to an action, in the order of Gymnasium.

    Attributes:
        observation: Token ids that the model reads before its next turn; unused if there is none.
        reward: Finite; the rewards of all steps are added up.
        terminated: The trajectory is over, and was played to its end.
        truncated: It is over, but was cut.
        info: Whatever the environment has to say.
    """

    observation: Sequence[int]
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    """What a model acts in; one object lives for one trajectory. All methods run in one event loop.

    Work that blocks belongs into ``asyncio.to_thread``: no trajectory goes on meanwhile.
    """

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """Begin.

        Args:
            prompt: What the group answers.
            seed: Of this trajectory; its group's others have other ones.

        Returns:
            Token ids of the first observation, at least one: the prompt of the row.
        """
        ...

    async def step(self, action: Sequence[int]) -> Step:
        """Take the tokens of one turn, its end token included, and answer.

        An action may be cut by the length limit; then no other follows.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; called exactly once, whatever happened."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Completion):
    """A completion of several turns: tokens of observations stand in the response with version -1.

    Attributes:
        reward: Sum over the steps.
        infos: Of the steps.
    """

    reward: float
    infos: tuple[Mapping[str, Any], ...]


@final
class MultiTurn:
    """A response is a trajectory in an environment, which also rewards it.

    A trajectory ends when the environment says so (``FinishCode.STOP`` if it terminated), after ``max_turns``
    turns, or when the request's ``max_new_tokens``, which count observations too, leave no room for another
    token (``FinishCode.LENGTH``). An exception or a timeout in the environment fails the group.

    Args:
        make_environment: Makes one for each trajectory.
        max_turns: Most turns of a trajectory.
        timeout: Seconds for one call of the environment.

    Raises:
        ValueError: If a number is not greater than 0.
    """

    def __init__(
        self, make_environment: Callable[[], Environment], *, max_turns: int, timeout: float = 60.0
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"MultiTurn: max_turns must be at least 1, got {max_turns}")
        self._make_environment, self._max_turns = make_environment, max_turns
        self._watchdog = Watchdog(timeout)
        self._loop = LoopThread("MultiTurn")

    def respond(
        self, engine: GenerationEngine, prompt: Prompt, requests: Sequence[GenerationRequest]
    ) -> Future[list[Completion]]:
        """Play a trajectory for each request, side by side. See ``Interaction.respond``."""
        return gathered([self.play(engine, prompt, request) for request in requests])

    def play(
        self, engine: GenerationEngine, prompt: Prompt, request: GenerationRequest
    ) -> Future[Completion]:
        """Play one; the future resolves to a ``Trajectory``."""
        future: Future[Completion] = Future()
        waiting = self._watch(future, prompt, "the event loop, which an environment blocks,")
        task = self._loop.start(self._live(engine, prompt, request, future, waiting))
        task.add_done_callback(
            lambda task: settle(
                future,
                CancelledError("MultiTurn was closed")
                if task.cancelled()
                else task.exception() or task.result(),
            )
        )
        future.add_done_callback(lambda _: task.cancel())
        return future

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[float]]:
        """See ``Interaction.rewards``."""
        future: Future[list[float]] = Future()
        future.set_result([c.reward for c in completions if isinstance(c, Trajectory)])
        return future

    def close(self) -> None:
        """See ``Interaction.close``."""
        self._watchdog.close()
        self._loop.close()

    async def _live(
        self,
        engine: GenerationEngine,
        prompt: Prompt,
        request: GenerationRequest,
        future: Future[Completion],
        waiting: Watch,
    ) -> Trajectory:
        """Play, and close the environment in any case."""
        waiting.over()
        ask = partial(self._ask, future, prompt)
        environment = await ask("make_environment", _made, self._make_environment)
        try:
            trajectory = await self._play(engine, prompt, request, environment, ask)
        except BaseException:
            await asyncio.gather(ask("close", environment.close), return_exceptions=True)
            raise
        await ask("close", environment.close)
        return trajectory

    async def _play(
        self,
        engine: GenerationEngine,
        prompt: Prompt,
        request: GenerationRequest,
        environment: Environment,
        ask: Callable[..., Awaitable[Any]],
    ) -> Trajectory:
        opening = tuple(await ask("reset", environment.reset, prompt, seed=request.seed))
        request = replace(request, prompt=opening)
        turns: list[Completion] = []
        response: list[int] = []
        steps: list[Step] = []
        while True:
            turn = await _sample(
                engine,
                replace(
                    request,
                    prompt=(*opening, *response),
                    max_new_tokens=request.max_new_tokens - len(response),
                    seed=stream_seed(request.seed, len(turns)),
                ),
            )
            turns.append(turn)
            action = turn.response.tolist()
            steps.append(await ask("step", _checked_step, environment, action))
            response += action
            room = request.max_new_tokens - len(response) - len(steps[-1].observation)
            over = steps[-1].terminated or steps[-1].truncated
            if over or room < 1 or len(turns) == self._max_turns:
                return _trajectory(request, turns, steps)
            response += steps[-1].observation

    async def _ask(
        self,
        future: Future[Completion],
        prompt: Prompt,
        what: str,
        method: Callable[..., Awaitable[ResultT]],
        *args: Any,
        **named: Any,
    ) -> ResultT:
        """Call the environment, within the timeout."""
        watch = self._watch(future, prompt, what)
        try:
            return await method(*args, **named)
        except GroupFailed:
            raise
        except Exception as error:
            where = f"{type(error).__name__} in {what} for prompt {prompt.prompt_id}"
            raise GroupFailed("environment error", f"{where}: {error}") from error
        finally:
            watch.over()

    def _watch(self, future: Future[Completion], prompt: Prompt, what: str) -> Watch:
        """Give the trajectory up if it does not go on in time."""
        late = GroupFailed(
            "environment timeout",
            f"no answer within {self._watchdog.seconds:g} s from {what} for prompt {prompt.prompt_id}",
        )
        return self._watchdog.watch(lambda: settle(future, late))


async def _made(make_environment: Callable[[], Environment]) -> Environment:
    return make_environment()


async def _checked_step(environment: Environment, action: Sequence[int]) -> Step:
    step = Step(*await environment.step(action))
    if not math.isfinite(step.reward):
        raise ValueError(f"MultiTurn: reward must be finite, got {step.reward}")
    return step


async def _sample(engine: GenerationEngine, request: GenerationRequest) -> Completion:
    """One turn. An engine does not take back what it was asked for, so only the waiting can be cancelled."""
    turn = await asyncio.shield(asyncio.wrap_future(engine.submit(request)))
    rows = packed_rows(
        [request.prompt], [len(turn.response)], turn.response, turn.behavior_log_probs, turn.policy_version
    )
    if not torch.equal(row_digests(rows)[0], turn.digest):
        raise ProvenanceError(f"MultiTurn: the digest of a turn of uid {request.uid} must hold, got another")
    return turn


def _trajectory(request: GenerationRequest, turns: Sequence[Completion], steps: Sequence[Step]) -> Trajectory:
    """One row of all turns, and between them the observations that were read."""
    if len({turn.context_id for turn in turns}) != 1:
        raise RuntimeError(f"MultiTurn: turns of uid {request.uid} must have one context, got several")
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    for turn, step in zip(turns, steps, strict=True):
        pieces.append((turn.response, turn.behavior_log_probs, turn.policy_version))
        said = torch.tensor(step.observation, dtype=torch.int32)
        pieces.append((said, torch.full(said.shape, torch.nan), torch.full_like(said, -1)))
    del pieces[-1]  # Nothing was sampled after the last observation.
    response, log_probs, version = (torch.cat(column) for column in zip(*pieces, strict=True))
    rows = packed_rows([request.prompt], [len(response)], response, log_probs, version)
    return Trajectory(
        request=request,
        response=response,
        behavior_log_probs=log_probs,
        policy_version=version,
        finish_code=FinishCode.STOP if steps[-1].terminated else FinishCode.LENGTH,
        context_id=turns[0].context_id,
        t_submit_ns=turns[0].t_submit_ns,
        t_first_ns=turns[0].t_first_ns,
        t_done_ns=turns[-1].t_done_ns,
        digest=row_digests(rows)[0],
        reward=math.fsum(step.reward for step in steps),
        infos=tuple(step.info for step in steps),
    )
