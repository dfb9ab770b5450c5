"""Deadlines that hold whatever the watched code does, also when it blocks its own thread or event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final


@final
class Watch:
    """One thing that may take a watchdog's time; see ``Watchdog.watch``."""

    __slots__ = ("deadline", "expire")

    def __init__(self, deadline: float, expire: Callable[[], object]) -> None:
        self.deadline = deadline
        self.expire: Callable[[], object] | None = expire

    def over(self) -> None:
        """It is done."""
        self.expire = None


@final
class Watchdog:
    """A thread that calls back when something takes too long.

    Every watch has the same time, so that the oldest one is always the next to expire.

    Args:
        seconds: Time of each watch, greater than 0.

    Raises:
        ValueError: If it is not.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"Watchdog: seconds must be greater than 0, got {seconds}")
        self.seconds = seconds
        self._watches: deque[Watch] = deque()
        self._condition = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="Watchdog", daemon=True).start()

    def watch(self, expire: Callable[[], object]) -> Watch:
        """Begin a watch.

        Args:
            expire: Called from the watchdog's thread if the watch is not over in time; it must not block, and
                in a rare race it is called although the watch was just over.
        """
        watch = Watch(time.monotonic() + self.seconds, expire)
        with self._condition:
            self._forget_the_past()
            self._watches.append(watch)
            if len(self._watches) == 1:
                self._condition.notify()
        return watch

    def close(self) -> None:
        """Watch no more."""
        with self._condition:
            self._closed = True
            self._watches.clear()
            self._condition.notify()

    def _run(self) -> None:
        while (expire := self._next_expired()) is not None:
            expire()

    def _next_expired(self) -> Callable[[], object] | None:
        with self._condition:
            while not self._closed:
                self._forget_the_past()
                if not self._watches:
                    self._condition.wait()
                    continue
                left = self._watches[0].deadline - time.monotonic()
                if left > 0:
                    self._condition.wait(left)
                elif (expire := self._watches.popleft().expire) is not None:
                    return expire
        return None

    def _forget_the_past(self) -> None:
        while self._watches and self._watches[0].expire is None:
            self._watches.popleft()
