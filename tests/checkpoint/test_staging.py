"""The copy of a moment: what was there, untouched by what comes, made without giving the lock away."""

import gc
import os
import sys
import threading
import time

import pytest
import torch
from torch import nn

from rzero.checkpoint import TrainingState, to_tensors
from rzero.checkpoint.staging import LARGE, stage, staged_tensors

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
TENSORS = {str(dtype): lambda dtype=dtype: torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES} | {
    "one number": lambda: torch.tensor(7),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "every second": lambda: torch.arange(8)[::2],
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "result": lambda: nn.Parameter(torch.ones(3)) * 2,
    "large": lambda: torch.arange(LARGE // 4, dtype=torch.int32),
    "large parameter": lambda: nn.Parameter(torch.zeros(LARGE)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_copy_is_of_the_moment(name):
    state = {"tensor": TENSORS[name](), "list": [1, 2.5], "pair": (None, ["a"]), "inner": {"b": "c"}}
    expected = {path: tensor.clone() for path, tensor in to_tensors(state).items()}
    staged = stage(state)
    state["tensor"].detach().zero_().logical_not_()
    state["list"].append(3)
    state["pair"][1].append("d")
    state["inner"]["b"] = "d"
    copies = staged_tensors(staged)
    assert list(copies) == list(expected)
    for path, tensor in expected.items():
        assert type(copies[path]) is torch.Tensor and not copies[path].requires_grad
        assert copies[path].dtype == tensor.dtype and torch.equal(copies[path], tensor)
        copies[path].zero_()  # nobody else's memory


def test_no_other_thread_runs_while_small_tensors_are_copied():
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(30)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    training = TrainingState(model, optimizer)
    stage(training.state_dict())
    fresh, turns, stop = [torch.ones(3) for _ in range(100)], [0], threading.Event()

    def take_turns():
        while not stop.is_set():
            os.stat(os.curdir)  # lets go of the lock, and asks for it again
            turns[0] += 1

    other, interval = threading.Thread(target=take_turns), sys.getswitchinterval()
    other.start()
    gc.collect()
    gc.disable()  # tensors that end would give the lock away
    sys.setswitchinterval(10.0)  # so that nobody has to
    time.sleep(0.01)  # who waits for the lock now does so for the new interval
    try:
        before = turns[0]
        staged = stage({"fresh": [fresh.pop() for _ in range(100)], **training.state_dict()})
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        stop.set()
        other.join()
    assert after == before
    assert len(staged_tensors(staged)) == 100 + 60 + 3 * 60 + 1
