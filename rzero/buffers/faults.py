"""Finding stored bytes that changed."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from rzero.buffers.digest import PROVENANCE_FIELDS, digest_rows
from rzero.buffers.entry import extras_checksums
from rzero.buffers.row_table import row_lengths
from rzero.buffers.token_log import TokenLog


class ProvenanceError(RuntimeError):
    """A stored response is no longer what was admitted."""


class Fault(NamedTuple):
    """A stored response whose bytes are not those that were admitted.

    Attributes:
        uid: the response.
        group_id: its group.
        fields: the fields under the checksum that fails; at least one of them changed.
        chunk: the chunk that holds it.
        file: the chunk's file; None in memory.
        start: first token within the chunk.
        stop: one past the last token within the chunk.
    """

    uid: int
    group_id: int
    fields: tuple[str, ...]
    chunk: int
    file: Path | None
    start: int
    stop: int


def find_faults(log: TokenLog, chunk: int, rows: np.ndarray) -> list[Fault]:
    """Recompute the digests and the extras' checksums of rows that lie in one chunk, without copying them."""
    starts = rows["start"]
    stops = starts + row_lengths(rows)
    columns = log.columns(chunk)
    digests = digest_rows([columns[name] for name in PROVENANCE_FIELDS], starts.tolist(), stops.tolist())
    extras = tuple(name for name in columns if name not in PROVENANCE_FIELDS)
    sums = extras_checksums([columns[name] for name in extras], starts.tolist(), stops.tolist())
    broken = {
        tuple(PROVENANCE_FIELDS): (digests != rows["digest"]).any(1),
        extras: sums != rows["extras_checksum"],
    }
    return [
        Fault(
            uid=int(rows["uid"][row]),
            group_id=int(rows["group_id"][row]),
            fields=fields,
            chunk=chunk,
            file=log.path(chunk),
            start=int(starts[row]),
            stop=int(stops[row]),
        )
        for fields, rows_broken in broken.items()
        for row in np.flatnonzero(rows_broken).tolist()
    ]
