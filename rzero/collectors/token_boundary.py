"""The token boundary: where the thread that samples stands still, so that other threads may act.

sampling --pause, hold--> standing (draws nothing) --resume, end of the last hold--> sampling
sampling --drain--> ends what is half sampled, starts nothing --end of the drain--> sampling
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from rzero.collectors.engine import EngineError, EngineLost


@final
class TokenBoundary:
    """How one sampling thread and any number of others meet between two tokens.

    Args:
        owner: Name of the engine, for its errors.

    Attributes:
        condition: Its lock guards what the threads share; the sampling thread waits on it.
        closed: Whether the engine was asked to stop for good.
        error: Why the sampling thread failed.
    """

    def __init__(self, owner: str) -> None:
        self.condition = threading.Condition()
        self.closed = False
        self.error: BaseException | None = None
        self._owner = owner
        self._paused = self._standing = False
        self._holds = self._drains = 0

    # ------------------------------------------------------------------ other threads

    def pause(self) -> None:
        """Have the thread stand until ``resume``; returns when it does, or when ``resume`` came before.

        Raises:
            EngineError: If the engine has failed.
            RuntimeError: If it is closed.
        """
        with self.condition:
            self._paused = True
            self._wait_for("pause", lambda: self._standing or not self._paused)

    def resume(self) -> None:
        """End the pause."""
        with self.condition:
            self._paused = False
            self.condition.notify_all()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Have the thread stand meanwhile; one holder at a time acts, in a pause or out of one."""
        with self.condition:
            self._holds += 1
            try:
                self._wait_for(caller, lambda: self._standing)
                yield
            finally:
                self._holds -= 1
                self.condition.notify_all()

    @contextmanager
    def drain(self, caller: str, is_empty: Callable[[], bool]) -> Iterator[None]:
        """Have the thread end what is half sampled first, and start nothing meanwhile.

        Raises:
            RuntimeError: If a pause keeps it from that.
        """
        with self.condition:
            if self._paused and not is_empty():
                raise RuntimeError(
                    f"{self._owner}.{caller}: the engine must not be paused while half-sampled responses are "
                    "to end first, call resume before"
                )
            self._drains += 1
        try:
            with self.condition:
                self._wait_for(caller, is_empty)
            yield
        finally:
            with self.condition:
                self._drains -= 1
                self.condition.notify_all()

    def refuse_if_stopped(self, caller: str) -> None:
        """Raise what ``pause`` raises."""
        if self.error is not None:
            kind = EngineLost if isinstance(self.error, EngineLost) else EngineError
            raise kind(f"{self._owner}.{caller}: the engine has failed: {self.error}") from self.error
        if self.closed:
            raise RuntimeError(f"{self._owner}.{caller}: the engine is closed")

    def close(self) -> None:
        """Ask the thread to end."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()

    def _wait_for(self, caller: str, reached: Callable[[], bool]) -> None:
        self.condition.notify_all()
        self.condition.wait_for(lambda: reached() or self.closed or self.error is not None)
        self.refuse_if_stopped(caller)

    # ------------------------------------------------------------------ the sampling thread

    @property
    def wanted(self) -> bool:
        """Whether somebody wants the thread to stand."""
        return self._paused or self._holds > 0

    @property
    def draining(self) -> bool:
        """Whether nothing may start."""
        return self._drains > 0

    def wait(self, has_work: Callable[[], bool]) -> bool:
        """Wait until there is something to do; returns whether the engine is still open."""
        with self.condition:
            self.condition.notify_all()  # a drain may wait for the last response
            self.condition.wait_for(lambda: self.closed or self.wanted or has_work())
            return not self.closed

    def stand(self) -> bool:
        """Stand while somebody wants it; returns whether the engine is still open.

        Raises:
            BaseException: The ``error`` that a holder left.
        """
        with self.condition:
            self._standing = True
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.closed or not self.wanted)
            self._standing = False
            if self.error is not None:
                raise self.error
            return not self.closed

    def fail(self, error: BaseException) -> None:
        """Tell all who wait, now or later, that the engine has failed."""
        with self.condition:
            self.error = error
            self.condition.notify_all()
