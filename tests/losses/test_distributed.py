"""Splits over real processes: gradients of all ranks sum to the gradient of the whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rzero.losses import (
    all_reduce_diagnostics,
    flash_reinforce_loss,
    global_num_responses,
    importance_diagnostics,
    reinforce_loss,
)
from tests.losses.batches import packed, padded, random_rows

NUM_ROWS = 7
# Rank -> its micro-batches of rows. Uneven everywhere; with three ranks the middle one is empty.
SPLITS = {
    2: [[[0, 1, 2], [3], [4]], [[5, 6]]],
    3: [[[6], [0, 3, 5]], [], [[1, 2, 4]]],
}


class Policy(nn.Module):
    """Log-probs as a function of shared parameters, so that gradients of ranks meet in one place."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.9, 1.2, 0.7], dtype=dtype))

    def forward(self, log_probs):
        return (
            log_probs * self.scale[0] - self.scale[1].square() * 0.1 + self.scale[2] * log_probs.sin() * 0.1
        )


def gradient(rows, loss_function, dtype, *, micro_batches, num_responses, layout=packed):
    """Gradient of the parameters, accumulated over micro-batches."""
    policy = Policy(dtype)
    total = torch.zeros((), dtype=dtype)
    for indices in micro_batches:
        part = rows.select(indices)
        tokens = layout(part)
        log_probs, behavior, mask = (tokens.pop(name) for name in ("log_probs", "behavior_log_probs", "mask"))
        # Junk under the mask would reach the parameters through the policy itself, not through the loss.
        log_probs = policy(torch.where(mask, log_probs, -1.0))
        total = total + loss_function(
            log_probs, behavior, part.advantages, mask, num_responses=num_responses, **tokens
        )
    if micro_batches:
        total.backward()
    grad = policy.scale.grad
    return torch.zeros_like(policy.scale) if grad is None else grad


def flash(*args, **options):
    return flash_reinforce_loss(*args, delta=5e-2, **options)


def worker(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        mine = SPLITS[world_size][rank]
        count = sum(map(len, mine))
        assert global_num_responses(count) == NUM_ROWS
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            rows = random_rows(17, num_rows=NUM_ROWS, longest=40, dtype=dtype)
            for loss_function in (reinforce_loss, flash):
                check_gradients(rows, loss_function, dtype, mine, tolerance)
        check_diagnostics(mine)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def check_gradients(rows, loss_function, dtype, mine, tolerance):
    everything = [list(range(NUM_ROWS))]
    whole = gradient(rows, loss_function, dtype, micro_batches=everything, num_responses=NUM_ROWS)
    for layout in (packed, padded):
        summed = gradient(
            rows,
            loss_function,
            dtype,
            micro_batches=mine,
            num_responses=global_num_responses(sum(map(len, mine))),
            layout=layout,
        )
        dist.all_reduce(summed)
        assert whole.norm() > 0
        assert (summed - whole).norm() <= tolerance * whole.norm(), (dtype, summed, whole)
        # The negative control: counting per rank weighs responses of small ranks more.
        local = gradient(
            rows, loss_function, dtype, micro_batches=mine, num_responses=max(sum(map(len, mine)), 1)
        )
        dist.all_reduce(local)
        assert (local - whole).norm() > 1e-2 * whole.norm()


def check_diagnostics(mine):
    rows = random_rows(17, num_rows=NUM_ROWS, longest=40)
    lag = [torch.full((len(mask),), row % 3) for row, mask in enumerate(rows.masks)]

    def record(indices):
        lags = torch.cat([torch.zeros(0, dtype=torch.int64), *(lag[row] for row in indices)])
        if not indices:
            nothing = torch.zeros(0)
            return importance_diagnostics(
                nothing, nothing, nothing.bool(), cu_seqlens=torch.tensor([0]), lag=lags, max_lag=4
            )
        return importance_diagnostics(**packed(rows.select(indices)), lag=lags, max_lag=4)

    ours = record([row for indices in mine for row in indices])
    reduced = all_reduce_diagnostics(ours).to_dict()
    assert reduced == pytest.approx(record(list(range(NUM_ROWS))).to_dict(), rel=1e-12, nan_ok=True)
    # Reduced into a new record: the rank's own is still its own.
    assert ours.to_dict()["token/count"] < reduced["token/count"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_add_up(world_size, tmp_path: Path):
    torch.multiprocessing.spawn(worker, args=(world_size, tmp_path / "store"), nprocs=world_size)


def test_alone_the_count_is_ones_own():
    assert global_num_responses(5) == 5


def test_alone_the_diagnostics_are_ones_own():
    record = importance_diagnostics(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([[True]]))
    assert all_reduce_diagnostics(record) is record


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match=r"^global_num_responses: num_responses must be at least 0, got -1"):
        global_num_responses(-1)


@pytest.mark.parametrize("count", [1.0, True])
def test_a_count_is_an_int(count):
    with pytest.raises(TypeError, match=r"^global_num_responses: num_responses must be an int"):
        global_num_responses(count)
