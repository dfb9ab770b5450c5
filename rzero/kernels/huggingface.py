"""What replaces the forwards of Hugging Face's Llama, Qwen2 and Qwen3 modules, and their attention function.

Imports transformers; only ``align`` imports this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from rzero.kernels.dispatch import (
    attention,
    attention_varlen,
    gated_mlp,
    linear,
    linear_joined,
    rms_norm,
    rope,
    rope_table,
    round_kv,
    silu_mul,
)

ATTENTION = "rzero"
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others change with the length of the batch

Forward = Callable[..., Any]


def forwards_of(model: nn.Module) -> dict[nn.Module, Forward]:
    """The new forward of every module of ``model`` that needs one.

    Raises:
        TypeError: A module is not supported.
    """
    forwards = {}
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is None:
            raise TypeError(
                "align: model must be made of Llama, Qwen2 or Qwen3 modules of transformers, nn.Linear and "
                f"nn.Embedding, got {type(module).__name__} at {repr(name) if name else 'the root'}"
            )
        if kind in _FORWARDS:
            forwards[module] = _FORWARDS[kind]
        if kind == "rotary" and module.rope_type not in FIXED_ROPE_TYPES:
            raise TypeError(
                f"align: rope_type must be one of {FIXED_ROPE_TYPES}, got {module.rope_type!r} at {name!r}"
            )
    return forwards


def _kind(module: nn.Module) -> str | None:
    """Which forward a module takes; None if it is unknown, or a subclass with a forward of its own."""
    if type(module).__name__ == "CheckpointWrapper":
        return "container"
    for known, kind in _KINDS.items():
        if isinstance(module, known) and type(module).forward is known.forward:
            return kind
    return None


def _observed(module: nn.Module, op: str, output: Tensor) -> Tensor:
    """``output`` [n, t, ...] of ``op``, shown to those forward hooks of ``module`` that observe its ops."""
    for hook in module._forward_hooks.values():
        if hasattr(hook, "observe"):
            hook.observe(op, output)  # type: ignore[attr-defined]
    return output


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return _observed(self, "linear", linear(input, self.weight, self.bias))


def _rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return _observed(self, "rms_norm", rms_norm(hidden_states, self.weight, eps=self.variance_epsilon))


def _rotary_forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [B, T, D], from a table that grows with the positions asked for."""
    needed = int(position_ids.max()) + 1
    inverse, cosines, sines = self.__dict__.get("rzero_table", (None, None, None))
    if inverse is None or len(cosines) < needed or not torch.equal(inverse, self.inv_freq):
        length = max(256, 1 << (needed - 1).bit_length())
        cosines, sines = rope_table(self.inv_freq, length=length, scaling=self.attention_scaling)
        self.__dict__["rzero_table"] = (self.inv_freq.clone(), cosines, sines)
    cosines, sines = cosines[position_ids], sines[position_ids]
    _observed(self, "rope_table", torch.cat([cosines, sines], -1))
    return cosines, sines


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    parts = (self.gate_proj, self.up_proj, self.down_proj)
    if all(map(_is_plain, parts)) and not any(part.bias is not None for part in parts):
        return _observed(self, "gated_mlp", gated_mlp(x, *(part.weight for part in parts)))
    return self.down_proj(_observed(self, "silu_mul", silu_mul(self.gate_proj(x), self.up_proj(x))))


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The modules' own forward with our ops; keys and values are rounded before a cache sees them."""
    parts = (self.q_proj, self.k_proj, self.v_proj)
    if all(map(_is_plain, parts)):
        weights, biases = tuple(part.weight for part in parts), tuple(part.bias for part in parts)
        heads = _observed(self, "linear_joined", linear_joined(hidden_states, weights, biases))
        heads = heads.unflatten(-1, (-1, self.head_dim))
    else:
        heads = torch.cat([part(hidden_states) for part in parts], -1).unflatten(-1, (-1, self.head_dim))
    groups = heads.shape[2] // (self.num_key_value_groups + 2)
    turned, value = heads[:, :, :-groups], heads[:, :, -groups:]
    if hasattr(self, "q_norm"):
        query, key = turned[:, :, :-groups], turned[:, :, -groups:]
        turned = torch.cat([self.q_norm(query), self.k_norm(key)], 2)
    turned = _observed(self, "rope", rope(turned, *(table[:, :, None] for table in position_embeddings)))
    turned = turned.transpose(1, 2)
    query, key, value = turned[:, :-groups], turned[:, -groups:], value.transpose(1, 2)
    if past_key_values is not None:
        both = round_kv(torch.cat([key, value], 1))
        key, value = past_key_values.update(both[:, :groups], both[:, groups:], self.layer_idx)
    if self.config._attn_implementation != ATTENTION:
        raise RuntimeError(
            f"aligned model: config._attn_implementation must stay {ATTENTION!r} until undo(), "
            f"got {self.config._attn_implementation!r}"
        )
    out, weights = ALL_ATTENTION_FUNCTIONS[ATTENTION](
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", None),
        rounded_kv=past_key_values is not None,
        **kwargs,
    )
    return self.o_proj(_observed(self, "attention", out).flatten(2)), weights


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    rounded_kv: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Our ``attention`` as transformers calls it: [B, H, T, D] and so on -> [B, Tq, H, D] and None."""
    if dropout:
        raise ValueError(f"aligned model: attention dropout must be 0, got {dropout}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            f"aligned model: a 4D attention_mask must have dtype torch.bool, got {attention_mask.dtype}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packed = attention_varlen(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k,
            scale=scale,
            rounded_kv=rounded_kv,
        )
        return packed[None], None
    if (
        attention_mask is None and query.shape[2] > 1
    ):  # plain causal from the first key on, in transformers' terms
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    out = attention(query, key, value, scale=scale, mask=attention_mask, rounded_kv=rounded_kv)
    return out.transpose(1, 2), None


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module does no more than our linear: no hooks, and nobody replaced its forward.

    Hooks that observe do not count: they are shown the op that is taken instead of the module.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if not all(hasattr(hook, "observe") for hook in module._forward_hooks.values()):
        return False
    return getattr(module.__dict__.get("forward"), "__func__", None) is _linear_forward


_FORWARDS: dict[str, Forward] = {
    "linear": _linear_forward,
    "rms_norm": _rms_norm_forward,
    "rotary": _rotary_forward,
    "mlp": _mlp_forward,
    "attention": _attention_forward,
}
_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "container",
    nn.ModuleList: "container",
    nn.SiLU: "container",
    SiLUActivation: "container",
    nn.parallel.DistributedDataParallel: "container",
}
for _family, _file in (("Llama", modeling_llama), ("Qwen2", modeling_qwen2), ("Qwen3", modeling_qwen3)):
    for _suffix, _name in (
        ("RMSNorm", "rms_norm"),
        ("RotaryEmbedding", "rotary"),
        ("MLP", "mlp"),
        ("Attention", "attention"),
        ("DecoderLayer", "container"),
        ("Model", "container"),
        ("ForCausalLM", "container"),
    ):
        _KINDS[getattr(_file, _family + _suffix)] = _name

AttentionInterface.register(ATTENTION, attention_function)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations whose attention implementation the modules read, each once."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(configs.values())


# Id of a configuration -> how many switches are open on it, and what it was before the first.
_switched: dict[int, tuple[int, str | None]] = {}


class ConfigSwitch:
    """Sets a configuration's attention implementation, and restores it with the last of the open switches."""

    def __init__(self, config: Any) -> None:
        if id(config) not in _switched:
            _switched[id(config)] = (0, config._attn_implementation)
            weakref.finalize(config, _switched.pop, id(config), None)
        count, before = _switched[id(config)]
        _switched[id(config)] = (count + 1, before)
        config._attn_implementation = ATTENTION
        self._config = config

    def undo(self) -> None:
        """Close this switch, once."""
        count, before = _switched.pop(id(self._config))
        if count > 1:
            _switched[id(self._config)] = (count - 1, before)
        else:
            self._config._attn_implementation = before
