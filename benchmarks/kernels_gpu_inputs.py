"""What the GPU script runs on: sizes, seeded inputs, a model; and how bits are compared."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from rzero.kernels.triton.vendor import ROWS


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What to run on: ``FULL`` on a GPU, ``TINY`` to try the script's own plumbing anywhere."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    products: tuple[tuple[int, int], ...]  # N, K
    rows: tuple[int, ...]
    prefill: int
    tokens: int
    hidden: int
    vocabulary: int
    heads: tuple[int, int, int]  # H, G, D
    context: int
    repeats: int
    model: dict[str, Any]


FULL = Sizes(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    products=((1536, 1536), (256, 1536), (8960, 1536), (1536, 8960)),
    rows=ROWS,
    prefill=8192,
    tokens=4096,
    hidden=1536,
    vocabulary=151_936,
    heads=(12, 2, 128),
    context=8192,
    repeats=20,
    model={
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 32_768,
    },
)
TINY = Sizes(
    device="cpu",
    dtypes=(torch.float32,),
    products=((20, 32),),
    rows=(1, 3, 17),
    prefill=5,
    tokens=3,
    hidden=16,
    vocabulary=40,
    heads=(2, 1, 16),
    context=9,
    repeats=1,
    model={
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 17,
    },
)


def rows_of(count: int, depth: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Signed rows of wide exponents."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-8, 9, (count, depth), generator=generator).float())
    return (torch.randn(count, depth, generator=generator) * spread).to(device, dtype)


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements that differ in any bit."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


def tiny_llama(sizes: Sizes, dtype: torch.dtype) -> Any:
    """A Llama with random weights, far from uniform."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes.model, initializer_range=0.05)
    return transformers.AutoModelForCausalLM.from_config(config).to(sizes.device, dtype).eval()
