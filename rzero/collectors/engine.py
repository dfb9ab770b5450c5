"""What every generation engine offers, and the records that go in and come out.

Token ids go in, token ids come out; text never crosses this boundary. An engine draws tokens, records the
probability with which it drew each one, and stamps each with the version of the weights that drew it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rzero.buffers import FinishCode, SamplingContext, provenance_digest


class EngineError(RuntimeError):
    """An engine failed; the message carries the original traceback, also from another process."""


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
    """

    uid: int
    group_id: int
    prompt_id: int
    sample_index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int

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
        digest: int64 [2], ``provenance_digest`` over prompt and response, taken where the tokens were drawn.
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


class Clock:
    """Wall-clock nanoseconds that never go backwards, whatever happens to the machine's clock meanwhile."""

    def __init__(self) -> None:
        self._base_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, as set when this clock was made."""
        return self._base_ns + time.monotonic_ns()


def row_fields(
    prompt: Sequence[int], response: Tensor, behavior_log_probs: Tensor, policy_version: Tensor
) -> dict[str, Tensor]:
    """The token fields of a whole row, prompt included, from those of its response.

    Args:
        prompt: P token ids.
        response: int32 [R].
        behavior_log_probs: float32 [R].
        policy_version: int32 [R].

    Returns:
        ``token_ids`` [P + R], ``behavior_log_probs`` [P + R] (NaN over the prompt, where nothing was
        sampled), ``policy_version`` [P + R] (-1 over the prompt) and ``response_mask`` [P + R] (False over
        the prompt).
    """
    count = len(prompt)
    return {
        "token_ids": torch.cat([torch.tensor(prompt, dtype=torch.int32), response]),
        "behavior_log_probs": torch.cat([torch.full((count,), torch.nan), behavior_log_probs]),
        "policy_version": torch.cat([torch.full((count,), -1, dtype=torch.int32), policy_version]),
        "response_mask": torch.arange(count + len(response)) >= count,
    }


def completion_digest(
    prompt: Sequence[int], response: Tensor, behavior_log_probs: Tensor, policy_version: Tensor
) -> Tensor:
    """The digest an engine puts on a completion: over prompt and response as the buffer will store them."""
    fields = row_fields(prompt, response, behavior_log_probs, policy_version)
    return provenance_digest(fields["token_ids"], fields["behavior_log_probs"], fields["policy_version"])


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

    def busy_seconds(self) -> float:
        """How long the engine has been sampling so far, in seconds."""
        ...

    def close(self) -> None:
        """Stop for good; what is still in flight is cancelled."""
        ...
