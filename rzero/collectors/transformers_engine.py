"""The embedded engine: continuous batching over any Hugging Face causal LM, on a CPU or a GPU.

    pending --prefill--> slot --one token a step--> ... --end token or length--> completion
                          ^                                                          |
                          +----------------- the freed slot is refilled at once -----+

Each step draws one token for every occupied slot. Between two steps lies the token boundary at which the
engine pauses, swaps weights and takes in new requests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from einops import rearrange, repeat
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rzero.buffers import FinishCode, SamplingContext
from rzero.collectors.engine import (
    Clock,
    Completion,
    GenerationRequest,
    InFlightPolicy,
    packed_rows,
    row_digests,
)
from rzero.collectors.futures import settle, then
from rzero.collectors.hashing import uniforms
from rzero.collectors.token_boundary import TokenBoundary
from rzero.collectors.tracing import traced
from rzero.collectors.transformers_slots import SlotState
from rzero.collectors.weights import load_weights, named_weights, weight_digests


@dataclass(slots=True)
class _Group:
    future: Future[list[Completion]]
    completions: list[Completion | None]  # in the order of the requests
    left: int

    def complete(self, index: int, completion: Completion) -> None:
        """Take one completion; the last one resolves the future."""
        self.completions[index] = completion
        self.left -= 1
        if not self.left:
            settle(self.future, cast(list[Completion], self.completions))


@dataclass(slots=True)
class _Slot:
    request: GenerationRequest
    group: _Group
    index: int  # in the group
    t_submit_ns: int
    t_first_ns: int = 0
    trace: list[dict[str, Tensor]] = field(default_factory=list)  # one entry a token


def sample_tokens(log_probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution at ``u``.

    Args:
        log_probs: float [n, V], normalised over the last dimension.
        u: float64 [n] in (0, 1).

    Returns:
        int64 [n]. A token of probability 0 is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)[:, 0]


class TransformersEngine:
    """Samples from a Hugging Face causal LM in a thread of its own.

    The recorded log-probability is of the very distribution that the token was drawn from: the softmax of the
    logits divided by the temperature, over the whole vocabulary. Tokens depend on the request's seed and not
    on who is sampled beside it, as far as the model's kernels compute each row independently of the batch.

    Args:
        model: A causal LM with full attention in every layer. The engine owns it: ``swap`` writes into its
            parameters.
        eos_token_ids: Tokens that end a response.
        temperature: Greater than 0; 1 samples from the model itself.
        max_slots: Responses sampled at the same time; more wait their turn.
        version: Version of the weights that the model holds now; -1 if it waits for its first ones.
        tokenizer_digest: Names the tokenizer in the sampling context.
        kernel_fingerprint: Names the kernels under the model in the sampling context.
        log_softmax: [n, V] logits to log-probabilities; pass the one that the learner uses.
        in_flight: What a swap does to responses that are half sampled.

    Raises:
        ValueError: If an argument is out of range, or the model has layers whose cache is not plain full
            attention.

    Example:
        See ``tests/collectors/test_transformers_engine.py`` and ``recipes/reinforce_zero.py``.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: tuple[int, ...],
        temperature: float = 1.0,
        max_slots: int = 256,
        version: int = 0,
        tokenizer_digest: str = "unknown",
        kernel_fingerprint: str | None = None,
        log_softmax: Callable[[Tensor], Tensor] = lambda logits: torch.log_softmax(logits, dim=-1),
        in_flight: InFlightPolicy = InFlightPolicy.KEEP_CACHE,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"TransformersEngine: temperature must be > 0, got {temperature}")
        if max_slots < 1:
            raise ValueError(f"TransformersEngine: max_slots must be >= 1, got {max_slots}")
        _refuse_other_than_full_attention(model.config)
        self.model = model.eval()
        self._device = next(model.parameters()).device
        self._log_softmax, self._temperature = log_softmax, temperature
        self._context = _context(model, temperature, tokenizer_digest, kernel_fingerprint)
        self._context_id = self._context.context_id
        self._version, self._in_flight = version, in_flight

        self._pending: deque[_Slot] = deque()
        self._slots: list[_Slot] = []  # The r-th stands in slot r of the cache.
        self._max_slots = max_slots
        self._state = SlotState(model.config.num_hidden_layers, self._device)
        self._eos = torch.tensor(eos_token_ids, dtype=torch.long, device=self._device)

        self._clock = Clock()
        self._boundary = TokenBoundary("TransformersEngine")
        self._busy_ns = 0
        self._thread = threading.Thread(target=self._run, name="TransformersEngine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what others call

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """See ``GenerationEngine.submit``."""
        return then(self.submit_group([request]), lambda completions: completions[0])

    def submit_group(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """See ``GenerationEngine.submit_group``."""
        group = _Group(Future(), [None] * len(requests), left=len(requests))
        with self._boundary.condition:
            self._boundary.refuse_if_stopped("submit")
            if self._version < 0:
                raise RuntimeError(
                    "TransformersEngine.submit: weights must be published first, got none so far"
                )
            now = self._clock.now_ns()
            self._pending.extend(_Slot(request, group, i, now) for i, request in enumerate(requests))
            self._boundary.condition.notify_all()
        return group.future

    def pause(self) -> None:
        """See ``GenerationEngine.pause``."""
        self._boundary.pause()

    def swap(self, version: int, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """See ``GenerationEngine.swap``; the in-flight policy says what becomes of half-sampled responses."""
        finish_first = self._in_flight is InFlightPolicy.FINISH_FIRST
        drained = self._boundary.drain("swap", lambda: not self._slots) if finish_first else nullcontext()
        with drained, self._boundary.hold("swap"):
            load_weights(self.model, weights, digests)
            self._version = version
            if self._in_flight is InFlightPolicy.RECOMPUTE_CACHE and self._slots:
                self._recompute_cache()

    def resume(self) -> None:
        """See ``GenerationEngine.resume``."""
        self._boundary.resume()

    def version(self) -> int:
        """See ``GenerationEngine.version``."""
        return self._version

    def context(self) -> SamplingContext:
        """See ``GenerationEngine.context``."""
        return self._context

    def weight_digests(self) -> dict[str, int]:
        """See ``GenerationEngine.weight_digests``."""
        with self._boundary.hold("weight_digests"):
            return weight_digests(named_weights(self.model))

    def busy_seconds(self) -> float:
        """See ``GenerationEngine.busy_seconds``."""
        return self._busy_ns / 1e9

    def close(self) -> None:
        """See ``GenerationEngine.close``."""
        self._boundary.close()
        self._thread.join()

    # ------------------------------------------------------------------ the engine's own thread

    def _run(self) -> None:
        try:
            while self._boundary.wait(self._has_work):
                if self._boundary.wanted:
                    self._boundary.stand()
                    continue
                started = time.monotonic_ns()
                self._admit()
                if self._slots:
                    self._step()
                self._busy_ns += time.monotonic_ns() - started
        except BaseException as error:
            self._boundary.fail(error)
        finally:
            reason = self._boundary.error or CancelledError("the engine was closed")
            for slot in [*self._slots, *self._pending]:
                settle(slot.group.future, reason)
            self._slots, self._pending = [], deque()

    def _has_work(self) -> bool:
        return bool(self._slots or (self._pending and not self._boundary.draining))

    def _admit(self) -> None:
        """Prefill waiting prompts, all but their last token, into free slots; equal ones once."""
        first = len(self._slots)
        with self._boundary.condition:  # a drain must see what is about to start
            while self._pending and len(self._slots) < self._max_slots and not self._boundary.draining:
                self._slots.append(self._pending.popleft())
        new = self._slots[first:]
        if new:
            self._state.open(first, [slot.request for slot in new])
            self._prefill({first + i: slot.request.prompt[:-1] for i, slot in enumerate(new)})

    def _recompute_cache(self) -> None:
        """Compute keys and values of everything sampled so far by the weights held now."""
        counts = self._state.count.tolist()
        drawn = [self._state.tokens[r, : counts[r]].tolist() for r in range(len(self._slots))]
        self._prefill({r: (*slot.request.prompt, *drawn[r])[:-1] for r, slot in enumerate(self._slots)})

    @torch.no_grad()
    def _prefill(self, prefixes: Mapping[int, tuple[int, ...]]) -> None:
        """Compute keys and values of token sequences into the slots that they belong to; equal ones once."""
        prefixes = {slot: prefix for slot, prefix in prefixes.items() if prefix}
        if not prefixes:
            return
        distinct = {prefix: index for index, prefix in enumerate(dict.fromkeys(prefixes.values()))}
        rows = [torch.tensor(prefix, device=self._device) for prefix in distinct]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self._device).tril()
        cache = DynamicCache()
        self._forward(
            ids,
            torch.arange(length, device=self._device).expand_as(ids),
            repeat(causal, "q k -> n 1 q k", n=len(rows)),
            cache,
        )
        self._state.cache.write(list(prefixes), cache, [distinct[prefix] for prefix in prefixes.values()])

    @torch.no_grad()
    def _step(self) -> None:
        """Draw one token for every occupied slot."""
        state, n = self._state, len(self._slots)
        positions = state.position[:n]
        width = int(positions.max()) + 1
        state.cache.aim(positions, width)
        mask = torch.arange(width, device=self._device) <= positions[:, None]
        tracing = [r for r, slot in enumerate(self._slots) if slot.request.trace]
        with traced(self.model) if tracing else nullcontext({}) as trace:
            logits = self._forward(
                state.last_token[:n, None], positions[:, None], rearrange(mask, "n t -> n 1 1 t"), state.cache
            )
        for r in tracing:
            self._slots[r].trace.append({name: rows[r, 0].cpu() for name, rows in trace.items()})
        log_probs = self._log_softmax(logits[:, -1].float() / self._temperature)
        tokens = sample_tokens(log_probs, uniforms(state.seed[:n], state.count[:n]))
        state.record(n, tokens, log_probs.gather(-1, tokens[:, None])[:, 0], self._version)
        now = self._clock.now_ns()
        for slot in self._slots:
            slot.t_first_ns = slot.t_first_ns or now
        ended = torch.isin(tokens, self._eos)
        done = ended | (state.count[:n] == state.limit[:n])
        if done.any():
            self._finish(done.nonzero()[:, 0].tolist(), ended, now)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        if self.model.config._attn_implementation == "eager":  # eager attention adds its mask
            zero = torch.zeros((), dtype=self.model.dtype, device=mask.device)
            mask = torch.where(mask, zero, torch.finfo(self.model.dtype).min)
        return self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits

    def _finish(self, rows: list[int], ended: Tensor, now: int) -> None:
        """Take complete responses out of their slots; the last slots move into the gaps."""
        slots = [self._slots[r] for r in rows]
        requests = [slot.request for slot in slots]
        lengths, response, log_probs, versions = self._state.take(rows)
        packed = packed_rows([r.prompt for r in requests], lengths, response, log_probs, versions)
        stops = ended[rows].tolist()
        completions = [
            Completion(
                request=slot.request,
                response=tokens,
                behavior_log_probs=drawn_with,
                policy_version=version,
                finish_code=FinishCode.STOP if stop else FinishCode.LENGTH,
                context_id=self._context_id,
                t_submit_ns=slot.t_submit_ns,
                t_first_ns=slot.t_first_ns,
                t_done_ns=now,
                digest=digest,
                trace={name: torch.stack([step[name] for step in slot.trace]) for name in slot.trace[0]}
                if slot.trace
                else {},
            )
            for slot, tokens, drawn_with, version, stop, digest in zip(
                slots,
                response.split(lengths),
                log_probs.split(lengths),
                versions.split(lengths),
                stops,
                row_digests(packed),
                strict=True,
            )
        ]
        self._close_gaps(rows)
        for slot, completion in zip(slots, completions, strict=True):
            slot.group.complete(slot.index, completion)

    def _close_gaps(self, rows: list[int]) -> None:
        count, gone = len(self._slots) - len(rows), set(rows)
        gaps = [r for r in rows if r < count]
        movers = [r for r in range(count, len(self._slots)) if r not in gone]
        if gaps:
            self._state.move(movers, gaps)
        for gap, mover in zip(gaps, movers, strict=True):
            self._slots[gap] = self._slots[mover]
        del self._slots[count:]


def _refuse_other_than_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"TransformersEngine: model must use full attention in every layer, got {sorted(kinds)} "
            f"in {type(config).__name__}"
        )


def _context(
    model: Any, temperature: float, tokenizer_digest: str, kernel_fingerprint: str | None
) -> SamplingContext:
    config = model.config.to_json_string(use_diff=False)
    return SamplingContext(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        log_prob_mode="processed",
        engine="TransformersEngine",
        engine_version=transformers.__version__,
        kernel_fingerprint=kernel_fingerprint or f"native-torch-{torch.__version__}",
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel_size=1,
        model_digest=hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        tokenizer_digest=tokenizer_digest,
    )
