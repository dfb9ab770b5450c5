"""The asynchronous loop: prompts to the engines, whole groups into the buffer, weights back."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, final

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector

from rzero.buffers import PackedBatch, ProvenanceReplayBuffer
from rzero.collectors.collector_state import CollectorState
from rzero.collectors.drain import drain
from rzero.collectors.engine import Completion, EngineLost, GenerationEngine, GenerationRequest
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.failures import FailureCounts, GroupFailed
from rzero.collectors.group_sampler import GroupSampler
from rzero.collectors.interaction import Interaction
from rzero.collectors.pack_completions import group_fields, pack_groups, split_groups
from rzero.collectors.prompt import Prompt
from rzero.collectors.publisher import PublishReport, WeightPublisher
from rzero.collectors.rewards import RewardFunction, SingleTurn
from rzero.collectors.scheduler import Scheduler
from rzero.collectors.weights import only_policy, policy_weights


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
    run ends if as many groups as can be in work fail with no success between them. If the publisher tolerates
    lost engines, another one samples what a lost one was sampling, from its beginning and with its seed.

    Args:
        engines: All at the same version, which is where the run starts.
        prompts: Endless; advanced by the background thread. To be saved, a collector needs a
            ``PromptStream``.
        reward_fn: Rewards a whole group; an ``Interaction`` says more about how, a plain or async function
            stands for ``SingleTurn(reward_fn)``.
        scheduler: Who may start, and in which order the learner gets what has finished.
        buffer: Empty, of the same group size and groups per batch.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
        publisher: Of the same engines; None makes one.
        postproc: Applied to each batch before the learner gets it.
        pre_collect_hook: Called before each wait for a batch.
        post_collect_hook: Called with each batch, after ``postproc``.
        timeout: Seconds that an iteration waits for a batch before it gives up with what is missing.

    Raises:
        ValueError: If the engines disagree about the version, or scheduler and buffer about the batch.
    """

    total_frames = -1  # endless, in TorchRL's words

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
        publisher: WeightPublisher | None = None,
        postproc: Callable[[PackedBatch], Any] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[Any], None] | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        versions = [engine.version() for engine in engines]
        if set(versions) != {scheduler.version}:
            raise ValueError(
                f"AsyncRolloutCollector: engines must all hold version {scheduler.version}, got {versions}"
            )
        self.publisher = publisher or WeightPublisher(engines)
        self.publisher.add_done_callback(self._published)
        self._pool = EnginePool(engines, tolerate_lost=self.publisher.tolerate_lost)
        self._prompts = prompts
        self._interaction = reward_fn if isinstance(reward_fn, Interaction) else SingleTurn(reward_fn)
        self._scheduler, self._buffer, self._timeout = scheduler, buffer, timeout
        self._postproc = postproc
        self._lock = threading.Lock()  # guards the scheduler and what has finished
        self._boundary = threading.Condition()  # held while events are handled; otherwise all agrees
        self._error: BaseException | None = None
        self._failures = FailureCounts(patience=scheduler.capacity)
        self._accepted: list[tuple[int, list[Completion], list[float]]] = []  # empty when all agrees
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sampler = GroupSampler(
            self._pool,
            self._interaction,
            events=self._events,
            accept=self._accept,
            fail=self._fail,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        self._state = CollectorState(
            scheduler=scheduler,
            prompts=prompts,
            sampler=self._sampler,
            buffer=buffer,
            failures=self._failures,
            interaction=self._interaction,
            group_size=group_size,
        )
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ what the learner calls

    def start(self) -> None:
        """Begin to sample in the background; iterating does this by itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="AsyncRolloutCollector", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """Whether the background thread works."""
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the engines stand still within a block; what they are sampling goes on afterwards."""
        engines = self.engines
        for engine in engines:
            engine.pause()
        try:
            yield
        finally:
            for engine in engines:
                engine.resume()

    def iterator(self) -> Iterator[Any]:
        """Batches for the learner, one after the other, without end."""
        self.start()
        while not self._stopping:
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            batch = self._next_batch()
            with self._lock:
                self._scheduler.train(batch.group_id.unique().tolist())
            self._state.frames += int(batch.response_mask.sum())
            self._state.batches += 1
            self._events.put(None)
            out = batch if self._postproc is None else self._postproc(batch)
            if self.post_collect_hook is not None:
                self.post_collect_hook(out)  # pyright: ignore[reportArgumentType]  # torchrl knows TensorDicts only
            yield out

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

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Tensor] | None = None,
        policy: nn.Module | None = None,
        worker_ids: None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish the weights after an update, in the background.

        When every engine has them, what was trained on gives its place back.

        Args:
            policy_or_weights: The learner's model, its ``named_weights``, or a TensorDict of it, of which the
                tensors that the engines hold are taken; None publishes the publisher's registered model.
            weights: Another way to pass weights.
            policy: Another way to pass the model.
            worker_ids: None; a version goes to all engines.
            model_id: None or ``"policy"``; there is one model.
            weights_dict: ``{"policy": weights}``, another way to pass weights.

        Raises:
            TypeError: If more than one thing is passed, or something else than weights.
            ValueError: If one worker or another model is asked for.
        """
        if worker_ids is not None or model_id not in (None, "policy"):
            raise ValueError(
                f"AsyncRolloutCollector.update_policy_weights_: all engines get the one policy, "
                f"got worker_ids={worker_ids!r}, model_id={model_id!r}"
            )
        given = only_policy(policy_or_weights, weights, policy, weights_dict=weights_dict)
        if given is None:
            return self.publisher.update_weights()
        new = policy_weights(given)
        if isinstance(given, TensorDictBase):
            # It may name tied weights twice, and buffers that never travel.
            new = {name: tensor for name, tensor in new.items() if name in self._weight_names}
        self.publisher.publish_async(new, self._scheduler.learner_version)

    @cached_property
    def _weight_names(self) -> set[str]:
        """Of the tensors that the engines hold."""
        return set(self.engines[0].weight_digests())

    @property
    def policy_version(self) -> int:
        """The newest version on every engine."""
        return self.publisher.common_version()

    def get_policy_version(self) -> int:
        """The newest version on every engine."""
        return self.policy_version

    @property
    def engines(self) -> list[GenerationEngine]:
        """The engines that are not lost."""
        return self._pool.living

    def stats(self) -> dict[str, int | float | bool]:
        """What happened so far.

        Sampled tokens (``frames``) and batches delivered, versions, engines that live, and groups by what
        became of them, failures also by their reasons.
        """
        with self._lock:
            counts = self._scheduler.counts
            counts |= {f"failed/{reason}": n for reason, n in self._failures.by_reason.items()}
            learner_version = self._scheduler.learner_version
        return {
            "frames": self._state.frames,
            "batches": self._state.batches,
            "policy_version": self.policy_version,
            "learner_version": learner_version,
            "engines": len(self.engines),
            **counts,
        }

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample something beside the training, e.g. to evaluate, and wait for it.

        Args:
            requests: With uids that no training response has, e.g. from 2**61 on.

        Raises:
            TimeoutError: If they take longer than ``timeout`` seconds.
        """
        return self._pool.sample(requests, timeout=self._timeout)

    def busy_seconds(self) -> float:
        """How long an engine has been sampling so far, in seconds, mean over those that live."""
        return self._pool.busy_seconds()

    def seconds_outside(self) -> float:
        """How long a group is on the way between processes or being rewarded, in seconds, mean so far."""
        return self._sampler.seconds_outside()

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the background thread, waiting for it ``timeout`` seconds at most, and close the engines."""
        self._stopping = True
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout if timeout is None else timeout)
        self._interaction.close()
        for engine in self.engines:
            with suppress(EngineLost) if self.publisher.tolerate_lost else nullcontext():
                engine.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed what is sampled from now on; returns the seed."""
        self._sampler.seed = seed
        return seed

    def quiesce(self) -> None:
        """Wait until the last publish has arrived and every group that it lets start is complete.

        Called before each ``update_policy_weights_``, with a strict order, it makes every group the work of
        one version, and which version, and which groups an update gets, no matter of time.

        Raises:
            TimeoutError: If that takes longer than ``timeout`` seconds.
        """
        self.start()

        def quiet() -> bool:
            if self._error is not None:
                raise self._error
            if self._scheduler.version < self.learner_version:
                return False
            self._advance()
            return not self._scheduler.running

        with self._boundary:
            if not self._boundary.wait_for(quiet, self._timeout):
                raise TimeoutError(
                    f"AsyncRolloutCollector.quiesce: all groups must be complete within {self._timeout:g} s, "
                    f"got {len(self._scheduler.running)} running"
                )

    def state_dict(self) -> OrderedDict:
        """Everything that is not with the learner, as it stands between events, in tensors and JSON.

        The scheduler, the prompts' cursor, the groups that wait here or in the buffer, the failures, the
        state of the reward function if it has one. Of the groups in flight it holds the prompts' ids: they
        are sampled again, each response from its own seed.

        Raises:
            TypeError: If the prompts are no ``PromptStream``, and could not be found again.
        """
        with self._boundary, self._lock:
            return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, and sample again what was in flight.

        The engines hold the weights of the version that was being made then.

        Raises:
            RuntimeError: If the collector has started.
            ValueError: If it was saved with other settings, or the engines hold another version.
            TypeError: If the prompts are no ``PromptStream``.
        """
        if self._thread is not None:
            raise RuntimeError("AsyncRolloutCollector.load_state_dict: must come before the first batch")
        self._state.load_state_dict(state_dict)

    # ------------------------------------------------------------------ the background thread

    def _run(self) -> None:
        try:
            with self._boundary:
                self._advance()
            while not self._stopping:
                events = drain(self._events)
                with self._boundary:
                    for event in events:
                        if event is not None:
                            event()
                    self._pack_accepted()
                    self._advance()
                    self._boundary.notify_all()
        except BaseException as error:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        self._buffer.abort(error)
        with self._boundary:
            self._error = self._error or error
            self._boundary.notify_all()

    def _advance(self) -> None:
        """Hand over what may be handed over, then start what may start."""
        with self._lock:
            released = [self._state.finished.pop(ticket) for ticket in self._scheduler.release()]
        if released:
            self._buffer.extend(pack_groups(released))
        while True:
            with self._lock:
                ticket = self._scheduler.admit()
            if ticket is None:
                return
            self._sampler.start(ticket, next(self._prompts))

    def _accept(self, ticket: int, completions: list[Completion], rewards: list[float]) -> None:
        self._failures.succeeded()
        self._accepted.append((ticket, completions, rewards))

    def _pack_accepted(self) -> None:
        """Pack what a series of events completed, all at once."""
        accepted, self._accepted = self._accepted, []
        if not accepted:
            return
        completions = [completion for _, group, _ in accepted for completion in group]
        fields = group_fields(completions, [reward for _, _, rewards in accepted for reward in rewards])
        groups = split_groups(fields, group_size=self._state.group_size)
        with self._lock:
            for (ticket, _, _), group in zip(accepted, groups, strict=True):
                self._state.finished[ticket] = group
                self._scheduler.accept(ticket)

    def _fail(self, ticket: int, error: GroupFailed) -> None:
        with self._lock:
            self._scheduler.fail(ticket)
        self._failures.add(error)

    def _published(self, future: Future[PublishReport]) -> None:
        error = future.exception()
        if error is not None:
            self._abort(error)
            return
        with self._boundary, self._lock:
            self._scheduler.publish(future.result().version)
            self._boundary.notify_all()
        self._events.put(None)
