"""Every batch of a run on disk, with what the update made of it, so that it can be made again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.errors import RecipeError
from recipes.learners import BATCH_FIELDS, Learners
from rzero.buffers import PackedBatch
from rzero.collectors.hashing import tensor_digest
from rzero.collectors.transport import Message, decode, encode


@dataclass(frozen=True, kw_only=True)
class RecordedUpdate:
    """What was trained on in one update, in the order in which it arrived, and what came out.

    Attributes:
        batch: The whole batch.
        loss: float32, to the last bit.
        gradients: ``tensor_digest`` of each parameter's gradient, before clipping.
        learners: How many ranks computed it.
        threads: With how many threads each.
    """

    batch: PackedBatch
    loss: float
    gradients: dict[str, int]
    learners: int
    threads: int


def gradient_digests(learners: Learners, model: Any) -> dict[str, int]:
    """``tensor_digest`` of each parameter's gradient; every learner must call this."""
    return {
        name: tensor_digest(learners.full(parameter.grad))
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def record_update(
    folder: Path, version: int, batch: PackedBatch, *, learners: Learners, model: Any, loss: Tensor
) -> None:
    """Write an update down, before the optimizer's step; a former record of the same update is replaced.

    Args:
        folder: Of the run.
        version: That is updated.
        batch: The whole batch.
        learners: Every one must call this; the first one writes.
        model: Its gradients are digested.
        loss: Scalar.
    """
    gradients = gradient_digests(learners, model)
    if not learners.first:
        return
    text = {"loss": float(loss).hex(), "gradients": json.dumps(gradients)}
    text |= {"learners": str(learners.size), "threads": str(torch.get_num_threads())}
    data = encode(Message("update", {name: getattr(batch, name) for name in BATCH_FIELDS}, text))
    path = _path(folder, version)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(data.numpy().tobytes())
    partial.replace(path)


def read_update(folder: Path, version: int) -> RecordedUpdate:
    """Read an update; nothing is unpickled.

    Raises:
        RecipeError: If it was not recorded.
    """
    try:
        data = np.fromfile(_path(folder, version), dtype=np.uint8)
    except OSError as error:
        raise RecipeError(f"update {version} must be recorded (--record) in {folder}: {error}") from error
    message = decode(torch.from_numpy(data))
    fields: dict[str, Any] = dict(message.tensors)
    return RecordedUpdate(
        batch=PackedBatch(**fields),
        loss=float.fromhex(message.text["loss"]),
        gradients=json.loads(message.text["gradients"]),
        learners=int(message.text["learners"]),
        threads=int(message.text["threads"]),
    )


def _path(folder: Path, version: int) -> Path:
    return folder / "batches" / f"{version:09d}.safetensors"
