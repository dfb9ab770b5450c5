"""Checked responses as plain arrays, ready to be copied into the store, and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tensordict import TensorDict
from torch import Tensor

from rzero.buffers.digest import PROVENANCE_FIELDS
from rzero.buffers.packing import PackedBatch, check_packed, offsets
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, Rollout, check_rows
from rzero.buffers.row_table import ROW_DTYPE, row_lengths

_INTEGERS = [name for name in ROW_FIELDS if name != "reward"]
_NARROW = {name for name in _INTEGERS if ROW_FIELDS[name] is not torch.int64}
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
    columns = {name: _array(fields[name]) for name in TOKEN_FIELDS}
    if fields.get("extras") is not None:
        columns |= {str(name): _array(value) for name, value in fields["extras"].items()}
    cu_seqlens = _array(fields["cu_seqlens"]).astype(np.int64)
    rows = np.zeros(len(cu_seqlens) - 1, ROW_DTYPE)
    for name in (*ROW_FIELDS, "digest"):
        rows[name] = _array(fields[name])
    return _finish(columns, cu_seqlens, rows, extra_fields, chunk_tokens)


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
    if len(records) == 0:
        raise ValueError("extend: data must hold at least one response, got none")
    fields = [dict(record.items()) for record in records]
    try:
        lengths = [record["token_ids"].numel() for record in fields]
        columns = {name: _column([record[name] for record in fields], name, lengths) for name in TOKEN_FIELDS}
        for name in fields[0].get("extras") or ():
            columns[name] = _column([record["extras"][name] for record in fields], name, lengths)
        rows = np.zeros(len(fields), ROW_DTYPE)
        rows["digest"] = torch.stack([record["digest"] for record in fields]).cpu().numpy()
        _fill(rows, _INTEGERS, [[record[name] for name in _INTEGERS] for record in fields], "iu")
        _fill(rows, ["reward"], [[record["reward"]] for record in fields], "iuf")
    except KeyError as error:
        raise TypeError(f"extend: every response must have the field {error}, got one without") from None
    cu_seqlens = np.zeros(len(fields) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return _finish(columns, cu_seqlens, rows, extra_fields, chunk_tokens)


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


def _finish(
    columns: dict[str, np.ndarray],
    cu_seqlens: np.ndarray,
    rows: np.ndarray,
    extra_fields: Mapping[str, np.dtype],
    chunk_tokens: int,
) -> Entry:
    """Check everything, and derive what the store keeps beside the fields."""
    check_rows(columns, rows, cu_seqlens, caller="extend")
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    if longest > chunk_tokens:
        raise ValueError(
            f"extend: a response must fit into chunk_tokens {chunk_tokens}, got {longest} tokens"
        )
    extras = _extra_columns(columns, extra_fields)
    # Read as unsigned, the -1 of a token that was not sampled is larger than every version.
    oldest = np.minimum.reduceat(columns["policy_version"].view(np.uint32), cu_seqlens[:-1])
    rows["version"] = np.minimum(oldest, _NO_VERSION)
    bounds = cu_seqlens.tolist()
    rows["extras_checksum"] = extras_checksums(list(extras.values()), bounds[:-1], bounds[1:])
    return Entry({name: columns[name] for name in PROVENANCE_FIELDS} | extras, cu_seqlens, rows)


def _extra_columns(
    columns: Mapping[str, np.ndarray], extra_fields: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    if unknown := columns.keys() - TOKEN_FIELDS.keys() - extra_fields.keys():
        raise ValueError(f"extend: extras must be among {sorted(extra_fields)}, got {sorted(unknown)}")
    extras = {}
    for name, dtype in extra_fields.items():
        if name in columns:
            if columns[name].dtype != dtype:
                raise TypeError(
                    f"extend: extras[{name!r}] must have dtype {dtype}, got {columns[name].dtype}"
                )
            extras[name] = columns[name]
        elif dtype.kind == "f":
            extras[name] = np.full(len(columns["token_ids"]), np.nan, dtype)
        else:
            raise ValueError(f"extend: extras must hold {name!r}, because {dtype} has no NaN for 'not there'")
    return extras


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().contiguous().numpy()


def _column(values: list[Tensor], name: str, lengths: list[int]) -> np.ndarray:
    """Join one token field of all responses, without letting torch promote a dtype."""
    dtype = TOKEN_FIELDS.get(name, values[0].dtype)
    if any(value.dtype is not dtype for value in values):
        raise TypeError(f"extend: {name} must have dtype {dtype}, got {[value.dtype for value in values]}")
    if list(map(torch.numel, values)) != lengths:
        raise ValueError(f"extend: {name} must have {lengths} tokens, got {list(map(torch.numel, values))}")
    column = torch.cat(values)
    if column.ndim != 1:
        raise ValueError(f"extend: {name} must have shape [T], got {tuple(values[0].shape)}")
    return column.detach().cpu().numpy()


def _fill(rows: np.ndarray, names: list[str], table: list[list[Any]], kinds: str) -> None:
    """Enter row fields, one line of the table a response, without letting numpy round or wrap a number."""
    for name, value in zip(names, table[0], strict=True):
        if isinstance(value, Tensor) and (value.dtype is not ROW_FIELDS[name] or value.ndim):
            raise TypeError(f"extend: {name} must be a {ROW_FIELDS[name]} number, got {value!r:.80}")
    numbers = np.array(table)
    if numbers.dtype.kind not in kinds or numbers.ndim != 2:
        raise TypeError(f"extend: {', '.join(names)} must be numbers of kind {kinds}, got {table[0]}")
    for column, name in enumerate(names):
        rows[name] = numbers[:, column]
        if name in _NARROW and np.count_nonzero(rows[name] != numbers[:, column]):
            raise ValueError(f"extend: {name} must fit {ROW_FIELDS[name]}, got {numbers[:, column].tolist()}")
