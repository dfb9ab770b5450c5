"""The background of a collector: one thread between the engines and the buffer."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, final

from torch.distributed.checkpoint.stateful import Stateful

from rzero.buffers import PackedBatch, ProvenanceReplayBuffer
from rzero.collectors.collector_state import CollectorState
from rzero.collectors.drain import drain
from rzero.collectors.engine_pool import EnginePool
from rzero.collectors.failures import FailureCounts, GroupFailed
from rzero.collectors.group_sampler import GroupSampler
from rzero.collectors.interaction import GroupPlayer
from rzero.collectors.pack_completions import Fields, pack_groups
from rzero.collectors.prompt import Prompt
from rzero.collectors.scheduler import Scheduler


@final
class RolloutLoop:
    """Starts groups when the scheduler lets it, and hands the buffer what they became.

        events: a group is complete | has failed; a version is on all engines; a batch was taken
        thread: wait for events --> handle all that are there --> release groups --> start groups

    Args:
        pool: The engines.
        prompts: See ``AsyncRolloutCollector``, like all others.
        play: Has an engine sample a group and get its rewards.
        reward_state: What the rewards remember, None if nothing.
        scheduler: Who may start.
        buffer: Gets whole groups.
        group_size: Responses per prompt.
        max_new_tokens: Length limit of a response.
        seed: With a response's uid it decides its random numbers.
        timeout: Seconds of a wait.
    """

    def __init__(
        self,
        pool: EnginePool,
        prompts: Iterator[Prompt],
        play: GroupPlayer,
        *,
        reward_state: Stateful | None,
        scheduler: Scheduler,
        buffer: ProvenanceReplayBuffer,
        group_size: int,
        max_new_tokens: int,
        seed: int,
        timeout: float,
    ) -> None:
        self._scheduler, self._prompts, self._buffer, self._timeout = scheduler, prompts, buffer, timeout
        self._lock = threading.Lock()  # guards the scheduler and what has finished
        self._boundary = threading.Condition()  # held while events are handled; otherwise all agrees
        self._error: BaseException | None = None
        self._failures = FailureCounts(patience=scheduler.capacity)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.sampler = GroupSampler(
            pool,
            play,
            events=self._events,
            accept=self._accept,
            fail=self._fail,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        self.state = CollectorState(
            scheduler=scheduler,
            prompts=prompts,
            sampler=self.sampler,
            buffer=buffer,
            failures=self._failures,
            reward_state=reward_state,
            group_size=group_size,
        )
        self._stopping, self._ended = False, True
        self._snapshot: Future[OrderedDict] | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ what other threads call

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="AsyncRolloutCollector", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """Whether the thread works."""
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    def stop(self, timeout: float | None) -> None:
        """Stop the thread, waiting for it ``timeout`` seconds at most."""
        self._stopping = True
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout if timeout is None else timeout)

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping

    def next_batch(self) -> PackedBatch:
        """Wait for a batch and take it for the update of ``learner_version``."""
        self._await_snapshot()
        try:
            batch = self._buffer.sample(timeout=self._timeout)
        except TimeoutError as error:
            error.add_note(str(self._failures))
            raise
        with self._lock:
            self._scheduler.train(batch.group_id.unique().tolist())
        self.state.frames += int(batch.response_mask.sum())
        self.state.batches += 1
        self._events.put(None)
        return batch

    def published(self, version: int) -> None:
        """A version is on all engines."""
        with self._boundary, self._lock:
            self._scheduler.publish(version)
            self._boundary.notify_all()
        self._events.put(None)

    def abort(self, error: BaseException) -> None:
        """End with an error, which whoever waits for a batch gets."""
        self._buffer.abort(error)
        with self._boundary:
            self._error = self._error or error
            self._boundary.notify_all()

    def counts(self) -> dict[str, int]:
        """Groups by what became of them, failures also by their reasons, and the learner's version."""
        with self._lock:
            failed = {f"failed/{reason}": n for reason, n in self._failures.by_reason.items()}
            return {"learner_version": self._scheduler.learner_version, **self._scheduler.counts, **failed}

    def quiesce(self) -> None:
        """See ``AsyncRolloutCollector.quiesce``."""
        self.start()

        def quiet() -> bool:
            if self._error is not None:
                raise self._error
            if self._scheduler.version < self._scheduler.learner_version - 1:
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
        """See ``AsyncRolloutCollector.state_dict``."""
        with self._boundary, self._lock:
            return self.state.state_dict()

    def snapshot(self) -> Future[OrderedDict]:
        """See ``AsyncRolloutCollector.snapshot``."""
        future = self._snapshot = Future()
        self._events.put(partial(self._take, future))
        if self._ended:
            self._take(future)
        return future

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``AsyncRolloutCollector.load_state_dict``."""
        if self._thread is not None:
            raise RuntimeError("AsyncRolloutCollector.load_state_dict: must come before the first batch")
        self.state.load_state_dict(state_dict)

    # ------------------------------------------------------------------ the thread

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
                    self._advance()
                    self._boundary.notify_all()
        except BaseException as error:
            self.abort(error)
        finally:
            self._ended = True
            if self._snapshot is not None:
                self._take(self._snapshot)

    def _take(self, snapshot: Future[OrderedDict]) -> None:
        with self._boundary:
            if not snapshot.done():
                try:
                    snapshot.set_result(self.state_dict())
                except Exception as error:
                    snapshot.set_exception(error)

    def _await_snapshot(self) -> None:
        if self._snapshot is not None and wait([self._snapshot], self._timeout).not_done:
            raise TimeoutError(
                f"AsyncRolloutCollector: its state must be copied within {self._timeout:g} s, got none"
            )
        self._snapshot = None

    def _advance(self) -> None:
        """Hand over what may be handed over, then start what may start."""
        with self._lock:
            released = [self.state.finished.pop(ticket) for ticket in self._scheduler.release()]
        if released:
            self._buffer.extend(pack_groups(released))
        while True:
            with self._lock:
                ticket = self._scheduler.admit()
            if ticket is None:
                return
            self.sampler.start(ticket, next(self._prompts))

    def _accept(self, ticket: int, group: Fields) -> None:
        self._failures.succeeded()
        with self._lock:
            self.state.finished[ticket] = group
            self._scheduler.accept(ticket)

    def _fail(self, ticket: int, error: GroupFailed) -> None:
        with self._lock:
            self._scheduler.fail(ticket)
        self._failures.add(error)
