"""REINFORCE Zero: samplers keep working while the learner updates their policy.

    torchrun --standalone --nproc-per-node=2 recipes/reinforce_zero.py --nominal-lag 2

Rank 0 learns, every other rank samples. ``sync.py``, ``lag2.py`` and ``lag8.py`` are presets of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from recipes.errors import RecipeError
from recipes.kernel_choice import require_ratios_of_one
from recipes.launch import parse, run
from recipes.policy import load_policy
from recipes.run_log import RunLog
from recipes.samplers import run_sampler, start_samplers, stop_samplers
from recipes.tasks import ReasoningTasks
from rzero.audit import AuditReport
from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    Channel,
    CreditScheduler,
    GenerationEngine,
    WeightPublisher,
    finished_first,
    named_weights,
)
from rzero.kernels.causal_lm import causal_lm_log_probs
from rzero.losses import group_mean_advantages, reinforce_loss

LEAST = {"nominal_lag": 0, "updates": 1, "prompts_per_update": 1, "group_size": 2, "max_new_tokens": 1}
LEAST |= {"temperature": 1e-3, "max_slots": 1, "eval_every": 1, "held_out": 1, "held_out_samples": 1}


@dataclass(frozen=True, kw_only=True)
class Config:
    """REINFORCE Zero on reasoning problems: rank 0 learns, the other ranks sample."""

    nominal_lag: int = 2
    """Updates that the samplers may be behind, on average, when a response is trained on; 0 is
    synchronous."""
    updates: int = 2000
    """Optimizer updates."""
    tasks: tuple[str, ...] = ("basic_arithmetic",)
    """Data sets of reasoning-gym, mixed in equal parts; each NAME or NAME:KEY=VALUE,KEY=VALUE."""
    model: Path | None = None
    """Folder of a local Hugging Face causal LM with its tokenizer; without it, a tiny Llama is made and
    warmed up."""
    prompts_per_update: int = 32
    """Groups in an update."""
    group_size: int = 8
    """Responses per prompt, at least 2."""
    max_new_tokens: int = 16
    """Length limit of a response, in tokens."""
    temperature: float = 1.0
    """The logits are divided by it, when sampling and when learning; greater than 0."""
    lr: float = 1e-4
    """Learning rate of AdamW (betas 0.9 and 0.95, no weight decay)."""
    lr_warm_up: int = 20
    """Updates over which the learning rate rises from 0."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this 2-norm."""
    max_slots: int = 512
    """Responses that one engine samples at the same time."""
    eval_every: int = 250
    """Updates between measurements of held-out accuracy."""
    audit_every: int = 0
    """Updates between audits of the samplers, in which all work waits; 0 for none."""
    held_out: int = 256
    """Held-out problems."""
    held_out_samples: int = 4
    """Responses per held-out problem, sampled like those trained on; the accuracy is the mean over all."""
    kernels: Literal["exact", "native"] = "native"
    """``exact``: sampler and learner agree to the last bit on equal weights; ``native``: torch's, faster."""
    seed: int = 0
    """Seed of problems and sampling."""
    warm_up_steps: int = 600
    """Supervised steps that make the tiny model."""
    runs: Path = Path("runs")
    """Folder under which the run's own folder is made."""
    tensorboard: bool = False
    """Write TensorBoard events beside the CSV files."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                flag = name.replace("_", "-")
                raise RecipeError(f"--{flag} must be at least {least}, got {getattr(self, name)}")


def learn(config: Config, channels: dict[int, tuple[Channel, Channel]]) -> dict[str, Any]:
    """The algorithm, on the learner's rank."""
    tasks = ReasoningTasks(config.tasks, seed=config.seed, held_out_size=config.held_out)
    policy = load_policy(
        config.model,
        specs=config.tasks,
        tasks=tasks,
        temperature=config.temperature,
        warm_up_steps=config.warm_up_steps,
        kernels=config.kernels,
    )
    engines = start_samplers(policy, channels, max_slots=config.max_slots)
    WeightPublisher(engines).publish(named_weights(policy.model), version=0)

    # At most (nominal_lag + 1) batches are started and not yet trained on and published.
    collector = AsyncRolloutCollector(
        engines,
        policy.prompts(),
        policy.rewards(),
        scheduler=CreditScheduler(
            nominal_lag=config.nominal_lag, groups_per_batch=config.prompts_per_update, order=finished_first()
        ),
        buffer=ProvenanceReplayBuffer(
            storage=TokenLogStorage(),
            group_size=config.group_size,
            groups_per_batch=config.prompts_per_update,
            capacity_updates=config.nominal_lag + 2,
        ),
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / (config.lr_warm_up + 1))
    )

    def accuracy(version: int) -> float:
        return policy.held_out_accuracy(
            version=version, samples=config.held_out_samples, max_new_tokens=config.max_new_tokens
        )

    def audit(engine: GenerationEngine, version: int) -> AuditReport:
        return policy.audit(engine, version=version, prompts=64, max_new_tokens=config.max_new_tokens)

    log = RunLog(config, name=f"lag{config.nominal_lag}", busy_seconds=collector.busy_seconds)
    log.held_out(0, accuracy(0))
    batches = iter(collector)
    for version in range(config.updates):
        with log.time("wait"):
            batch = next(batches)  # whole groups, each response once
        with log.time("train"):
            advantages = group_mean_advantages(batch.reward, batch.group_id, group_size=config.group_size)
            log_probs, entropies = causal_lm_log_probs(
                policy.model,
                batch.token_ids,
                batch.cu_seqlens,
                batch.response_mask,
                temperature=config.temperature,
                prompt_length=batch.prompt_length,  # each prompt is computed once for its group
                log_softmax=policy.kernels.log_softmax,
            )
            if config.nominal_lag == 0 and config.kernels == "exact":
                require_ratios_of_one(log_probs, batch.behavior_log_probs, batch.response_mask)
            loss = reinforce_loss(
                log_probs,
                batch.behavior_log_probs,  # recorded where each token was drawn
                advantages,
                batch.response_mask,
                cu_seqlens=batch.cu_seqlens,
            )
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
            collector.update_policy_weights_(policy.model)  # version + 1, in the background
        log.update(version, batch, log_probs=log_probs, entropies=entropies, loss=loss, grad_norm=grad_norm)
        if (version + 1) % config.eval_every == 0 or version + 1 == config.updates:
            with log.time("evaluate"):
                log.held_out(version + 1, accuracy(version + 1))
        if config.audit_every and (version + 1) % config.audit_every == 0:
            with log.time("evaluate"):
                collector.publisher.wait()
                log.audit(version + 1, [audit(engine, version + 1) for engine in engines])
    collector.shutdown()
    stop_samplers(channels)
    return log.finish()


def main(default: Config) -> None:
    """Read the flags and run this process's part."""
    config = parse(Config, default=default, description=Config.__doc__ or "")
    run(lambda channels: learn(config, channels), run_sampler)


if __name__ == "__main__":
    main(Config())
