"""The asynchronous loop: prompts to the engines, whole groups into the buffer, weights back."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torchrl.collectors import BaseCollector

from rzero.buffers import ROW_FIELDS, PackedBatch, ProvenanceReplayBuffer
from rzero.collectors.drain import drain
from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest, packed_rows
from rzero.collectors.failures import FailureCounts, GroupFailed
from rzero.collectors.hashing import stream_seed
from rzero.collectors.interaction import Interaction
from rzero.collectors.prompt import Prompt
from rzero.collectors.publisher import PublishReport, WeightPublisher
from rzero.collectors.rewards import RewardFunction, SingleTurn
from rzero.collectors.scheduler import Scheduler


def pack_completions(completions: Sequence[Completion], rewards: Sequence[float]) -> PackedBatch:
    """Completions with their rewards, as the buffer takes them."""
    requests = [c.request for c in completions]
    rows = packed_rows(
        [r.prompt for r in requests],
        [len(c.response) for c in completions],
        torch.cat([c.response for c in completions]),
        torch.cat([c.behavior_log_probs for c in completions]),
        torch.cat([c.policy_version for c in completions]),
    )
    numbers: dict[str, list[Any]] = {
        "uid": [r.uid for r in requests],
        "group_id": [r.group_id for r in requests],
        "prompt_id": [r.prompt_id for r in requests],
        "sample_index": [r.sample_index for r in requests],
        "prompt_length": [len(r.prompt) for r in requests],
        "response_length": [len(c.response) for c in completions],
        "reward": [float(reward) for reward in rewards],
        "finish_code": [int(c.finish_code) for c in completions],
        "context_id": [c.context_id for c in completions],
        "seed": [r.seed for r in requests],
        "t_submit_ns": [c.t_submit_ns for c in completions],
        "t_first_ns": [c.t_first_ns for c in completions],
        "t_done_ns": [c.t_done_ns for c in completions],
    }
    packed: dict[str, Any] = {name: torch.from_numpy(values) for name, values in rows.items()}
    packed |= {name: torch.tensor(numbers[name], dtype=dtype) for name, dtype in ROW_FIELDS.items()}
    packed["digest"] = torch.stack([c.digest for c in completions])
    return PackedBatch(**packed)


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    missing: int
    completions: list[Completion | None]


@final
class AsyncRolloutCollector(BaseCollector):
    """Keeps engines sampling while a learner updates, and hands the learner whole groups.

        prompts --admit--> engines --complete--> rewards --release--> buffer --iterate--> learner
           ^                  ^                                                              |
           +---- scheduler ---+------------------ publisher <------- update_policy_weights_ -+

    One background thread does everything but the sampling and the learning. The scheduler decides how far the
    engines may run ahead; with ``CreditScheduler(nominal_lag=0)`` the same code is synchronous.

    Iterating yields one ``PackedBatch`` of ``scheduler.groups_per_batch`` whole groups at a time, each
    response exactly once, without end; after each, the learner calls ``update_policy_weights_`` once. An
    exception in an engine, the reward function or the background thread is raised in the iteration, with its
    original traceback. ``GroupFailed`` loses its group alone, which is counted and gives its room back; the
    run ends if as many groups as can be in work fail with no success between them.

    Args:
        engines: All at the same version, which is where the run starts.
        prompts: Endless; advanced by the background thread.
        reward_fn: Rewards a whole group; an ``Interaction`` says more about how, a plain or async function
            stands for ``SingleTurn(reward_fn)``.
        scheduler: Who may start, and in which order the learner gets what has finished.
        buffer: Empty, of the same group size and groups per batch.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
        timeout: Seconds that an iteration waits for a batch before it gives up with what is missing.

    Raises:
        ValueError: If the engines disagree about the version, or scheduler and buffer about the batch.
    """

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        prompts: Iterator[Prompt],
        reward_fn: RewardFunction | Interaction,
        *,
        scheduler: Scheduler,
        buffer: ProvenanceReplayBuffer,
        group_size: int,
        max_new_tokens: int,
        seed: int,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        versions = [engine.version() for engine in engines]
        if set(versions) != {scheduler.version}:
            raise ValueError(
                f"AsyncRolloutCollector: engines must all hold version {scheduler.version}, got {versions}"
            )
        self._engines, self._prompts = list(engines), prompts
        self._interaction = reward_fn if isinstance(reward_fn, Interaction) else SingleTurn(reward_fn)
        self._scheduler, self._buffer = scheduler, buffer
        self._group_size, self._max_new_tokens = group_size, max_new_tokens
        self._seed, self._timeout = seed, timeout
        self.publisher = WeightPublisher(engines, on_done=self._published)
        self._lock = threading.Lock()  # guards the scheduler, the groups and the loads
        self._groups: dict[int, _Group] = {}
        self._finished: dict[int, tuple[list[Completion], list[float]]] = {}
        self._load = [0] * len(engines)
        self._failures = FailureCounts(patience=scheduler.capacity)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ what the learner calls

    def start(self) -> None:
        """Begin to sample in the background; iterating does this by itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="AsyncRolloutCollector", daemon=True)
            self._thread.start()

    def iterator(self) -> Iterator[PackedBatch]:
        """Batches for the learner, one after the other, without end."""
        self.start()
        while not self._stopping:
            batch = self._next_batch()
            with self._lock:
                self._scheduler.train(batch.group_id.unique().tolist())
            self._events.put(None)
            yield batch

    def _next_batch(self) -> PackedBatch:
        try:
            return self._buffer.sample(timeout=self._timeout)
        except TimeoutError as error:
            error.add_note(str(self._failures))
            raise

    @property
    def learner_version(self) -> int:
        """Version of the weights being updated: the number of updates before the current batch."""
        return self._scheduler.learner_version - 1

    def update_policy_weights_(self, policy_or_weights: nn.Module | None = None, **kwargs: Any) -> None:
        """Publish the weights after an update, in the background.

        When every engine has them, what was trained on gives its place back.

        Args:
            policy_or_weights: The learner's model.
            **kwargs: ``policy=model`` is another way to pass it; nothing else is accepted.
        """
        model = policy_or_weights if policy_or_weights is not None else kwargs.pop("policy", None)
        if not isinstance(model, nn.Module) or kwargs:
            raise TypeError(
                f"AsyncRolloutCollector.update_policy_weights_: policy must be a module and stand alone, "
                f"got {type(model).__name__} and {sorted(kwargs)}"
            )
        version = self._scheduler.learner_version
        self.publisher.publish_async(model, version)

    def get_policy_version(self) -> int:
        """The newest version on every engine."""
        return self.publisher.common_version()

    def stats(self) -> dict[str, int | float | bool]:
        """Counts of groups by what became of them, failures also by their reasons, and versions."""
        with self._lock:
            counts = self._scheduler.counts
            counts |= {f"failed/{reason}": n for reason, n in self._failures.by_reason.items()}
            learner_version = self._scheduler.learner_version
        return {**counts, "policy_version": self.get_policy_version(), "learner_version": learner_version}

    def busy_seconds(self) -> float:
        """How long an engine has been sampling so far, in seconds, mean over engines."""
        return sum(engine.busy_seconds() for engine in self._engines) / len(self._engines)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the background thread and close the engines."""
        self._stopping = True
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
        self._interaction.close()
        for engine in self._engines:
            engine.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed what is sampled from now on; returns the seed."""
        self._seed = seed
        return seed

    def state_dict(self) -> OrderedDict:
        """The scheduler's state; the buffer and the prompts' cursor have their own."""
        with self._lock:
            return OrderedDict(scheduler=self._scheduler.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` holds."""
        with self._lock:
            self._scheduler.load_state_dict(state_dict["scheduler"])

    # ------------------------------------------------------------------ the background thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._advance()
                for event in drain(self._events):
                    if event is not None:
                        event()
        except BaseException as error:
            self._buffer.abort(error)

    def _advance(self) -> None:
        """Hand over what may be handed over, then start what may start."""
        with self._lock:
            released = [self._finished.pop(ticket) for ticket in self._scheduler.release()]
        if released:
            completions = [completion for group, _ in released for completion in group]
            self._buffer.extend(
                pack_completions(completions, [r for _, rewards in released for r in rewards])
            )
        while True:
            with self._lock:
                ticket = self._scheduler.admit()
            if ticket is None:
                return
            self._start_group(ticket)

    def _start_group(self, ticket: int) -> None:
        prompt = next(self._prompts)
        size = self._group_size
        self._groups[ticket] = _Group(prompt, size, [None] * size)
        engine = min(range(len(self._engines)), key=self._load.__getitem__)
        self._load[engine] += size
        for index in range(size):
            uid = ticket * size + index
            request = GenerationRequest(
                uid=uid,
                group_id=ticket,
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt=prompt.token_ids,
                max_new_tokens=self._max_new_tokens,
                seed=stream_seed(self._seed, uid),
            )
            future = self._interaction.respond(self._engines[engine], prompt, request)
            future.add_done_callback(lambda _, engine=engine: self._unload(engine))
            self._when_done(future, self._collect, ticket, index)

    def _unload(self, engine: int) -> None:
        with self._lock:
            self._load[engine] -= 1

    def _when_done(self, future: Future[Any], then: Callable[..., None], ticket: int, *args: Any) -> None:
        """In the background thread, handle the future's result, or its group's failure."""

        def handle() -> None:
            try:
                result = future.result()
            except GroupFailed as error:
                self._fail(ticket, error)
            else:
                then(result, ticket, *args)

        future.add_done_callback(lambda _: self._events.put(handle))

    def _collect(self, completion: Completion, ticket: int, index: int) -> None:
        """Note a completion; the last of its group asks for the rewards."""
        group = self._groups.get(ticket)
        if group is None:
            return  # it failed by another of its responses
        group.completions[index] = completion
        group.missing -= 1
        if group.missing == 0:
            completions = [c for c in group.completions if c is not None]
            self._when_done(
                self._interaction.rewards(group.prompt, completions), self._accept, ticket, completions
            )

    def _accept(self, rewards: list[float], ticket: int, completions: list[Completion]) -> None:
        del self._groups[ticket]
        self._failures.succeeded()
        with self._lock:
            self._finished[ticket] = (completions, rewards)
            self._scheduler.accept(ticket)

    def _fail(self, ticket: int, error: GroupFailed) -> None:
        """Give a group up, once, and with it its room."""
        if self._groups.pop(ticket, None) is None:
            return
        with self._lock:
            self._scheduler.fail(ticket)
        self._failures.add(error)

    def _published(self, future: Future[PublishReport]) -> None:
        error = future.exception()
        if error is not None:
            self._buffer.abort(error)
            return
        with self._lock:
            self._scheduler.publish(future.result().version)
        self._events.put(None)
