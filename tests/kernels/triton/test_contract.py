"""The contract and its fingerprint, the tables, and the API that both backends share."""

import inspect
import json

import pytest
import torch

from rzero.kernels import contract as of_package
from rzero.kernels import dispatch
from rzero.kernels import triton as ours
from rzero.kernels.triton import contract, launch
from rzero.kernels.triton.contract import numeric_contract, segments

CPU = torch.device("cpu")  # under the interpreter


def test_the_contract_is_plain_data_and_names_what_it_runs_on():
    stated = json.loads(json.dumps(numeric_contract(CPU)))
    assert stated["backend"] == "triton" and stated["arch"] == "interpreter" and stated["vendor"] == []
    assert {op["op"] for op in stated["ops"]} >= {"linear", "linear_log_probs", "attention", "rms_norm"}


@pytest.mark.parametrize(
    "name", ["KV_SPLIT", "VOCAB_TILE", "VOCAB_SPLIT", "chain_k", "kv_tile", "architecture"]
)
def test_every_number_of_the_contract_changes_it(monkeypatch, name):
    before = numeric_contract(CPU)
    value = getattr(contract, name)
    other = {"architecture": lambda device: "sm_90"}.get(name, lambda dtype: 16)
    monkeypatch.setattr(contract, name, value * 2 if isinstance(value, int) else other)
    assert numeric_contract(CPU) != before


def test_a_listed_number_of_segments_is_used_and_changes_the_contract(monkeypatch):
    before = numeric_contract(CPU)
    key = (64, 4096, torch.float32, "interpreter")
    assert segments(*key) == 4
    monkeypatch.setitem(contract.SEGMENTS, key, 1)
    assert segments(*key) == 1 and numeric_contract(CPU) != before


def test_launch_parameters_are_not_in_the_contract(monkeypatch):
    before = numeric_contract(CPU)
    for key, entries in launch.DEFAULTS.items():
        monkeypatch.setitem(launch.DEFAULTS, key, entries[-1:])
    assert numeric_contract(CPU) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 256, 1536, 8960, 151_936])
@pytest.mark.parametrize("depth", [1, 64, 1000, 1536, 8960, 65_536])
def test_segments_are_equal_whole_steps_of_512_terms_or_more(columns, depth, dtype):
    count = segments(columns, depth, dtype, "sm_90")
    assert count in (1, 2, 4)
    assert count == 1 or (depth % (count * contract.chain_k(dtype)) == 0 and depth // count >= 512)


def test_the_fingerprint_of_a_gpu_is_that_of_its_contract(monkeypatch):
    monkeypatch.setattr(contract, "architecture", lambda device: "sm_90")
    assert of_package.numeric_contract("cuda")["arch"] == "sm_90"
    hopper = of_package.kernel_fingerprint("cuda")
    monkeypatch.setattr(contract, "architecture", lambda device: "sm_80")
    assert hopper.startswith("triton-") and of_package.kernel_fingerprint("cuda") != hopper


def test_the_api_is_that_of_the_exact_backend():
    for name in dispatch.__all__:
        if name not in ("backend_of", "forget_weights"):
            wanted, got = (inspect.signature(getattr(m, name)) for m in (dispatch, ours))
            assert list(got.parameters.values()) == list(wanted.parameters.values()), name


def test_tables_keep_the_tiles_that_the_matrix_instructions_need():
    tables = [*launch.DEFAULTS.items(), *((key, value) for key, value in launch.LAUNCHES.items())]
    for key, entries in tables:
        rows = [most for most, _ in entries]
        assert rows == sorted(rows) and rows[-1] == float("inf")
        wide = key[1] is True or torch.float32 in key
        for _, parameters in entries:
            if not wide and ("sm_90" in key or "sm_100" in key):
                assert parameters.block_m >= 64
