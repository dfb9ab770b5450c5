"""What invariance costs on a CPU: aligned against native Hugging Face, side by side in one run.

    python benchmarks/kernels_cpu.py                   # 1M parameters, then SmolLM2's 135M, on one thread
    python benchmarks/kernels_cpu.py --sizes 1m --threads 2

One training step is a forward over a padded batch, the log-probabilities of its tokens, backward and AdamW.
Sampling is a prefill and then one token at a time with a cache, log_softmax and a draw. Native and aligned
take turns, each with a copy of the same randomly initialised Llama; the first turn is not counted. On one
thread the CPU time of that thread is taken, so that neighbours on the machine count less, on more the wall
time. The ratio is that of the medians; the best times stand beside it. The aims are 1.6 for a training step
and 2.5 for sampling.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from rzero.kernels import align, log_softmax


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, and how much it is given to do."""

    config: dict[str, object]
    train_rows: int
    train_length: int
    sample_rows: int
    prompt: int
    new_tokens: int
    repeats: int


SMALL = {
    "train_rows": 128,
    "train_length": 48,
    "sample_rows": 128,
    "prompt": 16,
    "new_tokens": 32,
    "repeats": 9,
}
SIZES = {
    "tiny": Size(  # the recipes' default
        config={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 100,
        },
        **SMALL,
    ),
    "1m": Size(
        config={
            "hidden_size": 192,
            "num_hidden_layers": 2,
            "intermediate_size": 768,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 100,
        },
        **SMALL,
    ),
    "1m-deep": Size(
        config={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
        },
        **SMALL,
    ),
    "135m": Size(  # the shape of SmolLM2-135M
        config={
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
        train_rows=8,
        train_length=64,
        sample_rows=64,
        prompt=16,
        new_tokens=16,
        repeats=3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model with its optimizer and the log-softmax that goes with its kernels."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    log_softmax: Callable[[Tensor], Tensor]


def make_sides(size: Size) -> dict[str, Side]:
    torch.manual_seed(0)
    native = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size.config))  # type: ignore[arg-type]
    aligned = copy.deepcopy(native)
    align(aligned)
    return {
        name: Side(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), log_softmax=scores)
        for name, model, scores in (
            ("native", native, lambda logits: torch.log_softmax(logits, -1)),
            ("aligned", aligned, log_softmax),
        )
    }


def training_step(side: Side, ids: Tensor, mask: Tensor) -> None:
    logits = side.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    log_probs = side.log_softmax(logits[:, :-1].float()).gather(-1, ids[:, 1:, None])[..., 0]
    (-log_probs * mask[:, 1:]).sum().div(mask.sum()).backward()
    side.optimizer.step()
    side.optimizer.zero_grad()


@torch.no_grad()
def sample(side: Side, prompts: Tensor, new_tokens: int) -> None:
    cache, step = DynamicCache(), prompts
    for _ in range(new_tokens):
        logits = side.model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]
        step = torch.multinomial(side.log_softmax(logits.float()).exp(), 1)


def measure(
    work: Callable[[Side], None], sides: dict[str, Side], repeats: int, threads: int
) -> dict[str, list[float]]:
    """Seconds of each turn, native and aligned in alternation, without the first."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            start = clock()
            work(side)
            seconds[name].append(clock() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def report(label: str, seconds: dict[str, list[float]], aim: float) -> None:
    native, aligned = seconds["native"], seconds["aligned"]
    print(
        f"{label:24} native {median(native) * 1e3:9.1f} ms (best {min(native) * 1e3:9.1f})   "
        f"aligned {median(aligned) * 1e3:9.1f} ms (best {min(aligned) * 1e3:9.1f})   "
        f"ratio {median(aligned) / median(native):.2f} (best {min(aligned) / min(native):.2f}), aim {aim}",
        flush=True,
    )


def run(size: Size, threads: int) -> None:
    sides = make_sides(size)
    shape, vocabulary = (size.train_rows, size.train_length), int(str(size.config["vocab_size"]))
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[::2, size.train_length * 3 // 4 :] = 0
    prompts = ids[:, : size.prompt].repeat(-(-size.sample_rows // size.train_rows), 1)[: size.sample_rows]
    count = sum(p.numel() for p in sides["native"].model.parameters()) / 1e6
    train = measure(lambda side: training_step(side, ids, mask), sides, size.repeats, threads)
    report(f"{count:.1f}M training step", train, 1.6)
    draw = measure(lambda side: sample(side, prompts, size.new_tokens), sides, size.repeats, threads)
    report(f"{count:.1f}M sampling", draw, 2.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {arguments.threads} thread(s)"
    )
    for name in arguments.sizes:
        run(SIZES[name], arguments.threads)


if __name__ == "__main__":
    main()
