"""Every Python block of the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
