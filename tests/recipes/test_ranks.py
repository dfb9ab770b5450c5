"""More ranks than two: several that learn, several that sample, some of which die."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.recipes.conftest import ROOT, TINY, ranks_of, until
from tests.recipes.test_reinforce_zero import only_run


def updates_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "update" in row]


def test_two_learners_train_to_the_curve_of_one(start, tmp_path):
    """Synchronous runs repeat themselves, so both see the same responses as long as the weights agree."""
    curves = {}
    for learners, ranks in ((1, 2), (2, 4)):
        process = start("sync.py", *TINY, "--learners", str(learners), ranks=ranks)
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        run = only_run(tmp_path)
        curves[learners] = updates_of(run)
        run.rename(tmp_path.parent / f"{tmp_path.name}-{learners}")
    for one, two in zip(curves[1], curves[2], strict=True):
        assert two["reward"] == one["reward"]
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "kl_k3"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), (name, one["update"])
    assert {row["lag_max"] for row in curves[2]} == {0}


def test_a_killed_sampler_is_tolerated(start, tmp_path):
    process = start("lag2.py", *TINY, "--tolerate-failures", "--updates", "30", ranks=3)
    until(process, "version 0: held-out accuracy")
    supervisor = ranks_of(process, count=3)[2]
    supervisor.children()[0].kill()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "rank 2 ended by SIGKILL" in stderr
    run = only_run(tmp_path)
    assert [row["update"] for row in updates_of(run)] == list(range(30))
    assert json.loads((run / "summary.json").read_text())["engines"] == 1
    # Every prompt was served, and each of its responses once.
    assert json.loads((run / "summary.json").read_text())["lag"]["responses"] == 30 * 4 * 8


def test_the_last_sampler_is_not_tolerated_away(start):
    process = start("lag2.py", *TINY, "--tolerate-failures", "--updates", "100000")
    until(process, "version 0: held-out accuracy")
    ranks_of(process)[1].children()[0].kill()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the connection to rank 1 was lost" in stderr
    # Whoever notices first: the publisher, or the collector with what was being sampled.
    assert "all 1 engines are lost" in stderr or "reached not every engine" in stderr


def test_two_nodes_meet_by_torchruns_rendezvous(cache, tmp_path, free_port):
    flags = [str(ROOT / "recipes" / "lag2.py"), *TINY, "--runs", str(tmp_path)]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-id=test"),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**psutil.Process().environ(), "RZERO_CACHE": str(cache), "PYTHONWARNINGS": "ignore"},
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("lag per token" in stdout for stdout, _ in said) == 1
    assert len(updates_of(only_run(tmp_path))) == 6
