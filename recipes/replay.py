"""Do an update of a recorded run again, to the last bit, and show what it was made of.

    python recipes/replay.py runs/lag2-DATE-TIME --update 1234

The run was started with ``--record``. From the checkpoint before the update, the updates in between are done
again from their recorded batches; each one's loss must have the bits that were recorded, and at last the
gradients too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from recipes.config import Config, saved_config
from recipes.errors import RecipeError
from recipes.learners import Learners
from recipes.objectives import OBJECTIVES
from recipes.policy import Policy, new_policy
from recipes.reinforce_zero import compute_gradients, new_optimizer
from recipes.run.recording import RecordedUpdate, gradient_digests, read_update
from rzero.buffers import segments, unpack
from rzero.checkpoint import Checkpointer, CheckpointError, TrainingState


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Shows one update of a recorded run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run that was started with ``--record``."""
    update: int
    """Which update, from 0."""
    responses: int = 0
    """Show so many responses; 0 for all."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One update, done again.

    Attributes:
        config: Of the run.
        policy: The model before the update, with the update's gradients.
        recorded: What was written down when it was done first.
        loss: Now.
        log_probs: float32 [N], the learner's, now.
        gradients: ``tensor_digest`` of each parameter's gradient, now.
    """

    config: Config
    policy: Policy
    recorded: RecordedUpdate
    loss: float
    log_probs: Tensor
    gradients: dict[str, int]


def replay(run: Path, update: int) -> Replayed:
    """Do an update again.

    Raises:
        RecipeError: If the run has no record of the update, or no whole checkpoint before it.
        RuntimeError: If an update on the way there gives another loss than was recorded.
    """
    config, learners = saved_config(run), Learners(1)
    recorded = read_update(run, update)
    torch.set_num_threads(recorded.threads)  # torch's own kernels split sums by threads
    policy = new_policy(config)
    optimizer, schedule = new_optimizer(config, policy.model)
    start = _load_checkpoint(run, update, policy, optimizer, schedule)
    for version in range(start, update):
        _again(run, version, config, learners, policy, optimizer)
        clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
    measured = _again(run, update, config, learners, policy, optimizer)
    return Replayed(
        config=config,
        policy=policy,
        recorded=recorded,
        loss=float(measured["loss"]),
        log_probs=measured["log_probs"],
        gradients=gradient_digests(learners, policy.model),
    )


def _load_checkpoint(run: Path, update: int, policy: Policy, optimizer: Any, schedule: Any) -> int:
    checkpointer = Checkpointer(run / "checkpoints", read_only=True)
    try:
        start = checkpointer.latest(at_most=update)
        if start is None:
            raise RecipeError(f"{run} must have a whole checkpoint at or before update {update}, got none")
        state = {"training": TrainingState(policy.model, optimizer), "schedule": schedule}
        checkpointer.load(start, state)
    except CheckpointError as error:
        raise RecipeError(str(error)) from error
    return start


def _again(
    run: Path, version: int, config: Config, learners: Learners, policy: Policy, optimizer: Any
) -> dict[str, Tensor]:
    recorded = read_update(run, version)
    optimizer.zero_grad()
    measured = compute_gradients(config, learners, policy, recorded.batch)
    loss = float(measured["loss"])
    if recorded.learners == 1 and loss != recorded.loss:
        raise RuntimeError(
            f"replay: the loss of update {version} must be the recorded {recorded.loss!r}, got {loss!r}"
        )
    return measured


def describe(replayed: Replayed, *, update: int, responses: int = 0) -> Iterator[str]:
    """The update as lines of text: first whether it came out the same, then each response."""
    recorded, batch = replayed.recorded, replayed.recorded.batch
    same = sum(replayed.gradients.get(name) == digest for name, digest in recorded.gradients.items())
    yield f"update {update}: {batch.num_responses} responses, {int(batch.response_mask.sum())} sampled tokens"
    yield f"loss       recorded {recorded.loss!r}, now {replayed.loss!r}"
    yield f"gradients  {same} of {len(recorded.gradients)} parameters have the recorded bits"
    if recorded.learners > 1:
        yield f"           {recorded.learners} ranks learned, one computes now: equal to rounding only"
    objective = OBJECTIVES[replayed.config.objective]
    advantages = objective.advantages(batch, batch, replayed.config.group_size)
    ratios = torch.where(batch.response_mask, replayed.log_probs - batch.behavior_log_probs, 0.0).exp()
    decode = replayed.policy.tokenizer.decode
    for index, row in enumerate(unpack(batch)[: responses or None]):
        first, last = batch.cu_seqlens[index : index + 2].tolist()
        mask, start = batch.response_mask[first:last], first + int(row.prompt_length)
        own = ratios[first:last][mask]
        versions = ", ".join(f"{a}:{b} v{version}" for a, b, version in segments(row))
        yield ""
        names = ("uid", "group_id", "prompt_id", "sample_index", "reward")
        numbers = "  ".join(f"{name} {row.get(name).item():g}" for name in names)
        yield f"{numbers}  advantage {float(advantages[index]):+g}"
        yield f"  versions  {versions} (lag {update - int(row.policy_version[mask].min())} at most)"
        yield f"  ratio     mean {own.mean():.4f}, min {own.min():.4f}, max {own.max():.4f}"
        yield f"  prompt    {decode(batch.token_ids[first:start])!r}"
        yield f"  response  {decode(batch.token_ids[start:last])!r}"


def main() -> int:
    """Read the flags, do the update again and print it; 1 if it came out otherwise."""
    flags = tyro.cli(Replay)
    try:
        replayed = replay(flags.run, flags.update)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in describe(replayed, update=flags.update, responses=flags.responses):
        print(line)
    recorded = replayed.recorded
    return int(
        recorded.learners == 1 and (replayed.loss, replayed.gradients) != (recorded.loss, recorded.gradients)
    )


if __name__ == "__main__":
    sys.exit(main())
