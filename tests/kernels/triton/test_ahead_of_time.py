"""What would be launched compiles for chips that are not here, with the instructions that were meant."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from triton.runtime.jit import JITFunction

from benchmarks.kernels_aot import MATRIX, check, compile_all, show
from rzero.kernels import triton as ours
from rzero.kernels.triton import language
from rzero.kernels.triton.ahead_of_time import compile_launch, recording, specialised
from rzero.kernels.triton.attention_ops import launch_attention
from rzero.kernels.triton.launch import Launch
from rzero.kernels.triton.products import launch_column_sum, launch_product
from rzero.kernels.triton.softmax import launch_linear_log_probs


@pytest.fixture(autouse=True)
def interpreted():
    """Compiled here, not interpreted."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles_for_sm_90(dtype):
    rows = list(compile_all(["sm_90"], [dtype], small=True, processes=2))
    assert {row.kernel for row in rows} >= {"product_kernel", "linear_split_kernel", "attention_kernel"}
    assert not [show(row) for row in rows if row.faults]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", list(MATRIX))
def test_every_configuration_of_the_tables_compiles(arch, dtype):
    rows = compile_all([arch], [dtype], small=False, processes=2)
    assert not [show(row) for row in rows if row.faults]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", list(MATRIX))
def test_the_largest_heads_fit_the_chip(arch, dtype):
    """They may spill, which is slow; with too much shared memory they would not run."""
    query, key, value = (torch.empty(1, n, 256, 256, dtype=dtype, requires_grad=True) for n in (8, 4, 4))
    with recording(arch) as recorded:
        for mask in (None, torch.ones(1, 1, 256, 256, dtype=torch.bool)):
            ours.attention(query, key, value, scale=0.1, mask=mask).backward(torch.empty_like(query))
    assert len(recorded) >= 8
    for launch in recorded:
        resources = dataclasses.replace(compile_launch(launch, arch), spilled=0)
        assert check(launch, resources, arch, dtype) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", list(MATRIX))
def test_a_product_takes_the_instruction_that_was_meant(arch, dtype):
    x, weight = (torch.empty(n, 128, dtype=dtype) for n in (100, 64))
    with recording(arch) as recorded:
        launch_product(x[None], weight.mT[None], None, torch.empty(1, 100, 64, dtype=dtype), segments=1)
    assert check(recorded[0], compile_launch(recorded[0], arch), arch, dtype) == []


def test_faults_are_seen():
    """The control: a spill, another instruction and narrow loads are reported."""
    x, weight = (torch.empty(64, 128, dtype=torch.bfloat16) for _ in range(2))
    with recording("sm_90") as recorded:
        out = torch.empty(1, 64, 64, dtype=torch.bfloat16)
        launch_product(x[None], weight.mT[None], None, out, segments=1)
    launch, good = recorded[0], compile_launch(recorded[0], "sm_90")
    assert check(launch, good, "sm_90", torch.bfloat16) == []
    bad = {
        "spills": {"spilled": 8},
        "instead of wgmma": {"matrix_instructions": {"mma.m16n8k16": 4}},
        "no 16-byte loads": {"wide_loads": 0},
        "over": {"shared": 10**6},
    }
    for words, change in bad.items():
        faults = check(launch, dataclasses.replace(good, **change), "sm_90", torch.bfloat16)
        assert len(faults) == 1 and words in faults[0]
    as_tf32 = dataclasses.replace(good, matrix_instructions={"mma.m16n8k8": 4})
    assert "instead of None" in check(launch, as_tf32, "sm_90", torch.float32)[0]


def test_too_few_rows_in_a_tile_would_change_the_instruction():
    """Why the tables of sm_90 hold no tile of 16 rows."""
    x, weight = (torch.empty(n, 128, dtype=torch.bfloat16) for n in (16, 64))
    with recording("sm_90") as recorded:
        for block_m in (16, 64):
            launch = Launch(block_m=block_m, block_n=64, warps=4, stages=2)
            out = torch.empty(1, 16, 64, dtype=torch.bfloat16)
            launch_product(x[None], weight.mT[None], None, out, segments=1, launch=launch)
    found = [list(compile_launch(launch, "sm_90").matrix_instructions) for launch in recorded]
    assert found[0] == ["mma.m16n8k16"] and found[1][0].startswith("wgmma.")


def test_the_host_reads_no_value_of_a_tensor():
    """So that a CUDA graph may capture a launch: fake tensors have no values to read."""
    with FakeTensorMode(), recording("sm_90") as launches:
        offsets, table = torch.empty(4, dtype=torch.int32), torch.empty(3, 9, dtype=torch.int32)
        lengths, mask = torch.empty(3, dtype=torch.int32), torch.empty(3, 1, 5, 5, dtype=torch.bool)
        x, weight, ids = torch.empty(5, 64), torch.empty(70, 64), torch.empty(5, dtype=torch.int64)
        query, pages, padded = torch.empty(5, 4, 8), torch.empty(20, 16, 2, 8), torch.empty(3, 4, 5, 8)
        launch_product(x[None], weight.mT[None], None, torch.empty(1, 5, 70), segments=2)
        launch_column_sum(x, torch.empty(64))
        launch_linear_log_probs(x, weight, ids, 0.7)
        launch_attention(query, pages, pages, offsets, lengths, table, None, 0.3)
        settings = {"cu_seqlens_q": offsets, "scale": 0.3}
        ours.attention_paged(query, pages, pages, page_table=table, seqlens_k=lengths, **settings)
        ours.attention_varlen(query, query, query, cu_seqlens_k=offsets, **settings)
        ours.attention(padded, padded, padded, scale=0.3, mask=mask)
        ours.linear_log_probs(ours.rms_norm(ours.silu_mul(x, x), weight[0], eps=1e-5), weight, ids)
        with pytest.raises(DataDependentOutputException):
            lengths.tolist()  # the control
    assert len(launches) == 7


def test_the_number_of_rows_is_not_specialised():
    """17 to 64 rows, odd or even, are one compiled kernel; so a batch of another size compiles nothing."""
    sources = set()
    weight = torch.empty(64, 128, dtype=torch.bfloat16)
    for rows in (17, 32, 48, 64):
        with recording("sm_90") as recorded:
            x = torch.empty(rows, 128, dtype=torch.bfloat16)
            out = torch.empty(1, rows, 64, dtype=torch.bfloat16)
            launch_product(x[None], weight.mT[None], None, out, segments=1)
        # Strides over a batch of one are those of the whole, and so are the only trace of its rows.
        source = specialised(recorded[0])
        sources.add((str(source.signature), str(source.constants)))
    assert len(sources) == 1


def test_no_kernel_is_specialised_by_a_number_of_rows():
    """Every kernel, by its declaration: what grows with a batch is never a constant of the code."""
    counts = {"rows", "count", "tokens", "positions", "tiles", "first"}
    modules = [module for name, module in sys.modules.items() if name.startswith("rzero.kernels.triton.")]
    kernels = {value for m in modules for value in vars(m).values() if isinstance(value, JITFunction)}
    kernels = {kernel for kernel in kernels if kernel.__name__.endswith("_kernel")}
    assert len(kernels) >= 15
    specialised = {
        f"{kernel.__name__}: {parameter.name}"
        for kernel in kernels
        for parameter in kernel.params
        if parameter.name in counts and not parameter.do_not_specialize
    }
    assert specialised == set()


def test_the_order_of_sums_is_in_the_source():
    """No kernel sums by tl.sum, but for the two trees, which do over two elements at a time."""
    sources = {file.name: file.read_text() for file in Path(language.__file__).parent.glob("*.py")}
    assert {name: text.count("tl.sum(") for name, text in sources.items() if "tl.sum(" in text} == {
        "language.py": 2
    }
