"""As torch operators: fakes, gradients, torch.compile, empty batches, tied weights, a whole model."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from rzero.kernels import align, dispatch
from rzero.kernels import triton as ours
from rzero.kernels.triton import devices
from tests.kernels.bits import differing
from tests.kernels.models import batch, make, padded, real, with_cache
from tests.kernels.triton.compare import random

OPS = torch.ops.rzero
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def leaf(*shape, seed):
    return random(*shape, seed=seed).requires_grad_()


def cases():
    ids, offsets = torch.tensor([1, 4]), torch.tensor([0, 3, 5])
    row, table = random(2, seed=1), torch.ones(1, 8)
    q, k, v = leaf(5, 2, 8, seed=2), leaf(5, 1, 8, seed=3), leaf(5, 1, 8, seed=4)
    return {
        "product": (leaf(1, 3, 4, seed=5), leaf(1, 4, 5, seed=6), leaf(5, seed=7), True),
        "column_sum": (random(3, 4, seed=8),),
        "rms_norm": (leaf(3, 8, seed=9), leaf(3, 8, seed=10), leaf(8, seed=11), 1e-5),
        "silu_mul": (leaf(3, 8, seed=12), leaf(3, 8, seed=13)),
        "rope": (leaf(3, 8, seed=14), table, table, 1, False),
        "log_softmax": (leaf(3, 8, seed=15),),
        "linear_log_probs": (leaf(2, 8, seed=16), leaf(5, 8, seed=17), ids, 0.7),
        "attention": (q, k, v, offsets, offsets, None, None, 0.3),
        "rms_norm_backward": (
            *(random(3, 8, seed=n) for n in (18, 19)),
            random(8, seed=20),
            random(3, seed=21),
        ),
        "silu_mul_backward": tuple(random(3, 8, seed=n) for n in (22, 23, 24)),
        "log_softmax_backward": (random(3, 8, seed=25), random(3, 8, seed=26), torch.bfloat16),
        "linear_log_probs_backward": (
            row,
            row,
            random(2, 8, seed=27),
            random(5, 8, seed=28),
            ids,
            row,
            row,
            row,
            0.7,
        ),
        "attention_backward": (
            random(5, 2, 8, seed=29),
            *(x.detach() for x in (q, k, v)),
            offsets,
            offsets,
            None,
            None,
            random(5, 2, 8, seed=30),
            random(5, 2, seed=31),
            0.3,
        ),
    }


def test_every_operator_passes_torchs_own_checks():
    for name, arguments in cases().items():
        torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=CHECKS)


def test_compile_in_one_graph_and_with_any_number_of_rows():
    weight, down, vocabulary = random(6, 8, seed=1), random(8, 6, seed=2), random(11, 8, seed=3)
    scale = random(8, seed=4)
    ids = torch.arange(9) % 11

    def model(x, ids):
        h = ours.rms_norm(x, scale, eps=1e-5)
        h = x + ours.linear(ours.silu_mul(ours.linear(h, weight), ours.linear(h, weight)), down)
        return ours.linear_log_probs(h, vocabulary, ids, temperature=0.7)

    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
    x = random(9, 8, seed=5)
    for rows in (9, 3, 6):
        part = x[:rows].clone(), ids[:rows].clone()
        got, wanted = compiled(*part), model(*part)
        assert not any(differing(a, b) for a, b in zip(got, wanted, strict=True))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_empty_batches():
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    ids = torch.zeros(0, dtype=torch.int64)
    outputs = [
        ours.linear(x, weight, torch.ones(5)),
        *ours.linear_log_probs(x, weight, ids),
        ours.log_softmax(x),
        ours.rms_norm(x, weight[0], eps=1e-5),
        ours.silu_mul(x, x),
        ours.rope(x, torch.ones(8), torch.ones(8)),
    ]
    assert all(y.shape[0] == 0 for y in outputs)
    sum(y.sum() for y in outputs).backward()
    assert weight.grad is not None and float(weight.grad.abs().sum()) == 0 and x.grad.shape == (0, 8)
    assert ours.linear(torch.zeros(3, 0), torch.zeros(5, 0), torch.ones(5)).tolist() == [[1.0] * 5] * 3
    q, k, none = torch.zeros(0, 2, 8), torch.zeros(3, 1, 8), torch.tensor([0, 0])
    assert ours.attention_varlen(
        q, k, k, cu_seqlens_q=none, cu_seqlens_k=torch.tensor([0, 3]), scale=1.0
    ).shape == (
        0,
        2,
        8,
    )


def test_any_strides_give_the_same_bits():
    x, weight = random(7, 24, seed=1), random(9, 24, seed=2)
    whole = ours.linear(x, weight)
    transposed = x.t().contiguous().t(), weight.t().contiguous().t()
    spaced = x.repeat_interleave(2, 1)[:, ::2], weight.repeat_interleave(3, 0)[::3]
    for a, b in (transposed, spaced, (x.expand(1, 7, 24), weight)):
        assert differing(ours.linear(a, b).reshape(7, 9), whole) == 0
    assert (
        differing(ours.rms_norm(transposed[0], weight[0], eps=1e-5), ours.rms_norm(x, weight[0], eps=1e-5))
        == 0
    )
    assert differing(ours.silu_mul(*(transposed[0],) * 2), ours.silu_mul(x, x)) == 0


def test_tied_weights_gather_both_gradients():
    embedding = leaf(11, 8, seed=1)
    ids = torch.tensor([3, 7, 3])
    ours.linear_log_probs(embedding[ids], embedding, ids)[0].sum().backward()
    reference = embedding.detach().double().requires_grad_()
    torch.log_softmax(reference[ids] @ reference.t(), -1).gather(1, ids[:, None]).sum().backward()
    assert torch.allclose(embedding.grad.double(), reference.grad, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_aligned_model_has_one_value_of_a_logit_in_every_layout(monkeypatch, family):
    monkeypatch.setattr(dispatch, "backend_of", lambda tensor: ours)
    monkeypatch.setattr("rzero.kernels.triton.attention_ops.KV_SPLIT", 64)
    model = make(family, num_hidden_layers=1)
    ids, lengths = batch(seed=1, rows=2, length=5)
    with torch.no_grad():
        native = padded(model, ids, lengths)
        with align(model):
            whole = padded(model, ids, lengths)
            cached = with_cache(model, ids[:1], [2, 3, 5], transformers.DynamicCache())
    assert differing(cached[0], whole[0]) == 0
    mask = real(lengths, 5)
    assert torch.allclose(whole[mask], native[mask], atol=2e-4)


def test_gradients_of_an_aligned_model_are_the_native_ones(monkeypatch):
    monkeypatch.setattr(dispatch, "backend_of", lambda tensor: ours)
    model = make("qwen2", num_hidden_layers=1)
    ids, _ = batch(seed=2, rows=1, length=4)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    native = gradients()
    with align(model):
        aligned = gradients()
    for a, b in zip(aligned, native, strict=True):
        assert float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max()))


def test_no_launch_lets_a_product_and_a_sum_be_contracted():
    """Nor can the interpreter see it: every launch goes through ``run``, which says so to the compiler."""
    said = {}
    devices.run({(3,): lambda *arguments, **settings: said.update(settings)}, (3,), torch.empty(1), WIDTH=4)
    assert said == {"enable_fp_fusion": False, "WIDTH": 4}
    sources = [file.read_text() for file in Path(devices.__file__).parent.glob("*.py")]
    assert sum(len(re.findall(r"_?kernel\[", text)) for text in sources) == 1


def test_a_model_on_a_gpu_without_triton_is_told_what_to_install(monkeypatch):
    dispatch._triton.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "rzero.kernels.triton", None)
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no", name="triton")),
    )
    with pytest.raises(ImportError, match=r"need triton, got none installed; pip install 'rzero\[gpu\]'"):
        dispatch.backend_of(nn.Parameter(torch.empty(1, device="meta")).to("meta").as_subclass(OnGPU))
    dispatch._triton.cache_clear()
    assert dispatch.backend_of(torch.empty(1)).__name__ == "rzero.kernels.exact" and math.isfinite(1.0)


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")
