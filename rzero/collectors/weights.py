"""Weights on their way to the engines: named, digested, checked after loading, acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rzero.collectors.engine import EngineError, GenerationEngine
from rzero.collectors.hashing import tensor_digest


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once (tied ones under their first name) and every persistent buffer, as views."""
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict(keep_vars=False)
    weights.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return weights


def weight_digests(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """One 64-bit digest per tensor, see ``tensor_digest``."""
    return {name: tensor_digest(tensor) for name, tensor in weights.items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
    """Write weights into a model in place, all or none, and check what the model holds afterwards.

    Args:
        model: Receives them; its tensors keep their identity.
        weights: Exactly the names, shapes and dtypes of ``named_weights(model)``.
        digests: Of the weights as the learner holds them.

    Raises:
        EngineError: If names, shapes or dtypes differ, or if a tensor read back from the model has another
            digest. The model then holds its old weights.
    """
    own = named_weights(model)
    if own.keys() != weights.keys() or own.keys() != digests.keys():
        odd = sorted((own.keys() ^ weights.keys()) | (own.keys() ^ digests.keys()))
        raise EngineError(
            f"load_weights: weights must name exactly the model's tensors, differing in {odd[:5]}"
        )
    for name, tensor in own.items():
        new = weights[name]
        if new.shape != tensor.shape or new.dtype != tensor.dtype:
            raise EngineError(
                f"load_weights: {name} must be {tensor.dtype} {tuple(tensor.shape)}, "
                f"got {new.dtype} {tuple(new.shape)}"
            )
    old = {name: tensor.clone() for name, tensor in own.items()}
    for name, tensor in own.items():
        tensor.copy_(weights[name])
    wrong = [name for name, tensor in own.items() if tensor_digest(tensor) != digests[name]]
    if wrong:
        for name, tensor in own.items():
            tensor.copy_(old[name])
        raise EngineError(
            f"load_weights: {len(wrong)} of {len(own)} tensors differ from the learner's after loading, "
            f"first {wrong[0]}; the old weights were restored"
        )


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What became of one publish.

    Attributes:
        version: The version published.
        engine_versions: The version that each engine holds afterwards.
        errors: What went wrong, by engine index; an engine named here kept its old version.
    """

    version: int
    engine_versions: tuple[int, ...]
    errors: dict[int, str]


class WeightPublisher:
    """Publishes weights to all engines, each atomically, and knows what every engine holds.

    Versions are consecutive: 0 is what the engines start with, and each publish adds one. The common version
    is the smallest that an engine acknowledged, so it does not advance while one of them failed.

    Args:
        engines: Whom to publish to.

    Example:
        See ``AsyncRolloutCollector``, which owns one.
    """

    def __init__(self, engines: Sequence[GenerationEngine]) -> None:
        self._engines = list(engines)
        self._held = [engine.version() for engine in self._engines]
        self._last: Future[PublishReport] | None = None

    def common_version(self) -> int:
        """The newest version that every engine has acknowledged."""
        return min(self._held)

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
        if version <= max(self._held):
            raise ValueError(
                f"WeightPublisher.publish: version must be greater than {max(self._held)}, got {version}"
            )
        digests = weight_digests(weights)
        errors: dict[int, str] = {}
        with ThreadPoolExecutor(len(self._engines)) as pool:
            swaps = [pool.submit(engine.swap, version, weights, digests) for engine in self._engines]
        for index, swap in enumerate(swaps):
            error = swap.exception()
            if error is None:
                self._held[index] = version
            elif isinstance(error, EngineError):
                errors[index] = str(error)
            else:
                raise error
        report = PublishReport(version=version, engine_versions=tuple(self._held), errors=errors)
        if errors:
            listed = "; ".join(f"engine {i} keeps version {self._held[i]}: {e}" for i, e in errors.items())
            raise EngineError(
                f"WeightPublisher.publish: version {version} reached not every engine: {listed}"
            )
        return report

    def wait(self) -> PublishReport | None:
        """Wait for the publish under way and return its report; None if nothing was published so far.

        Raises:
            EngineError: If it failed.
        """
        return None if self._last is None else self._last.result()

    def publish_async(
        self, model: nn.Module, version: int, *, on_done: Callable[[Future[PublishReport]], object]
    ) -> Future[PublishReport]:
        """Copy the weights now and publish the copy in the background, so that the next update can begin.

        At most one publish is under way: a second call waits for the first.

        Args:
            model: The learner's.
            version: Greater than any published before.
            on_done: Called with the future from the publishing thread, also when it failed.
        """
        if self._last is not None:
            self._last.exception()  # waits; whoever holds the future deals with an error in it
        copy = {name: tensor.clone() for name, tensor in named_weights(model).items()}
        future: Future[PublishReport] = Future()
        future.add_done_callback(on_done)
        self._last = future

        def run() -> None:
            try:
                future.set_result(self.publish(copy, version))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"publish-{version}", daemon=True).start()
        return future
