"""Who may start, and in which order the learner gets what has finished.

A scheduler is a pure object: no thread, no clock, no tensor. It counts *groups* (all responses of one
prompt) and hands out one ticket per group, 0, 1, 2, ... The caller tells it what happened and, after
**every** event, asks ``release()`` once and then ``admit()`` until it says None. The collector's event loop
and the simulator in `rzero.collectors.simulate` drive the same objects.

The life of a ticket::

             admit()        accept(t)         release()         train([t, ...])        publish(v)
    (room) ----------> running -------> finished -------> released -------> trained -------> (room again)
                          |                 |                 |
                          +-----------------+-----------------+---> filter(t) or fail(t): room again, at once

    * submitted = accepted + filtered + failed + running, and accepted = finished + released + trained, after
      every event: capacity is never lost. A ticket that was accepted and then leaves untrained changes its
      column.
    * `release` hands out the oldest finished tickets that the order lets pass. The learner takes them first
      in, first out, ``groups_per_batch`` at a time. Groups that are finished and not released stay with the
      caller, who keeps them under their ticket.
    * One update trains on exactly ``groups_per_batch`` groups; ``learner_version`` counts updates and
      ``version`` is the newest that every engine runs. ``train`` belongs to the moment at which the learner
      takes the groups, before it computes the update.

How the two schedulers differ, with P groups per batch:

    ==================  ======================================================  ===========================
    scheduler           one more group may start while                          released, not trained
    ==================  ======================================================  ===========================
    CreditScheduler     running + finished + released + P * (updates not yet    at most P
                        published) < (nominal_lag + 1) * P
    SlotScheduler       running + finished < in_flight                          at most queue * P
    ==================  ======================================================  ===========================
"""

import math
from dataclasses import dataclass
from typing import Any, final

from rzero.collectors.tickets import Scheduler, require_int

__all__ = ["CreditScheduler", "Order", "Scheduler", "SlotScheduler", "finished_first", "strict", "windowed"]


@final
@dataclass(frozen=True, kw_only=True)
class Order:
    """How far a finished group may pass an unfinished older one.

    A finished ticket may be released while it is less than `window` tickets younger than the oldest running
    one. Make one with `strict`, `windowed` or `finished_first`.

    Attributes:
        fraction: Size of the window as a part of all credits; 0 is strict, infinity is no limit.

    Raises:
        ValueError: If `fraction` is neither in [0, 1] nor infinite.
    """

    fraction: float

    def __post_init__(self) -> None:
        """Refuses a fraction that is no window."""
        if not (0 <= self.fraction <= 1 or self.fraction == math.inf):
            raise ValueError(f"Order: fraction must lie in [0, 1] or be infinite, got {self.fraction}")

    def window(self, capacity: int) -> float:
        """Returns the window W in tickets, at least 1, for a scheduler that holds `capacity` groups."""
        if math.isinf(self.fraction):
            return math.inf
        # The small term keeps 0.29 * 100 from becoming 28.
        return max(1, math.floor(self.fraction * capacity + 1e-9))


def strict() -> Order:
    """Tickets are trained on in the order in which they started: the least lag, and the slowest.

    Example:
        >>> strict().window(capacity=32)
        1
    """
    return Order(fraction=0.0)


def windowed(fraction: float) -> Order:
    """A finished ticket may pass an unfinished older one within a window anchored at the oldest running one.

    Args:
        fraction: In [0, 1]; the window is ``floor(fraction * (nominal_lag + 1) * groups_per_batch)``, or 1 if
            that is 0.

    Raises:
        ValueError: If `fraction` is outside [0, 1].

    Example:
        >>> windowed(0.3).window(capacity=9 * 64)
        172
    """
    return Order(fraction=float(fraction))


def finished_first() -> Order:
    """The learner never waits for a slow group: it gets the oldest ones of those that have finished.

    Example:
        >>> finished_first().window(capacity=32)
        inf
    """
    return Order(fraction=math.inf)


@final
class CreditScheduler(Scheduler):
    """At most (S + 1) * P groups are started and not yet trained on and published.

    By Little's law the mean start lag of a saturated run is S in any order, because S * P groups are left
    each time the learner takes P. The order sets the tail and the price: a hard bound makes the learner wait
    for slow groups. S = 0 is synchronous with the same code: nothing starts before the last update is
    published, so the lag is exactly 0.

    The bound: when a group starts at version u, the u * P groups before that are trained on, and at most
    (S + 1) * P - 1 older ones are not. In an order with window W at most W - 1 younger ones pass it. So it is
    trained on at the latest in update ``u + ((S + 1) * P + W - 2) // P = u + S + ceil((W - 1) / P)``.

    Args:
        nominal_lag: S, how many updates a group may be behind on average; 0 is synchronous.
        groups_per_batch: P, groups per optimizer update.
        order: `strict()`, `windowed(fraction)` or `finished_first()`.
        version: Version of the weights from which the run starts.

    Raises:
        TypeError: If a number is not an int or `order` is not an `Order`.
        ValueError: If a number is out of range.

    Reference:
        The credits and the anchored window follow TorchTitan's RL experiment (`RolloutGroupWorkBuffer`) and
        MiniMax, arXiv 2605.26494, section 6.2.4. Here the order is a parameter and the bound is checked at
        every update.

    Example:
        >>> scheduler = CreditScheduler(nominal_lag=0, groups_per_batch=2, order=strict())
        >>> scheduler.admit(), scheduler.admit(), scheduler.admit()
        (0, 1, None)
        >>> scheduler.accept(1); scheduler.release()
        []
        >>> scheduler.accept(0); scheduler.release()
        [0, 1]
        >>> scheduler.train([0, 1]); scheduler.admit()  # the update is not on the engines yet
        >>> scheduler.publish(1); scheduler.drained, scheduler.admit()
        (True, 2)
    """

    def __init__(self, *, nominal_lag: int, groups_per_batch: int, order: Order, version: int = 0) -> None:
        """Starts with no ticket; see the class for the arguments."""
        super().__init__(groups_per_batch=groups_per_batch, version=version)
        require_int(self, "nominal_lag", nominal_lag, least=0)
        if not isinstance(order, Order):
            raise TypeError(f"CreditScheduler: order must be an Order, got {type(order).__name__}")
        self._nominal_lag = nominal_lag
        self.order = order

    @property
    def nominal_lag(self) -> int:
        """S."""
        return self._nominal_lag

    @property
    def capacity(self) -> int:
        """(S + 1) * P groups."""
        return (self._nominal_lag + 1) * self.groups_per_batch

    @property
    def hard_bound(self) -> float:
        """S + ceil((W - 1) / P); 0 for S = 0, whatever the order; `math.inf` without a window."""
        window = self._window()
        if self.nominal_lag == 0 or math.isinf(window):
            return 0 if self.nominal_lag == 0 else math.inf
        return self.nominal_lag + math.ceil((window - 1) / self.groups_per_batch)

    def _room(self) -> int:
        unpublished = self._learner_version - self._version
        return self.capacity - len(self._start) - self.groups_per_batch * unpublished

    def _releasable(self) -> int:
        # One batch ahead, not more: a slow group that finishes now still goes before younger ones.
        return self.groups_per_batch - len(self._released)

    def _window(self) -> float:
        return self.order.window(self.capacity)

    def _settings(self) -> dict[str, Any]:
        fraction = self.order.fraction
        return {
            "scheduler": "credit",
            "nominal_lag": self.nominal_lag,
            "groups_per_batch": self.groups_per_batch,
            "fraction": "inf" if math.isinf(fraction) else fraction,
        }


@final
class SlotScheduler(Scheduler):
    """A queue of Q batches, and C groups in flight whatever the queue holds.

    A finished group moves into the queue while there is a place, which the learner frees when it *takes* a
    batch, before it trains on it; a finished group that finds no place keeps its place in flight. So Q * P +
    C groups are in work while the learner is the slower side, and the mean start lag is Q + C / P, not Q;
    where sampling is the slower side the queue is empty and the lag is about C / P, whatever Q. Nothing
    bounds the lag of a single group.

    Args:
        queue: Q, batches that wait for the learner; at least 1.
        in_flight: C, groups that are sampled at the same time.
        groups_per_batch: P, groups per optimizer update.
        version: Version of the weights from which the run starts.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is out of range.

    Reference:
        The arrangement of Molt (`rollout_slots`, `rollout_queue`), whose nominal 8 measures about 10.5. We
        differ in one point: there the last refill of a batch waits for the next slot, one group of C.

    Example:
        >>> scheduler = SlotScheduler(queue=1, in_flight=2, groups_per_batch=1)
        >>> scheduler.admit(), scheduler.admit(), scheduler.admit()
        (0, 1, None)
        >>> scheduler.accept(1); scheduler.release(), scheduler.admit()
        ([1], 2)
        >>> scheduler.accept(0); scheduler.release(), scheduler.admit()
        ([], None)
        >>> scheduler.train([1]); scheduler.release(), scheduler.admit()
        ([0], 3)
    """

    def __init__(self, *, queue: int, in_flight: int, groups_per_batch: int, version: int = 0) -> None:
        """Starts with no ticket; see the class for the arguments."""
        super().__init__(groups_per_batch=groups_per_batch, version=version)
        require_int(self, "queue", queue, least=1)
        require_int(self, "in_flight", in_flight, least=1)
        self.queue = queue
        self.in_flight = in_flight

    @property
    def nominal_lag(self) -> int:
        """Q, the number by which such runs are named."""
        return self.queue

    @property
    def capacity(self) -> int:
        """Q * P + C groups; those being trained on do not count here."""
        return self.queue * self.groups_per_batch + self.in_flight

    @property
    def hard_bound(self) -> float:
        """`math.inf`: a slow group may be passed by any number of others."""
        return math.inf

    def _room(self) -> int:
        return self.in_flight - len(self._running) - len(self._finished)

    def _releasable(self) -> int:
        return self.queue * self.groups_per_batch - len(self._released)

    def _window(self) -> float:
        return math.inf

    def _settings(self) -> dict[str, Any]:
        return {
            "scheduler": "slot",
            "queue": self.queue,
            "in_flight": self.in_flight,
            "groups_per_batch": self.groups_per_batch,
        }
