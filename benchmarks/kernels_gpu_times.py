"""What the GPU script measures: our kernels beside the native ones, in turns, as ratios of medians."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels_gpu_inputs import Sizes, normal, tiny_llama
from rzero.kernels import align
from rzero.kernels import triton as kernels


def milliseconds(functions: dict[str, Callable[[], Any]], sizes: Sizes) -> dict[str, float]:
    """Medians, the functions taking turns so that clocks and neighbours strike all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(sizes.repeats + 3):
        for name, function in functions.items():
            elapsed = _time(function, sizes.device)
            if number >= min(3, sizes.repeats):
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def _time(function: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        function()
        return 1.0
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Most memory held above what was held before."""
    if device == "cpu":
        function()
        return 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_products(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The product against the vendor's; a ratio of 1 is as fast. Aim: at least 0.9."""
    dtype = sizes.dtypes[0]
    for columns, depth in sizes.products:
        weight = normal(columns, depth, dtype=dtype, device=sizes.device, seed=1)
        for rows in (1, 4, 16, 64, sizes.prefill):
            x = normal(rows, depth, dtype=dtype, device=sizes.device, seed=2)
            times = milliseconds(
                {
                    "native": lambda x=x, weight=weight: nn.functional.linear(x, weight),
                    "ours": lambda x=x, weight=weight: kernels.linear(x, weight),
                },
                sizes,
            )
            yield {
                "measure": f"linear {rows} rows {columns}x{depth}",
                **times,
                "ratio": times["native"] / times["ours"],
            }


def measure_log_probs(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Fused log-probs against materialised logits. Aim: 1.3x, with backward 1.4x, of the memory 5%."""
    dtype, rows = sizes.dtypes[0], sizes.tokens
    hidden = normal(rows, sizes.hidden, dtype=dtype, device=sizes.device, seed=1).requires_grad_()
    weight = (
        normal(sizes.vocabulary, sizes.hidden, dtype=dtype, device=sizes.device, seed=2)
        .mul_(0.02)
        .requires_grad_()
    )
    ids = torch.zeros(rows, dtype=torch.int64, device=sizes.device)

    def ours() -> Tensor:
        return kernels.linear_log_probs(hidden, weight, ids)[0]

    def native() -> Tensor:
        return torch.log_softmax(nn.functional.linear(hidden, weight).float(), -1).gather(1, ids[:, None])[
            :, 0
        ]

    def both(function: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        function().sum().backward()

    with torch.no_grad():
        forward = milliseconds({"native": native, "ours": ours}, sizes)
        memory = peak_bytes(ours, sizes.device) / peak_bytes(native, sizes.device)
    yield {
        "measure": f"linear_log_probs T={rows} V={sizes.vocabulary}: forward",
        **forward,
        "times native": forward["ours"] / forward["native"],
        "of its memory": memory,
    }
    whole = milliseconds({"native": lambda: both(native), "ours": lambda: both(ours)}, sizes)
    grads = weight.numel() * weight.element_size()  # of the weight, which either needs
    memory = (peak_bytes(lambda: both(ours), sizes.device) - grads) / (
        peak_bytes(lambda: both(native), sizes.device) - grads
    )
    yield {
        "measure": f"linear_log_probs T={rows} V={sizes.vocabulary}: forward and backward",
        **whole,
        "times native": whole["ours"] / whole["native"],
        "of its memory": memory,
    }


def measure_attention(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Attention against torch's SDPA, causal prefill and its backward, and decode. Aim: at least 0.8."""
    dtype, (heads, groups, size), length = sizes.dtypes[0], sizes.heads, sizes.context
    query = normal(length, heads, size, dtype=dtype, device=sizes.device, seed=1).requires_grad_()
    key, value = (
        normal(length, groups, size, dtype=dtype, device=sizes.device, seed=n).requires_grad_()
        for n in (2, 3)
    )
    offsets = torch.tensor([0, length], device=sizes.device)

    def ours() -> Tensor:
        return kernels.attention_varlen(
            query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, scale=size**-0.5
        )

    def native() -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        forward = milliseconds({"native": native, "ours": ours}, sizes)
    yield {
        "measure": f"attention {length} tokens: forward",
        **forward,
        "ratio": forward["native"] / forward["ours"],
    }
    both = milliseconds(
        {"native": lambda: native().sum().backward(), "ours": lambda: ours().sum().backward()}, sizes
    )
    yield {
        "measure": f"attention {length} tokens: with backward",
        **both,
        "ratio": both["native"] / both["ours"],
    }
    one = torch.tensor([0, 1], device=sizes.device)
    with torch.no_grad():
        decode = milliseconds(
            {
                "native": lambda: nn.functional.scaled_dot_product_attention(
                    query[-1:].transpose(0, 1)[None],
                    key.transpose(0, 1)[None],
                    value.transpose(0, 1)[None],
                    enable_gqa=True,
                ),
                "ours": lambda: kernels.attention_varlen(
                    query[-1:], key, value, cu_seqlens_q=one, cu_seqlens_k=offsets, scale=size**-0.5
                ),
            },
            sizes,
        )
    yield {
        "measure": f"attention, 1 query of {length} keys",
        **decode,
        "ratio": decode["native"] / decode["ours"],
    }


def measure_step(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A training step of a Llama, aligned and native. Aim: at most 1.1."""
    model = tiny_llama(sizes, sizes.dtypes[0]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    shape = (1, min(sizes.context, 2048))
    ids = torch.randint(0, sizes.model["vocab_size"], shape, generator=torch.Generator().manual_seed(1)).to(
        sizes.device
    )

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def aligned() -> None:
        with align(model):
            step()

    times = milliseconds({"native": step, "ours": aligned}, sizes)
    yield {
        "measure": f"training step of {shape[1]} tokens",
        **times,
        "times native": times["ours"] / times["native"],
    }


def all_measurements(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Every measurement."""
    for measure in (measure_products, measure_log_probs, measure_attention, measure_step):
        yield from measure(sizes)
