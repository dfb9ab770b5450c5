"""The arrows between the layers hold: who may import whom, and what a bare import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "rzero"

# Layer -> what of ours it may import, and which outside packages it must never import at any depth.
ALLOWED = {
    "losses": {"losses"},
    "kernels": {"kernels"},
    "buffers": {"buffers"},
    "collectors": {"collectors", "buffers"},
    "checkpoint": {"checkpoint"},
}
FORBIDDEN = {
    "losses": {"transformers", "vllm", "triton"},
    "kernels": {"torchrl"},
    "buffers": {"transformers", "vllm", "triton"},
    "collectors": set(),
    "checkpoint": {"transformers", "vllm", "triton", "tensordict"},
}


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import; write it absolutely"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_arrows_between_layers(layer):
    for file in (ROOT / layer).rglob("*.py"):
        for name in imports_of(file):
            root, *rest = name.split(".")
            if root == "rzero" and rest and (ROOT / rest[0]).exists():
                assert rest[0] in ALLOWED[layer], f"{file} imports {name}"
            assert root not in FORBIDDEN[layer], f"{file} imports {name}"
            assert root != "recipes", f"{file} imports {name}"


def test_no_underscore_name_of_torchrl():
    for file in ROOT.rglob("*.py"):
        for name in imports_of(file):
            if name.startswith(("torchrl", "tensordict")):
                assert not any(part.startswith("_") for part in name.split(".")), f"{file} imports {name}"


@pytest.mark.parametrize(
    ("module", "absent", "base"),
    [
        ("rzero", ["torch", "torchrl", "transformers", "triton", "vllm"], "sys"),
        ("rzero.losses", ["torchrl", "tensordict", "transformers", "triton", "vllm"], "torch"),
        ("rzero.kernels", ["torchrl", "tensordict", "transformers", "triton", "vllm"], "torch"),
        ("rzero.buffers", ["transformers", "triton", "vllm"], "torchrl"),
        ("rzero.checkpoint", ["torchrl", "tensordict", "transformers", "triton", "vllm"], "torch"),
        ("rzero.collectors", ["transformers", "triton", "vllm"], "torchrl.collectors"),
    ],
)
def test_a_bare_import_stays_light(module, absent, base):
    def loaded_by(name):
        code = f"import sys, {name}; print(*(set({absent!r}) & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    # torch and torchrl try optional imports of their own; only what our import adds counts.
    assert loaded_by(module) <= loaded_by(base)
