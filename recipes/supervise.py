"""A rank that may die without ending the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CHILD = "RZERO_SUPERVISED"


def is_supervised() -> bool:
    """Whether this process is the child of ``supervise``."""
    return CHILD in os.environ


def supervise() -> None:
    """Run this rank's command as a child process and wait for it, however it ends.

    torchrun ends all ranks as soon as the process of one fails; this process does not fail.
    """
    child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, CHILD: "1"})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    if code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        print(
            f"rank {os.environ['RANK']} ended by {how}; it is not started again", file=sys.stderr, flush=True
        )
