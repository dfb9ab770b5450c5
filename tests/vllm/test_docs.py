"""The page about vLLM runs, its blocks one after another in one program."""

import re
from pathlib import Path

from tests.vllm.real import pytestmark  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert len(blocks) > 3
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
