"""Speed and memory of the loss against TorchRL's GRPOLoss on the same log-probs.

512 responses of up to 2,048 tokens, forward and backward, one thread:

    OMP_NUM_THREADS=1 python -m pytest benchmarks/losses.py -o python_files=losses.py -s

pytest-benchmark prints the times. Each case also measures, outside of the timing, the peak of memory that one
forward and backward pass allocates beyond its inputs, in units of one float32 tensor of [N], and stores it in
``extra_info``. The last two cases compare both losses in one run, interleaved, so that a busy machine slows
both, and fail when ours is slower or holds more than three tensors of [N].
"""

import json
import math
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchrl.objectives.llm import GRPOLoss

from rzero.losses import flash_reinforce_loss, importance_diagnostics, reinforce_loss

NUM_ROWS, LENGTH = 512, 2048
NUM_TOKENS = NUM_ROWS * LENGTH


class GivenLogProbs(nn.Module):
    """The smallest actor that GRPOLoss takes: log-probs and mask are given."""

    in_keys = ("tokens",)

    def __init__(self, log_probs, mask):
        """Keep what is given."""
        super().__init__()
        self.log_probs, self.mask = log_probs, mask

    def get_dist(self, tensordict, **kwargs):
        """Be the distribution as well."""
        return self

    def log_prob(self, tokens):
        """The given log-probs, whatever the tokens."""
        return self.log_probs


def inputs():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (NUM_ROWS, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    log_probs = -3 * torch.rand(NUM_ROWS, LENGTH, generator=generator) - 0.01
    behavior = (log_probs + 0.05 * torch.randn(NUM_ROWS, LENGTH, generator=generator)).clamp(max=0)
    advantages = torch.randn(NUM_ROWS, generator=generator)
    return log_probs, torch.where(mask, behavior, math.nan), advantages, mask


def grpo() -> tuple[Callable[[], None], torch.Tensor]:
    log_probs, behavior, advantages, mask = inputs()
    leaf = log_probs.requires_grad_()
    loss = GRPOLoss(
        GivenLogProbs(leaf, mask),
        clip_epsilon=(1 - 1e-6, 1e6),
        aggregation="prompt_mean",
        entropy_bonus=False,
        masking_strategy="generic",
    )
    data = TensorDict(
        {
            ("tokens", "full"): torch.zeros(mask.shape, dtype=torch.int64),
            ("log_probs", "full"): behavior,
            "advantage": advantages[:, None, None],
        },
        batch_size=[NUM_ROWS],
    )

    def step():
        leaf.grad = None
        loss(data).loss_objective.sum().backward()

    return step, leaf


def padded(**options) -> tuple[Callable[[], None], torch.Tensor]:
    log_probs, behavior, advantages, mask = inputs()
    leaf = log_probs.requires_grad_()

    def step():
        leaf.grad = None
        reinforce_loss(leaf, behavior, advantages, mask, **options).backward()

    return step, leaf


def packed(**options) -> tuple[Callable[[], None], torch.Tensor]:
    # Every place of the padded batch is a token here, so that N is the same.
    log_probs, behavior, advantages, mask = inputs()
    leaf, behavior, mask = log_probs.flatten().requires_grad_(), behavior.flatten(), mask.flatten()
    cu_seqlens = torch.arange(0, NUM_TOKENS + 1, LENGTH)

    def step():
        leaf.grad = None
        reinforce_loss(leaf, behavior, advantages, mask, cu_seqlens=cu_seqlens, **options).backward()

    return step, leaf


def flash() -> tuple[Callable[[], None], torch.Tensor]:
    log_probs, behavior, advantages, mask = inputs()
    leaf = log_probs.requires_grad_()

    def step():
        leaf.grad = None
        flash_reinforce_loss(leaf, behavior, advantages, mask, delta=3e-3).backward()

    return step, leaf


def diagnostics() -> tuple[Callable[[], None], torch.Tensor]:
    log_probs, behavior, _, mask = inputs()
    return lambda: importance_diagnostics(log_probs, behavior, mask) and None, log_probs


CASES = {
    "GRPOLoss": grpo,
    "reinforce_loss padded": padded,
    "reinforce_loss padded, unchecked": lambda: padded(check_values=False),
    "reinforce_loss packed": packed,
    "reinforce_loss packed, unchecked": lambda: packed(check_values=False),
    "flash_reinforce_loss": flash,
    "importance_diagnostics": diagnostics,
}


def peak_tensors(step, leaf, folder) -> float:
    """Peak memory allocated by one step, its gradient included, in float32 tensors of [N]."""
    step()
    leaf.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [
        event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"
    ]
    events.sort(key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    return (max(totals) - (totals[0] - events[0]["args"]["Bytes"])) / (4 * NUM_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(benchmark, case, tmp_path):
    step, leaf = CASES[case]()
    benchmark.extra_info["peak_tensors_of_N"] = round(peak_tensors(step, leaf, tmp_path), 3)
    print(f"\n{case}: peak extra memory {benchmark.extra_info['peak_tensors_of_N']} float32 tensors of [N]")
    benchmark.pedantic(step, rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("case", ["reinforce_loss padded", "reinforce_loss packed"])
def test_ours_is_no_slower_and_holds_three_tensors(case, tmp_path):
    (ours, leaf), (theirs, their_leaf) = CASES[case](), grpo()
    times = {ours: [], theirs: []}
    for _ in range(10):
        for step, taken in times.items():
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    torch.testing.assert_close(leaf.grad.flatten(), their_leaf.grad.flatten(), rtol=1e-4, atol=1e-9)
    mine, other = (1e3 * statistics.median(taken) for taken in times.values())
    # Beside the tensors of [N] there are a few of [B], a thousandth of one here.
    peaks = [peak_tensors(step, at, tmp_path) for step, at in ((ours, leaf), (theirs, their_leaf))]
    print(
        f"\n{case}: {mine:.1f} ms, peak {peaks[0]:.3f} [N]; GRPOLoss: {other:.1f} ms, peak {peaks[1]:.3f} [N]"
    )
    assert mine <= other
    assert peaks[0] <= 3 + 16 * NUM_ROWS / NUM_TOKENS
