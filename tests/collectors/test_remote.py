"""Two real processes over gloo: an engine in one, its ``RemoteEngine`` in the other."""

import json
import subprocess
import sys


def run_ranks(scenario, folder):
    command = [sys.executable, "-W", "ignore", "-m", "tests.collectors.remote_ranks", scenario]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=None,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert ranks[0].returncode == 0, outputs[0][1]
    return json.loads(outputs[0][0]), ranks[1].returncode, outputs[1][1]


def test_a_remote_engine_serves_publishes_and_refuses(tmp_path):
    result, code, stderr = run_ranks("serve", tmp_path)
    assert code == 0, stderr
    assert result["first"] == -1
    assert result["versions"] == [[0], [1]]
    assert result["max_delta"] < 1e-5
    assert result["digests"]
    assert "1 of" in result["refused"] and "lm_head.weight" in result["refused"]
    assert result["version_after_refusal"] == 1
    assert not result["done_while_paused"]
    assert result["sampled_after_resume"] > 0
    assert result["context"] == "TransformersEngine"
    assert result["busy"] > 0


def test_an_exception_in_the_other_process_arrives_with_its_traceback(tmp_path):
    result, code, stderr = run_ranks("raise", tmp_path)
    assert result["kinds"] == ["EngineError"]
    assert not result["is_connection"]
    assert "in break_down" in result["text"] and "FloatingPointError: the model broke down" in result["text"]
    assert "has failed" in result["later"]
    assert code == 1
    assert "the model broke down" in stderr


def test_a_killed_process_is_noticed(tmp_path):
    result, code, _ = run_ranks("die", tmp_path)
    assert result["is_connection"]
    assert "the connection to rank 1 was lost" in result["text"]
    assert result["seconds"] < 30
    assert code == -9
