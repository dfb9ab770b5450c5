"""The tiny model that has seen how the calculator is used, and how well it does on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from recipes.policy import HELD_OUT_SEED, HELD_OUT_UIDS, Policy, load_policy
from recipes.tasks.calculator import CALL, now_and_then
from recipes.tasks.reasoning import ReasoningTasks
from recipes.tiny_model import cached_tiny_model, default_cache_dir, encode_prompts
from rzero.collectors import GenerationEngine, GenerationRequest, MultiTurn, Prompt, Trajectory

TASKS = ("basic_arithmetic:min_digits=2,max_digits=2",)
ANSWER_SECONDS = 600.0


def load_calculating_policy(*, seed: int, held_out: int, warm_up_steps: int) -> Policy:
    """The tiny model, whose turns end with an answer or with a call of the tool."""
    tasks = ReasoningTasks(TASKS, seed=seed, held_out_size=held_out)
    folder = cached_tiny_model(
        TASKS,
        warm_up_steps=warm_up_steps,
        cache_dir=default_cache_dir(),
        transcript=now_and_then,
    )
    policy = load_policy(
        folder,
        specs=TASKS,
        tasks=tasks,
        temperature=1.0,
        warm_up_steps=warm_up_steps,
        kernels="native",
    )
    ends = [policy.tokenizer.eos_token_id, policy.tokenizer.convert_tokens_to_ids(CALL)]
    policy.model.generation_config.eos_token_id = ends
    return policy


def play_held_out(
    policy: Policy, interaction: MultiTurn, engines: Sequence[GenerationEngine], *, max_new_tokens: int
) -> list[Trajectory]:
    """One trajectory for each held-out problem."""
    futures = []
    for index, problem in enumerate(policy.tasks.held_out):
        token_ids = tuple(encode_prompts(policy.tokenizer, [problem.question])[0])
        request = GenerationRequest(
            uid=HELD_OUT_UIDS + index,
            group_id=index,
            prompt_id=problem.prompt_id,
            sample_index=0,
            prompt=token_ids,
            max_new_tokens=max_new_tokens,
            seed=HELD_OUT_SEED + index,
        )
        prompt = Prompt(prompt_id=problem.prompt_id, token_ids=token_ids, problem=problem)
        futures.append(interaction.play(engines[index % len(engines)], prompt, request))
    return [cast(Trajectory, future.result(timeout=ANSWER_SECONDS)) for future in futures]
