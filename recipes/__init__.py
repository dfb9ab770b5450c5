"""Ready-made recipes, each started with ``torchrun``; everything they use is importable on its own."""

import os

# Wherever vLLM is installed, torchrl imports it.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
