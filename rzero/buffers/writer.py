"""TorchRL's Writer for a storage that finds the places itself."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torchrl.data.replay_buffers.writers import Writer

from rzero.buffers.packing import PackedBatch
from rzero.buffers.records import Rollout
from rzero.buffers.storage import TokenLogStorage


class TokenLogWriter(Writer):
    """Appends; nothing is overwritten. It has no state: what was written follows from the store's ledger."""

    def add(self, data: Rollout) -> int:
        """Store one response and return its place."""
        return int(self.extend([data]))

    def extend(self, data: PackedBatch | Sequence[Rollout | Mapping[str, Any]]) -> Tensor:
        """Store all responses or none, and return their places, int64 ``[B]``."""
        return cast(TokenLogStorage, self._storage).append(data)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def dumps(self, path: Any) -> None:
        """Nothing."""

    def loads(self, path: Any) -> None:
        """Nothing."""

    def _empty(self, empty_write_count: bool = True) -> None:
        """Nothing."""
