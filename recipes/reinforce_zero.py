"""REINFORCE Zero: samplers keep working while the learner updates their policy.

    torchrun --standalone --nproc-per-node=2 recipes/reinforce_zero.py --nominal-lag 2

The first rank learns, every other rank samples. ``sync.py``, ``lag2.py``, ``lag8.py`` and
``flash_reinforce.py`` are presets of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from recipes.config import Config, default_config
from recipes.evaluation import evaluate
from recipes.kernel_choice import require_ratios_of_one
from recipes.launch import Channels, keep_heap, parse, run
from recipes.learners import Learners
from recipes.objectives import OBJECTIVES
from recipes.plan import print_plan
from recipes.policy import Policy, new_policy
from recipes.run.log import RunLog
from recipes.run.recording import record_update
from recipes.run.resume import RunCheckpoints
from recipes.samplers import run_sampler, start_samplers
from recipes.tasks.sources import task_flags
from rzero.buffers import PackedBatch, ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    Scheduler,
    SlotScheduler,
    WeightPublisher,
    finished_first,
    rounded_weights,
    strict,
)
from rzero.kernels.causal_lm import causal_lm_log_probs


def new_scheduler(config: Config, *, version: int = 0) -> Scheduler:
    """Who may start, counted in groups."""
    lag, size = config.nominal_lag, config.prompts_per_update
    if config.in_flight:
        return SlotScheduler(queue=lag, in_flight=config.in_flight, groups_per_batch=size, version=version)
    # At most (nominal_lag + 1) batches are started and not yet trained on and published.
    order = strict() if config.deterministic or lag == 0 else finished_first()
    return CreditScheduler(nominal_lag=lag, groups_per_batch=size, order=order, version=version)


def start_collector(
    config: Config, policy: Policy, channels: Channels, weights: Mapping[str, Tensor], *, version: int
) -> AsyncRolloutCollector:
    """Build the samplers' engines and publish the first weights to them."""
    engines = start_samplers(
        policy, channels, max_slots=config.max_slots, engine=config.engine, tasks=task_flags(config)
    )
    publisher = WeightPublisher(engines, wire_dtype=config.wire, tolerate_lost=config.tolerate_failures)
    publisher.publish(weights, version=version)
    return AsyncRolloutCollector(
        engines,
        policy.prompts(),
        None,  # the samplers reward
        scheduler=new_scheduler(config, version=version),
        buffer=ProvenanceReplayBuffer(
            storage=TokenLogStorage(),
            group_size=config.group_size,
            groups_per_batch=config.prompts_per_update,
            capacity_updates=config.nominal_lag + 2,
        ),
        publisher=publisher,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )


def compute_gradients(
    config: Config, learners: Learners, policy: Policy, batch: PackedBatch
) -> dict[str, Tensor]:
    """Add the gradients of a batch to the model's.

    Returns:
        The loss, log-probabilities and entropies [N], and which responses the loss counted, bool [B].
    """
    objective = OBJECTIVES[config.objective]
    share = learners.share(batch, group_size=config.group_size)
    advantages = objective.advantages(share, batch, config.group_size)
    alone = learners.size > 1  # FSDP2 needs as many calls of the model in every learner
    parts = learners.micro_batches(
        batch, share, group_size=config.group_size, tokens=config.micro_batch_tokens
    )
    losses, tokens = [], {"log_probs": [], "entropies": []}
    with rounded_weights(policy.model, config.wire):  # as the samplers hold them
        for rows, part in parts:
            log_probs, entropies = causal_lm_log_probs(
                policy.model,
                part.token_ids,
                part.cu_seqlens,
                part.response_mask,
                temperature=config.temperature,
                prompt_length=None if alone else part.prompt_length,
                log_softmax=policy.kernels.log_softmax,
            )
            if config.nominal_lag == 0 and config.kernels == "exact":
                require_ratios_of_one(log_probs, part.behavior_log_probs, part.response_mask)
            loss = objective.loss(log_probs, part, advantages[rows], batch.num_responses)
            losses.append(learners.backward(loss))
            tokens["log_probs"].append(log_probs.detach())
            tokens["entropies"].append(entropies)
    whole = {
        name: learners.together(batch, torch.cat(values), group_size=config.group_size)
        for name, values in tokens.items()
    }
    admitted = torch.ones(batch.num_responses, dtype=torch.bool)
    if objective.admits is not None:
        admitted = objective.admits(whole["log_probs"], batch)
    return {"loss": torch.stack(losses).sum(), "admitted": admitted, **whole}


def new_optimizer(config: Config, model: Any) -> tuple[AdamW, LambdaLR]:
    """AdamW and the rise of its learning rate."""
    optimizer = AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / (config.lr_warm_up + 1)))


def learn(config: Config, learners: Learners, channels: Channels) -> dict[str, Any] | None:
    """The algorithm, on every rank that learns; the first one collects, publishes and returns a summary."""
    with learners.first_before_others():
        policy = new_policy(config, device=learners.device)
    model = policy.model
    learners.shard(model, compute_dtype=config.compute)
    optimizer, schedule = new_optimizer(config, model)
    checkpoints = RunCheckpoints(config, learners, model, optimizer, schedule)
    start = checkpoints.resume_training()  # 0 in a new run
    weights, log = learners.full_weights(model, dtype=config.compute), None
    if learners.first:
        collector = start_collector(config, policy, channels, weights, version=start)
        log = RunLog(config, collector, partial(new_scheduler, config), folder=checkpoints.folder)
        checkpoints.resume_collecting(start, log)
        if config.resume is None:
            evaluate(config, policy, log, version=0)
    if config.resume is None:
        checkpoints.save(0, log)

    keep_heap()
    batches = log.waiting(log.collector) if log else None
    for version in range(start, config.updates):
        batch = learners.next_batch(batches)  # whole groups, each response once
        checkpoints.save_soon(version + 1, log)
        optimizer.zero_grad()
        measured = compute_gradients(config, learners, policy, batch)
        if config.record:
            record_update(
                checkpoints.folder, version, batch, learners=learners, model=model, loss=measured["loss"]
            )
        grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()

        weights, grad_norm = learners.full_weights(model, dtype=config.compute), learners.full(grad_norm)
        if log:
            if config.deterministic:
                log.collector.quiesce()
            log.collector.update_policy_weights_(weights)  # version + 1, in the background
            log.update(version, batch, grad_norm=grad_norm, **measured)
            evaluate(config, policy, log, version=version + 1, weights=weights)
        checkpoints.save(version + 1, log)  # a copy; the rest in the background

    if log:
        log.collector.shutdown()
    summary = log.finish() if log else None
    checkpoints.close()
    return summary


def main(preset: Config | None = None) -> None:
    """Read the flags and run this process's part."""
    config = parse(Config, default=default_config(preset), description=Config.__doc__ or "")
    if config.dry_run:
        print_plan(config, new_scheduler(config))
        return
    run(
        partial(learn, config),
        run_sampler,
        learners=config.learners,
        tolerate_failures=config.tolerate_failures,
        device=config.device,
    )


if __name__ == "__main__":
    main()
