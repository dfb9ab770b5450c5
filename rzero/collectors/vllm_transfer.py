"""Ways of new weights into vLLM's workers: through shared memory, or by vLLM's own NCCL transfer.

Imports vLLM. Neither needs vLLM's flag for insecure serialisation: what travels as a message is names,
shapes and numbers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rzero.collectors.engine import EngineError
from rzero.collectors.vllm_rpc import ask_workers

SHARED_MEMORY = Path("/dev/shm")


class WeightTransfer(Protocol):
    """Brings weights into all workers of a vLLM engine that stands still.

    Attributes:
        keeps_old_weights: Whether all workers hold their old weights after a ``send`` that failed.
    """

    keeps_old_weights: bool

    def send(self, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """Load weights, all or none, into all workers or none.

        Raises:
            EngineError: If a worker then holds other weights than the digests say.
        """
        ...


class SharedMemoryTransfer:
    """Writes the weights to shared memory once, from where every worker of this machine loads them.

    Args:
        llm_engine: VLLM's ``LLMEngine``, with our worker extension.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._llm_engine = llm_engine
        self.keeps_old_weights = True

    def send(self, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """See ``WeightTransfer.send``; if one worker refuses, all hold their old weights."""
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        handle, path = tempfile.mkstemp(prefix="rzero-", suffix=".safetensors", dir=folder)
        os.close(handle)
        try:
            _write(weights, path)
            self._load(path, dict(digests))
        finally:
            os.unlink(path)

    def _load(self, path: str, digests: dict[str, int]) -> None:
        ask_workers(self._llm_engine, "rzero_check", path, digests)
        self.keeps_old_weights = False
        try:
            ask_workers(self._llm_engine, "rzero_load", path)
            ask_workers(self._llm_engine, "rzero_compare", digests)
        except EngineError:
            ask_workers(self._llm_engine, "rzero_end", True)
            self.keeps_old_weights = True
            raise
        ask_workers(self._llm_engine, "rzero_end", False)
        self.keeps_old_weights = True


def _write(weights: Mapping[str, Tensor], path: str) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
    except Exception as error:
        raise EngineError(f"VLLMEngine.swap: the weights must fit into a file {path}, got {error}") from error


class NCCLTransfer:
    """VLLM's own weight transfer: NCCL broadcasts from this process's GPU to the workers' GPUs.

    This process must not share a GPU with a worker, and vLLM must run in a process of its own.

    Args:
        llm_engine: VLLM's ``LLMEngine``, started with ``WeightTransferConfig(backend="nccl")``.
        workers: Number of its workers.
    """

    def __init__(self, llm_engine: Any, *, workers: int) -> None:
        self._llm_engine = llm_engine
        self.keeps_old_weights = False
        self._source = _Source()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        info = NCCLTrainerInitInfo(
            rank=0, master_address="127.0.0.1", master_port=port, world_size=workers + 1
        )
        self._sender = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self._source)

    def send(self, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """See ``WeightTransfer.send``; the old weights are gone while the new ones arrive."""
        self._source.weights = dict(weights)
        self._sender.send_weights()
        for held in ask_workers(self._llm_engine, "rzero_digests"):
            wrong = sorted(
                name for name in held.keys() | digests.keys() if held.get(name) != digests.get(name)
            )
            if wrong:
                raise EngineError(
                    f"VLLMEngine.swap: {len(wrong)} of {len(digests)} tensors differ from the learner's "
                    f"after loading, first {wrong[0]}"
                )

    # What vLLM's sender calls to reach the workers.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join the group."""
        self._llm_engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Have the workers get ready."""
        self._llm_engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the workers receive what is broadcast meanwhile."""
        self._llm_engine.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the workers use what they received; the engine labels the version itself."""
        self._llm_engine.collective_rpc("finish_weight_update")


class _Source(WeightSource):
    """The weights of the publish under way."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()
