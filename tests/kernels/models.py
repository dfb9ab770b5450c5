"""Tiny models of the supported families, far from uniform, and their logits in every layout."""

import torch
import transformers
from torch import Tensor

VOCABULARY = 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings):
    """A causal LM of ``family``: llama, qwen2 (biases) or qwen3 (norms of queries and keys)."""
    configs = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    extra = {"head_dim": 16} if family == "qwen3" else {}
    config = configs[family](**{**SIZES, **extra, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.to(dtype).eval()


def batch(seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] and how many of each row are real, at least one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    return ids, lengths


def real(lengths: Tensor, length: int) -> Tensor:
    """Bool [rows, length]: the first ``lengths`` of each row."""
    return torch.arange(length) < lengths[:, None]


def padded(model, ids: Tensor, lengths: Tensor) -> Tensor:
    """Logits of one forward with padding on the right: what all others must equal."""
    mask = real(lengths, ids.shape[1]).long()
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def with_cache(model, ids: Tensor, cuts: list[int], cache) -> Tensor:
    """Logits of unpadded rows in pieces that end at ``cuts``: one token each is decode, one piece prefill."""
    pieces = [
        model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True).logits
        for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)
    ]
    return torch.cat(pieces, 1)
