"""A checked batch as plain arrays, ready to be copied into the store."""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rzero.buffers.digest import PROVENANCE_FIELDS
from rzero.buffers.packing import PackedBatch, validate
from rzero.buffers.records import ROW_FIELDS
from rzero.buffers.row_table import ROW_DTYPE

_NO_VERSION = np.iinfo(np.int32).max


class Entry(NamedTuple):
    """B validated responses: stored columns ``[N]``, int64 offsets ``[B + 1]``, and rows ``[B]``."""

    columns: dict[str, np.ndarray]
    cu_seqlens: np.ndarray
    rows: np.ndarray


def prepare(batch: PackedBatch, extra_fields: Mapping[str, np.dtype], *, chunk_tokens: int) -> Entry:
    """Validate a batch and lay it out for the store.

    ``response_mask`` is not stored: it is True exactly where ``policy_version`` is not -1, so it cannot disagree.

    Args:
        batch: B responses.
        extra_fields: the extras that the store holds. A floating-point one that the batch lacks becomes NaN.
        chunk_tokens: the longest response that the store takes.

    Raises:
        ValueError: if a rule of `Rollout` is broken, a response is too long, or extras do not fit.
        TypeError: if an extra has another dtype.
    """
    validate(batch, caller="extend")
    fields = dict(batch.items())
    cu_seqlens = fields["cu_seqlens"].cpu().numpy().astype(np.int64)
    longest = int(np.diff(cu_seqlens).max())
    if longest > chunk_tokens:
        raise ValueError(
            f"extend: a response must fit into chunk_tokens {chunk_tokens}, got {longest} tokens"
        )
    columns = {name: fields[name].cpu().contiguous().numpy() for name in PROVENANCE_FIELDS}
    rows = np.zeros(len(cu_seqlens) - 1, ROW_DTYPE)
    for name in (*ROW_FIELDS, "digest"):
        rows[name] = fields[name].cpu().numpy()
    version = columns["policy_version"]
    sampled = np.where(version < 0, _NO_VERSION, version)
    rows["version"] = np.minimum.reduceat(sampled, cu_seqlens[:-1])
    extras = _extra_columns(fields.get("extras"), extra_fields, int(cu_seqlens[-1]))
    rows["extras_crc"] = extras_checksums(extras, cu_seqlens)
    return Entry({**columns, **extras}, cu_seqlens, rows)


def extras_checksums(extras: Mapping[str, np.ndarray], cu_seqlens: np.ndarray) -> np.ndarray:
    """CRC-32 over the extras of each response, uint32 ``[B]``; 0 without extras."""
    sums = np.zeros(len(cu_seqlens) - 1, np.uint32)
    bounds = cu_seqlens.tolist()
    for column in extras.values():
        view = memoryview(column)
        for row in range(len(sums)):
            sums[row] = zlib.crc32(view[bounds[row] : bounds[row + 1]], int(sums[row]))
    return sums


def _extra_columns(extras, extra_fields: Mapping[str, np.dtype], num_tokens: int) -> dict[str, np.ndarray]:
    given = (
        {} if extras is None else {name: value.cpu().contiguous().numpy() for name, value in extras.items()}
    )
    if unknown := given.keys() - extra_fields.keys():
        raise ValueError(f"extend: extras must be among {sorted(extra_fields)}, got {sorted(unknown)}")
    columns = {}
    for name, dtype in extra_fields.items():
        if name in given:
            if given[name].dtype != dtype:
                raise TypeError(f"extend: extras[{name!r}] must have dtype {dtype}, got {given[name].dtype}")
            columns[name] = given[name]
        elif dtype.kind == "f":
            columns[name] = np.full(num_tokens, np.nan, dtype)
        else:
            raise ValueError(f"extend: extras must hold {name!r}, because {dtype} has no NaN for 'not there'")
    return columns
