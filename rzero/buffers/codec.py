"""Named arrays and a small note as bytes, without pickle."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_ALIGN = 8


def encode(
    arrays: Mapping[str, np.ndarray | Sequence[np.ndarray]], note: Mapping[str, Any]
) -> list[bytes | memoryview]:
    """Write arrays and a JSON-able note.

    Args:
        arrays: contiguous arrays; a sequence of one-dimensional arrays is written end to end as one.
        note: whatever JSON can hold.

    Returns:
        The pieces of the message in order, arrays not copied.
    """
    table, pieces, offset = {}, [], 0
    for name, value in arrays.items():
        parts = [value] if isinstance(value, np.ndarray) else list(value)
        dtype = parts[0].dtype
        shape = list(value.shape) if isinstance(value, np.ndarray) else [sum(len(part) for part in parts)]
        size = sum(part.nbytes for part in parts)
        table[name] = [dtype.descr if dtype.names else dtype.str, shape, offset]
        pieces += [np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in parts if part.size]
        pieces.append(b"\0" * (-size % _ALIGN))
        offset += size + (-size % _ALIGN)
    head = json.dumps({"arrays": table, "note": note}, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 4) % _ALIGN)
    return [struct.pack("<I", len(head)), head, *pieces]


def decode(buffer: bytes | memoryview | np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read what `encode` wrote.

    Args:
        buffer: the message as one piece.

    Returns:
        The arrays, which look into the buffer, and the note.

    Raises:
        ValueError: if the bytes are not such a message.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    try:
        (size,) = struct.unpack_from("<I", view)
        head = json.loads(bytes(view[4 : 4 + size]))
        arrays = {}
        for name, (code, shape, offset) in head["arrays"].items():
            fields = (
                [(field[0], field[1], *map(tuple, field[2:])) for field in code]
                if type(code) is list
                else code
            )
            dtype = np.dtype(fields)
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = (
                np.frombuffer(view, dtype, count, 4 + size + offset).reshape(shape)
                if count
                else np.empty(shape, dtype)
            )
        return arrays, head["note"]
    except (struct.error, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"decode: buffer must be a message of encode, got {len(view)} bytes: {error}"
        ) from error
