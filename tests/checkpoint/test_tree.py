import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.checkpoint import from_tensors, to_tensors

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.integers(0, 5).map(torch.arange)
    | st.just(torch.tensor(2.5))
)
KEYS = st.text(max_size=3).filter(lambda key: "/" not in key) | st.integers(-3, 3)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.dictionaries(st.text(min_size=1, max_size=3).filter(lambda k: "/" not in k), TREES, max_size=4))
def test_every_tree_comes_back(state):
    try:
        tensors = to_tensors(state)
    except ValueError:  # e.g. the keys 1 and "1", or a tensor named json
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert same(from_tensors(tensors), state)


def test_what_json_needs_care_for():
    state = {"$tensor": "x", "big": 2**70, "nan": math.nan, "inf": -math.inf, "keys": {1: "a", "1": "b"}}
    back = from_tensors(to_tensors(state))
    assert math.isnan(back.pop("nan")) and math.isnan(state.pop("nan"))
    assert back == state


def test_an_optimizer_state_comes_back():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    back = from_tensors(to_tensors(optimizer.state_dict()))
    assert same(back, optimizer.state_dict())


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": {"b": object()}}, TypeError, "a/b must be a tensor, number, .*, got object"),
        ({"a": {1, 2}}, TypeError, "a must be a tensor, .* got set"),
        ({"a": {(1, 2): 3}}, TypeError, "got tuple"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, "paths must differ, got 'a/b' twice"),
        ({"json": torch.ones(1)}, ValueError, "must not hold a tensor named 'json'"),
    ],
)
def test_refusals(state, error, message):
    with pytest.raises(error, match=message):
        to_tensors(state)


def test_missing_parts_are_named():
    tensors = to_tensors({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="tensors must hold 'a'"):
        from_tensors({"json": tensors["json"]})
    with pytest.raises(ValueError, match="tensors must hold 'json'"):
        from_tensors({})
