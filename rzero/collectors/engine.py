"""What every generation engine offers, and the records that go in and come out.

Token ids go in, token ids come out; text never crosses this boundary. An engine draws tokens, records the
probability with which it drew each one, and stamps each with the version of the weights that drew it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rzero.buffers import FinishCode, SamplingContext
from rzero.buffers.digest import PROVENANCE_FIELDS, digest_rows


class EngineError(RuntimeError):
    """An engine failed; the message carries the original traceback, also from another process."""


class EngineLost(EngineError):
    """An engine's process is gone, and with it all that it was sampling."""


def origin(error: BaseException) -> BaseException:
    """The exception that made an engine fail, where an ``EngineError`` has one among its causes.

    Example:
        >>> failed = EngineError("the engine has failed")
        >>> failed.__cause__ = ZeroDivisionError("the model")
        >>> origin(failed), origin(EngineError("refused"))
        (ZeroDivisionError('the model'), EngineError('refused'))
    """
    cause: BaseException | None = error
    while isinstance(cause, EngineError):
        cause = cause.__cause__
    return cause or error


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to sample.

    Attributes:
        uid: Names the response for good; no two responses of a run share it.
        group_id: Responses of one prompt that are compared with each other.
        prompt_id: The problem.
        sample_index: 0 .. group_size - 1 within the group.
        prompt: Token ids of the prompt, at least one.
        max_new_tokens: The response ends here if the model has not ended it.
        seed: Seed of this response alone, so that its tokens do not depend on who is sampled beside it.
        trace: Record checksums of every module's output, for an audit; see ``rzero.collectors.tracing``.
    """

    uid: int
    group_id: int
    prompt_id: int
    sample_index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    trace: bool = False

    def __post_init__(self) -> None:
        """Check what an engine relies on."""
        if not self.prompt:
            raise ValueError("GenerationRequest: prompt must hold at least one token, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"GenerationRequest: max_new_tokens must be >= 1, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine sampled for one request: the evidence, complete but for the reward.

    Attributes:
        request: The request that it answers.
        response: int32 [R], the sampled tokens, the end token included.
        behavior_log_probs: float32 [R] nats, of exactly the distribution each token was drawn from.
        policy_version: int32 [R], the weights that drew each token.
        finish_code: How the response ended.
        context_id: The sampling context, see ``SamplingContext.context_id``.
        t_submit_ns: When the engine got the request, in nanoseconds of the engine's ``Clock``.
        t_first_ns: When the first token was drawn.
        t_done_ns: When the last token was drawn.
        digest: int64 [2], ``provenance_digest`` of the whole row, taken where the tokens were drawn.
        trace: By module name, int64 [R] checksums of the outputs behind each token; empty unless asked for.
    """

    request: GenerationRequest
    response: Tensor
    behavior_log_probs: Tensor
    policy_version: Tensor
    finish_code: FinishCode
    context_id: int
    t_submit_ns: int
    t_first_ns: int
    t_done_ns: int
    digest: Tensor
    trace: Mapping[str, Tensor] = field(default_factory=dict)


class Clock:
    """Wall-clock nanoseconds that never go backwards, whatever happens to the machine's clock meanwhile."""

    def __init__(self) -> None:
        self._base_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, as set when this clock was made."""
        return self._base_ns + time.monotonic_ns()


def packed_rows(
    prompts: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    response: Tensor | np.ndarray,
    behavior_log_probs: Tensor | np.ndarray,
    policy_version: Tensor | np.ndarray,
) -> dict[str, np.ndarray]:
    """The token fields of whole rows, prompts included, end to end, from those of their responses.

    Args:
        prompts: B prompts of token ids.
        response_lengths: B.
        response: int [R], responses end to end, on the CPU like all others.
        behavior_log_probs: float32 [R].
        policy_version: int32 [R]; -1, beside a log-probability of NaN, where an environment spoke.

    Returns:
        ``token_ids`` int32 [N], ``behavior_log_probs`` float32 [N] (NaN over prompts, where nothing was
        sampled), ``policy_version`` int32 [N] (-1 over prompts), ``response_mask`` bool [N] (True where the
        version is not -1) and ``cu_seqlens`` int64 [B + 1].
    """
    spans = [length for p, r in zip(prompts, response_lengths, strict=True) for length in (len(p), r)]
    in_response = np.repeat(np.arange(len(spans)) % 2 == 1, spans)
    ids = np.empty(len(in_response), dtype=np.int32)
    ids[~in_response] = np.fromiter(
        chain.from_iterable(prompts), dtype=np.int32, count=len(in_response) - int(in_response.sum())
    )
    ids[in_response] = np.asarray(response)
    log_probs = np.full(len(in_response), np.nan, dtype=np.float32)
    log_probs[in_response] = np.asarray(behavior_log_probs)
    version = np.full(len(in_response), -1, dtype=np.int32)
    version[in_response] = np.asarray(policy_version)
    bounds = np.concatenate([[0], np.cumsum(np.asarray(spans, dtype=np.int64).reshape(-1, 2).sum(1))])
    return {
        "token_ids": ids,
        "behavior_log_probs": log_probs,
        "policy_version": version,
        "response_mask": version >= 0,
        "cu_seqlens": bounds,
    }


def row_digests(rows: Mapping[str, np.ndarray]) -> Tensor:
    """int64 [B, 2]: the ``provenance_digest`` of each of the ``packed_rows``."""
    bounds = rows["cu_seqlens"].tolist()
    return torch.from_numpy(
        digest_rows([rows[name] for name in PROVENANCE_FIELDS], bounds[:-1], bounds[1:]).copy()
    )


class InFlightPolicy(Enum):
    """What a swap does to responses that are half sampled.

    Whatever it is, the recorded log-probabilities are of the distributions really sampled from.
    """

    KEEP_CACHE = "go on with the new weights over keys and values of the old ones"
    RECOMPUTE_CACHE = "compute keys and values of all tokens so far anew, then go on with the new weights"
    FINISH_FIRST = "load when the responses being sampled have ended; start none meanwhile"


@runtime_checkable
class GenerationEngine(Protocol):
    """Samples responses with weights that are swapped under it, and says which weights drew which token.

    Between ``pause`` and ``resume`` no token is drawn. ``swap`` loads at such a boundary, pausing by itself
    where nobody has, so that every token before it carries the old version and every token after it the new
    one, also within a response.
    """

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request; the future resolves to its completion, or raises what went wrong in the engine."""
        ...

    def submit_group(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """Queue at least one request; the future resolves when all are complete, in their order."""
        ...

    def pause(self) -> None:
        """Stop at the next token boundary and return when there."""
        ...

    def swap(self, version: int, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """Load weights at the next token boundary, all or none.

        Raises:
            EngineError: If the tensors held after loading have other digests; the engine keeps its old
                weights and version.
        """
        ...

    def resume(self) -> None:
        """Draw tokens again."""
        ...

    def version(self) -> int:
        """The version that the next token will carry."""
        ...

    def context(self) -> SamplingContext:
        """The law that tokens are drawn by."""
        ...

    def weight_digests(self) -> dict[str, int]:
        """Digests of the weights as the engine holds them now, read at a token boundary."""
        ...

    def busy_seconds(self) -> float:
        """How long the engine has been sampling so far, in seconds."""
        ...

    def close(self) -> None:
        """Stop for good; what is still in flight is cancelled."""
        ...
