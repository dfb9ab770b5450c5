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
_SEQUENCES = (list, tuple)


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
    tree, tensors = flatten(state)
    plain = {path: tensor.detach() if tensor.requires_grad else tensor for path, tensor in tensors.items()}
    return {**plain, JSON: text_tensor(tree)}


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The first half of ``to_tensors``, which looks at everything; errors are the same.

    Returns:
        What is no tensor, for ``text_tensor``; it shares nothing with the state that could change. And the
        tensors by their paths, as they are.
    """
    tensors: dict[str, Tensor] = {}
    tree = _strip(state, "", "", tensors)
    if JSON in tensors:
        raise ValueError(f"to_tensors: state must not hold a tensor named {JSON!r} at its top")
    return tree, tensors


def text_tensor(tree: Any) -> Tensor:
    """The second half: what is no tensor as JSON, uint8."""
    return torch.frombuffer(bytearray(json.dumps(tree, separators=(",", ":")).encode()), dtype=torch.uint8)


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of ``to_tensors``: tuples, integer keys and all; mappings come back as dicts.

    Raises:
        ValueError: If ``json`` is missing or names a tensor that is not there.
    """
    if JSON not in tensors:
        raise ValueError(f"from_tensors: tensors must hold {JSON!r}, got {sorted(tensors)[:5]}")
    return _fill(json.loads(tensors[JSON].cpu().numpy().tobytes()), tensors)


def _strip(value: Any, parent: str, key: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, _SEQUENCES) and _PLAIN.issuperset(map(type, value)):
        return list(value) if isinstance(value, list) else {_TUPLE: list(value)}
    path = f"{parent}/{key}" if parent else str(key)
    if isinstance(value, Tensor):
        if path in tensors:
            raise ValueError(f"to_tensors: paths must differ, got {path!r} twice")
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items, named = {}, True
        for name, inner in value.items():
            items[name] = inner if type(inner) in _PLAIN else _strip(inner, path, name, tensors)
            named = named and isinstance(name, str) and name[:1] != "$"
        return items if named else {_ITEMS: [[_plain(name, path), inner] for name, inner in items.items()]}
    if isinstance(value, _SEQUENCES):
        listed = [_strip(inner, path, index, tensors) for index, inner in enumerate(value)]
        return listed if isinstance(value, list) else {_TUPLE: listed}
    return _plain(value, path)


def _plain(value: Any, path: str) -> Any:
    if type(value) in _PLAIN:
        return value
    raise TypeError(
        f"to_tensors: {path or 'state'} must be a tensor, number, string, None, list, tuple or mapping, "
        f"got {type(value).__name__}"
    )


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
