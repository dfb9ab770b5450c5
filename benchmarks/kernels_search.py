"""Search launch parameters on a GPU, and print a table to commit to rzero/kernels/triton/launch.py.

    python benchmarks/kernels_search.py --shapes 1536x8960 8960x1536 --dtype bfloat16

For each (N, K) and each class of row counts, every candidate that compiles, does not change a bit and is the
fastest by its median. Nothing of this runs in a program that trains or samples.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels_gpu_inputs import FULL, Sizes, differing, normal
from benchmarks.kernels_gpu_times import milliseconds
from rzero.kernels.triton.contract import segments
from rzero.kernels.triton.devices import architecture, family
from rzero.kernels.triton.launch import FEW, Launch, product_launch
from rzero.kernels.triton.products import launch_product

ROWS = (16, FEW, 8192)  # the classes: up to 16, up to FEW, more


def candidates_for(rows: int, chips: str) -> list[Launch]:
    """Tiles that keep the matrix instruction of the architecture."""
    smallest = 64 if chips in ("sm_90", "sm_100") else 16
    heights = [smallest] if rows <= smallest else [64, 128] if rows > FEW else [smallest, 64]
    return [
        Launch(block_m=m, block_n=n, warps=warps, stages=stages)
        for m, n, warps, stages in itertools.product(
            dict.fromkeys(heights), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5)
        )
        if m * n <= 128 * 256
    ]


def best(
    x: Tensor, weight: Tensor, count: int, launches: list[Launch], default: Launch, sizes: Sizes
) -> Launch:
    """The fastest of ``launches``; those that do not compile or fit are left out.

    Raises:
        RuntimeError: A launch parameter changed a bit: the contract is broken.
    """
    expected = _product(x, weight, count, default)()
    usable: dict[Launch, Callable[[], Tensor]] = {}
    for launch in dict.fromkeys([default, *launches]):
        run = _product(x, weight, count, launch)
        try:
            out = run()
        except Exception as error:
            print(f"# {launch}: {type(error).__name__}", file=sys.stderr)
            continue
        if differing(out, expected):
            raise RuntimeError(f"kernels_search: {launch} must give the bits of {default}, got others")
        usable[launch] = run
    times = milliseconds({str(launch): run for launch, run in usable.items()}, sizes)
    return min(usable, key=lambda launch: times[str(launch)])


def _product(x: Tensor, weight: Tensor, count: int, launch: Launch) -> Callable[[], Tensor]:
    out = x.new_empty(1, len(x), len(weight))

    def run() -> Tensor:
        launch_product(x[None], weight.mT[None], None, out, segments=count, launch=launch)
        return out

    return run


def search(
    shapes: list[tuple[int, int]], dtypes: list[torch.dtype], sizes: Sizes, *, candidates: int | None = None
) -> list[str]:
    """Lines for ``LAUNCHES``; the first ``candidates`` of each class only, if given."""
    chips, lines = family(architecture(torch.device(sizes.device))), []
    for (columns, depth), dtype in itertools.product(shapes, dtypes):
        count = segments(columns, depth, dtype, chips)
        weight = normal(columns, depth, dtype=dtype, device=sizes.device, seed=1)
        entries = []
        for rows in ROWS:
            real = rows if sizes.device != "cpu" else min(rows, 40)
            x = normal(real, depth, dtype=dtype, device=sizes.device, seed=2)
            default = product_launch(rows, columns, depth, dtype, chips, segments=count)
            found = best(x, weight, count, candidates_for(rows, chips)[:candidates], default, sizes)
            limit = 'float("inf")' if rows == ROWS[-1] else str(rows)
            entries.append(f"({limit}, {found})")
        body = ", ".join(entry.replace("Launch(", "_launch(") for entry in entries)
        lines.append(f'    ({columns}, {depth}, {dtype}, "{chips}"): ({body}),\n')
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", required=True, help="NxK")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"]
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels_search: no GPU at hand")
        return 2
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes)]
    print("".join(search(shapes, [getattr(torch, name) for name in options.dtype], FULL)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
