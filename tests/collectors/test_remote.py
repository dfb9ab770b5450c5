"""Two real processes over gloo: an engine in one, its ``RemoteEngine`` in the other."""

import json
import subprocess
import sys

import pytest

from rzero.collectors import SingleTurn, serve_engine
from rzero.collectors.interaction import group_player


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


def test_groups_are_sampled_rewarded_and_packed_in_the_other_process(tmp_path):
    result, code, stderr = run_ranks("play", tmp_path)
    assert code == 0, stderr
    assert result["rewarded"], "each reward is of its own response and of the problem known there"
    assert result["stored"], "the buffer accepts the digests"
    assert result["same"], "the same seeds give the same responses as requests from here"
    assert result["group_ids"] == [6, 6, 6, 7, 7, 7, 9, 9, 9]
    assert result["uids"] == [18, 19, 20, 21, 22, 23, 27, 28, 29]
    kind, reason, message, traceback = result["error"]
    assert (kind, reason, message) == ("GroupFailed", "no judge", "the judge of problem 70 is away")
    assert "in rewards" in traceback


def test_an_exception_of_a_reward_function_in_the_other_process_ends_the_run(tmp_path):
    result, code, stderr = run_ranks("reward raises", tmp_path)
    assert result["kinds"] == ["EngineError"]
    assert "in rewards" in result["text"]
    assert "ZeroDivisionError: problem 90 cannot be judged" in result["text"]
    assert code == 1
    assert "problem 90 cannot be judged" in stderr


def test_an_engine_without_an_interaction_says_so(tmp_path):
    result, code, _ = run_ranks("no interaction", tmp_path)
    assert "interaction must be given to play whole groups" in result["text"]
    assert code == 1


def test_what_is_rewarded_elsewhere_has_no_state():
    class Judge:
        def __call__(self, prompt, responses):
            return [0.0] * len(responses)

        def state_dict(self):
            return {"seen": 3}

        def load_state_dict(self, state_dict):
            raise AssertionError

    interaction = SingleTurn(Judge())
    with pytest.raises(ValueError, match=r"must have no state, got \['seen'\]; give it to the collector"):
        serve_engine(None, None, None, interaction=interaction)
    interaction.close()


def test_a_collector_without_rewards_needs_engines_that_have_them(make_engine):
    engine = make_engine(version=0)
    with pytest.raises(TypeError, match="reward_fn must be given, as TransformersEngine plays no groups"):
        group_player(None, [engine])
