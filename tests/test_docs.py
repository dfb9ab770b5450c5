"""Every Python block of the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN_TESTS = {"vllm.md"}  # tests/vllm runs them
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in OWN_TESTS)]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))
]


def test_the_front_page_has_code():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block):
    exec(compile(block, "<documentation>", "exec"), {})
