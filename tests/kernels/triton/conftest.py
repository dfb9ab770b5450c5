"""Every test here runs our kernels in the faithful interpreter, over memory that is NaN until written."""

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton backend needs triton")

import rzero.kernels.triton  # noqa: F401
from tests.kernels.triton.interpreter import interpret, make_faithful


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch)
    make_faithful(monkeypatch)
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    # The interpreter computes with NumPy, which warns of inf - inf and of maxima over NaN; GPUs do not.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield
    torch.use_deterministic_algorithms(False)
