"""The contract, the fingerprint and the dispatch."""

import inspect
import json
import subprocess
import sys

import pytest
import torch

from rzero import kernels
from rzero.kernels import contract, dispatch, exact, kernel_fingerprint, numeric_contract


def test_the_fingerprint_names_the_backend_and_is_the_same_in_another_process():
    code = "from rzero.kernels import kernel_fingerprint; print(kernel_fingerprint())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == kernel_fingerprint()
    backend, digest = kernel_fingerprint().split("-")
    assert backend == "exact" and len(digest) == 16 and int(digest, 16)


@pytest.mark.parametrize(
    "name", ["LOG2_NORM", "WEIGHT_BITS", "SUM_BITS", "EXP2_POLY", "HALF_PI_PARTS", "BITS"]
)
def test_every_constant_of_the_arithmetic_changes_the_fingerprint(monkeypatch, name):
    before = kernel_fingerprint()
    value = getattr(contract, name)
    other = {int: lambda: value + 1, tuple: lambda: (*value, 0.0), str: lambda: value[::-1]}[type(value)]()
    monkeypatch.setattr(contract, name, other)
    assert kernel_fingerprint() != before


def test_the_contract_is_plain_data():
    assert json.loads(json.dumps(numeric_contract()))["backend"] == "exact"


def test_each_op_is_dispatched_with_the_signature_that_the_contract_states():
    for name in dispatch.__all__:
        assert getattr(kernels, name, dispatch.__dict__[name]) is dispatch.__dict__[name]
        if name not in ("backend_of", "forget_weights"):
            op = getattr(exact, name)
            assert inspect.signature(getattr(dispatch, name)) == inspect.signature(op)
            assert f"    {name}(" in contract.__doc__
            stated = contract.__doc__.split(f"    {name}(")[1].split("->")[0]
            for parameter in inspect.signature(op).parameters:
                assert parameter in stated, f"{name}: {parameter}"


def test_dispatch_calls_the_backend_of_the_first_tensor(monkeypatch):
    class Other:
        @staticmethod
        def linear(x, weight, bias=None):
            return "other"

    x = torch.zeros(1, 2)
    monkeypatch.setattr(dispatch, "backend_of", lambda tensor: Other if tensor is x else exact)
    assert kernels.linear(x, x) == "other" and kernels.linear(x.clone(), x).shape == (1, 1)
