"""A causal LM with its tokenizer, as the recipes use it: loaded, asked, and measured on held-out problems."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import transformers

from recipes.errors import RecipeError
from recipes.kernel_choice import Kernels, put_kernels_under
from recipes.tasks import Problem, ReasoningTasks
from recipes.tiny_model import cached_tiny_model, default_cache_dir, encode_prompts
from rzero.audit import AuditReport, audit
from rzero.collectors import GenerationEngine, GenerationRequest, Prompt, RewardFunction, TransformersEngine

HELD_OUT_SEED = 1  # Held-out responses draw the same random numbers at every evaluation and in every run.
ENCODED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model and its tokenizer.

    Attributes:
        model: Hugging Face causal LM.
        tokenizer: Its tokenizer.
        tasks: The problems it is trained and measured on.
        temperature: Of sampling and of learning.
        kernels: Under the model, in the learner and in every sampler.
    """

    model: Any
    tokenizer: Any
    tasks: ReasoningTasks
    temperature: float
    kernels: Kernels

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, as the model's generation config and the tokenizer name them."""
        named = self.model.generation_config.eos_token_id
        ids = named if isinstance(named, list) else [named, self.tokenizer.eos_token_id]
        return tuple(sorted({token for token in ids if token is not None}))

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the vocabulary."""
        return hashlib.blake2b(
            repr(sorted(self.tokenizer.get_vocab().items())).encode(), digest_size=16
        ).hexdigest()

    def prompts(self) -> Iterator[Prompt]:
        """The training stream, encoded."""
        stream = self.tasks.stream(0)
        while problems := list(islice(stream, ENCODED_AT_ONCE)):
            encoded = encode_prompts(self.tokenizer, [problem.question for problem in problems])
            for problem, token_ids in zip(problems, encoded, strict=True):
                yield Prompt(prompt_id=problem.prompt_id, token_ids=tuple(token_ids), problem=problem)

    def rewards(self) -> RewardFunction:
        """The task's own verifier, on the text of a group's responses."""

        def reward(prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[float]:
            texts = self.tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True)
            return [self.tasks.score(prompt.problem, text) for text in texts]

        return reward

    def held_out_accuracy(self, *, version: int, samples: int, max_new_tokens: int) -> float:
        """Share of correct responses to the held-out problems, sampled at the training temperature.

        Args:
            version: Version of the weights that the model holds now.
            samples: Responses per problem.
            max_new_tokens: Length limit.
        """
        engine = TransformersEngine(
            self.model,
            eos_token_ids=self.eos_token_ids,
            temperature=self.temperature,
            version=version,
            log_softmax=self.kernels.log_softmax,
        )
        prompts = [self._prompt(problem) for problem in self.tasks.held_out]
        futures = [
            engine.submit(
                GenerationRequest(
                    uid=index * samples + k,
                    group_id=index,
                    prompt_id=prompt.prompt_id,
                    sample_index=k,
                    prompt=prompt.token_ids,
                    max_new_tokens=max_new_tokens,
                    seed=HELD_OUT_SEED + index * samples + k,
                )
            )
            for index, prompt in enumerate(prompts)
            for k in range(samples)
        ]
        responses = [future.result().response.tolist() for future in futures]
        engine.close()
        reward = self.rewards()
        scores = [
            score
            for index, prompt in enumerate(prompts)
            for score in reward(prompt, responses[index * samples : (index + 1) * samples])
        ]
        return sum(score == 1.0 for score in scores) / len(scores)

    def audit(
        self, engine: GenerationEngine, *, version: int, prompts: int, max_new_tokens: int
    ) -> AuditReport:
        """Compare an engine with this model, which holds the weights of ``version``, on held-out problems."""
        problems = self.tasks.held_out
        return audit(
            engine,
            self.model,
            [self._prompt(problems[index % len(problems)]).token_ids for index in range(prompts)],
            version=version,
            temperature=self.temperature,
            kernel_fingerprint=self.kernels.fingerprint,
            tokenizer_digest=self.tokenizer_digest,
            max_new_tokens=max_new_tokens,
            seed=version,
            log_softmax=self.kernels.log_softmax,
        )

    def _prompt(self, problem: Problem) -> Prompt:
        return Prompt(
            prompt_id=problem.prompt_id,
            token_ids=tuple(encode_prompts(self.tokenizer, [problem.question])[0]),
            problem=problem,
        )


def load_policy(
    model: Path | None,
    *,
    specs: Sequence[str],
    tasks: ReasoningTasks,
    temperature: float,
    warm_up_steps: int,
    kernels: str,
) -> Policy:
    """Load a local model, or make the tiny one on the first call and load it.

    Raises:
        RecipeError: If the folder is missing or holds no causal LM with a tokenizer.
    """
    folder = model or cached_tiny_model(specs, warm_up_steps=warm_up_steps, cache_dir=default_cache_dir())
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"--model must name a folder with a Hugging Face model, got {folder} without config.json"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"--model {folder} could not be loaded: {str(error).splitlines()[0]}") from error
    return Policy(
        model=loaded.eval(),
        tokenizer=tokenizer,
        tasks=tasks,
        temperature=temperature,
        kernels=put_kernels_under(loaded, kernels),
    )
