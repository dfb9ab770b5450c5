"""The writer of TorchRL's buffer protocol, for a storage that chooses the places itself."""

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.writers import Writer

from rzero.buffers.packing import PackedBatch, pack
from rzero.buffers.records import Rollout


class TokenLogWriter(Writer):
    """Appends whole batches; nothing is ever overwritten."""

    def __init__(self):
        super().__init__()
        self._write_count = 0

    def add(self, data: Rollout) -> Tensor:
        return self.extend([data])

    def extend(self, data: Any) -> Tensor:
        batch = data if isinstance(data, PackedBatch) else pack(data)
        index, _ = self._storage.admit(self._storage.prepare(batch))
        self._write_count += len(index)
        return index

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._write_count = 0

    def state_dict(self):
        return {"write_count": torch.tensor(self._write_count)}

    def load_state_dict(self, state_dict):
        self._write_count = int(state_dict["write_count"])

    def dumps(self, path):
        torch.save(self.state_dict(), path)

    def loads(self, path):
        self.load_state_dict(torch.load(path, weights_only=True))
