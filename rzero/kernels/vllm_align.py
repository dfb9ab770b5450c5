"""align_vllm: put the kernels under the vLLM of this process, and take them away again.

Imports vLLM. Layers are replaced in their classes, because vLLM makes instances out of reach and repacks
their weights while it loads: so all engines of a process have the same kernels.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from rzero.kernels import vllm_layers
from rzero.kernels.contract import kernel_fingerprint
from rzero.kernels.dispatch import backend_of, forget_weights
from rzero.kernels.vllm_checks import refuse_unsupported_config, refuse_unsupported_model

__all__ = ["VLLM_VERSIONS", "align_vllm", "aligned_kernels"]

VLLM_VERSIONS = ("0.32.0",)
KERNELS = ("exact", "triton")
ATTENTION = "rzero.kernels.vllm_attention.PagedBackend"

# What is put in, and what restores it: empty while vLLM is as it was installed.
_undo: list[Callable[[], None]] = []
_names: list[str] = []


def aligned_kernels() -> str | None:
    """Name of the kernels under the vLLM of this process, None for its own."""
    return _names[-1] if _names else None


def align_vllm(kernels: str) -> Callable[[], None]:
    """Make every model that vLLM loads in this process from now on compute with rzero's kernels.

    A token's log-probability then has the bits that the aligned Hugging Face model gives it, whatever vLLM
    batches, chunks, preempts or finds in its prefix cache.

    Args:
        kernels: ``exact`` or ``triton``: the backend of ``rzero.kernels`` that must compute here.

    Returns:
        A function that restores vLLM, for engines made afterwards.

    Raises:
        ValueError: If ``kernels`` is not known, or another backend computes on this machine's device.
        RuntimeError: If vLLM has a version other than ``VLLM_VERSIONS``, or is aligned already.
    """
    _refuse(kernels)
    for owner, names, new in _replacements():
        for name in names:
            _replace(owner, name, new)
    selector._cached_get_attn_backend.cache_clear()
    _names.append(kernels)
    return _restore


def _refuse(kernels: str) -> None:
    if kernels not in KERNELS:
        raise ValueError(f"align_vllm: kernels must be one of {KERNELS}, got {kernels!r}")
    backend = backend_of(torch.empty(0, device=current_platform.device_type)).__name__.rsplit(".", 1)[-1]
    if kernels != backend:
        raise ValueError(
            f"align_vllm: kernels must be {backend!r}, which compute on device "
            f"{current_platform.device_type!r}, got {kernels!r}"
        )
    if vllm.__version__ not in VLLM_VERSIONS:
        raise RuntimeError(
            f"align_vllm: the version of vLLM must be one of {VLLM_VERSIONS}, got {vllm.__version__!r}"
        )
    if _names:
        raise RuntimeError(
            f"align_vllm: vLLM is aligned already, with kernels {_names[-1]!r}; undo that first"
        )


def _replacements() -> list[tuple[Any, tuple[str, ...], Any]]:
    sampling = ("forward_native", "forward_cpu", "forward_cuda")
    return [
        (UnquantizedLinearMethod, ("process_weights_after_loading",), vllm_layers.keep_weights),
        (UnquantizedEmbeddingMethod, ("process_weights_after_loading",), vllm_layers.keep_weights),
        (UnquantizedLinearMethod, ("apply",), vllm_layers.linear_apply),
        (UnquantizedEmbeddingMethod, ("apply",), vllm_layers.linear_apply),
        (RMSNorm, ("forward",), vllm_layers.rms_norm_forward),
        (SiluAndMul, ("forward",), vllm_layers.silu_and_mul_forward),
        (RotaryEmbedding, ("forward",), vllm_layers.rotary_forward),
        (Sampler, ("compute_logprobs",), staticmethod(vllm_layers.log_probs)),
        *(
            (TopKTopPSampler, (name,), vllm_layers.sampler_forward(getattr(TopKTopPSampler, name)))
            for name in sampling
        ),
        (
            type(current_platform),
            ("get_attn_backend_cls",),
            classmethod(lambda cls, *args, **kwargs: ATTENTION),
        ),
        (Worker, ("load_model",), _load_model(Worker.load_model)),
        *(
            (Worker, (name,), _forgetting(getattr(Worker, name)))
            for name in ("reload_weights", "finish_weight_update")
        ),
    ]


def _forgetting(original: Callable[..., None]) -> Callable[..., None]:
    """The original way of new weights in, after which no rounded copy of old ones is used."""

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        forget_weights(self.model_runner.get_model().parameters())

    return load


def _load_model(original: Callable[..., None]) -> Callable[..., None]:
    """The original, which also refuses what is not supported and says what was aligned."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unsupported_config(self.vllm_config)
        original(self, *args, **kwargs)
        model = self.model_runner.get_model()
        kinds = refuse_unsupported_model(model)
        vllm_layers.give_rotary_tables(model, self.vllm_config.model_config)
        model.rzero_kernels = kernel_fingerprint(next(model.parameters()).device)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(
            f"rzero: {type(model).__name__} under vLLM {vllm.__version__} computes with "
            f"{model.rzero_kernels}: {counted}, log-probabilities",
            file=sys.stderr,
            flush=True,
        )

    return load_model


def _replace(owner: Any, name: str, new: Any) -> None:
    inherited = object()
    old = vars(owner).get(name, inherited)
    setattr(owner, name, new)
    _undo.append(lambda: delattr(owner, name) if old is inherited else setattr(owner, name, old))


def _restore() -> None:
    while _undo:
        _undo.pop()()
    _names.clear()
    selector._cached_get_attn_backend.cache_clear()
