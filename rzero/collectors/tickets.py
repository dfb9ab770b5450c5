"""The life of a ticket, common to all schedulers; `rzero.collectors.scheduler` draws it, adds the rules."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any


class Scheduler(ABC):
    """The life of tickets that all schedulers share; see the drawing in `rzero.collectors.scheduler`.

    Args:
        groups_per_batch: Groups per optimizer update, P.
        version: Version of the weights from which the run starts, when it does not start from scratch.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If `groups_per_batch` is below 1 or `version` is negative.
    """

    def __init__(self, *, groups_per_batch: int, version: int = 0) -> None:
        """Starts with no ticket; see the class for the arguments."""
        require_int(self, "groups_per_batch", groups_per_batch, least=1)
        require_int(self, "version", version, least=0)
        self.groups_per_batch = groups_per_batch
        self._version = version
        self._learner_version = version
        self._submitted = self._accepted = self._filtered = self._failed = self._trained = 0
        self._start: dict[int, int] = {}  # ticket -> version at admission, of every ticket not yet trained on
        self._running: dict[int, None] = {}  # a set in ticket order: the first one is the oldest
        self._finished: list[int] = []  # sorted
        self._released: dict[int, None] = {}  # a set in order of release

    @property
    @abstractmethod
    def hard_bound(self) -> float:
        """No group is ever trained on with a larger start lag: an int, or `math.inf` if there is no bound."""

    @property
    @abstractmethod
    def nominal_lag(self) -> int:
        """The configured lag, which is not the measured one."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most groups that can be in work, from admission until they give their room back."""

    @abstractmethod
    def _room(self) -> int:
        """How many more groups may start now."""

    @abstractmethod
    def _releasable(self) -> int:
        """How many more finished groups may wait in front of the learner."""

    @abstractmethod
    def _window(self) -> float:
        """How many tickets younger than the oldest running one may be released."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What a restored state must agree on."""

    def admit(self) -> int | None:
        """Starts one more group now, at the current `version`.

        Returns:
            Its ticket, or None if it may not start yet.
        """
        if self._room() <= 0:
            return None
        ticket = self._submitted
        self._submitted += 1
        self._start[ticket] = self._version
        self._running[ticket] = None
        self._check()
        return ticket

    def accept(self, ticket: int) -> None:
        """The group is complete: all its responses are there and have their rewards.

        Raises:
            RuntimeError: If the ticket is not running.
        """
        if ticket not in self._running:
            raise RuntimeError(f"{self._name}.accept: ticket must be running, got {ticket!r}")
        del self._running[ticket]
        insort(self._finished, ticket)
        self._accepted += 1
        self._check()

    def filter(self, ticket: int) -> None:
        """The group left by choice, without being trained on; its capacity is returned.

        Raises:
            RuntimeError: If the ticket is unknown, already left or already trained on.
        """
        self._leave(ticket, "filter")
        self._filtered += 1
        self._check()

    def fail(self, ticket: int) -> None:
        """The group was lost: error, timeout, dead engine; its capacity is returned.

        Serving its prompt again is the caller's choice, under a new ticket.

        Raises:
            RuntimeError: If the ticket is unknown, already left or already trained on.
        """
        self._leave(ticket, "fail")
        self._failed += 1
        self._check()

    def release(self) -> list[int]:
        """Hands out the tickets that may go to the learner now.

        Returns:
            Newly released tickets, in the order in which the learner consumes them; each is returned once.
        """
        oldest = next(iter(self._running), math.inf)
        passing = bisect_left(self._finished, oldest + self._window())
        count = min(passing, self._releasable())
        if count <= 0:
            return []
        tickets, self._finished = self._finished[:count], self._finished[count:]
        self._released |= dict.fromkeys(tickets)
        self._check()
        return tickets

    def train(self, tickets: Sequence[int]) -> None:
        """The learner has taken these groups for the update of `learner_version`, which thereby grows by one.

        Args:
            tickets: Exactly `groups_per_batch` released tickets, in any order.

        Raises:
            ValueError: If their number is wrong or one appears twice.
            RuntimeError: If one is not released, or was started longer ago than `hard_bound` allows.
        """
        if len(tickets) != self.groups_per_batch or len(set(tickets)) != len(tickets):
            raise ValueError(
                f"{self._name}.train: tickets must be {self.groups_per_batch} different ones, "
                f"got {list(tickets)}"
            )
        for ticket in tickets:
            if ticket not in self._released:
                raise RuntimeError(f"{self._name}.train: every ticket must be released, got {ticket!r}")
            lag = self._learner_version - self._start[ticket]
            if lag > self.hard_bound:
                raise RuntimeError(
                    f"{self._name}.train: start lag must be at most {self.hard_bound}, got {lag} "
                    f"(ticket {ticket} started at version {self._start[ticket]}, "
                    f"the learner is at {self._learner_version})"
                )
        for ticket in tickets:
            del self._released[ticket], self._start[ticket]
        self._trained += len(tickets)
        self._learner_version += 1
        self._check()

    def publish(self, version: int) -> None:
        """Weights `version` are now on every engine: the groups trained on up to it give their room back.

        Raises:
            RuntimeError: If that version was not made yet, or is older than the one published last.
        """
        require_int(self, "version", version, least=0)
        if not self._version <= version <= self._learner_version:
            raise RuntimeError(
                f"{self._name}.publish: version must lie between the published {self._version} and the "
                f"learner's {self._learner_version}, got {version}"
            )
        self._version = version
        self._check()

    @property
    def version(self) -> int:
        """Newest version that is on every engine."""
        return self._version

    @property
    def learner_version(self) -> int:
        """Number of updates for which the learner has taken its groups."""
        return self._learner_version

    @property
    def running(self) -> tuple[int, ...]:
        """Tickets that are running, oldest first: after a restore, these prompts must be served again."""
        return tuple(self._running)

    @property
    def finished(self) -> tuple[int, ...]:
        """Tickets that are complete and not released, oldest first: their groups are with the caller."""
        return tuple(self._finished)

    @property
    def released(self) -> tuple[int, ...]:
        """Tickets that are released and not trained on, in the learner's order."""
        return tuple(self._released)

    @property
    def counts(self) -> dict[str, int]:
        """Groups by fate; `submitted`, `accepted`, `filtered`, `failed` and `trained` grow for ever."""
        return {
            "submitted": self._submitted,
            "accepted": self._accepted,
            "filtered": self._filtered,
            "failed": self._failed,
            "running": len(self._running),
            "finished": len(self._finished),
            "released": len(self._released),
            "trained": self._trained,
        }

    @property
    def drained(self) -> bool:
        """True if nothing is in flight: no ticket is untrained and every update is published."""
        return not self._start and self._version == self._learner_version

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state as plain ints, strings, lists and dicts, ready for JSON."""
        return {
            "settings": self._settings(),
            "version": self._version,
            "learner_version": self._learner_version,
            "counts": self.counts,
            "start": [[ticket, version] for ticket, version in self._start.items()],
            "running": list(self._running),
            "finished": list(self._finished),
            "released": list(self._released),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: the restored scheduler admits what the saved one would.

        Raises:
            ValueError: If the state was saved under other settings.
            RuntimeError: If the state's counts do not add up.
        """
        if state["settings"] != self._settings():
            raise ValueError(
                f"{self._name}.load_state_dict: settings must be {self._settings()}, got {state['settings']}"
            )
        counts = state["counts"]
        self._version, self._learner_version = state["version"], state["learner_version"]
        self._submitted, self._accepted = counts["submitted"], counts["accepted"]
        self._filtered, self._failed, self._trained = counts["filtered"], counts["failed"], counts["trained"]
        self._start = dict(state["start"])
        self._running = dict.fromkeys(state["running"])
        self._finished = list(state["finished"])
        self._released = dict.fromkeys(state["released"])
        self._check()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _leave(self, ticket: int, verb: str) -> None:
        if ticket in self._running:
            del self._running[ticket]
        elif ticket in self._start:
            self._accepted -= 1
            if ticket in self._released:
                del self._released[ticket]
            else:
                self._finished.remove(ticket)
        else:
            raise RuntimeError(f"{self._name}.{verb}: ticket must be in flight and untrained, got {ticket!r}")
        del self._start[ticket]

    def _check(self) -> None:
        counts = self.counts
        left = counts["accepted"] + counts["filtered"] + counts["failed"] + counts["running"]
        held = counts["finished"] + counts["released"] + counts["trained"]
        untrained = counts["running"] + counts["finished"] + counts["released"]
        whole = counts["submitted"] == left and counts["accepted"] == held and untrained == len(self._start)
        if not whole or min(counts.values()) < 0:
            raise RuntimeError(
                f"{self._name}: submitted must equal accepted + filtered + failed + running and accepted "
                f"must equal finished + released + trained, got {counts} with {len(self._start)} untrained"
            )


def require_int(scheduler: Scheduler, name: str, value: object, *, least: int) -> None:
    """Refuses a setting that is not an int or is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(scheduler).__name__}: {name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{type(scheduler).__name__}: {name} must be at least {least}, got {value}")
