"""Processes of a recipe: rank 0 learns, the others sample; when one ends badly, all end in seconds."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import transformers
import tyro
from tqdm import tqdm

from recipes.errors import RecipeError
from recipes.learners import Learners
from recipes.supervise import is_supervised, supervise
from rzero.collectors import Channel, open_channels
from rzero.collectors.transport import ConnectionLost, Message

ConfigT = TypeVar("ConfigT")
LEARNER = 0
GRACE = 10.0  # seconds
START = "torchrun --standalone --nproc-per-node={}"
Channels = dict[int, tuple[Channel, Channel]]


def parse(config_class: type[ConfigT], *, default: ConfigT, description: str) -> ConfigT:
    """The flags of this process as a config; a wrong one is said in one line, once, by the learner's rank.

    Args:
        config_class: A dataclass whose fields are documented.
        default: The preset that the flags change.
        description: What ``--help`` says first.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                config_class, default=default, description=description, console_outputs=_is_learner()
            )
    except RecipeError as error:
        said, code = io.StringIO(str(error)), 2
    except SystemExit as end:
        code = int(end.code or 0)
    if code:
        words = [line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()]
        _say("error: " + " ".join(word for word in words if word and word != "Parsing error"))
    if code:
        _let_the_learner_say_why()
    sys.exit(code)


def run(
    learn: Callable[[Learners, Channels], object],
    sample: Callable[[Channel, Channel], None],
    *,
    learners: int = 1,
    tolerate_failures: bool = False,
    device: str = "cpu",
) -> NoReturn:
    """Connect the ranks, run this one's part, and end the process.

    Args:
        learn: Called on the ranks that learn, on rank 0 with (to, from) channels by sampler rank.
        sample: Called on every other rank with the channels (to, from) rank 0.
        learners: The first so many ranks learn, the others sample.
        tolerate_failures: Whether a rank that samples may die without ending the job.
        device: ``cpu``, or ``cuda`` if the learners compute on GPUs.
    """
    # tqdm's own lock is a semaphore of the system, which os._exit would leak.
    tqdm.set_lock(threading.RLock())
    transformers.utils.logging.disable_progress_bar()
    # torchrun ends the ranks of a failed job by SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = 1
    try:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world < learners + 1:
            raise RecipeError(
                f"needs {learners} rank(s) that learn and at least one that samples, got {world}; "
                f"start it with `{START.format(learners + 1)} ...`"
            )
        if tolerate_failures and int(os.environ["RANK"]) >= learners and not is_supervised():
            supervise()
            sys.exit(0)
        _connect(device)
        channels = open_channels(LEARNER, list(range(learners, world)))
        # Every rank must take part in making a group, also those outside it.
        group = dist.new_group(list(range(learners)), backend="gloo") if learners > 1 else None
        saving_group = cast(dist.ProcessGroup | None, group)
        if dist.get_rank() < learners:
            learn(Learners(learners, saving_group, device=device), channels)
            for outgoing, _ in channels.values():
                with contextlib.suppress(ConnectionLost):  # its rank has ended already
                    outgoing.send(Message("stop"))
        else:
            sample(*channels[LEARNER])
        dist.destroy_process_group()
        gc.unfreeze()  # see ``keep_heap``
        sys.exit(0)
    except RecipeError as error:
        _say(f"error: {error}")
        _let_the_learner_say_why()
        code = 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            traceback.print_exc()
        else:
            _say(f"error: the run cannot be written: {error}; its checkpoints are whole, see --resume")
            code = 2
    except SystemExit:
        raise  # Everything was closed in order, and Python may take its leave as usual.
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except ConnectionLost as error:
        print(f"rank {os.environ['RANK']} ends: {str(error).split(': ')[0]}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    _end(code)


def keep_heap() -> None:
    """Tell the garbage collector that what is there stays: going through it takes 0.2 s, again and again."""
    gc.freeze()


def _connect(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("--device cuda needs a GPU that torch can use, got none")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    if os.environ.get("WORLD_SIZE") == str(local):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All ranks are here: stay on the loopback.
    try:
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RecipeError(
            f"could not connect the ranks at {address}: {str(error).splitlines()[0]}"
        ) from error


def _is_learner() -> bool:
    return os.environ.get("RANK", "0") == str(LEARNER)


def _say(line: str) -> None:
    if _is_learner():
        print(line, file=sys.stderr, flush=True)


def _let_the_learner_say_why() -> None:
    if not _is_learner():
        time.sleep(GRACE)  # torchrun ends all ranks when one ends


def _end(code: int) -> NoReturn:
    # Threads may stand in the network for ever; os._exit takes them along, where sys.exit would wait for
    # them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
