"""Objects with a state, where the thing itself has none that can be saved as it is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
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
        """Both states, as torch's ``get_state_dict`` returns them, which takes ten times as long.

        Parameters come as themselves: to detach one hands the interpreter's lock to other threads.
        """
        if not self._optimizer.state:
            get_state_dict(self._model, self._optimizer)  # makes the optimizer's state, still zero
        names: dict[Tensor, str] = {
            parameter: _plain(name) for name, parameter in self._model.named_parameters()
        }
        return {
            "model": {
                _plain(name): tensor for name, tensor in self._model.state_dict(keep_vars=True).items()
            },
            "optimizer": {
                "state": {names[parameter]: state for parameter, state in self._optimizer.state.items()},
                "param_groups": [
                    {**group, "params": [names[parameter] for parameter in group["params"]]}
                    for group in self._optimizer.param_groups
                ],
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set both."""
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def _plain(name: str) -> str:
    """The name of a parameter without what torch's wrappers for compiling and recomputing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


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
        version, words, gauss = random.getstate()
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from all of them; those of GPUs are left alone where the number of GPUs is another."""
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state_dict["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        if len(state_dict["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
