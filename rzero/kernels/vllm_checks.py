"""What ``align_vllm`` supports; all else is refused by its name. Imports vLLM."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.models import llama, qwen2, qwen3

LINEAR = (linear.QKVParallelLinear, linear.MergedColumnParallelLinear, linear.RowParallelLinear)
ROTARY = (
    RotaryEmbedding,
    Llama3RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
CONTAINERS = (
    nn.ModuleList,
    llama.LlamaForCausalLM,
    llama.LlamaModel,
    llama.LlamaDecoderLayer,
    llama.LlamaAttention,
    llama.LlamaMLP,
    qwen2.Qwen2ForCausalLM,
    qwen2.Qwen2Model,
    qwen2.Qwen2DecoderLayer,
    qwen2.Qwen2Attention,
    qwen2.Qwen2MLP,
    qwen3.Qwen3ForCausalLM,
    qwen3.Qwen3Model,
    qwen3.Qwen3DecoderLayer,
    qwen3.Qwen3Attention,
    LogitsProcessor,
    ApplyRotaryEmb,
)
EMBEDDING, HEAD = vocab_parallel_embedding.VocabParallelEmbedding, vocab_parallel_embedding.ParallelLMHead


def refuse_unsupported_config(config: Any) -> None:
    """Refuse options under which the kernels would not keep their contract.

    Raises:
        ValueError: An option is not supported; the message names it.
    """
    model, parallel = config.model_config, config.parallel_config
    options = {
        "enforce_eager": (config.compilation_config.mode == CompilationMode.NONE, True),
        "world_size": (parallel.world_size_across_dp, 1),
        "quantization": (model.quantization, None),
        "lora_config": (config.lora_config, None),
        "speculative_config": (config.speculative_config, None),
        "kv_transfer_config": (config.kv_transfer_config, None),
        "kv_cache_dtype": (config.cache_config.cache_dtype, "auto"),
        "head_dtype": (model.head_dtype, model.dtype),
        "model runner V2 (VLLM_USE_V2_MODEL_RUNNER)": (config.use_v2_model_runner, False),
    }
    for name, (got, supported) in options.items():
        if got != supported:
            raise ValueError(f"align_vllm: {name} must be {supported!r}, got {got!r}")


def refuse_unsupported_model(model: nn.Module) -> dict[str, int]:
    """Refuse modules that the kernels do not replace, and count those that they do, by kind.

    Raises:
        TypeError: A module is not supported; the message names it.
    """
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is None:
            raise TypeError(
                "align_vllm: model must be made of vLLM's modules of Llama, Qwen2 and Qwen3, without "
                f"quantisation, got {type(module).__name__} at {repr(name) if name else 'the root'}"
            )
        if kind:
            kinds[kind] += 1
    return dict(kinds)


def _kind(module: Any) -> str | None:
    """What an exact class is to us: a name to count, nothing for containers, None if it is unknown."""
    if type(module) in LINEAR:
        plain = type(module.quant_method) is linear.UnquantizedLinearMethod
        return "linear" if plain else None
    if type(module) in (EMBEDDING, HEAD):
        plain = type(module.quant_method) is vocab_parallel_embedding.UnquantizedEmbeddingMethod
        return {EMBEDDING: "", HEAD: "lm_head"}[type(module)] if plain else None
    if type(module) is RMSNorm:
        return "RMSNorm" if module.has_weight and module.variance_size_override is None else None
    if type(module) in ROTARY:
        whole = module.is_neox_style and module.rotary_dim == module.head_size
        return "rotary embedding" if whole else None
    if type(module) is LogitsProcessor:
        return "" if module.soft_cap is None and module.scale == 1.0 else None
    if type(module) is SiluAndMul:
        return "SiluAndMul"
    if type(module) is Attention:
        return "attention"
    return "" if type(module) in CONTAINERS else None
