"""Evidence out of vLLM's outputs: tokens, the probabilities they were drawn with, the weights that drew them.

For pipelines that already use vLLM: sample with ``sampling_params``, label the weights by vLLM's own
``finish_weight_update(weight_version=...)`` or ``update_weight_version``, and read a finished output with
``evidence_of``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rzero.collectors.engine import EngineError


def sampling_params(
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    streaming: bool = False,
) -> SamplingParams:
    """Ask vLLM for what ``evidence_of`` needs: plain sampling, and the probability of each sampled token.

    The engine must have been started with ``logprobs_mode="processed_logprobs"``; vLLM's default records the
    distribution before the temperature.

    Args:
        temperature: At least 0.01, below which vLLM draws from another distribution.
        seed: Of this response alone; its lower 63 bits count.
        max_new_tokens: Length limit.
        eos_token_ids: Tokens that end the response; none else does.
        streaming: One output per step, with what is new, instead of one at the end.
    """
    return SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=seed & (2**63 - 1),
        max_tokens=max_new_tokens,
        stop_token_ids=list(eos_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY,
    )


def sampled_log_probs(output: Any) -> list[float]:
    """The log-probability of each sampled token of a vLLM ``CompletionOutput``.

    Raises:
        EngineError: If vLLM gave none for a token.
    """
    tokens, given = list(output.token_ids), output.logprobs
    if tokens and given is None:
        raise EngineError("vLLM must give the log-probability of every sampled token, got none")
    values = []
    for index, token in enumerate(tokens):
        at_position = given[index] if index < len(given) else {}
        if token not in at_position:
            raise EngineError(
                f"vLLM must give the log-probability of every sampled token, got none of token {index}"
            )
        values.append(at_position[token].logprob)
    return values


def token_versions(output: Any, length: int) -> Tensor:
    """Int32 [length]: the weights that drew each token of a finished ``CompletionOutput``.

    Args:
        output: Its ``weight_versions`` cover the response; the labels are version numbers.
        length: Tokens of the response.

    Raises:
        EngineError: If the spans do not cover the response, or a label is no number.
    """
    versions = torch.full((length,), -1, dtype=torch.int32)
    for span in output.weight_versions or []:
        if not span.version.isdigit():
            raise EngineError(f"vLLM must label weights by version numbers, got {span.version!r}")
        versions[span.start : span.end] = int(span.version)
    if bool((versions < 0).any()):
        raise EngineError(
            f"vLLM must give the weight version of all {length} tokens, got {output.weight_versions}"
        )
    return versions


def evidence_of(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a finished vLLM ``CompletionOutput`` proves, ready for a loss.

    Args:
        output: Of a request sampled with ``sampling_params``.

    Returns:
        ``response`` int32 [R], ``behavior_log_probs`` float32 [R] nats and ``policy_version`` int32 [R].

    Raises:
        EngineError: If a log-probability or a version is missing.
    """
    response = torch.tensor(list(output.token_ids), dtype=torch.int32)
    log_probs = torch.tensor(sampled_log_probs(output), dtype=torch.float32)
    return response, log_probs, token_versions(output, len(response))
