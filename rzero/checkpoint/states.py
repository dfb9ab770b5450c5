"""Objects with a state, where the thing itself has none that can be saved as it is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


@final
class TrainingState:
    """A model with its optimizer, named by parameters, so that any number of ranks can load it.

    Args:
        model: Plain, or sharded by FSDP2.
        optimizer: Of the model's parameters.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> state = TrainingState(model, torch.optim.AdamW(model.parameters()))
        >>> sorted(state.state_dict())
        ['model', 'optimizer']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Both states, by torch's ``get_state_dict``."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set both."""
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


@final
class RNGState:
    """The random number generators of this process: of Python, NumPy, torch and every GPU of it.

    Example:
        >>> state = RNGState()
        >>> saved = state.state_dict()
        >>> first = torch.rand(1)
        >>> state.load_state_dict(saved)
        >>> bool(torch.rand(1) == first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """All states."""
        name, keys, *rest = np.random.get_state(legacy=True)
        return {
            "python": random.getstate(),
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from all of them; those of GPUs are left alone where the number of GPUs is another."""
        random.setstate(state_dict["python"])
        name, keys, *rest = state_dict["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        if len(state_dict["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
