import json

from tests.recipes.test_reinforce_zero import only_run

TINY = ["--updates", "3", "--eval-every", "3", "--warm-up-steps", "8", "--held-out", "8"]
TINY += ["--prompts-per-update", "4"]


def test_trajectories_are_trained_on_through_torchrun(start, tmp_path):
    process = start("multi_turn.py", *TINY)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["updates"] == 3
    assert sorted(summary["held_out_accuracy"]) == ["0", "3"]
    assert summary["lag"]["responses"] == 3 * 4 * 8
    assert "version 3: " in stdout and " calls of the tool a trajectory" in stdout
    assert "a trajectory that update 0 learned from" in stdout
    assert "version  mask   log-prob  text" in stdout
    assert "        -  False         -  '<bos>Calculate" in stdout
    assert "        0  True " in stdout
