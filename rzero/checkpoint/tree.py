"""State dicts as plain tensors: what is no tensor becomes one tensor of JSON.

Nothing is pickled, so nothing needs unpickling, and whatever cannot be told in tensors and JSON is refused
where it is saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

JSON = "json"
_TENSOR, _ITEMS, _TUPLE = "$tensor", "$items", "$tuple"
_PLAIN = {type(None), bool, int, float, str}


def to_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Lay a nested state out flat.

    Args:
        state: Tensors, numbers, strings, None, lists and tuples in nested mappings; a tensor keeps its
            sharding.

    Returns:
        The tensors by their paths, e.g. ``model/layers.0.weight``, without gradient, and ``json`` (uint8) for
        all the rest.

    Raises:
        TypeError: If something else is in it.
        ValueError: If two paths are equal.

    Example:
        >>> tensors = to_tensors({"model": {"weight": torch.ones(2)}, "lr": 0.1})
        >>> sorted(tensors), from_tensors(tensors)["lr"]
        (['json', 'model/weight'], 0.1)
    """
    tensors: dict[str, Tensor] = {}
    tree = _strip(state, "", tensors)
    if JSON in tensors:
        raise ValueError(f"to_tensors: state must not hold a tensor named {JSON!r} at its top")
    text = json.dumps(tree, separators=(",", ":")).encode()
    return {**tensors, JSON: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of ``to_tensors``: tuples, integer keys and all; mappings come back as dicts.

    Raises:
        ValueError: If ``json`` is missing or names a tensor that is not there.
    """
    if JSON not in tensors:
        raise ValueError(f"from_tensors: tensors must hold {JSON!r}, got {sorted(tensors)[:5]}")
    return _fill(json.loads(tensors[JSON].cpu().numpy().tobytes()), tensors)


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if path in tensors:
            raise ValueError(f"to_tensors: paths must differ, got {path!r} twice")
        tensors[path] = value.detach() if value.requires_grad else value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = [(key, _strip(inner, _join(path, key), tensors)) for key, inner in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(items)
        return {_ITEMS: [[_plain(key, path), inner] for key, inner in items]}
    if isinstance(value, list | tuple):
        if _PLAIN.issuperset(map(type, value)):
            listed = list(value)
        else:
            listed = [_strip(inner, _join(path, index), tensors) for index, inner in enumerate(value)]
        return listed if isinstance(value, list) else {_TUPLE: listed}
    return _plain(value, path)


def _plain(value: Any, path: str) -> Any:
    if type(value) in _PLAIN:
        return value
    raise TypeError(
        f"to_tensors: {path or 'state'} must be a tensor, number, string, None, list, tuple or mapping, "
        f"got {type(value).__name__}"
    )


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _fill(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_fill(inner, tensors) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        if tree[_TENSOR] not in tensors:
            raise ValueError(f"from_tensors: tensors must hold {tree[_TENSOR]!r}, got none of that name")
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(_fill(inner, tensors) for inner in tree[_TUPLE])
    if _ITEMS in tree:
        return {key: _fill(inner, tensors) for key, inner in tree[_ITEMS]}
    return {key: _fill(inner, tensors) for key, inner in tree.items()}
