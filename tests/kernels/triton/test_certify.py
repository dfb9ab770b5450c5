"""The certifier refuses what varies with the batch, accepts what does not, remembers, and falls back."""

import json

import pytest
import torch
from torch import nn

from rzero.kernels import exact
from rzero.kernels import triton as ours
from rzero.kernels.triton.contract import numeric_contract
from rzero.kernels.triton.vendor import certified_shapes, certify, is_certified, withdraw_certificates
from tests.kernels.bits import differing
from tests.kernels.triton.compare import random

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_certificates():
    withdraw_certificates()
    yield
    withdraw_certificates()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64, bias=False))


def by_rows(x, weight, bias=None):
    """A product that sums in another order from 16 rows on, as libraries do."""
    if len(x) < 16:
        return exact.linear(x, weight, bias)
    half = x.shape[1] // 2
    return exact.linear(x[:, :half], weight[:, :half]) + exact.linear(x[:, half:], weight[:, half:], bias)


def test_an_invariant_product_is_accepted_and_a_variant_one_refused(tmp_path):
    shapes = {(48, 64, "torch.float32", True), (64, 48, "torch.float32", False)}
    good = certify(model(), product=exact.linear, cache=tmp_path / "good.json")
    assert good == dict.fromkeys(shapes, True) and certified_shapes(CPU) == shapes
    bad = certify(model(), product=by_rows, cache=tmp_path / "bad.json")
    assert bad == dict.fromkeys(shapes, False) and certified_shapes(CPU) == frozenset()


def test_a_product_that_depends_on_the_place_of_a_row_is_refused(tmp_path):
    def by_place(x, weight, bias=None):
        out = exact.linear(x, weight, bias)
        out[5::8] += out[5::8].abs() * 2**-20
        return out

    assert not any(certify(model(), product=by_place, cache=tmp_path / "c.json").values())


def test_torchs_own_product_on_this_cpu_is_judged_as_it_is(tmp_path):
    """Whatever this host's library does, a verdict agrees with a direct look at one row against many."""
    layer = nn.Sequential(nn.Linear(512, 96, bias=False))
    verdict = certify(layer, cache=tmp_path / "c.json")[96, 512, "torch.float32", False]
    x, weight = random(64, 512, seed=1), layer[0].weight.detach()
    rows = torch.cat([nn.functional.linear(x[i : i + 1], weight) for i in range(64)])
    if differing(rows, nn.functional.linear(x, weight)):
        assert not verdict


def test_verdicts_are_remembered_by_device_and_driver(tmp_path, monkeypatch):
    calls = []

    def counted(x, weight, bias=None):
        calls.append(len(x))
        return exact.linear(x, weight, bias)

    cache = tmp_path / "deep" / "certificates.json"
    certify(model(), product=counted, cache=cache)
    tried = len(calls)
    withdraw_certificates()
    assert certify(model(), product=counted, cache=cache) and len(calls) == tried > 50
    assert certified_shapes(CPU)
    monkeypatch.setattr("rzero.kernels.triton.vendor.device_key", lambda device: "another driver")
    assert not certified_shapes(CPU)
    certify(model(), product=counted, cache=cache)
    assert len(calls) == 2 * tried and len(json.loads(cache.read_text())) == 2


def test_linear_uses_what_was_certified_and_falls_back(tmp_path):
    layer = model()[0]
    x = random(5, 64, seed=2)
    before, fingerprint = ours.linear(x, layer.weight, layer.bias), numeric_contract(CPU)
    certify(nn.Sequential(layer), product=exact.linear, cache=tmp_path / "c.json")
    vendor = nn.functional.linear(x, layer.weight, layer.bias)
    assert is_certified(layer.weight, bias=True) and not is_certified(layer.weight, bias=False)
    assert differing(ours.linear(x, layer.weight, layer.bias), vendor) == 0
    assert numeric_contract(CPU) != fingerprint
    leaf = x.clone().requires_grad_()
    ours.linear(leaf, layer.weight, layer.bias).sum().backward()
    assert torch.allclose(leaf.grad, layer.weight.sum(0).expand(5, 64), atol=1e-4)
    withdraw_certificates()
    assert differing(ours.linear(x, layer.weight, layer.bias), before) == 0
    assert numeric_contract(CPU) == fingerprint


def test_a_model_without_linear_modules_is_refused():
    with pytest.raises(ValueError, match=r"model must have nn.Linear modules on one device, got 0 devices"):
        certify(nn.LayerNorm(3))
