"""On what, from which revision and by which command a process runs."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "triton", "vllm", "reasoning-gym", "numpy")


def describe_start() -> dict[str, Any]:
    """This process as plain values; None for what cannot be found out."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
        "revision": _git("rev-parse", "HEAD"),
        "modified": None if changed is None else bool(changed),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def command() -> str:
    """What was typed, as far as a process knows it: torchrun is named if it started this one."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else sys.argv[0]
    typed = shlex.join([name, *sys.argv[1:]])
    world, local = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not local:
        return f"python {typed}"
    nodes = "--standalone" if world == local else f"--nnodes={world // local}"
    return f"torchrun {nodes} --nproc-per-node={local} {typed}"


def without_runs_folder(command: str) -> str:
    """A command as if in the default folder of runs: where a run's folder lay is no part of what it was."""
    words = shlex.split(command)
    if "--runs" in words:
        place = words.index("--runs")
        del words[place : place + 2]
    if "--resume" in words:
        place = words.index("--resume") + 1
        words[place] = f"runs/{Path(words[place]).name}"
    return shlex.join(words)


def cpu_name() -> str | None:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
