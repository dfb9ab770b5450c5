"""A checked batch as plain arrays, ready to be copied into the store, and back."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from rzero.buffers.digest import PROVENANCE_FIELDS
from rzero.buffers.packing import PackedBatch, offsets, validate
from rzero.buffers.records import ROW_FIELDS
from rzero.buffers.row_table import ROW_DTYPE, row_lengths

_NO_VERSION = np.iinfo(np.int32).max


class Entry(NamedTuple):
    """B validated responses: stored columns ``[N]``, int64 offsets ``[B + 1]``, and rows ``[B]``."""

    columns: dict[str, np.ndarray]
    cu_seqlens: np.ndarray
    rows: np.ndarray


def prepare(batch: PackedBatch, extra_fields: Mapping[str, np.dtype], *, chunk_tokens: int) -> Entry:
    """Validate a batch and lay it out for the store.

    ``response_mask`` is not stored: it is True exactly where ``policy_version`` is not -1, so it cannot
    come to disagree.

    Args:
        batch: B responses.
        extra_fields: the extras that the store holds. A floating-point one that the batch lacks becomes NaN.
        chunk_tokens: the longest response that the store takes.

    Raises:
        ValueError: if a rule of `Rollout` is broken, a response is too long, or extras do not fit.
        TypeError: if an extra has another dtype.
    """
    validate(batch, caller="extend")
    fields: dict[str, Any] = dict(batch.items())
    cu_seqlens = fields["cu_seqlens"].cpu().numpy().astype(np.int64)
    longest = int(np.diff(cu_seqlens).max())
    if longest > chunk_tokens:
        raise ValueError(
            f"extend: a response must fit into chunk_tokens {chunk_tokens}, got {longest} tokens"
        )
    columns = {name: fields[name].cpu().contiguous().numpy() for name in PROVENANCE_FIELDS}
    columns |= _extra_columns(fields.get("extras"), extra_fields, int(cu_seqlens[-1]))
    rows = np.zeros(len(cu_seqlens) - 1, ROW_DTYPE)
    for name in (*ROW_FIELDS, "digest"):
        rows[name] = fields[name].cpu().numpy()
    version = columns["policy_version"]
    rows["version"] = np.minimum.reduceat(np.where(version < 0, _NO_VERSION, version), cu_seqlens[:-1])
    bounds = cu_seqlens.tolist()
    rows["extras_crc"] = extras_checksums([columns[name] for name in extra_fields], bounds[:-1], bounds[1:])
    return Entry(columns, cu_seqlens, rows)


def restore_batch(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> PackedBatch:
    """Turn columns that were copied out of the store, and their rows, into a batch."""
    fields: dict[str, Any] = {name: torch.from_numpy(columns[name]) for name in PROVENANCE_FIELDS}
    fields["response_mask"] = fields["policy_version"] >= 0
    fields["cu_seqlens"] = offsets(row_lengths(rows))
    for name in (*ROW_FIELDS, "digest"):
        fields[name] = torch.from_numpy(np.ascontiguousarray(rows[name]))
    extras = {name: torch.from_numpy(columns[name]) for name in columns if name not in PROVENANCE_FIELDS}
    if extras:
        fields["extras"] = TensorDict(extras, batch_size=[len(columns["token_ids"])])
    return PackedBatch(**fields)


def extras_checksums(extras: Sequence[np.ndarray], starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
    """CRC-32 over the extras of each response, column after column, uint32 ``[B]``; 0 without extras."""
    sums = [0] * len(starts)
    for column in extras:
        view = column.data
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            sums[row] = zlib.crc32(view[start:stop], sums[row])
    return np.array(sums, np.uint32)


def _extra_columns(
    extras: TensorDict | None, extra_fields: Mapping[str, np.dtype], num_tokens: int
) -> dict[str, np.ndarray]:
    given = {} if extras is None else {str(name): value.cpu().contiguous() for name, value in extras.items()}
    if unknown := given.keys() - extra_fields.keys():
        raise ValueError(
            f"extend: extras must be among extra_fields {sorted(extra_fields)}, got {sorted(unknown)}"
        )
    columns = {}
    for name, dtype in extra_fields.items():
        if name in given:
            columns[name] = given[name].numpy()
            if columns[name].dtype != dtype:
                raise TypeError(
                    f"extend: extras[{name!r}] must have dtype {dtype}, got {columns[name].dtype}"
                )
        elif dtype.kind == "f":
            columns[name] = np.full(num_tokens, np.nan, dtype)
        else:
            raise ValueError(f"extend: extras must hold {name!r}, because {dtype} has no NaN for 'not there'")
    return columns
