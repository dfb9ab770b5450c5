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


NUMBERS = ["KV_SPLIT", "ROW_BLOCK", "ROW_SEGMENT", "VOCAB_CHUNK", "VOCAB_SPLIT", "VOCAB_TILE"]


def test_all_numbers_of_the_contract_are_tried_below():
    assert [name for name in contract.__all__ if name.isupper() and name != "SEGMENTS"] == NUMBERS


@pytest.mark.parametrize("name", [*NUMBERS, "chain_k", "kv_tile", "architecture"])
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
    assert segments(64, 4096, torch.bfloat16, "interpreter") == 4
    assert segments(64, 4096, torch.float32, "sm_90") == 4


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


def test_a_launch_is_looked_up_by_shape_dtype_and_architecture(monkeypatch):
    listed = launch.Launch(block_m=64, block_n=32, warps=4, stages=2)
    default = launch.product_launch(9, 64, 128, torch.bfloat16, "sm_90", segments=1)
    monkeypatch.setitem(launch.LAUNCHES, (64, 128, torch.float16, "sm_90"), ((float("inf"), listed),))
    assert launch.product_launch(9, 64, 128, torch.float16, "sm_90", segments=1) == listed
    others = [(64, 128, torch.bfloat16), (128, 64, torch.float16)]
    assert all(launch.product_launch(9, *key, "sm_90", segments=1) == default for key in others)
    assert launch.product_launch(9, 64, 128, torch.float16, "sm_100", segments=1) != listed


@pytest.mark.parametrize("chips", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_float32_has_smaller_tiles(chips):
    def area(launch):
        return launch.block_m * max(launch.block_n, 1) / launch.warps

    for lookup in (
        lambda dtype: launch.product_launch(4096, 1536, 1536, dtype, chips, segments=1),
        lambda dtype: launch.vocabulary_launch(4096, dtype, chips),
        lambda dtype: launch.attention_launch(128, dtype, chips),
    ):
        assert area(lookup(torch.float32)) < area(lookup(torch.float16)) == area(lookup(torch.bfloat16))


def test_tables_keep_the_tiles_that_the_matrix_instructions_need():
    tables = [*launch.DEFAULTS.items(), *((key, value) for key, value in launch.LAUNCHES.items())]
    for key, entries in tables:
        rows = [most for most, _ in entries]
        assert rows == sorted(rows) and rows[-1] == float("inf")
        wide = key[1] is True or torch.float32 in key
        for _, parameters in entries:
            if not wide and ("sm_90" in key or "sm_100" in key):
                assert parameters.block_m >= 64
