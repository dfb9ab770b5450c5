"""A process that works on a store until it is killed, and writes down what it was promised."""

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rzero.buffers import ProvenanceReplayBuffer, RandomGroupSampler, disk
from tests.buffers.responses import fields, make_buffer

SIZE = 4
ACTIONS = ["reserve", "extend", "extend", "extend", "annotate", "sample", "fail", "evict", "dump"]


def open_store(path: Path) -> ProvenanceReplayBuffer:
    # Small chunks and an impatient journal, so that kills also meet chunk changes and compactions.
    disk._COMPACT_BYTES = 20_000
    return make_buffer(
        path=path,
        chunk_tokens=64,
        capacity_updates=5,
        sampler=RandomGroupSampler(seed=0),
        extra_fields={"log_probs": torch.float32},
    )


def response(uid: int) -> dict:
    """The response of a uid, of uneven length."""
    return fields(
        uid, prompt=1 + uid % 3, versions=tuple(uid // 40 + step // 4 for step in range(1 + uid % 11))
    )


def annotation(uid: int, length: int) -> torch.Tensor:
    return torch.arange(length) + float(uid)


class Diary:
    """Lines that are in the file when the call returns, whatever happens next."""

    def __init__(self, path: Path, alive: Connection):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.alive = alive

    def attempt(self, word: str, numbers: list[int]) -> None:
        """Note what comes next, and say so to whoever will kill us in the middle of it."""
        self.write(f"try-{word}", numbers)
        self.alive.send_bytes(b".")

    def write(self, word: str, numbers: list[int]) -> None:
        os.write(self.file, f"{word} {' '.join(map(str, numbers))}\n".encode())


def work(folder: Path, seed: int, first_group: int, alive: Connection) -> None:
    """Reserve, extend, annotate, sample, fail, evict and dump at random, for ever."""
    torch.set_num_threads(1)
    choose, diary = random.Random(seed), Diary(folder / "diary.txt", alive)
    buffer = open_store(folder / "store")
    next_group = first_group
    while True:
        action = choose.choice(
            ["reserve", "extend", "extend", "extend", "annotate", "sample", "fail", "evict", "dump"]
        )
        missing = buffer.incomplete()
        if action == "reserve" and len(missing) < 6:
            diary.attempt("reserve", [next_group])
            buffer.reserve(next_group, SIZE)
            diary.write("reserve", [next_group])
            next_group += 1
        elif action == "extend" and missing:
            open_uids = [group * SIZE + index for group, indices in missing.items() for index in indices]
            uids = choose.sample(open_uids, min(len(open_uids), choose.randint(1, 9)))
            diary.attempt("extend", uids)
            buffer.extend([response(uid) for uid in uids])
            diary.write("evict", [eviction.group_id for eviction in buffer.take_evicted()])
            diary.write("extend", uids)
        elif action == "annotate" and len(buffer):
            uid = choose.choice(buffer[:].uid.tolist())
            length = len(response(uid)["token_ids"])
            diary.attempt("annotate", [uid])
            buffer.storage.annotate(torch.tensor([uid]), "log_probs", annotation(uid, length))
            diary.write("annotate", [uid])
        elif action == "sample" and buffer.can_sample():
            diary.attempt("sample", [])
            diary.write("sample", buffer.sample(timeout=0).group_id.unique().tolist())
        elif action == "fail" and missing and choose.random() < 0.3:
            group_id = choose.choice(sorted(missing))
            diary.attempt("fail", [group_id])
            buffer.fail(group_id, "lost")
            diary.write("fail", [group_id])
        elif action == "evict" and buffer.stats()["groups_ready"] > 3:
            groups = buffer.stale_groups(2**31 - 1)[:1]
            diary.attempt("expel", groups)
            buffer.evict(groups, "stale")
            diary.write("expel", groups)
        elif action == "dump":
            diary.attempt("dump", [])
            buffer.dumps(folder / "dump")
            diary.write("dump", [])
