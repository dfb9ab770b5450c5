"""The whole content of a store as tensors or as one file, independent of its chunks."""

import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rzero.buffers.codec import decode, encode


class State(NamedTuple):
    """Everything that a store holds.

    Attributes:
        columns: token columns, in pieces that follow one another.
        arrays: the rows, in the order of the tokens, and the arrays of the ledger.
        note: counts and layout, for JSON.
    """

    columns: dict[str, list[np.ndarray]]
    arrays: Mapping[str, np.ndarray]
    note: Mapping[str, Any]


def to_tensors(state: State) -> dict[str, Tensor]:
    """Lay a state out as plain tensors: one for each column, and ``book`` (uint8) for all the rest.

    There are no strings and no Python objects in it, so nothing is lost where only tensors are kept and
    nothing needs unpickling. Equal names meet under torch.distributed.checkpoint when several ranks save:
    prefix them with `prefix_rank`.
    """
    tensors = {name: torch.from_numpy(np.concatenate(pieces)) for name, pieces in state.columns.items()}
    return {**tensors, "book": torch.frombuffer(bytearray(_book(state)), dtype=torch.uint8)}


def from_tensors(tensors: Mapping[str, Tensor]) -> State:
    """Read what `to_tensors` returned.

    Raises:
        ValueError: if ``book`` is missing or is not one.
    """
    if "book" not in tensors:
        raise ValueError(f"load_state_dict: state must hold 'book', got {sorted(tensors)}")
    arrays, note = decode(tensors["book"].cpu().numpy())
    columns = {name: [value.cpu().numpy()] for name, value in tensors.items() if name != "book"}
    return State(columns, arrays, note)


def write_state(
    state: State, path: Path, *, also: Mapping[str, Mapping[str, Tensor]] | None = None, sync: bool = False
) -> None:
    """Write a state to one file, replaced atomically; pieces of columns are not copied in memory.

    Args:
        state: what to write.
        path: the file.
        also: further tensors that belong to it, nested in dicts.
        sync: flush to the device, which also outlives power failures.
    """
    book = np.frombuffer(_book(state), np.uint8)
    further = {f"+.{name}": value.numpy() for name, value in _flat(also or {})}
    arrays = {**state.columns, **further, "book": book}
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.writelines(encode(arrays, {"crc": zlib.crc32(book.data)}))
        if sync:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """Map a file of `write_state`.

    Returns:
        The state, which looks into the file, and copies of the further tensors, nested again.

    Raises:
        ValueError: if the file is not such a file, or its book is damaged.
    """
    with open(path, "rb") as file:
        content, note = decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    book = content.pop("book")
    if zlib.crc32(book.data) != note["crc"]:
        raise ValueError(f"loads: the book of {path} is damaged")
    further = {name: torch.from_numpy(content.pop(name).copy()) for name in list(content) if name[0] == "+"}
    return State({name: [column] for name, column in content.items()}, *decode(book)), _nested(further, "+")


def prefix_rank(state: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Give a state a name of its own among the ranks that save together.

    torch.distributed.checkpoint takes equal names on different ranks for copies of one tensor and keeps one
    of them: without the prefix every rank would load one rank's buffer, or a mixture.

    Args:
        state: what `state_dict` returned.
        rank: of this process.

    Example:
        >>> sorted(prefix_rank({"book": 1}, rank=3))
        ['rank3.book']
    """
    return {f"rank{rank}.{name}": value for name, value in _flat(state)}


def strip_rank(state: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Undo `prefix_rank`: pick this rank's entries and nest them again.

    Example:
        >>> strip_rank({"rank3.storage.book": 1, "rank4.storage.book": 2}, rank=3)
        {'storage': {'book': 1}}
    """
    return _nested(state, f"rank{rank}")


def _nested(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nest the entries ``prefix.a.b``, and leave the others out."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        head, _, rest = name.partition(".")
        if head == prefix:
            *parents, leaf = rest.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = value
    return nested


def _flat(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    entries = []
    for name, value in state.items():
        if isinstance(value, Mapping):
            entries += [(f"{name}.{inner}", leaf) for inner, leaf in _flat(value)]
        else:
            entries.append((name, value))
    return entries


def _book(state: State) -> bytes:
    return b"".join(encode(state.arrays, state.note))
