"""Marks of every test of real vLLM."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
