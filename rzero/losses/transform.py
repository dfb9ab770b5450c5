"""The group-mean advantage as a replay-buffer transform around :mod:`rzero.losses.advantages`."""

import threading
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs.transforms import Transform

from rzero.losses.advantages import group_mean_advantages

__all__ = ["GroupMeanAdvantage"]


class GroupMeanAdvantage(Transform):
    """Write each response's advantage on its way into a buffer, and hold a group back until it is complete.

        A_i = R_i - mean_{j in group} R_j

    Append it to a replay buffer and ``extend`` the buffer with rows, one complete response each, in any order
    and any portions. A row waits here until ``group_size`` rows share its group; then the whole group passes,
    in order of arrival. An incomplete group never passes: :meth:`take` hands it back, so that nothing is
    dropped unseen. Several threads may write; several processes may not, since what waits is this process's
    own, and ``ReplayBuffer.share`` refuses.

    TorchRL's ``MCAdvantage`` always divides by the group's standard deviation; this one never does.

    Args:
        group_size: responses that make a group complete, at least 2.
        group_key: integer group of each row.
        reward_key: the row's whole reward, one value.
        advantage_key: where the advantage is written, in the shape of the reward.

    Raises:
        ValueError: group_size below 2; on writing, a row with several rewards or a reward that is not finite,
            or data without a batch dimension.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=GroupMeanAdvantage(2), batch_size=2)
        >>> rows = TensorDict({"group_id": torch.tensor([7, 9, 7])}, batch_size=[3])
        >>> rows["next", "reward"] = torch.tensor([[1.0], [1.0], [0.0]])
        >>> _ = buffer.extend(rows)
        >>> len(buffer), buffer[:]["advantage"].flatten()
        (2, tensor([ 0.5000, -0.5000]))
    """

    requires_shared_write_state = True  # TorchRL's word for it: ReplayBuffer.share then refuses

    def __init__(
        self,
        group_size: int,
        *,
        group_key: NestedKey = "group_id",
        reward_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
    ) -> None:
        """Set up; see the class."""
        if group_size < 2:
            raise ValueError(f"GroupMeanAdvantage: group_size must be at least 2, got {group_size}")
        super().__init__(in_keys=[group_key, reward_key], out_keys=[advantage_key])
        self.group_size = group_size
        self.group_key, self.reward_key, self.advantage_key = group_key, reward_key, advantage_key
        self._waiting: dict[int, list[TensorDictBase]] = {}
        self._lock = threading.Lock()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave what is read from the buffer as it is."""
        return tensordict

    def waiting(self) -> dict[int, int]:
        """How many rows of each incomplete group are held back."""
        with self._lock:
            return {group: len(rows) for group, rows in self._waiting.items()}

    def take(self, group_id: int) -> list[TensorDictBase]:
        """Hand back, and forget, the rows of an incomplete group; KeyError if there is none."""
        with self._lock:
            return self._waiting.pop(group_id)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if tensordict.ndim == 0:
            raise ValueError(
                "GroupMeanAdvantage: tensordict must have a batch dimension; use extend, not add"
            )
        passing = []
        rows = tensordict if tensordict.ndim == 1 else tensordict.reshape(-1)
        for row in rows.unbind(0):
            group_id = int(cast(Tensor, row.get(self.group_key)))
            self._check_reward(row, group_id)
            row = row.clone()  # what waits must not change when its writer reuses memory
            with self._lock:
                group = self._waiting.setdefault(group_id, [])
                group.append(row)
                complete = len(group) == self.group_size
                if complete:
                    del self._waiting[group_id]
            if complete:
                passing += self._with_advantages(group)
        return lazy_stack(passing) if passing else None

    def _check_reward(self, row: TensorDictBase, group_id: int) -> None:
        reward = cast(Tensor, row.get(self.reward_key))
        if reward.numel() != 1 or not bool(reward.isfinite().all()):
            raise ValueError(
                f"GroupMeanAdvantage: {self.reward_key!r} must hold one finite reward for each response, "
                f"got {reward.tolist()} in group {group_id}"
            )

    def _with_advantages(self, rows: list[TensorDictBase]) -> list[TensorDictBase]:
        """The rows of one complete group, each with its advantage."""
        rewards = [cast(Tensor, row.get(self.reward_key)) for row in rows]
        flat = torch.stack([reward.flatten()[0] for reward in rewards])
        advantages = group_mean_advantages(flat, torch.zeros_like(flat, dtype=torch.int64))
        return [
            row.set(self.advantage_key, advantage.expand(reward.shape).clone())
            for row, reward, advantage in zip(rows, rewards, advantages, strict=True)
        ]

    def __getstate__(self) -> dict:
        """Everything but the lock, which cannot travel."""
        return {**super().__getstate__(), "_lock": None}

    def __setstate__(self, state: dict) -> None:
        """With a lock of its own."""
        super().__setstate__({**state, "_lock": threading.Lock()})
