"""What does it save to compute a prompt once for all its responses, forward and backward, on a CPU?

    python benchmarks/causal_lm.py

Four ways to the log-probabilities of one batch, in turns, in one thread; its CPU time counts:

    plain    what one writes first: all rows padded to the longest, one call, log_softmax of every position
    alone    ``causal_lm_log_probs`` without ``prompt_length``: the same, log_softmax of scored tokens only
    like     with ``prompt_length``, but no tree: rows of like length are computed together
    tree     with ``prompt_length``: each prompt once, followed by its responses

and the bytes that each keeps for the backward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rzero.kernels import align, causal_lm, log_softmax

VOCABULARY = 100


@dataclass(frozen=True, kw_only=True)
class Config:
    """The batch and the model."""

    groups: int = 32
    """Prompts."""
    group_size: int = 8
    """Responses of a prompt."""
    prompt: int = 22
    """Tokens of a prompt."""
    response: tuple[int, ...] = (3, 10, 40)
    """Mean tokens of the responses, one batch for each; log-normal, cv 0.4."""
    hidden: int = 64
    """Width of the model, which has two layers."""
    rounds: int = 7
    """Measurements of each way."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows, as ``causal_lm_log_probs`` takes them."""

    token_ids: Tensor
    cu_seqlens: Tensor
    mask: Tensor
    prompt_length: Tensor


def new_batch(config: Config, response: int) -> Batch:
    """Random prompts with random responses."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(config.groups):
        prompt = torch.randint(VOCABULARY, (config.prompt,), generator=generator)
        for _ in range(config.group_size):
            factor = torch.exp(0.385 * torch.randn((), generator=generator) - 0.074)
            length = max(1, round(response * factor.item()))
            rows.append(torch.cat([prompt, torch.randint(VOCABULARY, (length,), generator=generator)]))
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return Batch(
        token_ids=torch.cat(rows).int(),
        cu_seqlens=lengths.cumsum(0),
        mask=torch.cat([torch.arange(len(row)) >= config.prompt for row in rows]),
        prompt_length=torch.full((len(rows),), config.prompt),
    )


def new_model(config: Config) -> transformers.LlamaForCausalLM:
    """A Llama of the shape of the default recipe's."""
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(shape).eval()


def plain(
    model: transformers.LlamaForCausalLM, batch: Batch, normalise: Callable[[Tensor], Tensor]
) -> Tensor:
    """Log-probabilities of the scored tokens."""
    lengths = batch.cu_seqlens.diff().tolist()
    ids = pad_sequence(list(batch.token_ids.long().split(lengths)), batch_first=True)
    real = torch.arange(ids.shape[1]) < batch.cu_seqlens.diff()[:, None]
    scores = normalise(model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[:, :-1])
    log_probs = scores.gather(-1, ids[:, 1:, None])[..., 0]
    scored = pad_sequence(list(batch.mask.split(lengths)), batch_first=True)
    return log_probs[scored[:, 1:]]


def ways(
    model: transformers.LlamaForCausalLM, batch: Batch, normalise: Callable[[Tensor], Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Log-probabilities of the scored tokens by each way."""

    def ours(*, shared: bool, tree_tokens: int = causal_lm.TREE_TOKENS) -> Tensor:
        causal_lm.TREE_TOKENS, before = tree_tokens, causal_lm.TREE_TOKENS
        log_probs, _ = causal_lm.causal_lm_log_probs(
            model,
            batch.token_ids,
            batch.cu_seqlens,
            batch.mask,
            temperature=1.0,
            prompt_length=batch.prompt_length if shared else None,
            log_softmax=normalise,
        )
        causal_lm.TREE_TOKENS = before
        return log_probs[batch.mask]

    return {
        "plain": lambda: plain(model, batch, normalise),
        "alone": lambda: ours(shared=False),
        "like": lambda: ours(shared=True, tree_tokens=0),
        "tree": lambda: ours(shared=True),
    }


def kept_bytes(way: Callable[[], Tensor], model: torch.nn.Module) -> int:
    """What autograd keeps for the backward pass, the parameters aside."""
    sizes = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = way()  # noqa: F841  (keeps the graph alive, so that no memory is used twice)
    return sum(sizes.values())


def main() -> None:
    """A table."""
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    print(f"{config.groups} x {config.group_size} rows, prompts of {config.prompt} tokens; ms (MB kept)\n")
    print("| kernels | response | plain | alone | like | tree | plain / tree |")
    print("|---|---|---|---|---|---|---|")
    for kernels in ("native", "exact"):
        model = new_model(config)
        if kernels == "exact":
            align(model)
        normalise = log_softmax if kernels == "exact" else lambda x: torch.log_softmax(x, dim=-1)
        for response in config.response:
            batch = new_batch(config, response)
            times: dict[str, list[float]] = {}
            all_ways = ways(model, batch, normalise)
            for _ in range(config.rounds):
                for name, way in all_ways.items():
                    started = time.thread_time()
                    way().sum().backward()
                    times.setdefault(name, []).append(1000 * (time.thread_time() - started))
            ms = {name: statistics.median(values) for name, values in times.items()}
            cells = [f"{ms[n]:.1f} ({kept_bytes(way, model) / 1e6:.1f})" for n, way in all_ways.items()]
            print(f"| {kernels} | {response} | {' | '.join(cells)} | {ms['plain'] / ms['tree']:.2f}x |")


if __name__ == "__main__":
    main()
