"""What the GPU script checks: bits, accuracy and gradients of every kernel, and an aligned model.

A check is a record: its title under ``check``, whether it ``passed``, and the figures it judged by.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.kernels_gpu_inputs import Sizes, differing, normal, rows_of, tiny_llama
from rzero.kernels import align
from rzero.kernels import triton as kernels
from rzero.kernels.triton.attention_ops import launch_attention
from rzero.kernels.triton.contract import segments
from rzero.kernels.triton.devices import architecture, family
from rzero.kernels.triton.launch import DEFAULTS, LAUNCHES, Launch
from rzero.kernels.triton.products import launch_product
from rzero.kernels.triton.softmax import launch_linear_log_probs


def check_batches(name: str, op: Callable[[Tensor], Tensor], sample: Tensor, sizes: Sizes) -> dict[str, Any]:
    """Rows of a sample at random places of batches of every size keep the bits they have in the whole."""
    whole, generator, wrong, compared = op(sample), torch.Generator().manual_seed(1), 0, 0
    for count in sizes.rows:
        chosen = torch.randint(0, len(sample), (count,), generator=generator).to(sample.device)
        out = op(sample[chosen])
        wrong, compared = wrong + differing(out, whole[chosen]), compared + out.numel()
    return {"check": f"{name}: any batch", "differing": wrong, "of": compared, "passed": wrong == 0}


def check_launches(columns: int, depth: int, dtype: torch.dtype, sizes: Sizes) -> dict[str, Any]:
    """Every launch of the tables, and both ways to run segments, give one product."""
    chips = family(architecture(torch.device(sizes.device)))
    tables = [
        *DEFAULTS.get((chips, dtype == torch.float32), ()),
        *LAUNCHES.get((columns, depth, dtype, chips), ()),
    ]
    x, weight = (rows_of(n, depth, dtype, sizes.device, n) for n in (max(sizes.rows), columns))
    count, outs = segments(columns, depth, dtype, chips), []
    for launch in dict.fromkeys(entry for _, entry in tables):
        for split in (False, True):
            out = x.new_empty(1, len(x), columns)
            launch_product(x[None], weight.mT[None], None, out, segments=count, launch=launch, split=split)
            outs.append(out)
    wrong = sum(differing(out, outs[0]) for out in outs)
    name = f"linear {columns}x{depth} {dtype}: {len(outs)} launches"
    return {"check": name, "differing": wrong, "of": outs[0].numel() * len(outs), "passed": wrong == 0}


def check_instructions(sizes: Sizes) -> dict[str, Any]:
    """Whether tiles of 16 rows (mma.sync) have the bits of 64 (wgmma, tcgen05): nothing rests on it."""
    x, weight = (rows_of(n, 512, torch.bfloat16, sizes.device, n) for n in (64, 128))
    outs = []
    for block_m in (16, 64):
        out = x.new_empty(1, 64, 128)
        launch = Launch(block_m=block_m, block_n=64, warps=4, stages=2)
        launch_product(x[None], weight.mT[None], None, out, segments=1, launch=launch)
        outs.append(out)
    wrong = differing(*outs)
    return {
        "check": "small and large tiles agree (informative)",
        "differing": wrong,
        "of": 8192,
        "passed": True,
    }


def check_accuracy(name: str, got: Tensor, wanted: Tensor, tolerance: float) -> dict[str, Any]:
    """The largest error, relative to the largest value."""
    error = float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return {
        "check": f"{name}: accuracy",
        "error": error,
        "tolerance": tolerance,
        "passed": error <= tolerance,
    }


def check_log_probs(dtype: torch.dtype, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """linear_log_probs: batches, launches, materialised logits, values and gradients."""
    hidden = normal(sizes.tokens, sizes.hidden, dtype=dtype, device=sizes.device, seed=1)
    weight = (
        normal(sizes.vocabulary, sizes.hidden, dtype=dtype, device=sizes.device, seed=2) / sizes.hidden**0.5
    )
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, sizes.vocabulary, (sizes.tokens,), generator=generator).to(sizes.device)
    whole = kernels.linear_log_probs(hidden, weight, ids, temperature=0.7)
    few = slice(1, 1 + min(64, sizes.tokens - 1))
    part = kernels.linear_log_probs(hidden[few], weight, ids[few], temperature=0.7)
    wrong = sum(differing(a, b[few]) for a, b in zip(part, whole, strict=True))
    yield {"check": f"linear_log_probs {dtype}: few rows", "differing": wrong, "passed": wrong == 0}
    for block_m in (64, 128):
        launch = Launch(block_m=block_m, block_n=128, warps=8, stages=2)
        other = launch_linear_log_probs(hidden, weight, ids, 0.7, launch=launch)
        wrong = sum(differing(a, b) for a, b in zip(other, whole, strict=False))
        yield {
            "check": f"linear_log_probs {dtype}: tiles of {block_m}",
            "differing": wrong,
            "passed": wrong == 0,
        }
    logits = kernels.linear(hidden[few], weight).float() / torch.tensor(0.7, device=sizes.device)
    log_p = kernels.log_softmax(logits)
    wrong = differing(log_p.gather(1, ids[few, None])[:, 0], part[0])
    yield {"check": f"linear_log_probs {dtype}: materialised", "differing": wrong, "passed": wrong == 0}
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    wanted = torch.log_softmax((hidden[few].double() @ weight.double().t()) / 0.7, -1)
    selected = wanted.gather(1, ids[few, None])[:, 0]
    yield check_accuracy(f"linear_log_probs {dtype}", part[0], selected, tolerance)
    yield check_accuracy(f"entropy {dtype}", part[1], -(wanted.exp() * wanted).sum(-1), tolerance)

    leaves = hidden[few].clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropies = kernels.linear_log_probs(*leaves, ids[few], temperature=0.7)
    (log_probs + 0.1 * entropies).sum().backward()
    leaves64 = tuple(x.detach().double().requires_grad_() for x in leaves)
    log_p = torch.log_softmax(leaves64[0] @ leaves64[1].t() / 0.7, -1)
    (log_p.gather(1, ids[few, None])[:, 0] - 0.1 * (log_p.exp() * log_p).sum(-1)).sum().backward()
    for label, leaf, leaf64 in zip(("hidden", "weight"), leaves, leaves64, strict=True):
        name = f"linear_log_probs {dtype}: gradient of {label}"
        yield check_accuracy(name, leaf.grad, leaf64.grad, 3 * tolerance)  # type: ignore[arg-type]


def check_attention(dtype: torch.dtype, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Decode and chunks against prefill, splits either way, values and gradients against float64."""
    (heads, groups, size), length = sizes.heads, min(sizes.context, 2500)
    query = normal(length, heads, size, dtype=dtype, device=sizes.device, seed=4)
    key, value = normal(2, length, groups, size, dtype=dtype, device=sizes.device, seed=5).unbind()

    def attend(start: int, stop: int, *, split: bool) -> Tensor:
        cu_q, cu_k = (torch.tensor([0, n], device=sizes.device) for n in (stop - start, stop))
        q, k, v = query[start:stop], key[:stop], value[:stop]
        return launch_attention(q, k, v, cu_q, cu_k, None, None, size**-0.5, split=split)[0]

    whole, wrong, generator = attend(0, length, split=False), 0, torch.Generator().manual_seed(6)
    for number in range(12):
        start = int(torch.randint(0, length, (1,), generator=generator))
        stop = (
            start + 1 if number % 2 else int(torch.randint(start + 1, length + 1, (1,), generator=generator))
        )
        wrong += differing(attend(start, stop, split=number % 3 == 0), whole[start:stop])
    yield {"check": f"attention {dtype}: decode and chunks", "differing": wrong, "passed": wrong == 0}

    short = min(length, 300)
    offsets = torch.tensor([0, short], device=sizes.device)
    leaves = [x[:short].clone().requires_grad_() for x in (query, key, value)]
    out = kernels.attention_varlen(*leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, scale=size**-0.5)
    out.backward(query[:short])
    leaves64 = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = (x.transpose(0, 1) for x in leaves64)
    k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    out64 = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    out64.backward(query[:short].double())
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    yield check_accuracy(f"attention {dtype}", out.detach(), out64.detach(), tolerance)
    for label, leaf, leaf64 in zip(("query", "key", "value"), leaves, leaves64, strict=True):
        yield check_accuracy(f"attention {dtype}: gradient of {label}", leaf.grad, leaf64.grad, tolerance)  # type: ignore[arg-type]


def check_products(dtype: torch.dtype, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The product on every shape: batches, launches, values and gradients."""
    for columns, depth in sizes.products:
        sample, weight = (rows_of(n, depth, dtype, sizes.device, n) for n in (300, columns))
        name = f"linear {columns}x{depth} {dtype}"
        yield check_batches(name, lambda x, weight=weight: kernels.linear(x, weight), sample, sizes)
        yield check_launches(columns, depth, dtype, sizes)
        x, w = (normal(n, depth, dtype=dtype, device=sizes.device, seed=n) for n in (32, columns))
        leaves, leaves64 = (
            [t.to(kind, copy=True).requires_grad_() for t in (x, w)] for kind in (dtype, torch.float64)
        )
        grad = normal(32, columns, dtype=dtype, device=sizes.device, seed=7)
        out = kernels.linear(*leaves)
        out.backward(grad)
        out64 = nn.functional.linear(*leaves64)
        out64.backward(grad.double())
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        yield check_accuracy(name, out.detach(), out64.detach(), tolerance)
        for label, leaf, leaf64 in zip(("x", "weight"), leaves, leaves64, strict=True):
            yield check_accuracy(f"{name}: gradient of {label}", leaf.grad, leaf64.grad, tolerance)  # type: ignore[arg-type]


def check_rows(dtype: torch.dtype, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """rms_norm, silu_mul, log_softmax."""
    sample = rows_of(300, sizes.hidden, dtype, sizes.device, 8)
    weight = normal(sizes.hidden, dtype=dtype, device=sizes.device, seed=9)
    yield check_batches(f"rms_norm {dtype}", lambda x: kernels.rms_norm(x, weight, eps=1e-6), sample, sizes)
    yield check_batches(f"silu_mul {dtype}", lambda x: kernels.silu_mul(x, x), sample, sizes)
    yield check_batches(f"log_softmax {dtype}", kernels.log_softmax, sample, sizes)


def check_model(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """An aligned model: cached decode and a padded batch against one forward; the native one as control."""
    dtype = sizes.dtypes[0]
    model, length = tiny_llama(sizes, dtype), min(48, sizes.context)
    generator = torch.Generator().manual_seed(10)
    ids = torch.randint(0, sizes.model["vocab_size"], (2, length), generator=generator).to(sizes.device)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0

    def disagreements() -> tuple[int, int]:
        with torch.no_grad():
            padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            cache, pieces = transformers.DynamicCache(), []
            for start, stop in [(0, 3), *((t, t + 1) for t in range(3, length))]:
                pieces.append(
                    model(input_ids=ids[:1, start:stop], past_key_values=cache, use_cache=True).logits
                )
            alone = model(input_ids=ids[1:, : length // 2], use_cache=False).logits
        tokens = torch.cat([torch.cat(pieces, 1)[0] != padded[0], alone[0] != padded[1, : length // 2]])
        return int(tokens.any(-1).sum()), len(tokens)

    native, total = disagreements()
    with align(model) as alignment:
        aligned, _ = disagreements()
    yield {
        "check": f"aligned model {alignment.fingerprint}",
        "differing": aligned,
        "of": total,
        "native differing": native,
        "passed": aligned == 0,
    }


def captured(function: Callable[[], Any], device: str) -> Callable[[], Any]:
    """``function`` as the replay of a CUDA graph; on a CPU, which has none, as it is."""
    if device == "cpu":
        return function
    function()  # what compiles, compiles before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def check_graph(sizes: Sizes) -> dict[str, Any]:
    """A decode step captured once and replayed on other inputs, against the same step run eagerly."""
    dtype, device, (heads, groups, size) = sizes.dtypes[0], sizes.device, sizes.heads
    weight = normal(sizes.vocabulary, sizes.hidden, dtype=dtype, device=device, seed=1) / sizes.hidden**0.5
    keys, values = normal(2, 32, 16, groups, size, dtype=dtype, device=device, seed=2).unbind()
    table = torch.arange(32, dtype=torch.int32, device=device).view(4, 8)
    offsets = torch.arange(5, dtype=torch.int32, device=device)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, sizes.vocabulary, (4,), generator=generator)
        lengths = torch.randint(1, 8 * 16 + 1, (4,), dtype=torch.int32, generator=generator)
        hidden = normal(4, sizes.hidden, dtype=dtype, device=device, seed=seed)
        query = normal(4, heads, size, dtype=dtype, device=device, seed=seed)
        return hidden, query, ids.to(device), lengths.to(device)

    def step(hidden: Tensor, query: Tensor, ids: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        options = {"page_table": table, "cu_seqlens_q": offsets, "seqlens_k": lengths, "scale": size**-0.5}
        hidden = kernels.rms_norm(hidden, torch.ones_like(hidden[0]), eps=1e-6)
        return *kernels.linear_log_probs(hidden, weight, ids), kernels.attention_paged(
            query, keys, values, **options
        )

    held, others = inputs(3), inputs(4)
    with torch.no_grad():
        wanted, replay = step(*others), captured(lambda: step(*held), device)
        for old, new in zip(held, others, strict=True):
            old.copy_(new)
        outs = replay()
    wrong = sum(differing(a, b) for a, b in zip(outs, wanted, strict=True))
    return {"check": "a captured CUDA graph", "differing": wrong, "passed": wrong == 0}


def check_vendor(sizes: Sizes) -> dict[str, Any]:
    """Which shapes the vendor's product keeps; informative."""
    layers = nn.Sequential(*(nn.Linear(k, n, bias=False) for n, k in sizes.products))
    verdicts = kernels.certify(layers.to(sizes.device, sizes.dtypes[0]))
    kernels.withdraw_certificates()
    return {
        "check": f"vendor products certified: {sum(verdicts.values())} of {len(verdicts)}",
        "passed": True,
    }


def all_checks(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Every check, cheapest first."""
    for dtype in sizes.dtypes:
        yield from check_rows(dtype, sizes)
        yield from check_products(dtype, sizes)
        yield from check_log_probs(dtype, sizes)
        yield from check_attention(dtype, sizes)
    yield check_instructions(sizes)
    yield check_graph(sizes)
    yield from check_model(sizes)
    yield check_vendor(sizes)
