"""What stands in the slots of a continuously refilled batch: positions, draws so far, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from rzero.collectors.engine import GenerationRequest
from rzero.collectors.transformers_cache import SlotCache


class SlotState:
    """The tensors behind the slots: where each stands, what it has drawn so far, and its keys and values."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        self.cache = SlotCache(num_layers, device)
        self.position, self.count, self.limit, self.seed, self.last_token = (
            torch.zeros(0, dtype=torch.long, device=device) for _ in range(5)
        )
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(0, 0, device=device)
        self.versions = torch.zeros(0, 0, dtype=torch.int32, device=device)

    _PER_SLOT = ("position", "count", "limit", "seed", "last_token")
    _PER_TOKEN = ("tokens", "log_probs", "versions")

    def open(self, first: int, requests: list[GenerationRequest]) -> None:
        """Place requests into the slots from ``first`` on."""
        stop = first + len(requests)
        self.cache.reserve(stop, max(len(r.prompt) + r.max_new_tokens for r in requests))
        self._reserve(stop, max(r.max_new_tokens for r in requests))
        as_tensor = torch.tensor(
            [[len(r.prompt) - 1, 0, r.max_new_tokens, r.seed, r.prompt[-1]] for r in requests]
        )
        for name, column in zip(self._PER_SLOT, as_tensor.to(self.device).unbind(-1), strict=True):
            getattr(self, name)[first:stop] = column

    def _reserve(self, slots: int, length: int) -> None:
        old_slots, old_length = self.tokens.shape
        if slots > old_slots or length > old_length:
            slots, length = max(slots, 2 * old_slots), max(length, old_length)
            for name in self._PER_SLOT:
                old = getattr(self, name)
                setattr(self, name, torch.cat([old, old.new_zeros(slots - len(old))]))
            for name in self._PER_TOKEN:
                old = getattr(self, name)
                new = old.new_zeros(slots, length)
                new[:old_slots, :old_length] = old
                setattr(self, name, new)

    def record(self, n: int, tokens: Tensor, log_probs: Tensor, version: int) -> None:
        """Append one token to each of the first n slots."""
        rows, count = torch.arange(n, device=self.device), self.count[:n]
        self.tokens[rows, count] = tokens
        self.log_probs[rows, count] = log_probs
        self.versions[rows, count] = version
        self.last_token[:n] = tokens
        self.position[:n] += 1
        self.count[:n] += 1

    def take(self, rows: list[int]) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """What was drawn in some slots, end to end, on the CPU.

        Returns:
            Lengths, and of all their tokens: ids int32, log-probabilities float32, versions int32.
        """
        index = torch.tensor(rows, device=self.device)
        counts = self.count[index]
        drawn = torch.arange(self.tokens.shape[1], device=self.device) < counts[:, None]
        taken = (getattr(self, name)[index][drawn].cpu() for name in self._PER_TOKEN)
        tokens, log_probs, versions = taken
        return counts.tolist(), tokens.to(torch.int32), log_probs, versions

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots over others."""
        source, target = (torch.tensor(slots, device=self.device) for slots in (sources, targets))
        self.cache.move(source, target)
        for name in (*self._PER_SLOT, *self._PER_TOKEN):
            tensor = getattr(self, name)
            tensor[target] = tensor[source]
