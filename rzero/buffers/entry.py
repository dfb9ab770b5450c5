"""Checked responses as plain arrays, ready to be copied into the store, and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tensordict import TensorDict
from torch import Tensor

from rzero.buffers.digest import PROVENANCE_FIELDS
from rzero.buffers.packing import PackedBatch, check_packed, gather, offsets
from rzero.buffers.records import ROW_FIELDS, Rollout, check_rows
from rzero.buffers.row_table import ROW_DTYPE, row_lengths

_NO_VERSION = np.iinfo(np.int32).max


class Entry(NamedTuple):
    """B validated responses: stored columns ``[N]``, int64 offsets ``[B + 1]``, and rows ``[B]``.

    ``response_mask`` is not stored: it is True exactly where ``policy_version`` is not -1, so it cannot come
    to disagree.
    """

    columns: dict[str, np.ndarray]
    cu_seqlens: np.ndarray
    rows: np.ndarray


def entry_of_batch(batch: PackedBatch, extra_fields: Mapping[str, np.dtype], *, chunk_tokens: int) -> Entry:
    """Validate a batch and lay it out for the store.

    Args:
        batch: B responses.
        extra_fields: the extras that the store holds. A floating-point one that the batch lacks becomes NaN.
        chunk_tokens: the longest response that the store takes.

    Raises:
        ValueError: if a rule of `Rollout` is broken, a response is too long, or extras do not fit.
        TypeError: if a field has another dtype.
    """
    fields: dict[str, Any] = dict(batch.items())
    check_packed(fields)
    extras = fields.pop("extras", None)
    arrays: dict[str, Any] = {name: _array(value) for name, value in fields.items()}
    arrays["cu_seqlens"] = arrays["cu_seqlens"].astype(np.int64)
    arrays["extras"] = {} if extras is None else {name: _array(value) for name, value in extras.items()}
    return _entry(arrays, extra_fields, chunk_tokens)


def entry_of_records(
    records: Sequence[Rollout | Mapping[str, Any]], extra_fields: Mapping[str, np.dtype], *, chunk_tokens: int
) -> Entry:
    """Validate single responses and lay them out for the store; the same as packing them first, but faster.

    Args:
        records: at least one `Rollout`, or mappings as `pack_fields` takes them.
        extra_fields: see `entry_of_batch`.
        chunk_tokens: see `entry_of_batch`.

    Raises:
        ValueError: see `entry_of_batch`.
        TypeError: if a field is missing or has another dtype.
    """
    plain = [record if isinstance(record, dict) else dict(record.items()) for record in records]
    return _entry(gather(plain, caller="extend"), extra_fields, chunk_tokens)


def restore_batch(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> PackedBatch:
    """Turn columns that were copied out of the store, and their rows, into a batch."""
    fields: dict[str, Any] = {name: torch.from_numpy(columns[name]) for name in PROVENANCE_FIELDS}
    fields["response_mask"] = fields["policy_version"] >= 0
    fields["cu_seqlens"] = offsets(row_lengths(rows))
    for name in (*ROW_FIELDS, "digest"):
        fields[name] = torch.from_numpy(rows[name].copy())
    extras = {name: torch.from_numpy(columns[name]) for name in columns if name not in PROVENANCE_FIELDS}
    if extras:
        fields["extras"] = TensorDict(extras, batch_size=[len(columns["token_ids"])])
    return PackedBatch(**fields)


def extras_checksums(extras: Sequence[np.ndarray], starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
    """XXH3 of 64 bits over the extras of each response, column after column, uint64 ``[B]``; 0 without."""
    sums = np.zeros(len(starts), np.uint64)
    views = [column.data for column in extras]
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True) if extras else ()):
        state = xxhash.xxh3_64()
        for view in views:
            state.update(view[start:stop])
        sums[row] = state.intdigest()
    return sums


def _entry(fields: Mapping[str, Any], extra_fields: Mapping[str, np.dtype], chunk_tokens: int) -> Entry:
    """Check everything, and derive what the store keeps beside the fields."""
    cu_seqlens = fields["cu_seqlens"]
    check_rows(fields, fields, cu_seqlens, caller="extend")
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    if longest > chunk_tokens:
        raise ValueError(
            f"extend: a response must fit into chunk_tokens {chunk_tokens}, got {longest} tokens"
        )
    extras = _extra_columns(fields["extras"], extra_fields, len(fields["token_ids"]))
    rows = np.zeros(len(cu_seqlens) - 1, ROW_DTYPE)
    for name in (*ROW_FIELDS, "digest"):
        rows[name] = fields[name]
    # Read as unsigned, the -1 of a token that was not sampled is larger than every version.
    oldest = np.minimum.reduceat(fields["policy_version"].view(np.uint32), cu_seqlens[:-1])
    rows["version"] = np.minimum(oldest, _NO_VERSION)
    bounds = cu_seqlens.tolist()
    rows["extras_checksum"] = extras_checksums(list(extras.values()), bounds[:-1], bounds[1:])
    return Entry({name: fields[name] for name in PROVENANCE_FIELDS} | extras, cu_seqlens, rows)


def _extra_columns(
    given: Mapping[str, np.ndarray], extra_fields: Mapping[str, np.dtype], num_tokens: int
) -> dict[str, np.ndarray]:
    if unknown := given.keys() - extra_fields.keys():
        raise ValueError(f"extend: extras must be among {sorted(extra_fields)}, got {sorted(unknown)}")
    extras = {}
    for name, dtype in extra_fields.items():
        if name in given:
            if given[name].dtype != dtype:
                raise TypeError(f"extend: extras[{name!r}] must have dtype {dtype}, got {given[name].dtype}")
            extras[name] = given[name]
        elif dtype.kind == "f":
            extras[name] = np.full(num_tokens, np.nan, dtype)
        else:
            raise ValueError(f"extend: extras must hold {name!r}, because {dtype} has no NaN for 'not there'")
    return extras


def _array(value: Tensor) -> np.ndarray:
    plain = value.is_cpu and not value.requires_grad and value.is_contiguous()
    return value.numpy() if plain else value.detach().cpu().contiguous().numpy()
