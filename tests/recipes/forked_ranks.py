"""Ranks of a recipe as forked processes, which start in a moment, since everything is imported already.

Reads one JSON object a line: ``{"flags": [...], "ranks": 2, "kill": {"rank": 0, "after": 0.5} or null}``. It
runs the recipe, kills that rank so many seconds after the start, and says how the ranks ended:
``{"codes": [...], "port": ..., "said": ..., "seconds": ...}``. When one rank has failed the others are
ended, as torchrun does.
"""

import json
import os
import signal
import socket
import sys
import time

import reasoning_gym  # noqa: F401  # the ranks inherit what is imported
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

from recipes.reinforce_zero import main

GRACE = 1.0  # seconds


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def rank_process(rank, ranks, port, flags, log):
    child = os.fork()
    if child:
        return child
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["reinforce_zero.py", *flags]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(flags, ranks, kill):
    log = os.memfd_create("log")
    port = free_port()
    started = time.monotonic()
    children = [rank_process(rank, ranks, port, flags, log) for rank in range(ranks)]
    codes, failed = {}, None
    while len(codes) < ranks:
        now = time.monotonic()
        if kill and now - started >= kill["after"] and kill["rank"] not in codes:
            os.kill(children[kill["rank"]], signal.SIGKILL)
            kill = None
        for rank, child in enumerate(children):
            if rank not in codes and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = [child for rank, child in enumerate(children) if rank not in codes]
        if failed is None and any(codes.values()):
            failed, kill = now, None
            end(left, signal.SIGTERM)
        elif failed is not None and now - failed > GRACE:
            end(left, signal.SIGKILL)
        time.sleep(0.002)
    os.lseek(log, 0, os.SEEK_SET)
    said = b""
    while more := os.read(log, 1 << 20):
        said += more
    os.close(log)
    return {
        "codes": [codes[rank] for rank in range(ranks)],
        "port": port,
        "said": said.decode(),
        "seconds": time.monotonic() - started,
    }


def end(children, number):
    for child in children:
        os.kill(child, number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
