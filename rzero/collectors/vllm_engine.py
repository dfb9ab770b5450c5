"""VLLM as a ``GenerationEngine``: evidence of every token, versions from vLLM's own weight-version spans.

    pending --slot free--> vLLM (waiting, prefill, decode, preempted) --end token, length, abort--> completion

The engine's thread steps vLLM; between two steps lies the token boundary at which it pauses, swaps weights,
aborts and takes in new requests. Importing this file needs vLLM.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError("VLLMEngine: vLLM must be installed, e.g. by pip install 'rzero[vllm]'") from error

from rzero.buffers import FinishCode, SamplingContext
from rzero.collectors.engine import (
    Clock,
    Completion,
    EngineLost,
    GenerationRequest,
    InFlightPolicy,
)
from rzero.collectors.futures import gathered
from rzero.collectors.token_boundary import TokenBoundary
from rzero.collectors.vllm_core import VLLMCore
from rzero.collectors.vllm_slots import Finished, Slot, Slots

MIN_TEMPERATURE = 0.01  # vLLM draws from another distribution below


@final
class VLLMEngine:
    """Samples with vLLM in a thread of its own.

    The recorded log-probability is vLLM's ``processed_logprobs`` of exactly the sampled token: of the
    distribution after the temperature, over the whole vocabulary. The prefix cache is on, and no response
    that starts after a swap sees keys or values of older weights.

    Args:
        model: Folder of a Hugging Face model; for ``kernels`` other than native a Llama, Qwen2 or Qwen3.
        eos_token_ids: Tokens that end a response.
        temperature: At least 0.01.
        max_slots: Responses sampled at the same time; more wait their turn.
        version: Version of the weights in the folder; -1 reads none and waits for the first ones.
        tokenizer_digest: Names the tokenizer in the sampling context.
        kernels: ``exact`` or ``triton`` puts rzero's kernels under vLLM, which gives every token the bits
            that the aligned trainer computes; ``native`` leaves vLLM as it is.
        in_flight: What a swap does to responses that are half sampled.
        own_process: Run vLLM's engine core in a process of its own, as vLLM does by default; the program's
            main file then needs ``if __name__ == "__main__"``. False runs it in this process.
        transfer: The way of new weights: ``shared_memory`` of this machine, or vLLM's own ``nccl`` from a GPU
            of this process to other GPUs.
        engine_args: More of vLLM's ``EngineArgs`` by name, e.g. ``max_model_len``,
            ``max_num_batched_tokens``, ``kv_cache_memory_bytes``, ``tensor_parallel_size``.

    Raises:
        ImportError: If vLLM is not installed.
        ValueError: If an argument is out of range, or an option of vLLM does not go with ``kernels``.
        EngineError: If vLLM came up with other kernels than asked for.

    Example:
        See ``docs/vllm.md`` and ``tests/vllm/test_vllm_engine.py``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        eos_token_ids: tuple[int, ...],
        temperature: float = 1.0,
        max_slots: int = 256,
        version: int = 0,
        tokenizer_digest: str = "unknown",
        kernels: Literal["native", "exact", "triton"] = "native",
        in_flight: InFlightPolicy = InFlightPolicy.KEEP_CACHE,
        own_process: bool = True,
        transfer: Literal["shared_memory", "nccl"] = "shared_memory",
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        _refuse(temperature, max_slots, transfer, own_process)
        self._core = VLLMCore(
            Path(model),
            max_slots=max_slots,
            kernels=kernels,
            own_process=own_process,
            transfer=transfer,
            load_weights=version >= 0,
            engine_args=engine_args or {},
        )
        self._context = self._core.context(temperature, tokenizer_digest)
        self._version, self._in_flight, self._max_slots = version, in_flight, max_slots
        self._core.label(max(version, 0))
        self._clock = Clock()
        self._pending: deque[Slot] = deque()
        self._slots = Slots(
            self._core,
            temperature=temperature,
            eos_token_ids=eos_token_ids,
            context_id=self._context.context_id,
            clock=self._clock,
        )
        self._boundary = TokenBoundary("VLLMEngine")
        self._busy_ns = 0
        try:
            self._slots.warm_up(max_slots)
        except BaseException:
            self._core.close()
            raise
        self._thread = threading.Thread(target=self._run, name="VLLMEngine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what others call

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """See ``GenerationEngine.submit``; ``request.trace`` has no effect: vLLM's modules are not traced.

        Raises:
            ValueError: If the model lacks a token of the prompt, or prompt and response together may exceed
                vLLM's ``max_model_len``.
        """
        foreign = [token for token in request.prompt if not 0 <= token < self._core.vocabulary]
        if foreign:
            raise ValueError(
                f"VLLMEngine.submit: prompt tokens must be from 0 to {self._core.vocabulary - 1}, "
                f"got {foreign[0]}"
            )
        longest = len(request.prompt) + request.max_new_tokens
        if longest > self._core.max_model_len:
            raise ValueError(
                f"VLLMEngine.submit: prompt and max_new_tokens must be at most max_model_len = "
                f"{self._core.max_model_len} together, got {longest}"
            )
        future: Future[Completion] = Future()
        with self._boundary.condition:
            self._boundary.refuse_if_stopped("submit")
            if self._version < 0:
                raise RuntimeError("VLLMEngine.submit: weights must be published first, got none so far")
            self._pending.append(Slot(request, future, self._clock.now_ns()))
            self._boundary.condition.notify_all()
        return future

    def submit_group(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """See ``GenerationEngine.submit_group``."""
        return gathered([self.submit(request) for request in requests])

    def abort(self, uids: set[int]) -> None:
        """End responses now; their futures resolve to what was sampled so far, with ``FinishCode.ABORT``."""
        with self._boundary.hold("abort"):
            finished = self._abort(uids)
        self._slots.complete(finished)

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop at the next token boundary and return when there.

        Args:
            mode: What becomes of responses that are half sampled, in vLLM's terms: ``keep`` goes on with them
                after ``resume``; ``wait`` samples them to their end first and starts none meanwhile;
                ``abort`` ends them.
        """
        with self._drained("pause") if mode == "wait" else nullcontext():
            self._boundary.pause()
        if mode == "abort":
            self.abort(self._slots.uids())

    def resume(self) -> None:
        """See ``GenerationEngine.resume``."""
        self._boundary.resume()

    def swap(self, version: int, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """See ``GenerationEngine.swap``; the in-flight policy says what becomes of half-sampled responses.

        After an ``nccl`` transfer that failed the old weights are gone, so the engine stops for good.
        """
        finish_first = self._in_flight is InFlightPolicy.FINISH_FIRST
        with self._drained("swap") if finish_first else nullcontext(), self._boundary.hold("swap"):
            try:
                self._core.load(weights, digests, version)
            except BaseException as error:
                if not self._core.keeps_old_weights:
                    self._boundary.fail(error)
                raise
            self._version = version
            self._slots.on_publish()
            if self._in_flight is InFlightPolicy.RECOMPUTE_CACHE or not self._slots:
                self._core.forget_cache(running=bool(self._slots))

    def version(self) -> int:
        """See ``GenerationEngine.version``."""
        return self._version

    def context(self) -> SamplingContext:
        """See ``GenerationEngine.context``."""
        return self._context

    def weight_digests(self) -> dict[str, int]:
        """See ``GenerationEngine.weight_digests``."""
        with self._boundary.hold("weight_digests"):
            return self._core.digests()

    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache so far."""
        return self._slots.cached_tokens

    def busy_seconds(self) -> float:
        """See ``GenerationEngine.busy_seconds``."""
        return self._busy_ns / 1e9

    def close(self) -> None:
        """See ``GenerationEngine.close``."""
        self._boundary.close()
        self._thread.join()

    def _drained(self, caller: str) -> AbstractContextManager[None]:
        """No response is half sampled and none starts."""
        return self._boundary.drain(caller, lambda: not self._slots)

    def _abort(self, uids: set[int]) -> list[Finished]:
        waiting = [slot for slot in self._pending if slot.request.uid in uids]
        self._pending = deque(slot for slot in self._pending if slot.request.uid not in uids)
        nothing = torch.empty(0, dtype=torch.int32)
        return [*((slot, FinishCode.ABORT, nothing) for slot in waiting), *self._slots.abort(uids)]

    # ------------------------------------------------------------------ the engine's own thread

    def _run(self) -> None:
        try:
            while self._boundary.wait(self._has_work):
                if self._boundary.wanted:
                    self._stand_still()
                    continue
                started = time.monotonic_ns()
                self._admit()
                if self._slots:
                    self._slots.complete(self._slots.read(self._core.step()))
                self._busy_ns += time.monotonic_ns() - started
        except BaseException as error:
            self._boundary.fail(EngineLost(str(error)) if self._core.is_dead(error) else error)
        finally:
            self._core.close()
            reason = self._boundary.error or CancelledError("the engine was closed")
            self._slots.give_up(reason)
            while self._pending:
                self._pending.popleft().future.set_exception(reason)

    def _has_work(self) -> bool:
        return bool(self._slots or (self._pending and not self._boundary.draining))

    def _stand_still(self) -> None:
        self._slots.complete(self._slots.read(self._core.stop_drawing()))
        if self._boundary.stand():
            self._core.go_on()

    def _admit(self) -> None:
        """Give vLLM waiting requests while there are slots."""
        with self._boundary.condition:  # a drain must see what is about to start
            while self._pending and len(self._slots) < self._max_slots and not self._boundary.draining:
                self._slots.start(self._pending.popleft())


def _refuse(temperature: float, max_slots: int, transfer: str, own_process: bool) -> None:
    if not temperature >= MIN_TEMPERATURE:
        raise ValueError(f"VLLMEngine: temperature must be >= {MIN_TEMPERATURE}, got {temperature}")
    if max_slots < 1:
        raise ValueError(f"VLLMEngine: max_slots must be >= 1, got {max_slots}")
    if transfer not in ("shared_memory", "nccl"):
        raise ValueError(f"VLLMEngine: transfer must be 'shared_memory' or 'nccl', got {transfer!r}")
    if transfer == "nccl" and not own_process:
        raise ValueError("VLLMEngine: own_process must be True with transfer='nccl', got False")
