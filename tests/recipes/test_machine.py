import json
import platform
import subprocess
import sys

from recipes.machine import without_runs_folder
from tests.recipes.conftest import ROOT

WRITE = """
import sys
from pathlib import Path
from recipes.config import Config
from recipes.run.folder import write_config
write_config(Path(sys.argv[1]), Config())
"""


def test_every_start_writes_what_it_runs_on(tmp_path, monkeypatch):
    for rank_count in ("0", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", rank_count)
        monkeypatch.setenv("WORLD_SIZE", "2")
        subprocess.run([sys.executable, "-c", WRITE, str(tmp_path), "--lr", "1e-3"], cwd=ROOT, check=True)
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert first["command"] == f"python -c {tmp_path} --lr 1e-3"
    assert second["command"] == f"torchrun --standalone --nproc-per-node=2 -c {tmp_path} --lr 1e-3"
    assert first["python"] == platform.python_version()
    assert first["versions"]["torch"].startswith("2.")
    assert first["cores"] >= 1
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert first["revision"] == (revision.stdout.strip() or None)


def test_a_command_does_not_tell_where_its_run_lay():
    command = "torchrun recipes/lag2.py --seed 2 --resume /home/me/old/lag2-1 --runs /home/me/old --lr 1e-4"
    assert without_runs_folder(command) == "torchrun recipes/lag2.py --seed 2 --resume runs/lag2-1 --lr 1e-4"
    assert without_runs_folder("torchrun recipes/sync.py") == "torchrun recipes/sync.py"
