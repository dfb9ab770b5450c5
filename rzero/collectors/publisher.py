"""New weights to all engines: atomic per engine, digested, acknowledged, in the background."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from rzero.collectors.engine import EngineError, EngineLost, GenerationEngine
from rzero.collectors.weights import named_weights, rounded, weight_digests

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What became of one publish.

    Attributes:
        version: The version published.
        engine_versions: The version that each engine holds afterwards.
        errors: What went wrong, by engine index; an engine named here kept its old version or is lost.
        seconds: From the copy of the weights to the last acknowledgement.
    """

    version: int
    engine_versions: tuple[int, ...]
    errors: dict[int, str]
    seconds: float


@final
class WeightPublisher:
    """Publishes weights to all engines, each atomically, and knows what every engine holds.

    Versions increase: the engines start with one, and each publish brings a greater one. The common version
    is the smallest that an engine acknowledged, so it does not advance while one of them failed.

    It is also a sender for TorchRL's trainers, which call ``update_weights()`` on it.

    Args:
        engines: Whom to publish to.
        wire_dtype: Floating-point weights travel in this dtype, e.g. ``torch.bfloat16`` at half the bytes of
            float32; the engines then hold the rounded values. The learner computes its log-probs with the
            same ones inside ``rounded_weights``. None: as they are.
        tolerate_lost: Go on with the other engines when one is lost (``EngineLost``), instead of an error.
        timeout: Seconds that an engine has to acknowledge.

    Example:
        See ``AsyncRolloutCollector``, which owns one.
    """

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        *,
        wire_dtype: torch.dtype | None = None,
        tolerate_lost: bool = False,
        timeout: float = 600.0,
    ) -> None:
        self._engines = list(engines)
        self._held = [engine.version() for engine in self._engines]
        self._lost: set[int] = set()
        self._wire_dtype, self.tolerate_lost = wire_dtype, tolerate_lost
        self._timeout = timeout
        self._done_callbacks: list[Callable[[Future[PublishReport]], object]] = []
        self._newest = max(self._held)
        self._last: Future[PublishReport] | None = None
        self._room = threading.Semaphore(2)  # one publish under way, one that waits
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._model: nn.Module | None = None
        self._seconds: list[float] = []

    def common_version(self) -> int:
        """The newest version that every engine has acknowledged, lost ones aside."""
        living = [held for index, held in enumerate(self._held) if index not in self._lost]
        return min(living or self._held)

    def mean_seconds(self) -> float:
        """Mean time of a publish, in seconds; 0 before the first."""
        return sum(self._seconds) / max(1, len(self._seconds))

    def publish(self, weights: Mapping[str, Tensor], version: int) -> PublishReport:
        """Load weights into every engine and wait for all acknowledgements.

        Args:
            weights: As by ``named_weights``.
            version: Greater than any published before.

        Raises:
            ValueError: If the version does not increase.
            EngineError: If an engine did not take the weights, after all engines were tried; the message
                names each.
        """
        self._require_newer(version)
        return self._publish(weights, version, time.perf_counter())

    def publish_async(self, weights: nn.Module | Mapping[str, Tensor], version: int) -> Future[PublishReport]:
        """Copy the weights now and publish the copy in the background, so that the next update can begin.

        Publishes go one after the other. One may wait for another; a further call waits until it begins.

        Args:
            weights: The learner's model, or its weights as by ``named_weights``.
            version: Greater than any published before.

        Raises:
            ValueError: If the version does not increase.
        """
        self._require_newer(version)
        self._room.acquire()
        started = time.perf_counter()
        named = named_weights(weights) if isinstance(weights, nn.Module) else weights
        copy = {name: tensor.clone() for name, tensor in named.items()}
        future = self._last = Future()
        for callback in self._done_callbacks:
            future.add_done_callback(callback)

        def task() -> None:
            try:
                _resolve(future, partial(self._publish, copy, version, started))
            finally:
                self._room.release()

        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work_off, args=(self._tasks,), name="publish", daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return future

    def add_done_callback(self, callback: Callable[[Future[PublishReport]], object]) -> None:
        """Call something after each publish in the background with its future, also when it failed."""
        self._done_callbacks.append(callback)

    def wait(self) -> PublishReport | None:
        """Wait for the publish under way and return its report; None if nothing was published so far.

        Raises:
            EngineError: If it failed.
        """
        return None if self._last is None else self._last.result()

    def register_model(self, model: nn.Module) -> None:
        """Name the model that ``update_weights`` publishes."""
        self._model = model

    def update_weights(self) -> None:
        """Publish the registered model in the background as the next version, as TorchRL's trainers ask.

        Raises:
            RuntimeError: If no model is registered.
        """
        if self._model is None:
            raise RuntimeError("WeightPublisher.update_weights: register_model(model) must come first")
        self.publish_async(self._model, self._newest + 1)

    def _require_newer(self, version: int) -> None:
        if version <= self._newest:
            raise ValueError(
                f"WeightPublisher.publish: version must be greater than {self._newest}, got {version}"
            )
        self._newest = version

    def _publish(self, weights: Mapping[str, Tensor], version: int, started: float) -> PublishReport:
        wire = weights if self._wire_dtype is None else rounded(weights, self._wire_dtype)
        digests = weight_digests({name: wire[name].to(tensor.dtype) for name, tensor in weights.items()})
        swaps = {
            index: _in_background(partial(engine.swap, version, wire, digests), f"swap-{index}-{version}")
            for index, engine in enumerate(self._engines)
            if index not in self._lost
        }
        wait(swaps.values(), timeout=self._timeout)
        errors: dict[int, str] = {}
        cause: EngineError | None = None
        for index, swap in swaps.items():
            error = swap.exception() if swap.done() else EngineError(self._overdue())
            if error is None:
                self._held[index] = version
            elif isinstance(error, EngineError):
                errors[index], cause = str(error), cause or error
                if isinstance(error, EngineLost) and self.tolerate_lost:
                    self._lost.add(index)
            else:
                raise error
        if errors.keys() - self._lost or len(self._lost) == len(self._engines):
            listed = "; ".join(f"engine {i} keeps version {self._held[i]}: {e}" for i, e in errors.items())
            raise EngineError(
                f"WeightPublisher.publish: version {version} reached not every engine: {listed}"
            ) from cause
        self._seconds.append(time.perf_counter() - started)
        return PublishReport(
            version=version, engine_versions=tuple(self._held), errors=errors, seconds=self._seconds[-1]
        )

    def _overdue(self) -> str:
        return f"no acknowledgement within {self._timeout:g} s"


def _work_off(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the next wait would keep what it publishes, and its publisher


def _in_background(work: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Run work in a thread of its own that no exit of the process waits for."""
    future: Future[ResultT] = Future()
    threading.Thread(target=_resolve, args=(future, work), name=name, daemon=True).start()
    return future


def _resolve(future: Future[ResultT], work: Callable[[], ResultT]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
