"""Saves without end, in one process after the other, each of which is killed; argv: folder, kills, seed.

After each kill it prints the last version that was acknowledged. The processes are forked, since importing
torch would take longer than all the rest.
"""

import os
import random
import signal
import sys
import time

import torch

from rzero.checkpoint import Checkpointer


class Numbers:
    def __init__(self, version):
        self.version = version

    def state_dict(self):
        return {"values": torch.full((100_000,), self.version)}


def save_without_end(folder, acknowledged):
    torch.set_num_threads(1)
    checkpointer = Checkpointer(folder)
    for version in range((checkpointer.latest() or 0) + 1, 10**9):
        checkpointer.save(version, {"numbers": Numbers(version)})
        checkpointer.wait()
        os.write(acknowledged, f"{version}\n".encode())


def main(folder, kills, seed):
    chance = random.Random(seed)
    first = Checkpointer(
        folder
    )  # What a manifest says of packages is found once, and inherited by the others.
    first.save(1, {"numbers": Numbers(1)})
    first.close()
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_without_end(folder, writing)
        os.close(writing)
        said = os.read(reading, 20)  # it works
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 1 << 16):
            said += more
        os.close(reading)
        print(said.split()[-1].decode(), flush=True)
        input()  # the test has looked


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
