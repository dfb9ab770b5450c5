"""Tensors in a folder, by torch.distributed.checkpoint as safetensors: one file a rank, no pickle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None = None) -> None:
    """Write tensors and flush the files; each rank writes the shards that it holds.

    Args:
        tensors: By name. Equal names on different ranks are copies of one tensor, of which one is kept.
        folder: Of all ranks.
        group: The ranks that take part; None for this one alone.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plainly(group):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a folder, whole."""
    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}


def read_tensors(
    names: Mapping[str, Tensor | None], folder: Path, group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Read tensors, however they were sharded when they were written.

    Args:
        names: What to read, each with a tensor that is sharded as the result is to be; None for a whole one.
        folder: See ``write_tensors``.
        group: See ``write_tensors``.

    Returns:
        New tensors; whole ones lie on the CPU.
    """
    stored = stored_tensors(folder)
    targets: dict[str, Any] = {}
    for name, like in names.items():
        size, dtype = stored[name]
        if isinstance(like, DTensor) and like.shape == size:
            targets[name] = torch.empty_like(like, dtype=dtype)
        else:
            targets[name] = torch.empty(size, dtype=dtype)
    with _plainly(group):
        reader = HuggingFaceStorageReader(str(folder))
        load(targets, storage_reader=reader, process_group=group, no_dist=group is None)
    return targets


@contextmanager
def _plainly(group: ProcessGroup | None) -> Iterator[None]:
    """Errors of the system as such; and no warning that one process saves alone, which was asked for."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values() if isinstance(cause, OSError)]
            raise (causes[0] if causes else error) from error
