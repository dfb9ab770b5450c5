"""Check everything about the Triton kernels on a GPU, then measure them against the native ones.

    python benchmarks/kernels_gpu.py                   all checks, then all measurements
    python benchmarks/kernels_gpu.py --checks-only
    python benchmarks/kernels_gpu.py --json out.json

Checks: a row's bits in random batches, at random places, under every launch of the tables; accuracy against
float64; gradients; decode against prefill; a captured CUDA graph; an aligned Hugging Face model in every
layout; the matrix instructions against each other; the vendor's product certified. Measurements are ratios
of medians, taken side by side.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_gpu_checks import all_checks
from benchmarks.kernels_gpu_inputs import FULL
from benchmarks.kernels_gpu_times import all_measurements
from rzero.kernels import kernel_fingerprint


def show(record: dict[str, Any]) -> str:
    """One line."""
    title = record.get("check") or record.get("measure")
    values = {
        k: f"{v:.4g}" if isinstance(v, float) else v
        for k, v in record.items()
        if k not in ("check", "measure")
    }
    return f"{'FAILED  ' if record.get('passed') is False else ''}{title}: " + ", ".join(
        f"{name} {value}" for name, value in values.items() if name != "passed"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--json", type=Path, help="write all records here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "kernels_gpu: not measured, no GPU at hand; tests/kernels/triton vouches for the kernels on a CPU"
        )
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kernel_fingerprint('cuda')}")
    records = []
    stages = [all_checks(FULL)] if options.checks_only else [all_checks(FULL), all_measurements(FULL)]
    for stage in stages:
        for record in stage:
            records.append(record)
            print(show(record), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    failed = sum(record.get("passed") is False for record in records)
    print(f"{len(records)} records, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
