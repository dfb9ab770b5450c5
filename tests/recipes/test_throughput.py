import json

import pytest

from recipes.errors import RecipeError
from recipes.report import Report, make_report
from recipes.reporting.throughput import throughput_text
from recipes.throughput import Throughput, sum_up
from tests.recipes.conftest import TINY
from tests.recipes.test_report import folder  # noqa: F401  (a fixture)

SIMULATED = {
    "published": 2.4,
    "small_gpus": 16,
    "crossings": [{"cv": 0.4, "nominal_lag": 8, "learners": 13.4}],
    "splits": [{"cv": 0.4, "nominal": 8, "speed_up": speed_up} for speed_up in (1.5, 2.5, 2.0)],
    "large_gpus": 10_000,
    "large": [
        {"responses": 8192, "order": "strict", "nominal": 16, "publish": 2.0, "overlap": True}
        | {"of_ideal": 0.98, "trains": 0.91}
    ],
}


def row(step, wait):
    return {"step_seconds": step, "wait_seconds": wait, "tokens": 100.0}


def test_speed_up_and_ideal_overlap():
    """Sampling 3 of 4 seconds: at best the step is 3 s, a speed-up of 4/3; 3.2 s reach 3/3.2 of it."""
    rounds = {"native": {"synchronous": [row(4.0, 3.0)], "asynchronous": [row(3.2, 0.1)]}}
    found = sum_up(rounds)["native"]
    assert found["speed_up"] == pytest.approx(4 / 3.2)
    assert found["ideal_speed_up"] == pytest.approx(4 / 3)
    assert found["overlap"] == pytest.approx(3 / 3.2)
    # Learning 3 of 4 seconds: the same bound from the other side.
    rounds["native"]["synchronous"] = [row(4.0, 1.0)]
    assert sum_up(rounds)["native"]["overlap"] == pytest.approx(3 / 3.2)


def test_medians_are_over_the_rounds():
    rounds = {
        "exact": {
            "synchronous": [row(2.0, 1.0), row(4.0, 2.0), row(3.0, 1.5)],
            "asynchronous": [row(1.0, 0.0), row(1.0, 0.0), row(2.0, 0.0)],
        }
    }
    found = sum_up(rounds)["exact"]
    assert found["speed_ups"] == [2.0, 4.0, 1.5]
    assert found["speed_up"] == 2.0
    assert found["synchronous"]["step_seconds"] == 3.0


def test_the_first_updates_cannot_be_all():
    with pytest.raises(RecipeError, match="--updates must be more than --left-out 20, got 20"):
        Throughput(updates=20)


@pytest.mark.slow
def test_the_2x2_is_measured_in_one_command(start, tmp_path, folder):  # noqa: F811
    flags = ["--updates", "5", "--left-out", "2", "--rounds", "1", "--simulated-updates", "0"]
    process = start("throughput.py", *TINY, *flags)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    (written,) = tmp_path.glob("throughput-*/throughput.json")
    found = json.loads(written.read_text())
    for kernels in ("native", "exact"):
        (sync,), (other,) = found["rounds"][kernels]["synchronous"], found["rounds"][kernels]["asynchronous"]
        assert sync["lag"] == 0 < other["lag"]
        for one in (sync, other):
            assert 0 <= one["learner_idle"] <= 1
            assert 0 <= one["sampler_idle"] <= 1
            assert 0 < one["wait_seconds"] < one["step_seconds"]
    # One policy for all: synchronous runs of both kernels sample the same lengths but for near ties.
    lengths = [found["rounds"][kernels]["synchronous"][0]["tokens"] for kernels in ("native", "exact")]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)
    assert str(tmp_path) not in written.read_text()
    assert throughput_text(found) in stdout

    make_report(Report(runs=(folder,), out=tmp_path / "out", throughput=written))
    assert throughput_text(found) in (tmp_path / "out" / "README.md").read_text()

    found["simulated"] = SIMULATED
    text = throughput_text(found)
    assert "| 0.4 | 8 | 13.4 |" in text
    assert "| 0.4 | 8 | 1.50 to 2.50 |" in text
    assert "| 8,192 | strict | 16 | 2 | yes | 98% | 91% |" in text
