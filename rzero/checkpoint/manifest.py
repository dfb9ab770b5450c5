"""What a checkpoint says about itself, and whether its files are still what they were."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rzero.checkpoint.errors import CheckpointError, DamagedCheckpoint

FORMAT = 1
MANIFEST = "manifest.json"


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest beside the files it describes, and flush it to the device.

    Args:
        folder: Holds the files.
        content: What else to say, for JSON.
    """
    manifest = {
        "format": FORMAT,
        **content,
        "files": {path.name: _file_digest(path) for path in sorted(folder.iterdir())},
        "packages": _packages(),
        "git_revision": _git_revision(),
    }
    manifest["digest"] = _digest(manifest)
    with (folder / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, without a look at the other files.

    Raises:
        DamagedCheckpoint: If there is none or it was changed.
        CheckpointError: If a newer version wrote it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        stated, written_by = manifest.pop("digest"), manifest["format"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder}: {MANIFEST} cannot be read: {error}") from error
    if written_by > FORMAT:
        raise CheckpointError(
            f"checkpoint {folder}: format must be at most {FORMAT}, got {written_by}, written by rzero "
            f"{manifest.get('packages', {}).get('rzero', 'of a later version')}; update rzero to use it"
        )
    if stated != _digest(manifest):
        raise DamagedCheckpoint(f"checkpoint {folder}: {MANIFEST} was changed")
    return manifest


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Compare every file with its digest; returns the manifest.

    Raises:
        DamagedCheckpoint: Naming the first file that is missing or was changed.
        CheckpointError: If a newer version wrote it.
    """
    manifest = read_manifest(folder)
    for name, stated in manifest["files"].items():
        try:
            found = _file_digest(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"checkpoint {folder}: {name} cannot be read: {error}") from error
        if found != stated:
            raise DamagedCheckpoint(f"checkpoint {folder}: {name} is not what was written")
    return manifest


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@cache
def _packages() -> dict[str, str]:
    return {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }


@cache
def _git_revision() -> str | None:
    """The commit that rzero runs from, ``+changes`` if it was edited; None outside a repository."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
