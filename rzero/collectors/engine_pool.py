"""Which engine samples what, and which engines are lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from rzero.collectors.engine import EngineLost, GenerationEngine


@final
class EnginePool:
    """Engines with the number of responses that each has at the moment; safe between threads.

    Args:
        engines: At least one.
    """

    def __init__(self, engines: Sequence[GenerationEngine]) -> None:
        self._engines = list(engines)
        self._load = [0] * len(self._engines)
        self._lost: dict[int, BaseException] = {}
        self._lock = threading.Lock()

    @property
    def living(self) -> list[GenerationEngine]:
        """The engines that are not lost."""
        return [engine for index, engine in enumerate(self._engines) if index not in self._lost]

    def __getitem__(self, index: int) -> GenerationEngine:
        """The engine of an index that ``take`` gave."""
        return self._engines[index]

    def take(self, responses: int) -> int:
        """The index of the engine with the least to do, which gets so many responses more.

        Raises:
            EngineLost: If none is left.
        """
        with self._lock:
            candidates = [index for index in range(len(self._engines)) if index not in self._lost]
            if not candidates:
                index, error = next(reversed(self._lost.items()))
                raise EngineLost(f"all {len(self._engines)} engines are lost, the last: {error}") from error
            index = min(candidates, key=self._load.__getitem__)
            self._load[index] += responses
            return index

    def give_back(self, index: int) -> None:
        """One response of an engine is over."""
        with self._lock:
            self._load[index] -= 1

    def lose(self, index: int, error: BaseException) -> None:
        """Give an engine nothing more."""
        with self._lock:
            self._lost.setdefault(index, error)

    def busy_seconds(self) -> float:
        """How long an engine has been sampling so far, in seconds, mean over those that live."""
        living = self.living
        return sum(engine.busy_seconds() for engine in living) / max(1, len(living))
