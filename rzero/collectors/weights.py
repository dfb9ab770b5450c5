"""Weights on their way to the engines: named, rounded, digested, and checked after loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from rzero.collectors.engine import EngineError
from rzero.collectors.hashing import tensor_digests


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once (tied ones under their first name) and every persistent buffer, as views."""
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict(keep_vars=False)
    weights.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return weights


Policy = nn.Module | TensorDictBase | Mapping[str, Tensor]


def only_policy(*given: Policy | None, weights_dict: Mapping[str, Any] | None) -> Policy | None:
    """What was passed in one of the ways of TorchRL's ``update_policy_weights_``; None if nothing was.

    Raises:
        TypeError: If there are more, or ``weights_dict`` names another model than ``policy``.
    """
    named = {} if weights_dict is None else dict(weights_dict)
    there = [policy for policy in (*given, *named.values()) if policy is not None]
    if len(there) > 1 or named.keys() - {"policy"}:
        raise TypeError(
            f"AsyncRolloutCollector.update_policy_weights_: one policy must be given, got {len(there)} "
            f"values and weights_dict of {sorted(named)}"
        )
    return there[0] if there else None


def require_all_engines(worker_ids: Any, model_id: str | None) -> None:
    """Refuse what TorchRL's ``update_policy_weights_`` could ask for and no collector of versions can do.

    Raises:
        ValueError: If a part of the engines or another model is asked for.
    """
    if worker_ids is not None or model_id not in (None, "policy"):
        raise ValueError(
            f"AsyncRolloutCollector.update_policy_weights_: all engines get the one policy, "
            f"got worker_ids={worker_ids!r}, model_id={model_id!r}"
        )


def policy_weights(policy: Policy) -> dict[str, Tensor]:
    """The named weights of a model, or those that a TensorDict or another mapping holds.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(policy, nn.Module):
        return named_weights(policy)
    if isinstance(policy, TensorDictBase):
        return dict(policy.flatten_keys(".").items())
    if isinstance(policy, Mapping) and all(isinstance(value, Tensor) for value in policy.values()):
        return dict(policy)
    raise TypeError(
        f"policy_weights: policy must be a module or tensors by name, got {type(policy).__name__}"
    )


def weight_digests(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """One 64-bit digest per tensor, see ``tensor_digest``."""
    return dict(zip(weights, tensor_digests([*weights.values()]), strict=True))


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in ``dtype``, all others as they are."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()
    }


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let a learner compute with the weights that its samplers hold when ``dtype`` is what travels.

    Inside, the model's tensors have the values that arrive at an engine; afterwards their own again. Forward
    and backward belong inside, the optimizer's step outside: the gradient at the rounded weights moves the
    exact ones, as in mixed-precision training.

    Args:
        model: The learner's.
        dtype: The publisher's ``wire_dtype``; None changes nothing.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(1.001)
        >>> with rounded_weights(model, torch.bfloat16):
        ...     inside = model.weight.item()
        >>> inside, round(model.weight.item(), 3)
        (1.0, 1.001)
    """
    if dtype is None:
        yield
        return
    own = named_weights(model)
    exact = {name: tensor.clone() for name, tensor in own.items()}
    _overwrite(own, rounded(own, dtype))
    try:
        yield
    finally:
        _overwrite(own, exact)


@torch.no_grad()
def _overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
    """Write weights into a model in place, all or none, and check what the model holds afterwards.

    Args:
        model: Receives them; its tensors keep their identity.
        weights: Exactly the names and shapes of ``named_weights(model)``, in its dtypes or in narrower ones
            that convert to them without loss.
        digests: Of the weights as the learner holds them, in the model's dtypes.

    Raises:
        EngineError: If names, shapes or dtypes differ, or if a tensor read back from the model has another
            digest. The model then holds its old weights.
    """
    own = named_weights(model)
    if own.keys() != weights.keys() or own.keys() != digests.keys():
        odd = sorted((own.keys() ^ weights.keys()) | (own.keys() ^ digests.keys()))
        raise EngineError(
            f"load_weights: weights must name exactly the model's tensors, differing in {odd[:5]}"
        )
    for name, tensor in own.items():
        new = weights[name]
        if new.shape != tensor.shape or torch.promote_types(new.dtype, tensor.dtype) != tensor.dtype:
            raise EngineError(
                f"load_weights: {name} must be {tensor.dtype} {tuple(tensor.shape)}, "
                f"got {new.dtype} {tuple(new.shape)}"
            )
    old = {name: tensor.clone() for name, tensor in own.items()}
    _overwrite(own, weights)
    wrong = [name for name, digest in weight_digests(own).items() if digest != digests[name]]
    if wrong:
        _overwrite(own, old)
        raise EngineError(
            f"load_weights: {len(wrong)} of {len(own)} tensors differ from the learner's after loading, "
            f"first {wrong[0]}; the old weights were restored"
        )
