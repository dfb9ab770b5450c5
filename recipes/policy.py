"""A causal LM with its tokenizer, as the recipes use it: loaded, asked, and measured on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from recipes.config import Config
from recipes.errors import RecipeError
from recipes.kernel_choice import Kernels, put_kernels_under
from recipes.tasks.prompts import TaskPrompts, encoded, task_rewards, vocabulary_digest
from recipes.tasks.sources import Tasks, load_tasks, task_flags
from recipes.tiny_model import cached_tiny_model, default_cache_dir
from rzero.audit import AuditReport, audit
from rzero.collectors import (
    Completion,
    GenerationEngine,
    GenerationRequest,
    load_weights,
    weight_digests,
)

HELD_OUT_UIDS = 1 << 61  # Held-out responses are no training data and share no uid with it.
HELD_OUT_SEED = 1  # Held-out responses draw the same random numbers at every evaluation and in every run.


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model and its tokenizer.

    Attributes:
        model: Hugging Face causal LM.
        tokenizer: Its tokenizer.
        tasks: The problems it is trained and measured on.
        temperature: Of sampling and of learning.
        kernels: Under the model, in the learner and in every sampler.
        compute_dtype: In which learner and samplers compute, if it is not the model's.
    """

    model: Any
    tokenizer: Any
    tasks: Tasks
    temperature: float
    kernels: Kernels
    compute_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which learner and samplers compute."""
        return self.compute_dtype or self.model.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, as the model's generation config and the tokenizer name them."""
        named = self.model.generation_config.eos_token_id
        ids = named if isinstance(named, list) else [named, self.tokenizer.eos_token_id]
        return tuple(sorted({token for token in ids if token is not None}))

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the vocabulary."""
        return vocabulary_digest(self.tokenizer)

    def prompts(self) -> TaskPrompts:
        """The training stream, encoded."""
        return TaskPrompts(self.tokenizer, self.tasks)

    def held_out_accuracy(
        self,
        sample: Callable[[Sequence[GenerationRequest]], Sequence[Completion]],
        *,
        version: int,
        samples: int,
        max_new_tokens: int,
    ) -> float:
        """Share of correct responses to the held-out problems, sampled at the training temperature.

        Args:
            sample: Samples with the weights of ``version``.
            version: Version of the weights that are measured.
            samples: Responses per problem.
            max_new_tokens: Length limit.

        Raises:
            RuntimeError: If a token was sampled with weights of another version.
        """
        prompts = encoded(self.tokenizer, self.tasks.held_out)
        rewards = task_rewards(self.tokenizer, self.tasks)
        completions = sample(
            [
                GenerationRequest(
                    uid=HELD_OUT_UIDS + index * samples + k,
                    group_id=index,
                    prompt_id=prompt.prompt_id,
                    sample_index=k,
                    prompt=prompt.token_ids,
                    max_new_tokens=max_new_tokens,
                    seed=HELD_OUT_SEED + index * samples + k,
                )
                for index, prompt in enumerate(prompts)
                for k in range(samples)
            ]
        )
        others = {int(v) for c in completions for v in c.policy_version.unique()} - {version}
        if others:
            raise RuntimeError(
                f"held_out_accuracy: all must be sampled with version {version}, got {others} too"
            )
        responses = [completion.response.tolist() for completion in completions]
        scores = [
            score
            for index, prompt in enumerate(prompts)
            for score in rewards(prompt, responses[index * samples : (index + 1) * samples])
        ]
        return sum(score == 1.0 for score in scores) / len(scores)

    def audit(
        self,
        engine: GenerationEngine,
        weights: Mapping[str, Tensor],
        *,
        version: int,
        prompts: int,
        max_new_tokens: int,
    ) -> AuditReport:
        """Compare an engine with a model of the weights of ``version``, on held-out problems."""
        name, device = self.kernels.name, self.model.device
        model, kernels = new_model(self.model.config, dtype=self.dtype, kernels=name, device=device)
        load_weights(model, weights, weight_digests({n: t.to(self.dtype) for n, t in weights.items()}))
        held_out = encoded(self.tokenizer, self.tasks.held_out)
        return audit(
            engine,
            model,
            [held_out[index % len(held_out)].token_ids for index in range(prompts)],
            version=version,
            temperature=self.temperature,
            kernel_fingerprint=kernels.fingerprint,
            tokenizer_digest=self.tokenizer_digest,
            max_new_tokens=max_new_tokens,
            seed=version,
            log_softmax=kernels.log_softmax,
        )


def new_policy(config: Config, *, device: torch.device | str = "cpu") -> Policy:
    """The model that a run begins with, and its problems.

    Raises:
        RecipeError: See ``load_policy``; if the run needs a model or problems that no flag names.
    """
    if config.model is None and (config.problems or config.profile != "tiny"):
        raise RecipeError("--model must name a folder: the tiny one is made for reasoning-gym alone")
    if config.problems is None and config.profile != "tiny":
        raise RecipeError(f"--problems must name a file: --profile {config.profile} has none of its own")
    policy = load_policy(
        config.model,
        specs=config.tasks,
        tasks=load_tasks(**task_flags(config)),
        temperature=config.temperature,
        warm_up_steps=config.warm_up_steps,
        kernels=config.kernels,
        head_size=32 if config.engine == "vllm" else 16,  # vLLM's attention for CPUs takes no less
        compute_dtype=config.compute,
        device=device,
    )
    if config.recompute_activations:
        policy.model.gradient_checkpointing_enable()
        policy.model.train()  # or nothing is recomputed; the models have no dropout
    return policy


def new_model(
    config: Any, *, dtype: torch.dtype, kernels: str, device: torch.device | str = "cpu"
) -> tuple[Any, Kernels]:
    """A causal LM of a config, its weights still to come, and the kernels under it."""
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().to(device)
    return model, put_kernels_under(model, kernels)


def load_policy(
    model: Path | None,
    *,
    specs: Sequence[str],
    tasks: Tasks,
    temperature: float,
    warm_up_steps: int,
    kernels: str,
    head_size: int = 16,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Policy:
    """Load a local model, or make the tiny one on the first call and load it.

    With a ``compute_dtype`` its own weights are float32, so that small updates are not lost.

    Raises:
        RecipeError: If the folder is missing or holds no causal LM with a tokenizer.
    """
    folder = model or cached_tiny_model(
        specs, warm_up_steps=warm_up_steps, cache_dir=default_cache_dir(), head_size=head_size
    )
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"--model must name a folder with a Hugging Face model, got {folder} without config.json"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if compute_dtype is None else torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"--model {folder} could not be loaded: {str(error).splitlines()[0]}") from error
    loaded.to(device)
    return Policy(
        model=loaded.eval(),
        tokenizer=tokenizer,
        tasks=tasks,
        temperature=temperature,
        kernels=put_kernels_under(loaded, kernels),
        compute_dtype=compute_dtype,
    )
