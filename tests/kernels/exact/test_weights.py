"""The cache of rounded weights: never stale, no larger than promised, gone with the weights."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from rzero.kernels.exact import linear, linear_joined, weights
from rzero.kernels.exact.weights import FEW_ROWS, SMALL, forget_weights, rounded_weight
from tests.kernels.bits import differing

SMALL_SHAPE, LARGE_SHAPE = (16, 24), (300, 320)
assert LARGE_SHAPE[0] * LARGE_SHAPE[1] > SMALL


def fresh(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the layer must give: with a copy of its weight that nothing is cached of."""
    return linear(x, layer.weight.detach().clone(), layer.bias)


def replace_data(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def by_optimizer(**kwargs):
    def step(layer):
        layer.weight.grad = torch.randn_like(layer.weight)
        torch.optim.AdamW([layer.weight], lr=1e-2, **kwargs).step()

    return step


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight.mul_(1.5)


def in_place(layer):
    with torch.no_grad():
        layer.weight.add_(1.0)


def load(layer, **kwargs):
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()}, **kwargs)


def through_a_vector(layer):
    flat = torch.randn(sum(p.numel() for p in layer.parameters()))
    torch.nn.utils.vector_to_parameters(flat, layer.parameters())


WRITES = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "load_state_dict": load,
    "load_state_dict assign": lambda layer: load(layer, assign=True),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.randn_like(layer.weight)),
    "data = other": replace_data,
    "detach().mul_": lambda layer: layer.weight.detach().mul_(-1),
    "numpy": lambda layer: layer.weight.detach().numpy().__imul__(2.0),
    "storage": lambda layer: layer.weight.untyped_storage().copy_(
        torch.randn_like(layer.weight).untyped_storage()
    ),
    "AdamW loop": by_optimizer(foreach=False),
    "AdamW foreach": by_optimizer(foreach=True),
    "AdamW fused": by_optimizer(fused=True),
    "vector_to_parameters": through_a_vector,
}


@pytest.mark.parametrize("shape", [SMALL_SHAPE, LARGE_SHAPE])
@pytest.mark.parametrize("rows", [1, FEW_ROWS])
@pytest.mark.parametrize("write", WRITES)
def test_no_stale_weight_after(write, shape, rows):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    x = torch.randn(rows, shape[1])
    before = linear(x, layer.weight, layer.bias)
    WRITES[write](layer)
    after = linear(x, layer.weight, layer.bias)
    assert differing(after, fresh(layer, x)) == 0
    assert differing(after, before) > 0


@pytest.mark.parametrize(("shape", "rows"), [(SMALL_SHAPE, 1), ((200, 200), 1), (LARGE_SHAPE, FEW_ROWS)])
def test_a_single_element_written_behind_torchs_back_is_seen(shape, rows):
    layer = nn.Linear(shape[1], shape[0])
    x = torch.randn(rows, shape[1])
    linear(x, layer.weight)
    layer.weight.data[3, 5] += 1e-3
    assert differing(linear(x, layer.weight, layer.bias), fresh(layer, x)) == 0


def test_a_fused_step_that_changes_one_element_is_seen_with_few_rows():
    """Fused steps do not count as versions, and small ones move a bfloat16 weight in few places."""
    weight = nn.Parameter(torch.full(LARGE_SHAPE, 256.0, dtype=torch.bfloat16))
    x = torch.zeros(1, LARGE_SHAPE[1], dtype=torch.bfloat16)
    x[0, 9] = 1.0
    before = linear(x, weight)
    weight.grad = torch.zeros_like(weight)
    weight.grad[7, 9] = 1.0
    version = weight._version
    torch.optim.AdamW([weight], lr=64.0, weight_decay=0.0, fused=True).step()  # the first step is lr * sign
    assert weight._version == version and weight[7, 9] == 192
    after = linear(x, weight)
    assert differing(after, linear(x, weight.detach().clone())) == 0 and differing(after, before) == 1


def test_a_write_that_torch_sees_needs_no_sample():
    weight = nn.Parameter(torch.randn(LARGE_SHAPE))
    x = torch.randn(1, LARGE_SHAPE[1])
    linear(x, weight)
    with torch.no_grad():
        weight[0, 2] += 1.0  # not one of the samples
    assert differing(linear(x, weight), linear(x, weight.detach().clone())) == 0


def test_the_same_memory_in_another_layout_is_another_weight():
    weight = nn.Parameter(torch.randn(20, 20))
    x = torch.randn(3, 20)
    linear(x, weight)
    weight.data = weight.data.t()
    assert differing(linear(x, weight), linear(x, weight.detach().clone())) == 0


def test_forget_weights_covers_what_can_escape():
    """An unseen write that moves none of the samples, used with one row: the one case that needs help."""
    weight = nn.Parameter(torch.randn(LARGE_SHAPE))
    x = torch.randn(1, LARGE_SHAPE[1])
    linear(x, weight)
    weight.data[0, 2] += 1.0
    stale = linear(x, weight)
    assert differing(stale, linear(x, weight.detach().clone())) == 1
    forget_weights([weight])
    assert differing(linear(x, weight), linear(x, weight.detach().clone())) == 0


def test_the_address_of_a_freed_weight_cannot_be_mistaken():
    weight = nn.Parameter(torch.randn(SMALL_SHAPE))
    x = torch.randn(2, SMALL_SHAPE[1])
    for _ in range(20):
        weight.data = torch.randn(SMALL_SHAPE)
        assert differing(linear(x, weight), linear(x, weight.detach().clone())) == 0


def test_the_copy_is_reused_while_nothing_changes():
    weight = nn.Parameter(torch.randn(LARGE_SHAPE))
    first = rounded_weight(weight, rows=1)
    for rows in (1, FEW_ROWS, 1000):
        assert rounded_weight(weight, rows=rows) is first


def test_eight_bytes_a_parameter_also_in_groups():
    q, k, v = (nn.Parameter(torch.randn(n, 24)) for n in (16, 8, 8))
    alone = rounded_weight(k, rows=1).clone()
    joined = rounded_weight(q, k, v, rows=1)
    assert joined.untyped_storage().nbytes() == 8 * sum(w.numel() for w in (q, k, v))
    part = rounded_weight(k, rows=1)
    assert part.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    assert differing(part, alone) == 0
    held = {id(weights._entries[w][0].rounded) for w in (q, k, v)}
    assert held == {id(joined)}


def test_a_member_of_a_group_that_changes_is_seen_from_both_sides():
    q, k = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(4, 8))
    x = torch.randn(3, 8)
    linear_joined(x, (q, k))
    k.data.mul_(3.0)
    assert differing(linear(x, k), linear(x, k.detach().clone())) == 0
    joined = linear_joined(x, (q, k))
    assert differing(joined[:, 6:], linear(x, k)) == 0 and differing(joined[:, :6], linear(x, q)) == 0


def test_released_with_the_model():
    gc.collect()
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 24))
    for layer in model:
        linear(torch.randn(2, layer.in_features), layer.weight)
    copies = [weakref.ref(weights._entries[layer.weight][0].rounded) for layer in model]
    count = len(weights._entries)
    del model, layer
    gc.collect()
    assert all(copy() is None for copy in copies)
    assert len(weights._entries) == count - 2


def test_a_deep_copy_has_its_own():
    layer = nn.Linear(24, 16)
    x = torch.randn(2, 24)
    linear(x, layer.weight)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.add_(1.0)
    assert differing(linear(x, twin.weight, twin.bias), fresh(twin, x)) == 0
    assert differing(linear(x, layer.weight, layer.bias), fresh(layer, x)) == 0


def test_weights_of_inference_mode_and_odd_sizes_are_checked_too():
    with torch.inference_mode():
        weight = torch.randn(3, 5)
        x = torch.randn(1, 5)
        linear(x, weight)
        weight[1, 1] += 1.0
        assert differing(linear(x, weight), linear(x, weight.clone())) == 0


def test_views_that_are_not_contiguous_are_never_cached():
    whole = torch.randn(10, 24)
    weight = whole[:, :12]
    x = torch.randn(2, 12)
    linear(x, weight)
    assert weight not in weights._entries
    whole.data.mul_(2.0)
    assert differing(linear(x, weight), linear(x, weight.clone())) == 0


def test_saving_a_module_saves_no_copy(tmp_path):
    layer = nn.Linear(300, 300)
    linear(torch.randn(2, 300), layer.weight)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    assert (tmp_path / "layer.pt").stat().st_size < 1.1 * 4 * 300 * 301
