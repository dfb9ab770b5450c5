"""VLLM's own engine, started so that its evidence is complete, and the few things that we have it do.

Imports vLLM. All calls come from one thread at a time.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from rzero.buffers import SamplingContext
from rzero.collectors.engine import EngineError
from rzero.collectors.vllm_rpc import ask_workers
from rzero.collectors.vllm_transfer import NCCLTransfer, SharedMemoryTransfer, WeightTransfer

KERNELS = "RZERO_VLLM_KERNELS"  # what the plugin of rzero.kernels reads in vLLM's processes
CPU_CACHE_BYTES = 1 << 30
WORKER_EXTENSION = "rzero.collectors.vllm_worker.WorkerExtension"
_OURS = ("model", "max_num_seqs", "logprobs_mode", "worker_extension_cls", "weight_transfer_config")
_OURS += ("async_scheduling", "generation_config", "skip_tokenizer_init")


class VLLMCore:
    """One ``LLMEngine``, in this process or with its engine core in a process of its own.

    Args:
        model: Folder of a Hugging Face model.
        max_slots: Responses sampled at the same time.
        kernels: ``native``, or what ``RZERO_VLLM_KERNELS`` may name.
        own_process: Whether the engine core gets one.
        transfer: ``shared_memory`` or ``nccl``.
        load_weights: False leaves the weights random, for those that will be sent.
        engine_args: More of vLLM's ``EngineArgs``.
    """

    _in_process = False  # vLLM keeps one state a process

    def __init__(
        self,
        model: Path,
        *,
        max_slots: int,
        kernels: str,
        own_process: bool,
        transfer: str,
        load_weights: bool,
        engine_args: Mapping[str, Any],
    ) -> None:
        self._own_process = own_process
        args = _engine_args(model, max_slots, kernels, transfer, load_weights, engine_args)
        self._refuse_second_state()
        with _environment(kernels), ExitStack() as on_failure:
            self._restore_vllm = (lambda: None) if own_process else _plugin()()
            on_failure.callback(self._restore_vllm)
            on_failure.callback(lambda: None if own_process else cleanup_dist_env_and_memory())
            config = args.create_engine_config()
            self._engine = LLMEngine(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=False,
                multiprocess_mode=own_process,
            )
            VLLMCore._in_process |= not own_process
            if own_process:
                _watch(self._engine.engine_core)
            on_failure.pop_all()
            on_failure.callback(self.close)
            self._fingerprint = self._prepare(kernels)
            self._transfer: WeightTransfer = (
                NCCLTransfer(self._engine, workers=config.parallel_config.world_size)
                if transfer == "nccl"
                else SharedMemoryTransfer(self._engine)
            )
            on_failure.pop_all()
        self.vocabulary: int = config.model_config.get_vocab_size()
        self.max_model_len: int = config.model_config.max_model_len
        self._config = config

    def _refuse_second_state(self) -> None:
        if self._own_process:
            return
        if VLLMCore._in_process:
            raise RuntimeError(
                "VLLMEngine: at most one engine may run inside a process; close it or set own_process=True"
            )
        if torch.distributed.is_initialized():
            raise RuntimeError(
                "VLLMEngine: own_process must be True where torch.distributed is initialised, got False"
            )

    def _prepare(self, kernels: str) -> str:
        """Fingerprint of the kernels, as the workers say."""
        said: list[dict[str, str]] = ask_workers(self._engine, "rzero_prepare")
        found = {worker["kernels"] for worker in said}
        if kernels == "native" and found != {""}:
            raise EngineError(
                f"VLLMEngine: vLLM must compute with its own kernels, got {sorted(found)}, put there by an "
                "earlier engine of this process; set own_process=True"
            )
        if kernels != "native" and "" in found:
            raise EngineError(
                f"VLLMEngine: kernels {kernels!r} must be under every worker, got vLLM's own in one; "
                "is VLLM_PLUGINS set without rzero?"
            )
        return found.pop() or f"native-vllm-{vllm.__version__}-{said[0]['device']}"

    def context(self, temperature: float, tokenizer_digest: str) -> SamplingContext:
        """The law that tokens are drawn by."""
        model = self._config.model_config
        config = transformers.AutoConfig.from_pretrained(model.model).to_json_string(use_diff=False)
        return SamplingContext(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            log_prob_mode="processed",
            engine="VLLMEngine",
            engine_version=vllm.__version__,
            kernel_fingerprint=self._fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            tensor_parallel_size=self._config.parallel_config.tensor_parallel_size,
            model_digest=hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
            tokenizer_digest=tokenizer_digest,
        )

    def add(self, name: str, prompt: Sequence[int], params: Any, *, salt: str) -> str:
        """Queue a request; only requests of one salt share keys and values. Returns vLLM's own name."""
        return self._engine.add_request(name, {"prompt_token_ids": list(prompt), "cache_salt": salt}, params)

    def abort(self, internal_name: str) -> Any:
        """Stop a request; returns its last output, empty of tokens, with all its weight versions."""
        self._engine.engine_core.abort_requests([internal_name])
        last = EngineCoreOutput(internal_name, [], finish_reason=FinishReason.ABORT)
        return self._engine.output_processor.process_outputs([last]).request_outputs[0]

    def step(self) -> list[Any]:
        """Draw, or wait for, one token of every running request."""
        return self._engine.step()

    def stop_drawing(self) -> list[Any]:
        """Stand at a token boundary; returns what was drawn up to it and not yet taken."""
        if not self._own_process:  # without step() nothing is drawn
            return []
        self._engine.sleep(level=0, mode="keep")
        outputs: list[Any] = []
        while self._engine.engine_core.outputs_queue.qsize():
            outputs += self._engine.step()
        return outputs

    def go_on(self) -> None:
        """End ``stop_drawing``."""
        if self._own_process:
            self._engine.wake_up(tags=["scheduling"])

    def load(self, weights: Mapping[str, Tensor], digests: Mapping[str, int], version: int) -> None:
        """Load weights into all workers and label what they draw from now on."""
        self._transfer.send(weights, digests)
        self.label(version)

    def label(self, version: int) -> None:
        """Have vLLM stamp this version on every token from now on."""
        self._engine.set_weight_version(str(version))

    def forget_cache(self, *, running: bool) -> None:
        """Empty the prefix cache; requests that are running are computed anew, or must be none."""
        if not self._engine.reset_prefix_cache(reset_running_requests=running):
            raise EngineError("VLLMEngine: the prefix cache must be empty after a swap, vLLM kept it")

    def digests(self) -> dict[str, int]:
        """Digests of the weights that the workers compute with, who must agree."""
        first, *others = ask_workers(self._engine, "rzero_digests")
        if any(digests != first for digests in others):
            raise EngineError("VLLMEngine: all workers must hold the same weights, got others")
        return first

    @property
    def keeps_old_weights(self) -> bool:
        """Whether a ``load`` that failed left the weights as they were."""
        return self._transfer.keeps_old_weights

    @staticmethod
    def is_dead(error: BaseException) -> bool:
        """Whether an error says that the engine core's process is gone."""
        return isinstance(error, EngineDeadError)

    def close(self) -> None:
        """Stop for good."""
        client = self._engine.engine_core
        client.shutdown()
        if self._own_process:  # vLLM leaves its sockets' context open
            client.output_queue_thread.join()
            client.ctx.destroy(linger=0)
        self._restore_vllm()
        VLLMCore._in_process &= self._own_process


def _watch(client: Any) -> None:
    """Wake whoever waits for an engine core's process when it is gone; vLLM leaves them waiting."""

    def watch() -> None:
        connection.wait([process.sentinel for process in client.resources.engine_manager.processes])
        client.outputs_queue.put_nowait(EngineDeadError())
        for future in list(client.utility_results.values()):
            if not future.done():
                future.set_exception(EngineDeadError())

    threading.Thread(target=watch, name="VLLMEngine-watch", daemon=True).start()


def _engine_args(
    model: Path, max_slots: int, kernels: str, transfer: str, load_weights: bool, more: Mapping[str, Any]
) -> EngineArgs:
    ours = [
        *_OURS,
        *([] if load_weights else ["load_format"]),
        *([] if kernels == "native" else ["enforce_eager"]),
    ]
    taken = sorted(set(ours) & more.keys())
    if taken:
        raise ValueError(f"VLLMEngine: engine_args must leave {taken} to VLLMEngine, got {dict(more)}")
    cpu = current_platform.is_cpu()
    if cpu and transfer == "nccl":
        raise ValueError("VLLMEngine: transfer must be 'shared_memory' where vLLM runs on a CPU, got 'nccl'")
    config = transformers.AutoConfig.from_pretrained(model)
    settings: dict[str, Any] = {
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "enforce_eager": cpu or kernels != "native",
    }
    if cpu:
        settings["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if not load_weights:
        settings["load_format"] = "dummy"
    if transfer == "nccl":
        settings["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    return EngineArgs(
        model=str(model),
        max_num_seqs=max_slots,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        async_scheduling=False,
        generation_config="vllm",
        skip_tokenizer_init=True,
        **{**settings, **more},
    )


@contextmanager
def _environment(kernels: str) -> Iterator[None]:
    """What vLLM's processes read while they start."""
    native = kernels == "native"
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", KERNELS: "" if native else kernels}
    if current_platform.is_cpu():
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the one worker gets a process of its own
    if not native:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _plugin() -> Callable[[], Callable[[], None]]:
    """Our plugin, as vLLM finds it; vLLM itself runs plugins once a process, so we run it for each engine."""
    found = entry_points(group="vllm.general_plugins", name="rzero")
    if not found:
        raise RuntimeError("VLLMEngine: rzero must be installed by pip, so that vLLM finds its plugin")
    return next(iter(found)).load()
