"""What a run is going to be: its ranks, data, memory and lag, before it is started."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.config import Config
from recipes.errors import RecipeError
from recipes.profiles import MODELS
from recipes.simulation.cluster import SMALL
from recipes.tasks.math_problems import read_problems
from recipes.tiny_model import character_tokenizer, tiny_llama
from rzero.collectors import Scheduler, simulate

GIB = 2**30
LONGEST_PROMPT = 1024  # tokens; of the published setting
SIMULATED_UPDATES = 100


def print_plan(config: Config, scheduler: Scheduler) -> None:
    """Print the plan, once, or say what is wrong and end the process.

    Args:
        config: Of the run.
        scheduler: A fresh one of the run's kind, for the prediction.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print("\n".join(plan(config, scheduler, ranks=ranks_of(config))))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def ranks_of(config: Config) -> int:
    """As many as torchrun started; without it, as many that sample as learn."""
    return int(os.environ.get("WORLD_SIZE", 2 * config.learners))


def plan(config: Config, scheduler: Scheduler, *, ranks: int) -> list[str]:
    """The plan as lines of text.

    Args:
        config: Of the run.
        scheduler: A fresh one of the run's kind.
        ranks: Of the job.

    Raises:
        RecipeError: If nobody is left to sample, or a named file cannot be read.
    """
    samplers = ranks - config.learners
    if samplers < 1:
        raise RecipeError(f"needs {config.learners} rank(s) that learn and one that samples, got {ranks}")
    shape, on_gpus = model_shape(config), config.device == "cuda"
    count = sum(parameter.numel() for parameter in shape.parameters())
    responses = config.prompts_per_update * config.group_size
    arrangement = "synchronous" if config.nominal_lag == 0 else f"nominal lag {config.nominal_lag}"
    if config.in_flight:
        arrangement = f"queue of {config.nominal_lag} batches, {config.in_flight} groups in flight"
    lines = [
        f"profile {config.profile}: {config.updates:,} updates by {config.objective}, {arrangement}",
        f"  ranks      {ranks}: {config.learners} learn{' by FSDP2' if config.learners > 1 else ''}, "
        f"{samplers} sample by {config.engine}; one {'GPU' if on_gpus else 'process'} each",
        f"  model      {config.model or 'not given'}: {count / 1e9:.3f}B parameters",
        f"  problems   {_problems(config)}",
        f"  update     {config.prompts_per_update} groups of {config.group_size} = {responses} responses of "
        f"up to {config.max_new_tokens:,} new tokens; temperature {config.temperature:g}",
        f"  optimizer  AdamW, learning rate {config.lr:g} after {config.lr_warm_up} updates, weight decay "
        f"{config.weight_decay:g}, gradient norm at most {config.max_grad_norm:g}",
        f"  numbers    kernels {config.kernels}, computed in {config.compute_dtype}, weights travel in "
        f"{config.wire_dtype if config.compute is None else config.compute_dtype}",
    ]
    if not on_gpus:
        return [*lines, "  lag        is predicted by the run itself, from its own timings"]
    lines += _table("memory of a learner's GPU, GiB", learner_memory(config, shape.config, count))
    lines += _table("memory of a sampler's GPU, GiB", sampler_memory(config, shape.config, count))
    return lines + predicted_lag(config, scheduler, count, ranks=ranks)


def model_shape(config: Config) -> Any:
    """The model without its weights: of the folder, else of the profile.

    Raises:
        RecipeError: If the folder has no readable config.
    """
    if config.model is None and config.profile not in MODELS:
        return tiny_llama(len(character_tokenizer()), hidden_size=64, layers=2, seed=0)
    try:
        if config.model is not None:
            shape = transformers.AutoConfig.from_pretrained(Path(config.model), local_files_only=True)
        else:
            shape = transformers.AutoConfig.for_model(**MODELS[config.profile])
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"--model {config.model} could not be read: {str(error).splitlines()[0]}"
        ) from error
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(shape)


def learner_memory(config: Config, shape: Any, parameters: int) -> dict[str, float]:
    """Bytes on one learner, by use: arithmetic, not measurements.

    Logits are counted once in the dtype of the computation and four times in float32: scores, their softmax
    and the gradients of both.
    """
    computed = 2 if config.compute is not None else 4
    per_rank = parameters / config.learners
    response = LONGEST_PROMPT + config.max_new_tokens
    whole = config.prompts_per_update * config.group_size // config.learners * response
    tokens = max(config.micro_batch_tokens or whole, response)
    layer = tokens * (8 * shape.hidden_size + 3 * shape.intermediate_size) * computed
    layers = shape.num_hidden_layers
    kept = layers * tokens * shape.hidden_size * computed + layer
    root = 2 * shape.vocab_size * shape.hidden_size * computed
    return {
        "weights, float32": 4 * per_rank,
        "gradients, float32": 4 * per_rank,
        "AdamW's moments, float32": 8 * per_rank,
        "gathered layers": (root + 2 * (parameters * computed - root) / layers) if config.learners > 1 else 0,
        f"activations of {tokens:,} tokens": kept if config.recompute_activations else layers * layer,
        f"logits of {tokens:,} tokens": tokens * shape.vocab_size * (computed + 4 * 4),
    }


def sampler_memory(config: Config, shape: Any, parameters: int) -> dict[str, float]:
    """Bytes on one sampler, by use, if every slot held a response of full length."""
    computed = 2 if config.compute is not None else 4
    heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    response = LONGEST_PROMPT + config.max_new_tokens
    cache = 2 * shape.num_hidden_layers * heads * head_size * computed * config.max_slots * response
    return {"weights": computed * parameters, f"keys and values of {config.max_slots} slots": cache}


def predicted_lag(config: Config, scheduler: Scheduler, parameters: int, *, ranks: int) -> list[str]:
    """What the simulator says, with the speeds that ``recipes/simulation/cluster.py`` assumes for GPUs."""
    cluster = replace(
        SMALL,
        gpus=ranks,
        parameters=parameters,
        weight_gigabytes=2 * parameters / 1e9,
        responses=config.prompts_per_update * config.group_size,
        group_size=config.group_size,
        limit=config.max_new_tokens,
        slots=config.max_slots,
    )
    run = simulate(scheduler, cluster.workload(config.learners), updates=SIMULATED_UPDATES, seed=config.seed)
    lag = run.lag.to_dict()["token_mean"]["per_token"]
    return [
        f"  lag        predicted per token: mean {lag['mean']:.2f}, p50 {lag['p50']:.0f}, p95 "
        f"{lag['p95']:.0f}, max {lag['max']:.0f}; a step of {run.step_seconds:.1f} s, the learner idle for "
        f"{run.learner['idle']:.0%}",
        f"             assumed: responses of {cluster.mean_length:.0f} tokens (cv {cluster.cv:g}), "
        f"{cluster.train_teraflops:.0f} Tflop/s in training, {1e3 * cluster.step_seconds:.0f} ms a decoding "
        "step",
    ]


def _problems(config: Config) -> str:
    if config.problems is None:
        return "none given" if config.profile != "tiny" else f"{', '.join(config.tasks)} of reasoning-gym"
    text = f"{len(read_problems(config.problems)):,} of {config.problems}"
    if config.held_out_problems is None:
        return f"{text}, of which the last {config.held_out} are held out"
    return f"{text}, {len(read_problems(config.held_out_problems))} held out of {config.held_out_problems}"


def _table(title: str, uses: dict[str, float]) -> list[str]:
    total = {**uses, "in all": sum(uses.values())}
    return [f"  {title}", *(f"    {size / GIB:8.2f}  {name}" for name, size in total.items())]
