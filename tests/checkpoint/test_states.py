"""What is saved of a model, its optimizer and the random number generators."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict

from rzero.checkpoint import RNGState, TrainingState


class Tied(nn.Module):
    """Two layers of one weight, a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(3, 3, bias=False), nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.last(self.frozen(self.first(x))) * self.scale


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
    "tied": Tied,
    "recomputed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(3, 4)), nn.Linear(4, 3)),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager"),
}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def flat(value, path=""):
    if isinstance(value, dict):
        return {name: leaf for key, x in value.items() for name, leaf in flat(x, f"{path}/{key}").items()}
    if isinstance(value, list) and path.endswith("param_groups"):
        return {name: leaf for i, x in enumerate(value) for name, leaf in flat(x, f"{path}/{i}").items()}
    return {path: value}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_the_state_is_that_of_torch(model_name, optimizer_name, steps):
    model = MODELS[model_name]()
    optimizer = OPTIMIZERS[optimizer_name]([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = flat(TrainingState(model, optimizer).state_dict())
    its_model, its_optimizer = get_state_dict(model, optimizer)
    theirs = flat({"model": its_model, "optimizer": its_optimizer})
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, name


def test_all_generators_go_on_where_they_were():
    random.gauss(0.0, 1.0)  # keeps a second number back
    state = RNGState()
    saved = state.state_dict()
    first = (random.gauss(0.0, 1.0), random.random(), np.random.rand(), float(torch.rand(1)))
    random.seed(1)
    state.load_state_dict(saved)
    assert (random.gauss(0.0, 1.0), random.random(), np.random.rand(), float(torch.rand(1))) == first
