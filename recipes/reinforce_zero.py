"""REINFORCE Zero: samplers keep working while the learner updates their policy.

    torchrun --standalone --nproc-per-node=2 recipes/reinforce_zero.py --nominal-lag 2

The first rank learns, every other rank samples. ``sync.py``, ``lag2.py`` and ``lag8.py`` are presets of this
file.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from recipes.config import Config
from recipes.evaluation import evaluate
from recipes.kernel_choice import require_ratios_of_one
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.policy import Policy, load_policy
from recipes.run_log import RunLog
from recipes.samplers import run_sampler, start_samplers, stop_samplers
from recipes.tasks import ReasoningTasks
from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    Scheduler,
    SlotScheduler,
    WeightPublisher,
    finished_first,
    named_weights,
    rounded_weights,
)
from rzero.kernels.causal_lm import causal_lm_log_probs
from rzero.losses import group_mean_advantages, reinforce_loss


def new_scheduler(config: Config) -> Scheduler:
    """Who may start, counted in groups."""
    size = config.prompts_per_update
    if config.in_flight:
        return SlotScheduler(queue=config.nominal_lag, in_flight=config.in_flight, groups_per_batch=size)
    # At most (nominal_lag + 1) batches are started and not yet trained on and published.
    return CreditScheduler(nominal_lag=config.nominal_lag, groups_per_batch=size, order=finished_first())


def start_collector(config: Config, policy: Policy, channels: Channels) -> AsyncRolloutCollector:
    """Build the samplers' engines, publish version 0 to them and let them begin."""
    engines = start_samplers(policy, channels, max_slots=config.max_slots, engine=config.engine)
    publisher = WeightPublisher(engines, wire_dtype=config.wire, tolerate_lost=config.tolerate_failures)
    publisher.publish(named_weights(policy.model), version=0)
    return AsyncRolloutCollector(
        engines,
        policy.prompts(),
        policy.rewards(),
        scheduler=new_scheduler(config),
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


def learn(config: Config, learners: Learners, channels: Channels) -> dict[str, Any] | None:
    """The algorithm, on every rank that learns; the first one collects, publishes and returns a summary."""
    with learners.first_before_others():
        tasks = ReasoningTasks(config.tasks, seed=config.seed, held_out_size=config.held_out)
        policy = load_policy(
            config.model,
            specs=config.tasks,
            tasks=tasks,
            temperature=config.temperature,
            warm_up_steps=config.warm_up_steps,
            kernels=config.kernels,
            head_size=32 if config.engine == "vllm" else 16,  # vLLM's attention for CPUs takes no less
        )
    model = policy.model
    log = None
    if learners.first:
        collector = start_collector(config, policy, channels)
        log = RunLog(config, collector, partial(new_scheduler, config))
        evaluate(config, policy, log, version=0)
    learners.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / (config.lr_warm_up + 1))
    )

    batches = log.waiting(log.collector) if log else None
    for version in range(config.updates):
        batch = learners.next_batch(batches)  # whole groups, each response once
        share = learners.share(batch, group_size=config.group_size)
        advantages = group_mean_advantages(share.reward, share.group_id, group_size=config.group_size)
        with rounded_weights(model, config.wire):  # as the samplers hold them
            log_probs, entropies = causal_lm_log_probs(
                model,
                share.token_ids,
                share.cu_seqlens,
                share.response_mask,
                temperature=config.temperature,
                # Each prompt is computed once for its group, but FSDP2 allows one forward: each row alone.
                prompt_length=share.prompt_length if learners.size == 1 else None,
                log_softmax=policy.kernels.log_softmax,
            )
            if config.nominal_lag == 0 and config.kernels == "exact":
                require_ratios_of_one(log_probs, share.behavior_log_probs, share.response_mask)
            loss = reinforce_loss(
                log_probs,
                share.behavior_log_probs,  # recorded where each token was drawn
                advantages,
                share.response_mask,
                cu_seqlens=share.cu_seqlens,
                num_responses=batch.num_responses,
            )
            optimizer.zero_grad()
            loss = learners.backward(loss)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()

        weights = learners.full_weights(model)
        measured = {"loss": loss, "grad_norm": learners.full(grad_norm)}
        for name, values in (("log_probs", log_probs), ("entropies", entropies)):
            measured[name] = learners.together(batch, values, group_size=config.group_size)
        if log:
            log.collector.update_policy_weights_(weights)  # version + 1, in the background
            log.update(version, batch, **measured)
            evaluate(config, policy, log, version=version + 1, weights=weights)

    if log:
        log.collector.shutdown()
        stop_samplers(channels)
    return log.finish() if log else None


def main(default: Config) -> None:
    """Read the flags and run this process's part."""
    config = parse(Config, default=default, description=Config.__doc__ or "")
    run(
        partial(learn, config),
        run_sampler,
        learners=config.learners,
        tolerate_failures=config.tolerate_failures,
    )


if __name__ == "__main__":
    main(Config())
