"""Which kernels a recipe puts under its model."""

import sys

import torch

from recipes.kernel_choice import put_kernels_under
from tests.collectors.conftest import llama


def test_the_fingerprint_is_of_the_kernels_on_the_model_s_device(monkeypatch):
    module = sys.modules["rzero.kernels.align"]  # the package has a function of this name
    monkeypatch.setattr(module, "kernel_fingerprint", lambda device: f"kernels of {device}")
    assert put_kernels_under(llama(), "exact").fingerprint == "kernels of cpu"
    assert put_kernels_under(llama().to("meta"), "exact").fingerprint == "kernels of meta"
    assert put_kernels_under(llama(), "native").fingerprint == f"native-torch-{torch.__version__}"
