"""align: put the kernels under an existing Hugging Face model, and take them away again."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rzero.kernels.contract import kernel_fingerprint

__all__ = ["Alignment", "align"]

# How many alignments are open on a module; the forward it had before the first one stands beside the count.
_depths: WeakKeyDictionary[nn.Module, tuple[int, Callable[..., Any] | None]] = WeakKeyDictionary()


def align(model: nn.Module) -> Alignment:
    """Make a Hugging Face causal LM compute with rzero's kernels, in training and in sampling alike.

    A token's logits then have the same bits in a padded forward, in prefill, in decode with any cache, in
    any chunks and in any batch. Parameters, buffers, names, hooks and checkpoints stay as they are: modules
    get an instance ``forward``, attention goes through transformers' attention interface. Works before and
    after ``fully_shard`` (FSDP2), with activation checkpointing and with tied embeddings; not with
    torch.compile. Caches must be filled by the aligned model, and rounded weights are shared by all that use
    a parameter.

    Packed sequences: pass ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int [B+1]) with input and position ids
    [1, N], and any 4D bool tensor of one element as ``attention_mask``, or transformers builds an N x N one.

    Args:
        model: Llama, Qwen2 or Qwen3 of transformers (``...ForCausalLM`` or ``...Model``), in float32,
            bfloat16 or float16.

    Returns:
        A handle: ``undo()`` or leaving it as a context restores the model. Alignments nest; the last one
        undone restores.

    Raises:
        TypeError: A module, activation or position embedding is not supported; the message names it. Nothing
            has been changed then.

    Example:
        >>> import torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> with align(model):
        ...     whole, start = model(ids).logits, model(ids[:, :2]).logits
        >>> torch.equal(whole[:, :2], start)
        True
    """
    from rzero.kernels import huggingface

    forwards = huggingface.forwards_of(model)
    configs = huggingface.configs_of(model)
    for module, forward in forwards.items():
        depth, before = _depths.get(module, (0, None))
        if depth == 0:
            before = module.__dict__.get("forward")
            module.forward = MethodType(forward, module)
        _depths[module] = (depth + 1, before)
    return Alignment(list(forwards), [huggingface.ConfigSwitch(config) for config in configs])


class Alignment:
    """An open alignment of a model: ``undo`` it once, or use it as a context manager.

    Attributes:
        fingerprint: ``kernel_fingerprint`` of the kernels that were put in, on the model's device.
    """

    def __init__(self, modules: list[nn.Module], switches: list[Any]) -> None:
        device = next((p.device for module in modules for p in module.parameters()), "cpu")
        self.fingerprint = kernel_fingerprint(device)
        self._modules, self._switches = modules, switches

    def undo(self) -> None:
        """Restore what this alignment changed; a second call does nothing."""
        modules, self._modules = self._modules, []
        switches, self._switches = self._switches, []
        for module in modules:
            depth, before = _depths.pop(module)
            if depth > 1:
                _depths[module] = (depth - 1, before)
            elif before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        for switch in switches:
            switch.undo()

    def __enter__(self) -> Alignment:
        """Leave the alignment open for the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo, whatever happened in the block."""
        self.undo()
