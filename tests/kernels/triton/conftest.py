"""Every test of this folder runs our kernels in the faithful interpreter, unless it asks for ``compiled``."""

import warnings

import numpy as np
import pytest

pytest.importorskip("triton", reason="the Triton backend needs triton")

import rzero.kernels.triton  # noqa: F401
from tests.kernels.triton.interpreter import interpret, make_faithful


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    if "compiled" in request.keywords:
        yield
        return
    interpret(monkeypatch)
    make_faithful(monkeypatch)
    # The interpreter computes with NumPy, which warns of inf - inf and of maxima over NaN; GPUs do not.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"numpy|triton")
        yield
