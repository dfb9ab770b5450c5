"""Checkpoints: whole or absent, verified before they are used, and never unpickled.

`Checkpointer` saves and loads whatever has a ``state_dict``; it knows no other class of rzero. The TorchRL
adapter loads on first use.
"""

from typing import TYPE_CHECKING, Any

from rzero.checkpoint.checkpointer import Checkpointer
from rzero.checkpoint.errors import CheckpointError, DamagedCheckpoint
from rzero.checkpoint.manifest import read_manifest, verify_checkpoint
from rzero.checkpoint.states import RNGState, TrainingState
from rzero.checkpoint.tree import from_tensors, to_tensors

if TYPE_CHECKING:
    from rzero.checkpoint.torchrl_adapter import StatefulCheckpointAdapter

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpoint",
    "RNGState",
    "StatefulCheckpointAdapter",
    "TrainingState",
    "from_tensors",
    "read_manifest",
    "to_tensors",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "StatefulCheckpointAdapter":
        from rzero.checkpoint.torchrl_adapter import StatefulCheckpointAdapter

        return StatefulCheckpointAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
