import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.recipes.conftest import ROOT, TINY, ranks_of, until


def one_line(stderr):
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def only_run(folder):
    runs = [path for path in folder.iterdir() if path.is_dir()]
    assert len(runs) == 1
    return runs[0]


@pytest.mark.parametrize(("recipe", "nominal_lag"), [("sync.py", 0), ("lag2.py", 2)])
def test_a_recipe_trains_and_leaves_its_folder(start, tmp_path, recipe, nominal_lag):
    process = start(recipe, *TINY)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    run = only_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    lag = summary["lag"]["token_mean"]["per_token"]
    assert summary["updates"] == 6
    assert summary["lag"]["nominal_lag"] == nominal_lag
    assert lag["max"] == 0 if nominal_lag == 0 else lag["max"] >= 1
    assert summary["lag"]["responses"] == 6 * 4 * 8
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "update" in row] == list(range(6))
    assert [row["version"] for row in rows if "held_out_accuracy" in row] == [0, 6]
    assert all(0 < row["ess_fraction"] <= 1 for row in rows if "update" in row)
    for figure in ("reward", "lag", "ratio", "idle"):
        assert (run / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["prompts_per_update"] == 4
    assert list((run / "csv").rglob("reward.csv"))
    for said in ("held-out accuracy", "nominal", "effective sample size", "idle", "a second"):
        assert said in stdout
    assert f"nominal {nominal_lag}; measured mean" in stdout


@pytest.mark.parametrize("wire", ["model", "bfloat16"])
def test_every_ratio_is_one_when_nothing_lags_and_kernels_are_exact(start, tmp_path, wire):
    """The recipe itself checks that after each forward; the audits compare weights, tokens and modules."""
    flags = ["--kernels", "exact", "--wire-dtype", wire, "--audit-every", "3"]
    process = start("sync.py", *TINY, *flags)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["ratio_mean"], summary["ratio_second_moment"], summary["ratio_max"]) == (1.0, 1.0, 1.0)
    assert [audit["version"] for audit in summary["audits"]] == [3, 6]
    assert all(audit["mismatching"] == 0 < audit["tokens"] for audit in summary["audits"])


def test_a_local_model_and_mixed_tasks(start, tmp_path, cache):
    from recipes.tiny_model import cached_tiny_model

    folder = cached_tiny_model(["basic_arithmetic"], warm_up_steps=8, cache_dir=cache)
    flags = ["--model", str(folder), "--tasks", "chain_sum", "gcd:max_value=9", "--tensorboard"]
    process = start("reinforce_zero.py", *TINY, *flags, "--updates", "2", ranks=3)  # two samplers
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert list(only_run(tmp_path).rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--no-such-flag", "1"], 2, "Unrecognized options: --no-such-flag"),
        (["--updates", "many"], 2, "--updates"),
        (["--model", "/no/such/folder"], 2, "--model must name a folder with a Hugging Face model, got"),
        (["--tasks", "no_such_task"], 2, "specs must name data sets of reasoning-gym"),
        (["--group-size", "1"], 2, "--group-size must be at least 2, got 1"),
        ([], 1, "needs 1 rank(s) that learn and at least one that samples, got 1; start it with"),
    ],
)
def test_a_mistake_is_said_in_one_line(start, flags, ranks, message):
    process = start("lag2.py", *flags, ranks=ranks)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    lines = one_line(stderr)
    assert len(lines) == 1, stderr
    assert message in lines[0]
    assert "Traceback" not in stderr.split("torch/distributed")[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run(start, victim):
    process = start("lag2.py", *TINY, "--updates", "100000")
    until(process, "version 0: held-out accuracy")
    ranks = ranks_of(process)
    ranks[victim].kill()
    started = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - started < 30
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_ctrl_c_ends_the_run(start):
    process = start("lag2.py", *TINY, "--updates", "100000")
    until(process, "version 0: held-out accuracy")
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "interrupted" in stderr
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_a_port_in_use_is_said_in_one_line(tmp_path):
    # torchrun itself opens the port; this is what a rank started by other means says.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, str(ROOT / "recipes" / "lag2.py"), "--runs", str(tmp_path)],
            env={**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert one_line(done.stderr) == [line for line in done.stderr.splitlines() if f"127.0.0.1:{port}" in line]
    assert "could not connect the ranks" in done.stderr
    assert "Traceback" not in done.stderr
