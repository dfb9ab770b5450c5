"""The settings of a run; each is a flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from recipes.errors import RecipeError, require_least

LEAST = {"nominal_lag": 0, "updates": 1, "prompts_per_update": 1, "group_size": 2, "max_new_tokens": 1}
LEAST |= {
    "learners": 1,
    "in_flight": 0,
    "temperature": 1e-3,
    "max_slots": 1,
    "eval_every": 1,
    "held_out": 1,
    "held_out_samples": 1,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """REINFORCE Zero on reasoning problems: the first ranks learn, the others sample."""

    nominal_lag: int = 2
    """Updates that the samplers may be behind, on average, when a response is trained on; 0 is
    synchronous."""
    in_flight: int = 0
    """If not 0: so many groups are sampled at a time beside a queue of ``nominal_lag`` batches, and the lag
    is whatever that makes it; with 0, credits hold its mean at ``nominal_lag``."""
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
    engine: Literal["transformers", "vllm"] = "transformers"
    """What samples: the embedded engine, or vLLM, which must be installed."""
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
    wire_dtype: Literal["model", "bfloat16"] = "model"
    """Weights travel, and are sampled and learned with, in this precision; the optimizer keeps the
    model's."""
    learners: int = 1
    """Ranks that learn, with FSDP2 if several; all others sample."""
    tolerate_failures: bool = False
    """Go on while one sampler lives; what a dead one was sampling is sampled again elsewhere."""
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
        require_least(self, LEAST)
        if self.in_flight and not self.nominal_lag:
            raise RecipeError("--in-flight needs a queue: --nominal-lag must be at least 1, got 0")

    @property
    def wire(self) -> torch.dtype | None:
        """``wire_dtype`` as the publisher takes it."""
        return torch.bfloat16 if self.wire_dtype == "bfloat16" else None
