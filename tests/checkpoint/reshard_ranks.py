"""Two ranks save together, one loads alone, and the other way round; run by torchrun, argv: folder.

Every rank asserts what it sees, and says at the end that all was well.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rzero.checkpoint import Checkpointer, TrainingState


class Box:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"buffer": torch.full((3,), self.value)}

    def load_state_dict(self, state_dict):
        self.value = int(state_dict["buffer"][0])


def training(mesh=None, *, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


def weights(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def main(folder):
    dist.init_process_group("gloo")
    rank, mesh, group = dist.get_rank(), DeviceMesh("cpu", [0, 1]), dist.new_group([0, 1])
    sharded = training(mesh, seed=0)
    train(*sharded)
    together = Checkpointer(folder / "two", group=group)
    together.save(1, {"training": TrainingState(*sharded)}, rank_state={"box": Box(10 + rank)})
    together.wait()
    assert together.latest() == 1
    expected = [w.detach().clone() for w in weights(sharded[0])]

    # One rank goes on alone; its own buffer is its own, not a copy of the other's.
    if rank == 0:
        alone = training(seed=1)
        box, other = Box(0), Box(0)
        one = Checkpointer(folder / "two", read_only=True)
        one.load(1, {"training": TrainingState(*alone)}, rank_state={"box": box})
        assert all(map(torch.equal, weights(alone[0]), expected)) and box.value == 10
        train(*alone)
        saver = Checkpointer(folder / "one")
        saver.save(2, {"training": TrainingState(*alone)}, rank_state={"box": other})
        saver.close()
    dist.barrier()
    train(*sharded)
    after_two = weights(sharded[0])

    # Two go on from what one has saved: same weights, and moments that make the same next step.
    again, box = training(mesh, seed=2), Box(20 + rank)
    loader = Checkpointer(folder / "one", group=group, read_only=True)
    manifest = loader.load(2, {"training": TrainingState(*again)}, rank_state={"box": box})
    assert manifest["ranks"] == 1 and box.value == (0 if rank == 0 else 21)
    assert all(isinstance(p, DTensor) for p in again[0].parameters())
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(weights(again[0]), after_two, strict=True))
    train(*again)
    train(*sharded)
    pairs = zip(weights(again[0]), weights(sharded[0]), strict=True)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in pairs)

    # Two again from two.
    box = Box(0)
    loader = Checkpointer(folder / "two", group=group, read_only=True)
    loader.load(1, {"training": TrainingState(*again)}, rank_state={"box": box})
    assert all(map(torch.equal, weights(again[0]), expected)) and box.value == 10 + rank
    together.close()
    dist.destroy_process_group()
    print(f"rank {rank}: all was well\n", end="", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
