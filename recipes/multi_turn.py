"""Several turns: a model learns to use a calculator, by REINFORCE Zero on trajectories.

    torchrun --standalone --nproc-per-node=2 recipes/multi_turn.py

Warmed up, the tiny model calls the tool for about half of the problems and guesses at the others. A
trajectory is one row; what the tool said is masked in it and carries no evidence. Rank 0 learns, every other
rank samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from recipes.calculator_policy import load_calculating_policy, play_held_out
from recipes.errors import require_least
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.run.log import RunLog
from recipes.run.show_trajectory import most_eventful, show_trajectory
from recipes.samplers import run_sampler, start_samplers
from recipes.tasks.calculator import Calculator
from rzero.buffers import ProvenanceReplayBuffer, TokenLogStorage
from rzero.collectors import (
    AsyncRolloutCollector,
    CreditScheduler,
    MultiTurn,
    WeightPublisher,
    finished_first,
    named_weights,
)
from rzero.kernels.causal_lm import causal_lm_log_probs
from rzero.losses import group_mean_advantages, reinforce_loss


@dataclass(frozen=True, kw_only=True)
class Config:
    """Learning to use a calculator: rank 0 learns, the others sample."""

    nominal_lag: int = 2
    """Updates that the samplers may be behind, on average, when a trajectory is trained on; 0 is
    synchronous."""
    updates: int = 60
    """Optimizer updates."""
    prompts_per_update: int = 32
    """Groups in an update."""
    group_size: int = 8
    """Trajectories per prompt, at least 2."""
    max_slots: int = 512
    """Trajectories that a sampler works on together at most."""
    max_turns: int = 4
    """Most turns of a trajectory."""
    max_new_tokens: int = 48
    """Length limit of a trajectory after its prompt, in tokens, those of the tool included."""
    lr: float = 3e-4
    """Learning rate of AdamW (betas 0.9 and 0.95, no weight decay)."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this 2-norm."""
    eval_every: int = 15
    """Updates between measurements on held-out problems."""
    held_out: int = 256
    """Held-out problems."""
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
        least = {"nominal_lag": 0, "updates": 1, "prompts_per_update": 1, "group_size": 2, "max_turns": 1}
        require_least(self, {**least, "max_new_tokens": 1, "eval_every": 1, "held_out": 1})


def learn(config: Config, learners: Learners, channels: Channels) -> dict[str, Any]:
    """The algorithm, on the rank that learns."""
    policy = load_calculating_policy(
        seed=config.seed, held_out=config.held_out, warm_up_steps=config.warm_up_steps
    )
    model = policy.model
    engines = start_samplers(policy, channels, max_slots=config.max_slots)
    WeightPublisher(engines).publish(named_weights(model), version=0)
    interaction = MultiTurn(lambda: Calculator(policy.tokenizer, policy.tasks), max_turns=config.max_turns)

    def new_scheduler() -> CreditScheduler:
        return CreditScheduler(
            nominal_lag=config.nominal_lag, groups_per_batch=config.prompts_per_update, order=finished_first()
        )

    collector = AsyncRolloutCollector(
        engines,
        policy.prompts(),
        interaction,  # in place of a reward function
        scheduler=new_scheduler(),
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    log = RunLog(config, collector, new_scheduler)

    def evaluate(version: int) -> None:
        if version % config.eval_every == 0 or version == config.updates:
            with log.evaluating():
                collector.publisher.wait()
                played = play_held_out(policy, interaction, engines, max_new_tokens=config.max_new_tokens)
                log.held_out(version, sum(t.reward == 1.0 for t in played) / len(played))
                calls = sum(len(t.infos) - 1 for t in played) / len(played)
                tqdm.write(f"version {version}: {calls:.2f} calls of the tool a trajectory")

    evaluate(0)
    for version, batch in zip(range(config.updates), log.waiting(collector), strict=False):
        advantages = group_mean_advantages(batch.reward, batch.group_id, group_size=config.group_size)
        log_probs, entropies = causal_lm_log_probs(
            model,
            batch.token_ids,
            batch.cu_seqlens,
            batch.response_mask,  # False over prompts and over what the tool said
            temperature=policy.temperature,
            prompt_length=batch.prompt_length,
        )
        loss = reinforce_loss(
            log_probs,
            batch.behavior_log_probs,
            advantages,
            batch.response_mask,
            cu_seqlens=batch.cu_seqlens,
        )
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        collector.update_policy_weights_(model)  # version + 1, in the background
        log.update(version, batch, log_probs=log_probs, entropies=entropies, loss=loss, grad_norm=grad_norm)
        if version % config.eval_every == 0 or version + 1 == config.updates:
            shown = show_trajectory(batch, most_eventful(batch), policy.tokenizer)
            tqdm.write(f"a trajectory that update {version} learned from\n{shown}")
        evaluate(version + 1)
    collector.shutdown()
    return log.finish()


def main() -> None:
    """Read the flags and run this process's part."""
    config = parse(Config, default=Config(), description=Config.__doc__ or "")
    run(partial(learn, config), run_sampler)


if __name__ == "__main__":
    main()
