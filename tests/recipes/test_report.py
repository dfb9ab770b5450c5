"""Reports of real runs, of runs that broke off, and of damaged folders; the verdict by hand."""

import json
import shutil

import pytest

from recipes.config import Config
from recipes.errors import RecipeError
from recipes.report import Report, make_report
from recipes.reporting.data import label_runs, read_run, read_runs, thinned
from recipes.reporting.verdict import alarms, verdict
from recipes.run.folder import write_config
from tests.recipes.conftest import TINY


@pytest.fixture
def folder(tmp_path):
    """A run of four updates as it leaves its folder, without its summary."""
    folder = tmp_path / "lag2-a"
    folder.mkdir()
    write_config(folder, Config(updates=4, eval_every=2))
    names = "reward loss entropy ratio_mean ratio_second_moment ratio_max ess_fraction grad_norm kl_k3"
    names += " lag_mean lag_max response_length zero_variance_groups wait_seconds train_seconds sampler_idle"
    rows = [{"version": 0, "held_out_accuracy": 0.25}]
    rows += [{"update": update, **dict.fromkeys(names.split(), 0.5)} for update in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_a_report_of_two_real_runs(start, tmp_path):
    for recipe in ("sync.py", "lag2.py"):
        process = start(recipe, *TINY, "--updates", "3", "--eval-every", "1")
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
    runs = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    out = tmp_path / "results" / "two"
    report = make_report(Report(runs=tuple(runs), out=out))

    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    kept = json.loads((out / "report.json").read_text())
    for run, summary in zip(kept["runs"], summaries, strict=True):
        assert run["held_out"] == summary["held_out_accuracy"]
        assert run["lag"] == summary["lag"]["token_mean"]["per_token"]
        assert run["totals"]["updates_per_second"] == summary["updates_per_second"]
        assert run["updates"] == 3
        assert "torchrun --standalone --nproc-per-node=2 recipes/" in run["starts"][0]["command"]
        assert str(tmp_path) not in json.dumps(run)
    page = (out / "README.md").read_text()
    assert "| sync | 0 | 3 of 3 |" in page
    assert "| lag 2 | 0 | 3 of 3 |" in page
    assert report["runs"][0]["starts"][0]["revision"] in page
    assert report["verdicts"][runs[1].name]["reference"] == runs[0].name
    for figure in ("accuracy", "training", "lag", "idle"):
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")

    again = make_report(Report(runs=(out / "report.json",), out=tmp_path / "again"))
    assert again["runs"] == kept["runs"]
    assert again["verdicts"] == kept["verdicts"]

    # Had the run broken off before its summary, its updates would tell the same.
    whole = read_run(runs[1])
    (runs[1] / "summary.json").unlink()
    broken = read_run(runs[1])
    assert (whole["finished"], broken["finished"]) == (True, False)
    for name in ("ratio_mean", "ratio_second_moment", "ratio_max", "ess_fraction"):
        assert broken["totals"][name] == pytest.approx(whole["totals"][name], rel=1e-4), name
    for name in ("mean", "max"):
        assert broken["lag"][name] == pytest.approx(whole["lag"][name]), name


def test_a_run_that_broke_off_is_reported_as_such(folder, tmp_path):
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"update": 4, "rew')
    (folder / "starts.jsonl").unlink()
    report = make_report(Report(runs=(folder,), out=tmp_path / "out"))
    found = report["verdicts"]["lag2-a"]
    assert found["stable"] is None
    run = report["runs"][0]
    assert run["lag"] == {"mean": 0.5, "max": 0.5}
    # All updates have a ratio of mean 0.5 and second moment 0.5, and wait half of their second.
    assert run["totals"]["ess_fraction"] == 0.5
    assert run["totals"]["learner_idle_share"] == 0.5
    assert run["totals"]["updates_per_second"] == 1.0
    page = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "ended early, or still runs: 4 of 4 updates",
        "no synchronous run of the same setting was given",
        "the last line of metrics.jsonl is cut off and was left out",
        "command, hardware, versions and revision were not written down",
        "how far other seeds differ",
    ):
        assert said in page.split("## What is not known")[1]


def test_settings_that_are_younger_than_a_run_are_named(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["weight_decay"], config["objective"]
    (folder / "config.json").write_text(json.dumps(config))
    (note,) = read_run(folder)["notes"][:1]
    assert "`objective = reinforce_zero`, `weight_decay = 0.0`" in note


def lose(name):
    return lambda folder: (folder / name).unlink()


def rewrite(name, old, new):
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose("config.json"), r"a run must have .*config\.json: No such file"),
        (lose("metrics.jsonl"), r"a run must have .*metrics\.jsonl: No such file"),
        (rewrite("config.json", "{", "{{"), r"config\.json must be JSON"),
        (rewrite("metrics.jsonl", '"reward": 0.5', '"reward": 0.5.5'), "line 2 must be JSON"),
        (rewrite("metrics.jsonl", '"update": 1', '"update": 7'), "follow one another from 0"),
        (rewrite("metrics.jsonl", '"entropy"', '"heat"'), r"must tell \['entropy'\]"),
        (rewrite("starts.jsonl", "{", "{{"), r"starts\.jsonl must be JSON lines"),
        (lambda folder: (folder / "summary.json").write_text('{"updates": 9}'), "must have the 9 updates"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(folder, tmp_path, damage, message):
    damage(folder)
    with pytest.raises(RecipeError, match=message) as refused:
        make_report(Report(runs=(folder,), out=tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_run_is_given_once(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other" / folder.name)
    with pytest.raises(RecipeError, match=r"\['lag2-a'\] more than once"):
        read_runs([folder, tmp_path / "other" / folder.name])


def test_windows():
    assert thinned([1.0, 2.0, 4.0, 8.0, 3.0], 2) == [1.5, 6.0, 3.0]
    assert thinned([1.0, 2.0, 4.0, 8.0, 3.0], 2, max) == [2.0, 8.0, 3.0]


def made(folder, name, curve, **changes):
    run = read_run(folder)
    config = {**run["config"], "updates": max(curve), **changes}
    return run | {"name": name, "config": config, "held_out": curve, "finished": True}


@pytest.mark.parametrize(
    ("curve", "stable", "said"),
    [
        ({0: 0.5, 10: 0.80, 20: 0.79}, True, None),
        ({0: 0.5, 10: 0.80, 20: 0.78}, True, None),  # exactly 2 points
        ({0: 0.5, 10: 0.81, 20: 0.78}, False, "ends 3.0 points below its best"),
        ({0: 0.5, 10: 0.39, 20: 0.80}, False, "collapses: 11.0 points below its best at 10"),
        ({0: 0.5, 10: 0.60, 20: 0.75}, False, "5.0 points below the synchronous run at 20"),
        ({0: 0.5, 10: 0.77}, True, None),  # equal updates: 10
        ({0: 0.5, 15: 0.9}, True, None),
        ({0: 0.5, 20: 0.8, 30: 0.8}, None, "was not measured after update 20"),
    ],
)
def test_the_verdict(folder, curve, stable, said):
    sync = made(folder, "sync", {0: 0.5, 10: 0.8, 15: 0.85, 20: 0.8}, nominal_lag=0)
    run = made(folder, "run", curve)
    found = verdict(run, [run, sync])
    assert found["stable"] is stable
    assert said is None or said in " ".join([*found["reasons"], *found["unknown"]])
    assert found["reference"] == "sync"


def test_the_synchronous_run_is_of_the_same_setting_and_seed(folder):
    curve = {0: 0.5, 10: 0.8}
    others = [
        made(folder, "other task", curve, nominal_lag=0, tasks=["gcd"]),
        made(folder, "other size", curve, nominal_lag=0, prompts_per_update=16),
        made(folder, "other seed", curve, nominal_lag=0, seed=1),
        made(folder, "ablation", curve, nominal_lag=0, objective="ppo_clip"),
        made(folder, "right", curve, nominal_lag=0),
    ]
    run = made(folder, "run", curve, objective="ppo_clip")
    assert verdict(run, others)["reference"] == "right"
    assert verdict(run, others[:2])["stable"] is None
    responses = run["config"]["prompts_per_update"] * run["config"]["group_size"]
    single = made(folder, "as many responses", curve, group_size=1, prompts_per_update=responses)
    assert verdict(single, others)["reference"] == "right"


def test_labels_name_what_differs(folder):
    runs = [
        made(folder, "a", {0: 0.5}, nominal_lag=0),
        made(folder, "b", {0: 0.5}, objective="ppo_clip", nominal_lag=8),
        made(folder, "c", {0: 0.5}, nominal_lag=8, in_flight=128, lr=1e-3, seed=3),
    ]
    assert list(label_runs(runs).values()) == [
        "sync, lr 0.0001",
        "lag 8, ppo_clip, lr 0.0001",
        "lag 8, queue, 128 in flight, lr 0.001",
    ]


def test_alarms_name_the_first_update(folder):
    run = made(folder, "run", {0: 0.5})
    calm = [1.0] * 8
    run["series"] = {"update": [100 * index for index in range(8)]} | {
        "ratio_second_moment": [*calm[:6], 2.5, 3.0],
        "ess_fraction": calm,
        "grad_norm": [*calm[:7], 3.5],
        "entropy": [9.0, *calm[:7]],
        "reward": calm,
    }
    found = alarms(run)
    assert found["ratio second moment above 2"] == 600
    assert found["gradient norm above 3x its median"] == 700
    assert found["effective sample size below half"] is None
    assert found["entropy above 2x its median"] is None
