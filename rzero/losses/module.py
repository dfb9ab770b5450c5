"""The thin TorchRL shell around the loss. The maths stands in :mod:`rzero.losses.reinforce`."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives.common import LossModule

from rzero.losses.importance import importance_weights
from rzero.losses.reinforce import reinforce_loss

__all__ = ["ReinforceZeroLoss", "ReinforceZeroLossOutput"]


class ReinforceZeroLossOutput(TensorClass["nocast"]):
    """Scalars of one call; only ``loss_objective`` carries a gradient.

    Attributes:
        loss_objective: :func:`rzero.losses.reinforce_loss`.
        ESS: effective sample size of the counted tokens as a share of them, 1 when sampler and learner agree.
        kl_approx: mean of log mu - log pi over the counted tokens, in nats.
        ratio_mean: mean importance weight of the counted tokens.
        ratio_max: the largest.
        grad_norm: None; TorchRL's trainers write it after their step.
    """

    loss_objective: Tensor
    ESS: Tensor
    kl_approx: Tensor
    ratio_mean: Tensor
    ratio_max: Tensor
    grad_norm: Tensor | None = None

    def __getitem__(self, item: str) -> Tensor:
        """A scalar by name, as ``dispatch`` and trainers ask for it."""
        return self.get(item)

    def __setitem__(self, item: str, value: Tensor) -> None:
        """Set a scalar by name, as trainers do."""
        self.set(item, value)


class ReinforceZeroLoss(LossModule):
    """:func:`rzero.losses.reinforce_loss` for TorchRL pipelines and trainers.

        loss_objective = -(1/B) sum_i (1/T_i) sum_t  w_it * A_i * log pi_theta(a_it | h_it)

    Reads TorchRL's own layout: what the sampler recorded at ``("log_probs", "full")``, the advantage at
    ``"advantage"``, one for each row, and which tokens count at ``("masks", "all_assistant_mask")``. The
    learner's log-probs come from ``actor_network``, called on a copy of the input and read where TorchRL's
    wrappers write them, or without a network from ``("learner_log_probs", "full")``. Every key can be renamed
    by ``set_keys`` and may be nested. Padded, packed and jagged entries are taken as the function takes them;
    ragged lazy stacks are padded on the left, as TorchRL pads them.

    Args:
        actor_network: module that writes log-probs of the given tokens, such as TorchRL's
            ``TransformersWrapper(generate=False)``; None when they are in the input already.
        num_responses: B over all ranks and micro-batches of the optimizer step; None: the rows of each call.
            A trainer that itself divides by its accumulation steps wants the count of one micro-batch.
        check_values: refuse unusable numbers on counted tokens.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> loss = ReinforceZeroLoss()
        >>> data = TensorDict({"advantage": torch.tensor([1.0])}, batch_size=[1])
        >>> data["learner_log_probs", "full"] = torch.tensor([[0.3]]).log().requires_grad_()
        >>> data["log_probs", "full"] = torch.tensor([[0.2]]).log()
        >>> data["masks", "all_assistant_mask"] = torch.tensor([[True]])
        >>> output = loss(data)
        >>> output.loss_objective.backward()
        >>> data["learner_log_probs", "full"].grad
        tensor([[-1.5000]])
    """

    @dataclass
    class _AcceptedKeys:
        """Where each tensor is found, by TorchRL's names."""

        advantage: NestedKey = "advantage"
        sample_log_prob: NestedKey = ("log_probs", "full")
        actor_log_prob: NestedKey = ("log_probs", "full")
        log_prob: NestedKey = ("learner_log_probs", "full")
        mask: NestedKey = ("masks", "all_assistant_mask")
        cu_seqlens: NestedKey = "cu_seqlens"

    default_keys = _AcceptedKeys
    actor_network: TensorDictModuleBase | None
    output_type = ReinforceZeroLossOutput

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        num_responses: int | None = None,
        check_values: bool = True,
    ) -> None:
        """Set up; see the class."""
        super().__init__()
        self.actor_network = actor_network
        self.num_responses = num_responses
        self.check_values = check_values
        self.out_keys = ["loss_objective", "ESS", "kl_approx", "ratio_mean", "ratio_max"]
        self._set_in_keys()

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """Follow a change of keys; there is no value estimator."""
        self._set_in_keys()

    def _set_in_keys(self) -> None:
        keys = cast(ReinforceZeroLoss._AcceptedKeys, self.tensor_keys)
        learner = [keys.log_prob] if self.actor_network is None else list(self.actor_network.in_keys)
        read = [*learner, keys.sample_log_prob, keys.advantage, keys.mask, keys.cu_seqlens]
        self.in_keys = list(dict.fromkeys(read))

    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(self, tensordict: TensorDictBase) -> ReinforceZeroLossOutput:
        """Compute the loss and what its ratios look like.

        Args:
            tensordict: B responses; never written to.

        Raises:
            KeyError: an entry is missing.
            ValueError: as :func:`rzero.losses.reinforce_loss`, or more than one advantage for a response.
        """
        keys = cast(ReinforceZeroLoss._AcceptedKeys, self.tensor_keys)
        behavior_log_probs = _read(tensordict, "sample_log_prob", keys.sample_log_prob, padding=torch.nan)
        mask = _read(tensordict, "mask", keys.mask, padding=False)
        advantages = _read(tensordict, "advantage", keys.advantage)
        cu_seqlens = cast("Tensor | None", tensordict.get(keys.cu_seqlens, None))
        if self.actor_network is None:
            log_probs = _read(tensordict, "log_prob", keys.log_prob, padding=torch.nan)
        else:
            acted = self.actor_network(tensordict.copy())
            log_probs = _read(acted, "actor_log_prob", keys.actor_log_prob, padding=torch.nan)
        tokens = log_probs, behavior_log_probs
        loss = reinforce_loss(
            *tokens,
            _one_per_row(advantages),
            mask,
            cu_seqlens=cu_seqlens,
            num_responses=self.num_responses,
            check_values=self.check_values,
        )
        weights = importance_weights(*tokens, mask, cu_seqlens=cu_seqlens, check_values=False)
        return ReinforceZeroLossOutput(loss_objective=loss, **_ratio_scalars(weights, mask))


def _ratio_scalars(weights: Tensor, mask: Tensor) -> dict[str, Any]:
    """The logged scalars; NaN when nothing counts."""
    if weights.is_nested:
        weights, mask = weights.values(), mask.values()
    count, total = mask.sum(), weights.sum()
    return {
        "ESS": total.square() / (count * weights.square().sum()),
        "kl_approx": -torch.where(mask, weights, 1.0).log().sum() / count,
        "ratio_mean": total / count,
        "ratio_max": torch.where(mask.any(), weights.amax(), torch.nan) if mask.numel() else total / count,
    }


def _read(
    tensordict: TensorDictBase, role: str, key: NestedKey, *, padding: float | bool | None = None
) -> Tensor:
    """An entry; that of a ragged stack is padded on the left with a value that cannot pass for data."""
    ragged = {"as_padded_tensor": True, "padding_side": "left", "padding_value": padding}
    value = tensordict.get(key, None, **({} if padding is None else ragged))  # pyright: ignore
    if value is None:
        raise KeyError(
            f"ReinforceZeroLoss: tensordict must hold {key!r} ({role}; set_keys renames it), "
            f"got {sorted(map(str, tensordict.keys(True, True)))}"
        )
    return cast(Tensor, value)


def _one_per_row(advantages: Tensor) -> Tensor:
    """[B] from TorchRL's [B], [B, 1] or [B, 1, 1]."""
    if advantages.ndim == 0 or advantages.numel() != len(advantages):
        raise ValueError(
            "ReinforceZeroLoss: advantage must hold one value for each response, "
            f"got shape {tuple(advantages.shape)}"
        )
    return advantages.flatten()
