"""The settings of a run; each is a flag."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from recipes.errors import RecipeError, require_least
from recipes.profiles import PROFILES

LEAST = {"nominal_lag": 0, "updates": 1, "prompts_per_update": 1, "group_size": 1, "max_new_tokens": 1}
LEAST |= {
    "learners": 1,
    "in_flight": 0,
    "temperature": 1e-3,
    "max_slots": 1,
    "checkpoint_every": 0,
    "micro_batch_tokens": 0,
    "weight_decay": 0,
    "eval_every": 1,
    "held_out": 1,
    "held_out_samples": 1,
}

# What a resumed run may be given anew: how long it lasts, what is measured, kept and tolerated, and on what.
MAY_CHANGE = {"updates", "eval_every", "audit_every", "checkpoint_every", "record", "tensorboard", "runs"}
MAY_CHANGE |= {"resume", "learners", "micro_batch_tokens", "recompute_activations", "max_slots"}
MAY_CHANGE |= {"tolerate_failures", "dry_run"}

Objective = Literal[
    "reinforce_zero",
    "no_importance_weight",
    "recomputed_behavior",
    "ppo_clip",
    "batch_mean",
    "trust_gate",
    "flash_reinforce",
]
ONE_RESPONSE_IS_ENOUGH = {"batch_mean", "flash_reinforce"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """REINFORCE Zero on reasoning problems: the first ranks learn, the others sample."""

    profile: Literal["tiny", "r1d-1.5b"] = "tiny"
    """Settings that the other flags change (``recipes/profiles.py``)."""
    nominal_lag: int = 2
    """Updates that the samplers may be behind, on average, when a response is trained on; 0 is
    synchronous."""
    in_flight: int = 0
    """If not 0: so many groups are sampled at a time beside a queue of ``nominal_lag`` batches, and the lag
    is whatever that makes it; with 0, credits hold its mean at ``nominal_lag``."""
    updates: int = 2000
    """Optimizer updates."""
    objective: Objective = "reinforce_zero"
    """What an update minimises: the method, or an ablation of it (``recipes/objectives.py``)."""
    tasks: tuple[str, ...] = ("basic_arithmetic",)
    """Data sets of reasoning-gym, mixed in equal parts; each NAME or NAME:KEY=VALUE,KEY=VALUE."""
    problems: Path | None = None
    """File of mathematical problems (``recipes/tasks/math_problems.py``) to train on, not on ``tasks``."""
    held_out_problems: Path | None = None
    """File of held-out ones; without it, the last ones of ``problems`` are held out."""
    model: Path | None = None
    """Folder of a local Hugging Face causal LM with its tokenizer; without it, a tiny Llama is made and
    warmed up."""
    prompts_per_update: int = 32
    """Groups in an update."""
    group_size: int = 8
    """Responses per prompt; at least 2 where the mean of a group is the baseline."""
    max_new_tokens: int = 16
    """Length limit of a response, in tokens."""
    temperature: float = 1.0
    """The logits are divided by it, when sampling and when learning; greater than 0."""
    lr: float = 1e-4
    """Learning rate of AdamW, whose betas are 0.9 and 0.95."""
    weight_decay: float = 0.0
    """Of AdamW."""
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
    compute_dtype: Literal["model", "bfloat16"] = "model"
    """Weights travel, and samplers and learners compute, in it; the optimizer keeps float32 by FSDP2, so
    that at least two must learn."""
    recompute_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where all ranks compute; a rank has the GPU of its number on its machine."""
    micro_batch_tokens: int = 0
    """Whole responses of about so many tokens are computed at a time; 0 for a whole batch at once."""
    learners: int = 1
    """Ranks that learn, with FSDP2 if several; all others sample."""
    tolerate_failures: bool = False
    """Go on while one sampler lives; what a dead one was sampling is sampled again elsewhere."""
    seed: int = 0
    """Seed of problems and sampling."""
    warm_up_steps: int = 600
    """Supervised steps that make the tiny model."""
    deterministic: bool = False
    """Each group is sampled by one version, and groups are trained on in the order in which they started:
    with exact kernels a run repeats itself to the last bit. Slower."""
    checkpoint_every: int = 100
    """Updates between checkpoints, from which ``--resume`` goes on; 0 for none."""
    resume: Path | None = None
    """Folder of a run to go on with, in the same folder and with its own settings."""
    record: bool = False
    """Keep every batch and every checkpoint, so that ``recipes/replay.py`` can do any update again."""
    runs: Path = Path("runs")
    """Folder under which the run's own folder is made."""
    tensorboard: bool = False
    """Write TensorBoard events beside the CSV files."""
    dry_run: bool = False
    """Print the plan of the run, its memory and its predicted lag, and end; needs no GPU."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        require_least(self, LEAST)
        if self.objective not in ONE_RESPONSE_IS_ENOUGH:
            require_least(self, {"group_size": 2})
        if self.in_flight and not self.nominal_lag:
            raise RecipeError("--in-flight needs a queue: --nominal-lag must be at least 1, got 0")
        if self.in_flight and self.deterministic:
            raise RecipeError("--deterministic needs credits, and not --in-flight")
        if self.compute_dtype != "model" and (self.learners < 2 or self.wire_dtype != "model"):
            raise RecipeError(
                "--compute-dtype bfloat16 needs --learners of at least 2, and no --wire-dtype, "
                f"got {self.learners} and {self.wire_dtype}"
            )
        if self.held_out_problems and not self.problems:
            raise RecipeError("--held-out-problems needs --problems")
        if self.record and not self.checkpoint_every:
            raise RecipeError("--record needs checkpoints: --checkpoint-every must be at least 1, got 0")
        if self.resume is not None:
            self._refuse_another_method(saved_config(self.resume))

    def _refuse_another_method(self, saved: Config) -> None:
        for field in fields(self):
            was, now = getattr(saved, field.name), getattr(self, field.name)
            if was != now and field.name not in MAY_CHANGE:
                raise RecipeError(
                    f"--{field.name.replace('_', '-')} is {was} in {self.resume} and cannot become {now}; "
                    f"leave it out, or start a new run"
                )

    @property
    def compute(self) -> torch.dtype | None:
        """``compute_dtype`` as FSDP2 takes it."""
        return torch.bfloat16 if self.compute_dtype == "bfloat16" else None

    @property
    def wire(self) -> torch.dtype | None:
        """``wire_dtype`` as the publisher takes it."""
        return torch.bfloat16 if self.wire_dtype == "bfloat16" else None


def saved_config(run: Path) -> Config:
    """The config of a run's folder.

    Raises:
        RecipeError: If there is none, or one of another version.
    """
    try:
        saved: dict[str, Any] = json.loads((run / "config.json").read_text())
        saved["tasks"] = tuple(saved["tasks"])
        for name in ("model", "runs", "problems", "held_out_problems"):
            saved[name] = None if saved.get(name) is None else Path(saved[name])
        return Config(**{**saved, "resume": None})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"--resume must name the folder of a run, got {run}: {error}") from error


def default_config(preset: Config | None) -> Config:
    """What the flags of this process change: a preset, or the config of the run that is resumed.

    Args:
        preset: None if the recipe stands for no nominal lag and no objective of its own.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--profile", choices=PROFILES, default="tiny")
    try:
        flags = parser.parse_known_args()[0]
        if flags.resume is None:
            return _of_profile(flags.profile, preset)
        saved = saved_config(flags.resume)
    except (RecipeError, argparse.ArgumentError):  # The flags are going to be refused for it.
        return preset or Config()
    if preset is None:
        return saved
    named: dict[str, Any] = {"nominal_lag": preset.nominal_lag}
    if preset.objective != Config.objective:
        named["objective"] = preset.objective
    return replace(saved, **named)


def _of_profile(profile: str, preset: Config | None) -> Config:
    """A profile, of which a preset changes what it names."""
    settings = {**PROFILES[profile], "profile": profile}
    if preset is not None:
        usual = Config()
        named = {field.name: getattr(preset, field.name) for field in fields(Config)}
        settings |= {name: value for name, value in named.items() if value != getattr(usual, name)}
        settings["nominal_lag"] = preset.nominal_lag
    return Config(**settings)
