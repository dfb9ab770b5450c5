"""What replaces the layers and the sampler of vLLM; ``align_vllm`` puts it in. Imports vLLM."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from rzero.kernels.dispatch import linear, log_softmax, rms_norm, rope, rope_table, silu_mul
from rzero.kernels.huggingface import FIXED_ROPE_TYPES


def keep_weights(self: Any, layer: nn.Module) -> None:
    """Leave the weight as it was loaded; vLLM would repack it for its own product."""


def linear_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of linear layers, merged ones too, and of the head: a column depends on its own row of the weight."""
    return linear(x, layer.weight, bias)


def rms_norm_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """Like Hugging Face: the sum is rounded to the dtype before it is normalised."""
    if residual is None:
        return rms_norm(x, self.weight, eps=self.variance_epsilon)
    x = x + residual
    return rms_norm(x, self.weight, eps=self.variance_epsilon), x


def silu_and_mul_forward(self: Any, x: Tensor) -> Tensor:
    """[..., 2 I] to [..., I]: gates in the first half."""
    return silu_mul(*x.chunk(2, dim=-1))


def rotary_forward(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Turn queries and keys [T, heads D], or [T, heads, D], by ``give_rotary_tables``' tables."""
    cosines, sines = (table[positions][:, None] for table in self.rzero_tables)

    def turn(x: Tensor) -> Tensor:
        return rope(x.view(x.shape[0], -1, self.head_size), cosines, sines).view(x.shape)

    return turn(query), None if key is None else turn(key)


def give_rotary_tables(model: nn.Module, model_config: Any) -> None:
    """Cosines and sines, float32 [max_model_len, D], from the frequencies that Hugging Face computes.

    Raises:
        TypeError: If the frequencies depend on the length of the sequence.
    """
    source = LlamaRotaryEmbedding(model_config.hf_text_config)
    if source.rope_type not in FIXED_ROPE_TYPES:
        raise TypeError(f"align_vllm: rope_type must be one of {FIXED_ROPE_TYPES}, got {source.rope_type!r}")
    device = next(model.parameters()).device
    tables = rope_table(
        source.inv_freq.to(device), length=model_config.max_model_len, scaling=source.attention_scaling
    )
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.__dict__["rzero_tables"] = tables


def log_probs(logits: Tensor) -> Tensor:
    """Float32 log-probabilities of logits [n, V]."""
    return log_softmax(logits.float())


def sampler_forward(original: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """The original way of drawing, with our log-probabilities of the distribution drawn from."""

    def forward(
        self: Any, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if k is not None or p is not None:
            raise ValueError("aligned vLLM: top_k and top_p must be off, got a request that has one")
        processed = log_probs(logits) if self.logprobs_mode == "processed_logprobs" else None
        sampled, _ = original(self, logits, generators, None, None)
        return sampled, processed

    return forward
