"""The key-value cache of continuous batching: one slot a response, each at its own position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, length, dim], each slot valid up to its position."""

    def __init__(self, positions: SlotPositions) -> None:
        super().__init__()
        self._positions = positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the slots and the length asked for so far."""
        shape = (self._positions.slots, key_states.shape[1], self._positions.length)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one new token into each of the first n slots; return all that these slots hold, padded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows, current = self._positions.rows, self._positions.current
        self.keys[rows, :, current] = key_states[:, :, 0]
        self.values[rows, :, current] = value_states[:, :, 0]
        n, width = len(rows), self._positions.width
        return self.keys[:n, :, :width], self.values[:n, :, :width]

    def write(self, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store prefilled ``[n, heads, t, dim]`` at the start of the given slots."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None and self.values is not None
        index = torch.tensor(slots, device=keys.device)
        self.keys[index, :, : keys.shape[2]] = keys
        self.values[index, :, : keys.shape[2]] = values

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots over others, as far as any slot is valid."""
        if self.keys is not None and self.values is not None:
            width = self._positions.width
            self.keys[target, :, :width] = self.keys[source, :, :width]
            self.values[target, :, :width] = self.values[source, :, :width]

    def grow(self, slots: int, length: int) -> None:
        """Keep what is stored in a larger allocation."""
        if self.keys is None or self.values is None:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The engine passes its own masks; these are the sizes they have."""
        return self._positions.width, 0

    def get_seq_length(self) -> int:
        """The widest position written so far."""
        return self._positions.width

    def get_max_length(self) -> int:
        """No bound: the cache grows."""
        return -1


class SlotPositions:
    """Where the next forward writes: set by the engine before it, read by every layer during it."""

    def __init__(self, device: torch.device) -> None:
        self.slots, self.length, self.width = 0, 0, 0
        self.rows = torch.empty(0, dtype=torch.long, device=device)
        self.current = torch.empty(0, dtype=torch.long, device=device)


class SlotCache(Cache):
    """A Hugging Face cache whose rows are slots of a continuously refilled batch."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.positions = SlotPositions(device)
        self.slot_layers = [SlotLayer(self.positions) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``slots`` slots of ``length`` tokens; sizes double, so growing is rare."""
        p = self.positions
        if slots <= p.slots and length <= p.length:
            return
        p.slots = max(p.slots, 1 << (slots - 1).bit_length())
        p.length = max(p.length, 1 << (length - 1).bit_length())
        for layer in self.slot_layers:
            layer.grow(p.slots, p.length)

    def aim(self, positions: Tensor, width: int) -> None:
        """Have the next forward write slot r at positions[r] (int64 [n]) and see ``width`` places."""
        self.positions.rows = torch.arange(len(positions), device=positions.device)
        self.positions.current, self.positions.width = positions, width

    def write(self, slots: Sequence[int], prefilled: Cache, source: Sequence[int]) -> None:
        """Copy row ``source[i]`` of a prefilled cache into slot ``slots[i]``."""
        for ours, theirs in zip(self.slot_layers, prefilled.layers, strict=True):
            assert (
                isinstance(theirs, CacheLayerMixin) and theirs.keys is not None and theirs.values is not None
            )
            index = torch.tensor(source, device=theirs.keys.device)
            ours.write(slots, theirs.keys.index_select(0, index), theirs.values.index_select(0, index))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` over slots ``target``, int64 [m] each, after a forward that saw them all."""
        for layer in self.slot_layers:
            layer.move(source, target)
