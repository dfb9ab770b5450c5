import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_save_and_one_loads_and_the_other_way_round(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "checkpoint" / "reshard_ranks.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: all was well", "rank 1: all was well"]
    assert "was not saved by rank1, which keeps its own ['box']" in done.stderr
    assert len(list((tmp_path / "two" / "version-000000001").glob("*.safetensors"))) == 2
