"""What would be launched compiles for chips that are not here, with the instructions that were meant."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.kernels_aot import MATRIX, check, compile_all, show
from rzero.kernels.triton import language
from rzero.kernels.triton.ahead_of_time import compile_launch, recording, specialised
from rzero.kernels.triton.launch import Launch
from rzero.kernels.triton.products import launch_product


@pytest.fixture(autouse=True)
def interpreted():
    """Compiled here, not interpreted."""


def test_every_kernel_compiles_for_sm_90():
    rows = list(compile_all(["sm_90"], ["bfloat16"], small=True, processes=2))
    assert {row.kernel for row in rows} >= {"product_kernel", "linear_split_kernel", "attention_kernel"}
    assert not [show(row) for row in rows if row.faults]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", list(MATRIX))
def test_every_configuration_of_the_tables_compiles(arch):
    rows = compile_all([arch], ["bfloat16"], small=False, processes=2)
    assert not [show(row) for row in rows if row.faults]


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


def test_the_order_of_sums_is_in_the_source():
    """No kernel sums by tl.sum, but for the two trees, which do over two elements at a time."""
    sources = {file.name: file.read_text() for file in Path(language.__file__).parent.glob("*.py")}
    assert {name: text.count("tl.sum(") for name, text in sources.items() if "tl.sum(" in text} == {
        "language.py": 2
    }
