"""The folder of a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.machine import describe_start


def new_run_folder(root: Path, name: str) -> Path:
    """``root/name-DATE-TIME``, created; a number is added if two runs start in one second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        folder = root / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise RuntimeError(f"new_run_folder: {root} must have room for a run, got 1000 of {stem}")


def write_config(folder: Path, config: Any) -> None:
    """``config.json``, replaced atomically, and one more line of ``starts.jsonl``: on what it runs."""
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(asdict(config), indent=2, default=str) + "\n")
    partial.replace(folder / "config.json")
    with (folder / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps(describe_start()) + "\n")
