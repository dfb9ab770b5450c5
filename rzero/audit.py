"""The audit: with equal weights and equal histories, do sampler and trainer give every token the same bits?

Draws through the engine's own sampling path and recomputes with the trainer's model, in this order:

    kernels, sampling law, weights   must agree, or the audit refuses: it would compare other things than
    execution token ids                        the engine's digests must hold over what came back
    modules and ops                  the first one whose output differs, layer by layer
    log-probabilities                counted token by token; a mean is never a verdict
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rzero.collectors.engine import Completion, GenerationEngine, GenerationRequest, packed_rows, row_digests
from rzero.collectors.tracing import traced
from rzero.collectors.weights import named_weights, weight_digests
from rzero.kernels.causal_lm import causal_lm_log_probs

AUDIT_UIDS = 1 << 62  # Audited responses are no training data and share no uid with it.


class AuditRefused(RuntimeError):
    """Sampler and trainer do not even claim to compute the same; the message says what differs."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Attributes:
        tokens: Sampled tokens that were compared.
        left_out: Sampled tokens that were not, because other weights drew them or their history.
        mismatching: Compared tokens whose recorded log-probability differs in any bit from one of those that
            were recomputed: over whole rows, and with equal prompts computed once for all their rows.
        max_abs: Largest |difference|, in nats.
        max_ulp: Largest distance in units in the last place of float32.
        kl: Mean of exp(d) - 1 - d over the compared tokens, d = recomputed - recorded: an estimate of the
            divergence between sampler and trainer, 0 only if every d is.
        first_difference: The first module or op, in the order of computation, with an output row that
            differs: ``model.layers.0.self_attn:rope`` is rope in the attention of the first layer,
            ``...o_proj:input`` what was computed before ``o_proj`` in a model that is not aligned;
            ``log_softmax`` stands for what follows equal logits. None if nothing differs or the engine
            recorded nothing.
        traced_modules: Number of modules and ops compared.
    """

    tokens: int
    left_out: int
    mismatching: int
    max_abs: float
    max_ulp: int
    kl: float
    first_difference: str | None
    traced_modules: int

    @property
    def exact(self) -> bool:
        """True if something was compared and no bit differs: every importance ratio is exactly 1."""
        return self.tokens > 0 and self.mismatching == 0 and self.first_difference is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "exact": self.exact}

    def __str__(self) -> str:
        """One line for people."""
        where = f"; first difference in {self.first_difference}" if self.first_difference else ""
        return (
            f"{self.mismatching} of {self.tokens} tokens differ, max |delta| {self.max_abs:.3g}, "
            f"max {self.max_ulp} ulp, {self.traced_modules} modules and ops compared, "
            f"{self.left_out} tokens left out{where}"
        )


def audit(
    engine: GenerationEngine,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    version: int,
    temperature: float,
    kernel_fingerprint: str,
    max_new_tokens: int,
    seed: int = 0,
    tokenizer_digest: str | None = None,
    log_softmax: Callable[[Tensor], Tensor] = lambda logits: torch.log_softmax(logits, dim=-1),
) -> AuditReport:
    """Compare an engine with a trainer's model, token by token and module by module.

    The trainer's side is computed twice, over whole rows and with each prompt once for all its responses
    (``prompt_length`` of ``causal_lm_log_probs``): a token must agree with both.

    Args:
        engine: Samples, through the very path that training data comes from.
        model: The trainer's, holding the weights of ``version``.
        prompts: Token ids; give some twice, so that neighbours and shared prefixes occur.
        version: Version of the model's weights. Tokens drawn by other weights, or after a swap inside their
            response, are left out.
        temperature: The trainer's.
        kernel_fingerprint: Of the trainer's kernels.
        max_new_tokens: Length limit of the audited responses.
        seed: Of the audited responses.
        tokenizer_digest: The trainer's, if it is to be compared.
        log_softmax: The trainer's.

    Returns:
        What was found.

    Raises:
        AuditRefused: If kernels, sampling law, tokenizer, weights or digests differ.
        ValueError: If there is no prompt.
    """
    if not prompts:
        raise ValueError("audit: prompts must hold at least one prompt, got none")
    _refuse_other_law(engine, temperature, kernel_fingerprint, tokenizer_digest)
    _refuse_other_weights(engine, model, version)
    completions = _draw(engine, prompts, max_new_tokens, seed)
    rows = packed_rows(
        [c.request.prompt for c in completions],
        [len(c.response) for c in completions],
        torch.cat([c.response for c in completions]),
        torch.cat([c.behavior_log_probs for c in completions]),
        torch.cat([c.policy_version for c in completions]),
    )
    if not torch.equal(row_digests(rows), torch.stack([c.digest for c in completions])):
        raise AuditRefused("audit: digests must hold over the tokens that came back, got others")
    return _compare(completions, rows, model, version, temperature, log_softmax)


def _refuse_other_law(
    engine: GenerationEngine, temperature: float, kernel_fingerprint: str, tokenizer_digest: str | None
) -> None:
    context = engine.context()
    ours = {
        "kernel_fingerprint": kernel_fingerprint,
        "temperature": temperature,
        "log_prob_mode": "processed",
    }
    ours |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if tokenizer_digest is not None:
        ours["tokenizer_digest"] = tokenizer_digest
    for name, expected in ours.items():
        if getattr(context, name) != expected:
            raise AuditRefused(
                f"audit: {name} of engine and trainer must agree, "
                f"got {getattr(context, name)!r} and {expected!r}"
            )


def _refuse_other_weights(engine: GenerationEngine, model: Any, version: int) -> None:
    if engine.version() != version:
        raise AuditRefused(f"audit: the engine must hold version {version}, got {engine.version()}")
    theirs, ours = engine.weight_digests(), weight_digests(named_weights(model))
    wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if wrong:
        raise AuditRefused(
            f"audit: weights of engine and trainer must agree, {len(wrong)} of {len(ours)} tensors differ, "
            f"first {wrong[0]}"
        )


def _draw(
    engine: GenerationEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> list[Completion]:
    futures = [
        engine.submit(
            GenerationRequest(
                uid=AUDIT_UIDS + index,
                group_id=AUDIT_UIDS + index,
                prompt_id=index,
                sample_index=0,
                prompt=tuple(prompt),
                max_new_tokens=max_new_tokens,
                seed=seed + index,
                trace=True,
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    return [future.result() for future in futures]


def _compare(
    completions: Sequence[Completion],
    rows: Mapping[str, np.ndarray],
    model: Any,
    version: int,
    temperature: float,
    log_softmax: Callable[[Tensor], Tensor],
) -> AuditReport:
    ids, cu_seqlens, mask = (
        torch.from_numpy(rows[name]) for name in ("token_ids", "cu_seqlens", "response_mask")
    )
    device = next(model.parameters()).device

    def recompute(prompt_length: Tensor | None) -> Tensor:
        """As a learner does: with gradient, whose kernels may be others."""
        log_probs, _ = causal_lm_log_probs(
            model,
            ids.to(device),
            cu_seqlens.to(device),
            mask.to(device),
            temperature=temperature,
            prompt_length=prompt_length,
            log_softmax=log_softmax,
        )
        return log_probs.detach().cpu()[mask]

    with traced(model) as trace:
        whole = recompute(None)
    shared = recompute(torch.tensor([len(c.request.prompt) for c in completions], device=device))
    recorded = torch.cat([c.behavior_log_probs for c in completions])
    # A token counts while it and all tokens before it in its response were drawn by the audited weights.
    counted = torch.cat([(c.policy_version == version).long().cumprod(0).bool() for c in completions])
    recomputed = torch.stack([whole, shared])[:, counted]
    delta = (recomputed - recorded[counted]).double()
    ulp = (_ordered(recomputed) - _ordered(recorded[counted])).abs()
    first, compared = _first_difference(completions, trace, counted)
    if first is None and compared and bool(ulp[0].any()):
        first = "log_softmax"
    return AuditReport(
        tokens=int(counted.sum()),
        left_out=int((~counted).sum()),
        mismatching=int((ulp != 0).any(0).sum()),
        max_abs=float(delta.abs().max()) if delta.numel() else 0.0,
        max_ulp=int(ulp.max()) if ulp.numel() else 0,
        kl=float((delta.expm1() - delta).mean()) if delta.numel() else 0.0,
        first_difference=first,
        traced_modules=compared,
    )


def _first_difference(
    completions: Sequence[Completion], trace: Mapping[str, Tensor], counted: Tensor
) -> tuple[str | None, int]:
    """The first module or op whose output differs in a counted row, and how many were compared."""
    count = len(completions)
    shared = [
        name
        for name, rows in trace.items()
        if len(rows) in (1, count) and all(name in c.trace for c in completions)
    ]
    for name in shared:
        theirs = torch.cat([c.trace[name] for c in completions])
        ours = torch.cat(
            [
                row[len(c.request.prompt) - 1 : len(c.request.prompt) - 1 + len(c.response)]
                for row, c in zip(trace[name].cpu().expand(count, -1), completions, strict=True)
            ]
        )
        if not torch.equal(theirs[counted], ours[counted]):
            return name, len(shared)
    return None, len(shared)


def _ordered(values: Tensor) -> Tensor:
    """float32 as int64 such that neighbouring floats are neighbouring integers."""
    bits = values.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
