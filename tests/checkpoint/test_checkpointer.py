"""Whatever happens to a process, a folder or a file: the newest whole checkpoint is found, and is whole."""

import json
import logging
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from rzero.checkpoint import Checkpointer, CheckpointError, RNGState, StatefulCheckpointAdapter, TrainingState


class Box:
    """An object with a state."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = dict(state_dict)


def numbers(version, size=64):
    return Box(values=torch.full((size,), version), text=f"version {version}")


@pytest.fixture
def open_folder(tmp_path):
    opened = []

    def go(folder=tmp_path / "checkpoints", **settings):
        opened.append(Checkpointer(folder, **settings))
        return opened[-1]

    yield go
    for checkpointer in opened:
        checkpointer.close()


def saved(open_folder, versions, **settings):
    checkpointer = open_folder(**settings)
    for version in versions:
        checkpointer.save(version, {"numbers": numbers(version)})
    checkpointer.wait()
    return checkpointer


def loaded(checkpointer, version):
    box = Box()
    checkpointer.load(version, {"numbers": box})
    return box.state


def test_a_future_is_awaited_in_the_background(open_folder):
    checkpointer, future = saved(open_folder, [1]), Future()
    checkpointer.save(2, {"numbers": numbers(2)}, rank_state={"late": future})
    assert checkpointer.versions() == [1]
    future.set_result({"cursor": 7, "values": torch.arange(3)})
    checkpointer.wait()
    late = Box()
    checkpointer.load(2, {}, rank_state={"late": late})
    assert late.state["cursor"] == 7 and late.state["values"].tolist() == [0, 1, 2]


def test_a_future_that_fails_or_never_ends_fails_its_save_alone(open_folder, monkeypatch):
    checkpointer, failed = saved(open_folder, [1]), Future()
    failed.set_exception(ZeroDivisionError("in the state"))
    checkpointer.save(2, {"numbers": numbers(2)}, rank_state={"late": failed})
    with pytest.raises(ZeroDivisionError, match="in the state"):
        checkpointer.wait()
    monkeypatch.setattr("rzero.checkpoint.checkpointer._TIMEOUT", 0.1)
    checkpointer.save(3, {"numbers": numbers(3)}, rank_state={"late": Future()})
    with pytest.raises(
        CheckpointError, match=r"the state of rank0/late must be there within 0\.1 s, got none"
    ):
        checkpointer.wait()
    assert checkpointer.latest() == 1 and not list(checkpointer._folder.path.glob(".partial"))
    checkpointer.save(4, {"numbers": numbers(4)})
    checkpointer.wait()
    assert checkpointer.latest() == 4


class Training:
    """Dropout, momentum and a learning rate that changes: all that a resumed run must not forget."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (k + 1))

    def parts(self):
        return {"training": TrainingState(self.model, self.optimizer), "schedule": self.schedule}

    def train(self, updates):
        for _ in range(updates):
            x = torch.randn(3, 4) * random.random() + torch.from_numpy(np.random.rand(4)).float()
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()
        return [p.detach().clone() for p in self.model.parameters()]


def test_an_interrupted_training_ends_with_the_same_bits(open_folder):
    checkpointer, whole = open_folder(), Training()
    random.seed(1)
    np.random.seed(2)
    whole.train(3)
    checkpointer.save(3, whole.parts(), rank_state={"rng": RNGState()})
    expected = whole.train(4)  # also while the checkpoint is written
    checkpointer.wait()
    other = Training(seed=5)
    checkpointer.load(checkpointer.latest(), other.parts(), rank_state={"rng": RNGState()})
    assert all(map(torch.equal, other.train(4), expected))
    without = Training(seed=5)
    checkpointer.load(3, {"training": without.parts()["training"]})  # piece by piece
    assert not all(map(torch.equal, without.train(4), expected))


def test_the_copy_is_of_the_moment_of_saving(open_folder):
    checkpointer, box = open_folder(), numbers(1)
    checkpointer.save(1, {"numbers": box})
    box.state["values"].zero_()
    checkpointer.wait()
    assert loaded(checkpointer, 1)["values"].tolist() == [1] * 64


def damage_byte(folder):
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    return file.name


def damage_tail(folder):
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    return file.name


def damage_absence(folder):
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    return file.name


def damage_config(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"] = {"lr": 2.0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return "manifest.json was changed"


def damage_manifest(folder):
    os.truncate(folder / "manifest.json", 40)
    return "manifest.json cannot be read"


@pytest.mark.parametrize("damage", [damage_byte, damage_tail, damage_absence, damage_config, damage_manifest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(open_folder, tmp_path, caplog, damage):
    checkpointer = saved(open_folder, [1, 2, 3], keep_last=3)
    assert checkpointer.latest() == 3
    named = damage(tmp_path / "checkpoints" / "version-000000003")
    with caplog.at_level(logging.WARNING):
        assert checkpointer.latest() == 2
    assert "version-000000003" in caplog.text and named in caplog.text and "the one before" in caplog.text
    assert loaded(checkpointer, 2)["text"] == "version 2"
    # The run goes on from 2, and makes 3 again.
    checkpointer.save(3, {"numbers": numbers(33)})
    checkpointer.wait()
    assert checkpointer.latest() == 3
    assert loaded(checkpointer, 3)["text"] == "version 33"


def test_the_last_ones_and_the_best_are_kept(open_folder):
    checkpointer = open_folder(keep_last=2)
    for version, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.4), (5, None), (6, 0.1)]:
        checkpointer.save(version, {"numbers": numbers(version)}, score=score)
        checkpointer.wait()
    assert checkpointer.versions() == [2, 5, 6]
    checkpointer.save(7, {"numbers": numbers(7)}, score=0.9)  # as good, and newer
    checkpointer.wait()
    assert checkpointer.versions() == [6, 7]


def test_damaged_ones_do_not_count_among_the_last(open_folder, tmp_path):
    saved(open_folder, [1, 2, 3], keep_last=3).close()
    damage_byte(tmp_path / "checkpoints" / "version-000000003")
    checkpointer = open_folder(keep_last=2)
    assert checkpointer.latest() == 2
    checkpointer.save(4, {"numbers": numbers(4)})
    checkpointer.wait()
    assert checkpointer.versions() == [2, 3, 4]


def test_a_clock_that_goes_backwards_changes_nothing(open_folder, tmp_path, monkeypatch):
    checkpointer = saved(open_folder, [1])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    checkpointer.save(2, {"numbers": numbers(2)})
    checkpointer.wait()
    for path in [tmp_path / "checkpoints" / "version-000000002", *(tmp_path / "checkpoints").rglob("*2/*")]:
        os.utime(path, (0, 0))
    assert checkpointer.latest() == 2


def test_the_manifest_says_what_made_the_checkpoint(open_folder):
    checkpointer = saved(open_folder, [4], config={"lr": 0.5})
    manifest = checkpointer.load(4, {})
    assert manifest["config"] == {"lr": 0.5} and manifest["version"] == 4
    assert manifest["packages"]["torch"] == torch.__version__.split("+")[0] or manifest["packages"]["torch"]
    assert len(manifest["git_revision"] or "0" * 40) >= 40
    assert all(len(digest) == 64 for digest in manifest["files"].values())


def test_a_newer_format_is_refused(open_folder, tmp_path):
    checkpointer = saved(open_folder, [1, 2])
    path = tmp_path / "checkpoints" / "version-000000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format must be at most 1, got 99, .* update rzero"):
        checkpointer.latest()


def test_two_runs_in_one_folder(open_folder):
    first = saved(open_folder, [1])
    with pytest.raises(CheckpointError, match="belong to a run that still works"):
        open_folder()
    assert open_folder(read_only=True).latest() == 1  # looking is free
    first.close()
    assert open_folder().latest() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_read_only_folder(tmp_path, open_folder):
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"checkpoints must be written to .*Permission denied"):
            open_folder()
    finally:
        os.seteuid(0)


def test_a_full_disk_loses_nothing(open_folder, tmp_path):
    checkpointer = saved(open_folder, [1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        checkpointer.save(2, {"numbers": numbers(2, size=10_000)})
        with pytest.raises(
            CheckpointError, match=r"saving checkpoint 2 in .* failed: .*versions \[1\] are kept"
        ):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["lock", "version-000000001"]
    checkpointer.save(3, {"numbers": numbers(3)})  # when there is room again
    checkpointer.wait()
    assert checkpointer.latest() == 3


def test_what_is_not_there_is_named(open_folder):
    checkpointer = saved(open_folder, [1])
    with pytest.raises(CheckpointError, match=r"must hold 'model', got \['numbers'\]"):
        checkpointer.load(1, {"model": Box()})
    with pytest.raises(TypeError, match="x must be a tensor"):
        checkpointer.save(2, {"numbers": Box(x=object())})
    assert open_folder(checkpointer._folder.path / "none", read_only=True).latest() is None


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_is_not_run(open_folder, tmp_path):
    checkpointer = saved(open_folder, [1, 2])
    folder, marker = tmp_path / "checkpoints" / "version-000000002", tmp_path / "executed"
    evil = pickle.dumps(Malicious(marker))
    (file,) = folder.glob("*.safetensors")
    for name in (".metadata", "0.distcp", "more.safetensors"):
        (folder / name).write_bytes(evil)
    with pytest.raises(Exception, match=r"(?i)header|safetensors"):
        checkpointer.load(2, {"numbers": Box()})
    (folder / "more.safetensors").unlink()
    assert loaded(checkpointer, 2)["text"] == "version 2"
    file.write_bytes(evil)
    assert checkpointer.latest() == 1
    with pytest.raises(Exception, match=r"(?i)header|safetensors"):
        checkpointer.load(2, {"numbers": Box()})
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # it would have been


def test_torchrl_saves_and_loads_by_the_adapter(tmp_path):
    from torchrl.checkpoint import Checkpoint

    trained, other = Training(), Training(seed=9)
    trained.train(2)
    for training, act in ((trained, "save"), (other, "load")):
        checkpoint = Checkpoint()
        state = TrainingState(training.model, training.optimizer)
        checkpoint.register("training", state, adapter=StatefulCheckpointAdapter())
        getattr(checkpoint, act)(tmp_path / "torchrl")
    assert all(map(torch.equal, trained.model.parameters(), other.model.parameters()))
    assert not list((tmp_path / "torchrl").rglob("*.pt"))


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_kill_at_any_instant_leaves_the_last_one_whole(open_folder, tmp_path, kills):
    folder, reached = tmp_path / "checkpoints", 0
    worker = [sys.executable, "-m", "tests.checkpoint.kill_worker", str(folder), str(kills), "0"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(kills):
            acknowledged = int(process.stdout.readline())
            assert acknowledged > reached
            checkpointer = open_folder(folder)
            reached = checkpointer.latest()
            assert reached >= acknowledged
            assert loaded(checkpointer, reached)["values"].unique().tolist() == [reached]
            checkpointer.close()
            assert not [path for path in folder.iterdir() if path.name.startswith(".")]
            assert len(checkpointer.versions()) <= 3
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
