"""Which engine samples what, and which engines are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import final

from rzero.collectors.engine import Completion, EngineLost, GenerationEngine, GenerationRequest


@final
class EnginePool:
    """Engines with the number of responses that each has at the moment; safe between threads.

    Args:
        engines: At least one.
        tolerate_lost: Whether the others go on when one is lost.
    """

    def __init__(self, engines: Sequence[GenerationEngine], *, tolerate_lost: bool = False) -> None:
        self._engines = list(engines)
        self._tolerate_lost = tolerate_lost
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

    def give_back(self, index: int, responses: int) -> None:
        """So many responses of an engine are over."""
        with self._lock:
            self._load[index] -= responses

    def lose(self, index: int, error: EngineLost) -> None:
        """Give an engine nothing more.

        Raises:
            EngineLost: The given error, if losing an engine is not tolerated.
        """
        if not self._tolerate_lost:
            raise error
        with self._lock:
            self._lost.setdefault(index, error)

    def sample(self, requests: Sequence[GenerationRequest], *, timeout: float) -> list[Completion]:
        """Sample requests on all engines and wait for them; what a lost engine had is sampled by another.

        Args:
            requests: In any number.
            timeout: Seconds that all of them may take.

        Raises:
            TimeoutError: If they take longer.
            EngineLost: If losing an engine is not tolerated, or none is left.
        """
        deadline = time.monotonic() + timeout
        done: dict[int, Completion] = {}
        while missing := [k for k in range(len(requests)) if k not in done]:
            placed = [(k, self.take(1)) for k in missing]
            futures = [self._submit(engine, requests[k]) for k, engine in placed]
            for (k, engine), future in zip(placed, futures, strict=True):
                try:
                    done[k] = future.result(timeout=max(0.0, deadline - time.monotonic()))
                except EngineLost as error:
                    self.lose(engine, error)
                except TimeoutError:
                    raise TimeoutError(
                        f"EnginePool.sample: {len(requests)} responses must be done within {timeout:g} s, "
                        f"got {len(done)}"
                    ) from None
                finally:
                    self.give_back(engine, 1)
        return [done[k] for k in range(len(requests))]

    def busy_seconds(self) -> float:
        """How long an engine has been sampling so far, in seconds, mean over those that live."""
        living = self.living
        return sum(engine.busy_seconds() for engine in living) / max(1, len(living))

    def _submit(self, index: int, request: GenerationRequest) -> Future[Completion]:
        try:
            return self._engines[index].submit(request)
        except EngineLost as error:
            future: Future[Completion] = Future()
            future.set_exception(error)
            return future
