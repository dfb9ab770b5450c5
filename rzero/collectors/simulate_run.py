"""The event loop of a simulated run: one virtual clock, real scheduler objects."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from rzero.collectors.lag import LagReport, Lags, segment_lags
from rzero.collectors.scheduler import Scheduler
from rzero.collectors.simulate_engine import VirtualEngine

if TYPE_CHECKING:
    from rzero.collectors.simulate import Workload

# Groups whose lengths are drawn at once.
BLOCK = 256


@dataclass(kw_only=True)
class Group:
    """A group from admission to training; the segments of its ended responses lie end to end."""

    waiting_for: int
    versions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)  # per ended response


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the clock says about the measured window; the attributes are those of `Simulation`."""

    step_seconds: float
    tokens_per_second: float
    learner: dict[str, float]
    engines: dict[str, float]


@final
class SimulatedRun:
    """Plays collector, engines and learner around one scheduler.

    Args:
        scheduler: A fresh scheduler.
        workload: What happens, and how long it takes.
        first: Learner version at which measuring begins.
        updates: Number of updates to measure.
        seed: Seed of everything random.
    """

    def __init__(
        self, scheduler: Scheduler, workload: Workload, *, first: int, updates: int, seed: int
    ) -> None:
        """Sets the clock to 0; see the class for the arguments."""
        self.scheduler, self.workload = scheduler, workload
        self.lag = LagReport(nominal_lag=scheduler.nominal_lag)
        self._first, self._last = first, first + updates
        self._length_rng, self._event_rng = (np.random.default_rng([seed, stream]) for stream in (0, 1))
        self._lengths = iter(())
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        slots = math.inf if workload.engine_slots is None else workload.engine_slots
        self._engines = [
            VirtualEngine(rate_law=workload.rate_law, version=scheduler.version, slots=slots)
            for _ in range(workload.engines)
        ]
        self._planned = [math.inf] * workload.engines  # time of the one valid end event of each engine
        self._loads = [(0, index) for index in range(workload.engines)]
        self._groups: dict[int, Group] = {}
        self._buffer: deque[int] = deque()
        self._learner_free = True
        self._publishing = False
        self._made = scheduler.version  # newest version that the learner has finished
        self._held = scheduler.version  # by every engine that is up
        self._touched: set[int] = set()  # engines whose next end must be planned again
        self._seconds = {"train": 0.0, "publish": 0.0}
        self._tokens = 0
        self._window_start = math.inf
        for index in range(workload.engines):
            self._plan_failure(index)

    def play(self) -> None:
        """Runs until the last measured batch gives way to the next one.

        Raises:
            RuntimeError: If nothing can ever happen again.
        """
        scheduler, patience = self.scheduler, self._patience()
        trained, events = scheduler.learner_version, 0
        self._settle()
        while scheduler.learner_version <= self._last:
            events = 0 if scheduler.learner_version > trained else events + 1
            trained = scheduler.learner_version
            if not self._events or events > patience:
                raise RuntimeError(
                    f"simulate: every update must come to its turn, got none since {events} events at "
                    f"{self._now:.3f} s: {scheduler.counts}, published {scheduler.version} of {trained}"
                )
            self._now, _, action = heapq.heappop(self._events)
            action()

    def measured(self) -> Measured:
        """Step time and the parts of everyone's time since measuring began."""
        window = self._now - self._window_start
        parts = {name: seconds / window for name, seconds in self._seconds.items()}
        totals = dict.fromkeys(self._engines[0].seconds, 0.0)
        for engine in self._engines:
            engine.advance(self._now)
            for name, seconds in engine.seconds.items():
                totals[name] += seconds
        concurrency = totals.pop("sequence") / totals["busy"] if totals["busy"] else 0.0
        engine_time = window * len(self._engines)
        return Measured(
            step_seconds=window / (self._last - self._first),
            tokens_per_second=self._tokens / window,
            learner=parts | {"idle": max(0.0, 1.0 - sum(parts.values()))},
            engines={name: seconds / engine_time for name, seconds in totals.items()}
            | {"concurrency": concurrency},
        )

    def _patience(self) -> int:
        """More events than any update takes, unless failures keep it from ever coming."""
        return 10_000 + 1000 * (self.workload.engines + self.scheduler.groups_per_batch)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _settle(self) -> None:
        """What is owed after every event: release, admit, and let the learner take a batch."""
        scheduler = self.scheduler
        while True:
            self._buffer.extend(scheduler.release())
            while (index := self._least_loaded()) is not None and (ticket := scheduler.admit()) is not None:
                self._start(ticket, index)
            if not self._learner_free or len(self._buffer) < scheduler.groups_per_batch:
                break
            self._take()
        for index in self._touched:
            self._planned[index] = time = self._engines[index].next_end()
            if time < math.inf:
                self._at(time, partial(self._end, index, time))
        self._touched.clear()

    def _least_loaded(self) -> int | None:
        """The least loaded engine that is up; None if all are down."""
        while self._loads:
            load, index = self._loads[0]
            if self._engines[index].up and load == self._engines[index].load:
                return index
            heapq.heappop(self._loads)  # An entry of the past: the load has changed since.
        return None

    def _touch(self, index: int) -> VirtualEngine:
        self._engines[index].advance(self._now)
        self._touched.add(index)
        return self._engines[index]

    def _start(self, ticket: int, index: int) -> None:
        lengths = next(self._lengths, None)
        if lengths is None:
            size = BLOCK * self.workload.group_size
            drawn = self.workload.length_law(self._length_rng, size)
            self._lengths = iter(drawn.reshape(BLOCK, -1).tolist())
            lengths = next(self._lengths)
        engine = self._touch(index)
        engine.announce(ticket, lengths)
        self._groups[ticket] = Group(waiting_for=len(lengths))
        heapq.heappush(self._loads, (engine.load, index))
        if self.workload.submit_seconds:
            self._at(self._now + self.workload.submit_seconds, partial(self._receive, ticket, index))
        else:
            engine.receive(ticket)

    def _receive(self, ticket: int, index: int) -> None:
        self._touch(index).receive(ticket)
        self._settle()

    def _end(self, index: int, time: float) -> None:
        if time != self._planned[index]:
            return  # The engine has changed its pace since this event was planned.
        engine = self._touch(index)
        for ticket, versions, counts in engine.pop_ended():
            group = self._groups[ticket]
            group.versions += versions
            group.counts += counts
            group.segments.append(len(versions))
            group.waiting_for -= 1
            if group.waiting_for == 0 and self.workload.reward_seconds:
                self._at(self._now + self.workload.reward_seconds, partial(self._complete, ticket))
            elif group.waiting_for == 0:
                self._judge(ticket)
        heapq.heappush(self._loads, (engine.load, index))
        self._settle()

    def _complete(self, ticket: int) -> None:
        self._judge(ticket)
        self._settle()

    def _judge(self, ticket: int) -> None:
        workload, scheduler = self.workload, self.scheduler
        chance = self._event_rng.random()
        if chance < workload.filter_probability:
            scheduler.filter(ticket)
        elif chance < workload.filter_probability + workload.fail_probability:
            scheduler.fail(ticket)
        else:
            scheduler.accept(ticket)
            return
        del self._groups[ticket]

    def _plan_failure(self, index: int) -> None:
        mean = self.workload.engine_failure_seconds
        if mean is not None:
            self._at(self._now + self._event_rng.exponential(mean), partial(self._fail, index))

    def _fail(self, index: int) -> None:
        for ticket in self._touch(index).fail():
            self.scheduler.fail(ticket)
            del self._groups[ticket]
        self._at(self._now + self.workload.repair_seconds, partial(self._repair, index))
        self._settle()

    def _repair(self, index: int) -> None:
        self._touch(index).repair(self._held)
        heapq.heappush(self._loads, (0, index))
        self._plan_failure(index)
        self._settle()

    def _take(self) -> None:
        scheduler = self.scheduler
        version = scheduler.learner_version
        tickets = [self._buffer.popleft() for _ in range(scheduler.groups_per_batch)]
        scheduler.train(tickets)
        groups = [self._groups.pop(ticket) for ticket in tickets]
        tokens = sum(sum(group.counts) for group in groups)
        if version == self._first:
            self._begin_window()
        if self._first <= version < self._last:
            self._tokens += tokens
            self.lag.add(_lags(groups, learner_version=version))
        seconds = self.workload.train_seconds(tokens)
        self._seconds["train"] += seconds if version < self._last else 0.0
        self._learner_free = False
        self._at(self._now + seconds, self._trained)

    def _begin_window(self) -> None:
        self._window_start = self._now
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        for engine in self._engines:
            engine.advance(self._now)
            engine.seconds = dict.fromkeys(engine.seconds, 0.0)

    def _trained(self) -> None:
        self._made = self.scheduler.learner_version
        if self.workload.overlap_publish:
            self._learner_free = True
        else:
            self._seconds["publish"] += self.workload.publish_seconds
        if not self._publishing:
            self._send()
        self._settle()

    def _send(self) -> None:
        self._publishing = True
        arrival = self._now + self.workload.publish_seconds
        swap = arrival - self.workload.acknowledge_seconds
        if self.workload.pause_seconds:
            self._at(swap - self.workload.pause_seconds, self._hold_all)
        self._at(swap, partial(self._swap, self._made))
        self._at(arrival, partial(self._arrive, self._made))

    def _hold_all(self) -> None:
        for index in range(len(self._engines)):
            self._touch(index).hold()
        self._settle()

    def _let_go_all(self) -> None:
        for index in range(len(self._engines)):
            self._touch(index).let_go()
        self._settle()

    def _swap(self, version: int) -> None:
        self._held = version
        for index in range(len(self._engines)):
            engine = self._touch(index)
            engine.swap(version)
            if self.workload.pause_seconds:
                engine.let_go()
        self._settle()

    def _arrive(self, version: int) -> None:
        workload, before = self.workload, self.scheduler.version
        every = workload.evaluate_every
        evaluate = every > 0 and version // every > before // every
        if evaluate:
            for index in range(len(self._engines)):
                self._touch(index).hold()
        self.scheduler.publish(version)
        self._publishing = False
        self._learner_free = self._learner_free or not workload.overlap_publish
        if evaluate:
            self._at(self._now + workload.evaluation_seconds, self._let_go_all)
        if self._made > version:
            self._send()
        self._settle()


def _lags(groups: list[Group], *, learner_version: int) -> Lags:
    segments = [count for group in groups for count in group.segments]
    return segment_lags(
        torch.tensor([version for group in groups for version in group.versions]),
        torch.tensor([count for group in groups for count in group.counts]),
        torch.tensor([0, *itertools.accumulate(segments)]),
        learner_version=learner_version,
    )
