"""The vendor's matrix product, where a trial shows that it treats every row alike; ours everywhere else.

cuBLAS and hipBLASLt choose an algorithm by the number of rows, so that a row's bits may change with its
batch. For some shapes they never do. ``certify`` tries; what passes is used by ``linear`` from then on, and
stands in the fingerprint, because the bits are no longer those of our contract. Gradients stay ours.

A trial is evidence about the row counts and places tried, not a proof like the kernels' own.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["ROWS", "certified_shapes", "certify", "device_key", "is_certified", "withdraw_certificates"]

# Around every edge at which a library is known to switch algorithms.
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 127, 128, 129, 256)
TRIALS = 3  # random places of the rows, for each number

Shape = tuple[int, int, str, bool]  # N, K, dtype, whether there is a bias
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Device key -> the shapes that `linear` gives to the vendor.
_certified: dict[str, frozenset[Shape]] = {}


def device_key(device: torch.device) -> str:
    """All that the vendor's choice of an algorithm is known to depend on, beside the shape."""
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return f"{torch.__version__}, {device}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
    flags = (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_tf32,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )
    return f"{_hardware(device)}, {flags}"


@functools.cache
def _hardware(device: torch.device) -> str:
    """Chip, driver and the versions of torch and its libraries."""
    files = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
    driver = next(
        (file.read_text().splitlines()[0].strip() for file in files if file.exists()), "no driver file"
    )
    versions = f"cuda {torch.version.cuda}, hip {torch.version.hip}"
    return f"{torch.__version__}, {versions}, {torch.cuda.get_device_name(device)}, {driver}"


def certify(
    model: nn.Module, *, product: Product = nn.functional.linear, cache: Path | None = None
) -> dict[Shape, bool]:
    """Try the vendor's product on every shape of ``model``'s linear modules; use it where it never varied.

    Each shape is tried on the device of its weight, with rows of signed values of wide exponents: the same
    rows among others, in batches of every size of ``ROWS``, at random places, must keep their bits. The first
    that does not refuses the shape, and ``linear`` keeps computing it with our kernels.

    Args:
        model: All its ``nn.Linear`` count, tied or not.
        product: What to try: (x, weight, bias) -> x W^T + b.
        cache: File that remembers verdicts by device, driver and versions; by default
            ``certificates.json`` in ``$RZERO_CACHE`` or ``~/.cache/rzero``.

    Returns:
        (N, K, dtype, has bias) -> whether the vendor computes it from now on.

    Raises:
        ValueError: The model has no ``nn.Linear``, or they lie on several devices.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    devices = {module.weight.device for module in modules}
    if len(devices) != 1:
        raise ValueError(
            f"certify: model must have nn.Linear modules on one device, got {len(devices)} devices"
        )
    device, cache = devices.pop(), cache or _default_cache()
    key = device_key(device)
    memory = json.loads(cache.read_text()) if cache.exists() else {}
    known: dict[str, bool] = memory.setdefault(key, {})
    verdicts: dict[Shape, bool] = {}
    for module in modules:
        columns, depth = module.weight.shape
        shape = (columns, depth, str(module.weight.dtype), module.bias is not None)
        name = json.dumps(shape)
        if name not in known:
            known[name] = _keeps_bits(module.weight, module.bias, product)
        verdicts[shape] = known[name]
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(memory, indent=1, sort_keys=True))
    part.replace(cache)
    proved = frozenset(shape for shape, good in verdicts.items() if good)
    _certified[key] = _certified.get(key, frozenset()) - verdicts.keys() | proved
    return verdicts


def is_certified(weight: Tensor, *, bias: bool) -> bool:
    """Whether ``linear`` gives this weight's shape to the vendor."""
    if not _certified:
        return False
    shape = (weight.shape[0], weight.shape[1], str(weight.dtype), bias)
    return weight.is_contiguous() and shape in certified_shapes(weight.device)


def certified_shapes(device: torch.device) -> frozenset[Shape]:
    """The shapes in use by the vendor on a device."""
    return _certified.get(device_key(device), frozenset()) if _certified else frozenset()


def withdraw_certificates() -> None:
    """Let our kernels compute every shape again, in this process."""
    _certified.clear()


def _default_cache() -> Path:
    return Path(os.environ.get("RZERO_CACHE", Path.home() / ".cache" / "rzero")) / "certificates.json"


def _keeps_bits(weight: Tensor, bias: Tensor | None, product: Product) -> bool:
    generator = torch.Generator().manual_seed(0)
    depth = weight.shape[1]

    def rows(count: int) -> Tensor:
        spread = torch.exp2(torch.randint(-8, 9, (count, depth), generator=generator).float())
        return (torch.randn(count, depth, generator=generator) * spread).to(weight)

    with torch.no_grad():
        sample = rows(max(ROWS))
        reference = product(sample, weight, bias)
        return all(
            _same_bits(product(batch, weight, bias)[places], reference[chosen])
            for batch, places, chosen in _trials(sample, rows, generator)
        )


def _trials(
    sample: Tensor, rows: Callable[[int], Tensor], generator: torch.Generator
) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Batches of each size in which rows of the sample stand among others; where, and which."""
    for count in ROWS:
        for _ in range(TRIALS):
            known = int(torch.randint(1, count + 1, (1,), generator=generator))
            places = torch.randperm(count, generator=generator)[:known].to(sample.device)
            chosen = torch.randperm(len(sample), generator=generator)[:known].to(sample.device)
            batch = rows(count)
            batch[places] = sample[chosen]
            yield batch, places, chosen


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
