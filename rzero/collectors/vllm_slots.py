"""The responses that vLLM is sampling: what has been drawn for each, and what becomes of it.

Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from tqdm import tqdm

from rzero.buffers import FinishCode
from rzero.collectors.engine import (
    Clock,
    Completion,
    EngineError,
    GenerationRequest,
    packed_rows,
    row_digests,
)
from rzero.collectors.vllm_core import VLLMCore
from rzero.collectors.vllm_outputs import sampled_log_probs, sampling_params, token_versions

WARM_UP_TOKENS = 4
FINISH_CODES = {"stop": FinishCode.STOP, "length": FinishCode.LENGTH, "abort": FinishCode.ABORT}


@dataclass(slots=True)
class Slot:
    """One response; ``internal_name`` is vLLM's for its request."""

    request: GenerationRequest
    future: Future[Completion]
    t_submit_ns: int
    internal_name: str = ""
    t_first_ns: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


Finished = tuple[Slot, FinishCode, Tensor]  # with the versions of its tokens, int32 [R]


@final
class Slots:
    """The responses that vLLM has, by the names that its outputs carry.

    Args:
        core: Samples them.
        temperature: For all.
        eos_token_ids: End them.
        context_id: Goes into their completions.
        clock: Stamps them.
    """

    def __init__(
        self,
        core: VLLMCore,
        *,
        temperature: float,
        eos_token_ids: tuple[int, ...],
        context_id: int,
        clock: Clock,
    ) -> None:
        self._core, self._clock, self._context_id = core, clock, context_id
        self._temperature, self._eos = temperature, eos_token_ids
        self._slots: dict[str, Slot] = {}
        self._named = 0
        self._publishes = 0
        self.cached_tokens = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._slots)

    def uids(self) -> set[int]:
        """Of their requests."""
        return {slot.request.uid for slot in self._slots.values()}

    def start(self, slot: Slot) -> None:
        """Give a request to vLLM; it shares keys and values with those that started with the same weights."""
        params = sampling_params(
            temperature=self._temperature,
            seed=slot.request.seed,
            max_new_tokens=slot.request.max_new_tokens,
            eos_token_ids=self._eos,
            streaming=True,
        )
        self._named += 1
        name = f"{slot.request.uid}.{self._named}"
        slot.internal_name = self._core.add(name, slot.request.prompt, params, salt=str(self._publishes))
        self._slots[name] = slot

    def on_publish(self) -> None:
        """Let responses without a token start with the new weights, which share no keys with older ones."""
        self._publishes += 1
        for name in [name for name, slot in self._slots.items() if not slot.tokens]:
            slot = self._slots.pop(name)
            self._core.abort(slot.internal_name)
            self.start(slot)

    def abort(self, uids: set[int]) -> list[Finished]:
        """Stop responses; returns what was drawn of them."""
        names = [slot.internal_name for slot in self._slots.values() if slot.request.uid in uids]
        return self.read([self._core.abort(name) for name in names])

    def read(self, outputs: Iterable[Any]) -> list[Finished]:
        """Take in what vLLM drew; returns the responses that ended.

        Raises:
            EngineError: If a token lacks its log-probability or version, or a response failed in vLLM.
        """
        now, finished = self._clock.now_ns(), []
        for output in outputs:
            slot, drawn = self._slots[output.request_id], output.outputs[0]
            if drawn.token_ids:
                slot.t_first_ns = slot.t_first_ns or now
                slot.log_probs += sampled_log_probs(drawn)
                slot.tokens += drawn.token_ids
            if output.finished:
                del self._slots[output.request_id]
                if drawn.finish_reason not in FINISH_CODES:
                    raise EngineError(
                        f"VLLMEngine: vLLM must end a response by one of {list(FINISH_CODES)}, "
                        f"got {drawn.finish_reason!r}"
                    )
                self.cached_tokens += output.num_cached_tokens or 0
                versions = token_versions(drawn, len(slot.tokens))
                finished.append((slot, FINISH_CODES[drawn.finish_reason], versions))
        return finished

    def complete(self, finished: list[Finished]) -> None:
        """Resolve the futures of responses that ended."""
        if not finished:
            return
        now = self._clock.now_ns()
        lengths = [len(slot.tokens) for slot, _, _ in finished]
        response = torch.tensor([t for slot, _, _ in finished for t in slot.tokens], dtype=torch.int32)
        log_probs = torch.tensor([p for slot, _, _ in finished for p in slot.log_probs], dtype=torch.float32)
        versions = torch.cat([version for _, _, version in finished])
        prompts = [slot.request.prompt for slot, _, _ in finished]
        digests = row_digests(packed_rows(prompts, lengths, response, log_probs, versions))
        parts = zip(response.split(lengths), log_probs.split(lengths), digests, strict=True)
        for (slot, code, version), (tokens, drawn_with, digest) in zip(finished, parts, strict=True):
            completion = Completion(
                request=slot.request,
                response=tokens,
                behavior_log_probs=drawn_with,
                policy_version=version,
                finish_code=code,
                context_id=self._context_id,
                t_submit_ns=slot.t_submit_ns,
                t_first_ns=slot.t_first_ns or now,
                t_done_ns=now,
                digest=digest,
            )
            slot.future.set_result(completion)

    def give_up(self, reason: BaseException) -> None:
        """Fail all futures."""
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.future.set_exception(reason)

    def warm_up(self, most: int) -> None:
        """Make vLLM's slow first calls: one request alone, then as many as there can be."""
        sizes = sorted({1, most})
        params = sampling_params(
            temperature=self._temperature, seed=0, max_new_tokens=WARM_UP_TOKENS, eos_token_ids=()
        )
        with tqdm(total=sum(sizes), desc="warming up vLLM", unit="response", dynamic_ncols=True) as progress:
            for size in sizes:
                for index in range(size):
                    self._core.add(f"warm-up {size}.{index}", [0, 0], params, salt="warm-up")
                done = 0
                while done < size:
                    finished = sum(output.finished for output in self._core.step())
                    progress.update(finished)
                    done += finished
        self._core.forget_cache(running=False)
