"""A run under faults for a while: real processes, rewards that hang, samplers that are killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORLD = 5  # a learner and four samplers, three of which are killed
KILLED = (1, 2, 4)


@pytest.mark.parametrize(
    ("seconds", "seed", "where"),
    [
        (8, 0, "here"),
        (8, 0, "there"),
        pytest.param(1800, 1, "there", marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_nothing_is_lost_under_faults(tmp_path, seconds, seed, where):
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.collectors.soak_ranks"),
                *(str(rank), str(WORLD), str(tmp_path / "store"), str(seconds), str(seed), where),
            ],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(WORLD)
    ]
    try:
        assert ranks[0].stdout is not None
        assert '"progress": 50' in ranks[0].stdout.readline()  # all samplers are at work
        for victim in KILLED:
            ranks[victim].kill()
            time.sleep(seconds / 10)
        stdout, stderr = ranks[0].communicate(timeout=seconds + 120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    print(result)
    stats = result["stats"]
    assert stats["engines"] == WORLD - 1 - len(KILLED)
    assert result["updates"] > 60
    assert result["versions"] >= result["updates"] - 1
    # A fault of the last moment may not be counted yet; a loaded machine adds timeouts of its own.
    assert 0 <= result["fates"]["gives up"] - stats["failed/no reward"] < 10
    assert stats["failed/reward timeout"] > result["fates"]["hung"] - 10
    assert stats["failed"] == stats["failed/reward timeout"] + stats["failed/no reward"]
    assert result.get("oldest_unrewarded", 0) <= 60
