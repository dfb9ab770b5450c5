"""Our format inside TorchRL's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torchrl.checkpoint import CheckpointAdapter

from rzero.checkpoint.shards import read_tensors, stored_tensors, write_tensors
from rzero.checkpoint.tree import from_tensors, to_tensors


@final
class StatefulCheckpointAdapter(CheckpointAdapter):
    """Saves whatever has ``state_dict`` and ``load_state_dict``, as tensors and JSON, without pickle.

    Example:
        >>> from torchrl.checkpoint import Checkpoint
        >>> checkpoint = Checkpoint()
        >>> model = __import__("torch").nn.Linear(2, 1)
        >>> _ = checkpoint.register("model", model, adapter=StatefulCheckpointAdapter())
    """

    adapter_id = "rzero.stateful"

    def save(self, component: Any, path: Path, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write the component's state below ``path``."""
        write_tensors(to_tensors(component.state_dict(*args, **kwargs)), path)

    def load(
        self,
        component: Any,
        path: Path,
        *,
        map_location: Any,
        tensor_load_kwargs: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Give the component the state below ``path``, which moves tensors to where they belong."""
        tensors = read_tensors(dict.fromkeys(stored_tensors(path)), path)
        component.load_state_dict(from_tensors(tensors), *args, **kwargs)
