"""Recipes as a user starts them: through torchrun, in processes of their own."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--updates", "6", "--warm-up-steps", "8", "--held-out", "16", "--prompts-per-update", "4"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(cache, tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a recipe in ``tmp_path``; whatever is left of it at the end is killed, and the test fails."""
    started: list[psutil.Process] = []

    def go(recipe: str, *flags: str, ranks: int = 2, env: dict[str, str] | None = None) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        process = subprocess.Popen(
            [*command, str(ROOT / "recipes" / recipe), *flags, "--runs", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "RZERO_CACHE": str(cache), "PYTHONWARNINGS": "ignore", **(env or {})},
        )
        started.append(psutil.Process(process.pid))
        return process

    yield go
    for process in started:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            for child in [*process.children(recursive=True), process]:
                child.kill()


def ranks_of(process: subprocess.Popen, count: int = 2) -> list[psutil.Process]:
    """The processes of the ranks, by rank, once all have started."""
    while True:
        children = psutil.Process(process.pid).children()
        ranks = {c.environ()["RANK"]: c for c in children if "RANK" in _environ(c)}
        if len(ranks) >= count or process.poll() is not None:
            return [ranks[rank] for rank in sorted(ranks)]


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def until(process: subprocess.Popen, text: str) -> str:
    """Read what a recipe says on standard error until it says ``text``."""
    said = ""
    assert process.stderr is not None
    while text not in said:
        character = process.stderr.read(1)
        assert character, f"the recipe ended before it said {text!r}:\n{said}"
        said += character
    return said


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
