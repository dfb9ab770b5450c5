"""Runs that are killed at any instant go on: nothing lost, nothing twice, and the same bits if promised."""

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter

import psutil
import pytest
import torch

from recipes import replay as replay_recipe
from recipes.errors import RecipeError
from recipes.replay import replay
from recipes.run.recording import read_update
from rzero.checkpoint import Checkpointer
from tests.recipes.conftest import ROOT
from tests.recipes.test_reinforce_zero import only_run

UPDATES = 6
TINY = ["--updates", str(UPDATES), "--warm-up-steps", "60", "--held-out", "8", "--held-out-samples", "1"]
TINY += ["--prompts-per-update", "2", "--group-size", "8", "--max-new-tokens", "6"]
TINY += ["--lr", "0.001", "--lr-warm-up", "0", "--checkpoint-every", "1", "--record"]
METHODS = {
    "synchronous": ["--nominal-lag", "0", "--kernels", "exact"],
    "lagging": ["--nominal-lag", "2", "--kernels", "exact", "--deterministic"],
    "free": ["--nominal-lag", "2"],
}


class Ranks:
    """Starts the ranks of a recipe, and kills some."""

    def __init__(self, process):
        self._process = process

    def __call__(self, *flags, ranks=2, kill=None):
        order = {"flags": [*map(str, flags)], "ranks": ranks, "kill": kill}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the starting process ended"
        return json.loads(line)


@pytest.fixture(scope="module")
def ranks(cache):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.recipes.forked_ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RZERO_CACHE": str(cache), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield Ranks(process)
        process.stdin.close()
        process.wait(timeout=30)
    assert process.returncode == 0


class Box:
    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        self.state = state_dict


def final_state(run):
    checkpoints, box = Checkpointer(run / "checkpoints", read_only=True), {"training": Box()}
    own = {"collector": Box()}
    assert checkpoints.latest() == UPDATES
    checkpoints.load(UPDATES, box, rank_state=own)
    return box["training"].state, own["collector"].state


def trained_on(run):
    batches = [read_update(run, version).batch for version in range(UPDATES)]
    assert len(list((run / "batches").iterdir())) == UPDATES
    return batches


def samples(batches):
    return Counter(
        pair
        for batch in batches
        for pair in zip(batch.prompt_id.tolist(), batch.sample_index.tolist(), strict=True)
    )


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "update" in row]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """Runs that nobody interrupted, by method."""
    runs, seconds = {}, {}
    first = ranks(*TINY, "--updates", "1", "--runs", tmp_path_factory.mktemp("first"))  # makes the tiny model
    assert first["codes"] == [0, 0], first["said"]

    def of(method):
        if method not in runs:
            folder = tmp_path_factory.mktemp(method)
            done = ranks(*TINY, *METHODS[method], "--runs", folder)
            assert done["codes"] == [0, 0], done["said"]
            runs[method], seconds[method] = only_run(folder), done["seconds"]
            learned = [row["grad_norm"] > 0 for row in metrics(runs[method])]
            assert sum(learned) >= 3, "nothing is learned, so that all weights are equal"
        return runs[method]

    of.seconds = seconds
    return of


def interrupted(ranks, folder, method, *, kills, seconds, chance):
    """A run that is killed so often at most, each time within ``seconds``: its folder, and the kills."""
    run, killed = None, 0
    while True:
        home = folder / str(killed)
        flags = ["--resume", run] if run else [*TINY, *METHODS[method], "--runs", home]
        kill = {"rank": chance.randrange(2), "after": chance.uniform(0.0, seconds)}
        done = ranks(*flags, kill=kill if killed < kills else None)
        if run is None and home.exists():
            run = only_run(home)
            if not Checkpointer(run / "checkpoints", read_only=True).versions():
                run = None  # killed before its first checkpoint: there is nothing to lose yet
        if done["codes"] == [0, 0]:  # It was faster than the kill, or not to be killed.
            return run, killed
        assert -9 in done["codes"], done["said"]
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", done["port"]))  # nobody listens there any more
        killed += 1


def check_whole_and_once(run, method, whole):
    batches, (_, collector) = trained_on(run), final_state(run)
    assert max(samples(batches).values()) == 1
    tickets = [set(batch.group_id.tolist()) for batch in batches]
    scheduler = collector["scheduler"]
    in_work = {*scheduler["running"], *scheduler["finished"], *scheduler["released"]}
    assert set.union(*tickets) | in_work == set(range(scheduler["counts"]["submitted"]))
    assert not set.union(*tickets) & in_work
    assert [row["update"] for row in metrics(run)] == list(range(UPDATES))
    for version, batch in enumerate(batches):
        assert int(batch.policy_version.max()) <= version
    if method != "free":
        assert samples(batches) == samples(trained_on(whole(method)))


def same_weights(run, other):
    a, b = final_state(run)[0], final_state(other)[0]
    return all(torch.equal(a["model"][name], b["model"][name]) for name in b["model"])


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(7, id="21 kills"),
        pytest.param(67, id="201 kills", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_killed_runs_lose_nothing_and_use_nothing_twice(ranks, whole, tmp_path, method, kills):
    whole(method)
    chance, done = random.Random(method), 0
    for attempt in itertools.count():
        if done >= kills:
            break
        run, killed = interrupted(
            ranks,
            tmp_path / str(attempt),
            method,
            kills=kills - done,
            seconds=whole.seconds[method],
            chance=chance,
        )
        done += killed
        check_whole_and_once(run, method, whole)
        if method != "free":
            assert same_weights(run, whole(method))
        assert {path.name[:7] for path in (run / "checkpoints").iterdir()} == {"lock", "version"}
        assert not list(run.rglob("*.partial"))
    assert not psutil.Process(ranks._process.pid).children()


def test_a_run_repeats_itself_only_where_it_is_promised(ranks, whole, tmp_path):
    done = ranks(*TINY, *METHODS["lagging"], "--runs", tmp_path)
    assert done["codes"] == [0, 0], done["said"]
    assert same_weights(only_run(tmp_path), whole("lagging"))
    lags = {version: set() for version in range(UPDATES)}
    for version, batch in enumerate(trained_on(only_run(tmp_path))):
        lags[version] = set((version - batch.policy_version[batch.response_mask]).tolist())
        # The recorded order of arrival is the virtual one: groups in the order in which they started.
        assert batch.group_id.unique_consecutive().tolist() == [2 * version, 2 * version + 1]
    assert lags == {version: {min(version, 2)} for version in range(UPDATES)}
    assert not same_weights(whole("synchronous"), whole("lagging"))


def test_a_changed_method_is_refused_with_both_values(ranks, whole):
    run = whole("synchronous")
    for flags, said in [
        (["--lr", "0.5"], f"--lr is 0.001 in {run} and cannot become 0.5"),
        (["--kernels", "native"], f"--kernels is exact in {run} and cannot become native"),
        (["--updates", "2"], f"--updates must be at least the {UPDATES} that {run} has done, got 2"),
    ]:
        done = ranks("--resume", run, *flags)
        assert 0 not in done["codes"] and said in done["said"], done["said"]
    done = ranks("--resume", run / "none")
    assert 0 not in done["codes"] and "--resume must name the folder of a run, got" in done["said"]


def test_two_learners_go_on_with_a_run_of_one_and_the_other_way_round(ranks, tmp_path):
    flags = [*TINY, *METHODS["synchronous"], "--updates", "2", "--runs", tmp_path]
    assert ranks(*flags)["codes"] == [0, 0]
    run = only_run(tmp_path)
    more = ranks("--resume", run, "--learners", "2", "--updates", "4", ranks=3)
    assert more["codes"] == [0, 0, 0], more["said"]
    more = ranks("--resume", run, "--learners", "1", "--updates", str(UPDATES))
    assert more["codes"] == [0, 0], more["said"]
    assert [row["update"] for row in metrics(run)] == list(range(UPDATES))
    assert json.loads((run / "summary.json").read_text())["updates"] == UPDATES
    assert max(samples(trained_on(run)).values()) == 1


@pytest.fixture
def replayable(whole, tmp_path, cache, monkeypatch):
    """A copy of a recorded run, of which only the first checkpoint is left."""
    monkeypatch.setenv("RZERO_CACHE", str(cache))
    threads = torch.get_num_threads()

    def copy(method):
        run = tmp_path / method
        shutil.copytree(whole(method), run)
        for version in range(1, UPDATES + 1):
            shutil.rmtree(run / "checkpoints" / f"version-{version:09d}")
        return run

    yield copy
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", METHODS)
def test_any_update_can_be_done_again(replayable, method):
    run = replayable(method)
    for update in (0, UPDATES - 1):
        again = replay(run, update)
        assert again.loss == again.recorded.loss
        assert again.gradients == again.recorded.gradients
        assert len(again.gradients) == len(list(again.policy.model.parameters()))
    updates = [read_update(run, update) for update in range(UPDATES)]
    assert len({tuple(update.gradients.values()) for update in updates}) >= 4


def test_an_update_that_comes_out_otherwise_is_named(replayable):
    run = replayable("free")
    path = run / "batches" / "000000002.safetensors"
    data = bytearray(path.read_bytes())
    recorded = read_update(run, 2)
    rewards = recorded.batch.reward.numpy().tobytes()
    assert data.count(rewards) == 1
    other = (recorded.batch.reward + torch.arange(len(recorded.batch.reward))).numpy().tobytes()
    path.write_bytes(data.replace(rewards, other))
    with pytest.raises(RuntimeError, match="the loss of update 2 must be the recorded"):
        replay(run, 3)
    assert replay(run, 1).loss == read_update(run, 1).loss
    with pytest.raises(RecipeError, match=r"update 99 must be recorded \(--record\)"):
        replay(run, 99)
    shutil.rmtree(run / "checkpoints" / "version-000000000")
    with pytest.raises(RecipeError, match="must have a whole checkpoint at or before update 1, got none"):
        replay(run, 1)


def test_the_command_shows_every_response(replayable, monkeypatch, capsys):
    run = replayable("lagging")
    monkeypatch.setattr(sys, "argv", ["replay.py", str(run), "--update", "4"])
    assert replay_recipe.main() == 0
    said = capsys.readouterr().out
    parameters = len(read_update(run, 4).gradients)
    assert f"gradients  {parameters} of {parameters} parameters have the recorded bits" in said
    assert len(re.findall(r"^uid \d+  group_id \d+  prompt_id \d+ .* advantage", said, flags=re.M)) == 16
    assert len(re.findall(r"versions  0:\d v2 \(lag 2 at most\)", said)) == 16
    assert said.count("  ratio     mean") == said.count("  response  '") == 16
