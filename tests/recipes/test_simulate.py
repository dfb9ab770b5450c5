"""The recipe runs on a small machine, and its answers hold together."""

import dataclasses
import json

import pytest
from matplotlib.image import imread

from recipes.simulate import Config, crossings, main, table
from recipes.simulation.cluster import LARGE, SMALL, balance
from rzero.collectors.scheduler import strict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    small = dataclasses.replace(SMALL, gpus=6, responses=64)
    large = dataclasses.replace(LARGE, gpus=100, responses=128)
    config = Config(out=tmp_path_factory.mktemp("runs") / "new", updates=10, small=small, large=large)
    return config, main(config)


def test_files_are_written(run):
    config, answers = run
    assert json.loads((config.out / "simulate.json").read_text()) == json.loads(json.dumps(answers))
    height, width = imread(config.out / "simulate.png").shape[:2]
    assert (height, width) == (1080, 1560)


def test_lag_of_the_slot_queue_follows_the_closed_form(run):
    _, answers = run
    rows = {(row["name"], row["nominal"], row["g"]): row for row in answers["lag"]}
    # Q + C/B at the start; ten updates and little warm-up leave the queue short of full near balance.
    assert rows["slot queue", 2, 0.5]["start"] == pytest.approx(6, abs=0.05)
    assert rows["slot queue", 8, 0.5]["start"] == pytest.approx(12, abs=0.05)
    assert rows["slot queue", 8, 0.5]["token_mean"] == pytest.approx(11.5, abs=0.15)
    assert rows["credits, strict", 8, 0.95]["start_max"] == 8
    assert rows["slot queue", 8, 1.5]["learner_idle"] == pytest.approx(1 / 3, abs=0.05)


def test_speed_ups_are_ratios_of_the_same_work(run):
    _, answers = run
    assert {row["learners"] for row in answers["splits"]} == {2, 4}
    for row in answers["splits"]:
        assert row["speed_up"] == pytest.approx(row["synchronous"] / row["step"])
        assert row["speed_up"] > 1
        assert row["start_max"] >= row["start"]


def test_more_lag_feeds_the_learner(run):
    config, answers = run
    chosen = [row for row in answers["large"] if row["order"] == "strict"]
    assert [row["nominal"] for row in chosen] == [2, 4, 8, 16, 32, 48]
    assert chosen[0]["learner_trains"] < chosen[3]["learner_trains"] <= 1
    assert all(row["start_max"] <= row["nominal"] for row in chosen)
    assert {row["responses"] for row in answers["large"]} == {
        config.large.responses,
        4 * config.large.responses,
    }


def test_the_balanced_split_makes_both_sides_equally_long():
    split = balance(LARGE)
    assert split.engines == (10_000 - split.learners) // 8
    workload = LARGE.workload(split.learners)
    # By hand: the mean of the cut log-normal is about 11,300 tokens.
    trained = workload.train_seconds(8192 * 11_300)
    sampled = 8192 * 11_300 / (split.engines * 128 * workload.rate_law(128))
    assert trained == pytest.approx(split.step_seconds, rel=0.03)
    assert sampled == pytest.approx(split.step_seconds, rel=0.03)


def test_a_cluster_in_numbers():
    # 2 s + 6 * 1.5e9 operations * 7e6 tokens / (350e12 * 2 per second) = 2 + 90 s.
    workload = SMALL.workload(2)
    assert workload.train_seconds(7_000_000) == pytest.approx(92.0)
    assert workload.engines == 14 and SMALL.colocated().engines == 16
    assert SMALL.credits(3, strict()).capacity == 4 * 512 // 8
    # A quarter of the cluster has a quarter of the tokens and takes as long.
    model = SMALL.workload(4, scale=4)
    assert model.engines == 3
    assert model.train_seconds(7_000_000 // 4) == pytest.approx(SMALL.workload(4).train_seconds(7_000_000))


def test_crossings_interpolate():
    curve = [(2, 3.0), (4, 2.0), (6, 1.0)]
    rows = [{"cv": 0.1, "nominal": 2, "learners": x, "speed_up": y} for x, y in curve]
    assert crossings(rows, 2.4) == [(0.1, 2, pytest.approx(3.2))]
    assert crossings(rows, 9.0) == []


def test_table_aligns_columns():
    text = table([{"a": 1.5, "b": "long name"}, {"a": 22, "b": True}], {"a": "x", "b": "y"})
    assert text.splitlines() == ["   x          y", "1.50  long name", "  22       True"]
