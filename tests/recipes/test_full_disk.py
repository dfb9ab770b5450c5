"""A run whose disk is full says so in a sentence, and goes on where there is room again."""

import subprocess

import pytest

from rzero.checkpoint import Checkpointer
from tests.recipes.test_reinforce_zero import only_run
from tests.recipes.test_resume import TINY, ranks

__all__ = ["ranks"]

FLAGS = [*TINY, "--nominal-lag", "2", "--updates", "12"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB: room for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("records", "said"), [(True, "the run cannot be written"), (False, "are kept")])
def test_a_full_disk_ends_the_run_and_loses_nothing(ranks, small_disk, records, said):
    flags = FLAGS if records else [flag for flag in FLAGS if flag != "--record"]
    done = ranks(*flags, "--runs", small_disk)
    assert 0 not in done["codes"]
    assert said in done["said"] and "No space left on device" in done["said"], done["said"]
    assert "Traceback" not in done["said"]
    run = only_run(small_disk)
    whole = Checkpointer(run / "checkpoints", read_only=True).latest()
    assert whole is not None
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)
    more = ranks("--resume", run)
    assert more["codes"] == [0, 0], more["said"]
    assert Checkpointer(run / "checkpoints", read_only=True).latest() == 12
