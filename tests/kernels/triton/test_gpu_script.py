"""The script for GPUs runs through on a CPU, on tiny sizes: its checks for real, its clocks for show."""

import dataclasses

import pytest
import torch

from benchmarks import kernels_gpu, kernels_search
from benchmarks.kernels_gpu_checks import all_checks, check_products
from benchmarks.kernels_gpu_inputs import TINY
from benchmarks.kernels_gpu_times import all_measurements
from rzero.kernels import dispatch
from rzero.kernels import triton as ours
from rzero.kernels.triton import linear_ops


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("RZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "backend_of", lambda tensor: ours)
    monkeypatch.setattr("rzero.kernels.triton.attention_ops.KV_SPLIT", 64)
    monkeypatch.setattr("rzero.kernels.triton.softmax.VOCAB_SPLIT", 128)


def test_every_check_passes():
    records = list(all_checks(TINY))
    assert not [kernels_gpu.show(record) for record in records if not record["passed"]]
    titles = " ".join(record["check"] for record in records)
    for name in (
        "linear",
        "launches",
        "linear_log_probs",
        "gradient of weight",
        "decode",
        "aligned model",
        "vendor",
    ):
        assert name in titles


def test_a_variant_kernel_fails_the_checks(monkeypatch):
    real = linear_ops.launch_product

    def variant(a, b, bias, out, *, segments):
        real(a, b, bias, out, segments=2 if a.shape[1] == 17 else 1)

    monkeypatch.setattr(linear_ops, "launch_product", variant)
    sizes = dataclasses.replace(TINY, products=((20, 128),))
    assert [r["check"] for r in check_products(torch.float32, sizes) if not r["passed"]] == [
        "linear 20x128 torch.float32: any batch"
    ]


def test_every_measurement_runs():
    lines = [kernels_gpu.show(record) for record in all_measurements(TINY)]
    for name in ("linear 1 rows", "forward and backward", "1 query", "training step"):
        assert any(name in line for line in lines)


def test_the_search_prints_a_table_that_can_be_committed():
    lines = kernels_search.search([(20, 32)], [torch.float32], TINY, candidates=2)
    entries = eval("{" + "".join(lines) + "}", {"torch": torch, "_launch": kernels_search.Launch, "FEW": 64})
    assert list(entries) == [(20, 32, torch.float32, "interpreter")] if entries else lines == []


def test_without_a_gpu_it_says_so_and_guesses_nothing(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr("sys.argv", ["kernels_gpu.py"])
    assert kernels_gpu.main() == 2 and "not measured, no GPU at hand" in capsys.readouterr().out
