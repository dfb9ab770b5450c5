"""A recipe that samples with vLLM, as a user starts it."""

import json

import pytest

from tests.recipes.conftest import TINY, cache, start  # noqa: F401  (fixtures)
from tests.vllm.real import pytestmark  # noqa: F401


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--kernels", "exact", "--audit-every", "3"), id="exact"),
        pytest.param((), id="native", marks=pytest.mark.slow),
    ],
)
def test_lag2_trains(start, tmp_path, flags):  # noqa: F811
    process = start("lag2.py", *TINY, "--engine", "vllm", *flags)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["updates"] == 6
    assert [audit["exact"] for audit in summary["audits"]] == ([True, True] if flags else [])
