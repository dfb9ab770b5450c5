"""The sampler ranks: told by the learner what to build, then serving an engine, which also rewards."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.errors import RecipeError
from recipes.launch import keep_heap
from recipes.policy import Policy, new_model
from recipes.tasks.prompts import task_rewards, vocabulary_digest
from recipes.tasks.sources import load_tasks
from rzero.collectors import (
    Channel,
    GenerationEngine,
    RemoteEngine,
    SingleTurn,
    TransformersEngine,
    serve_engine,
)
from rzero.collectors.transport import Message


def start_samplers(
    policy: Policy,
    channels: dict[int, tuple[Channel, Channel]],
    *,
    max_slots: int,
    engine: str = "transformers",
    tasks: Mapping[str, Any] | None = None,
) -> list[RemoteEngine]:
    """On the learner's rank: have each sampler build an engine, still without its weights.

    Args:
        policy: Whose shape and kernels the engines have.
        channels: To and from each sampler.
        max_slots: Responses that one engine samples at the same time.
        engine: ``transformers`` or ``vllm``.
        tasks: As ``load_tasks`` takes them; with them, each sampler rewards what it samples.
    """
    settings = {
        "config": policy.model.config.to_json_string(use_diff=False),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": policy.model.device.type,
        "eos_token_ids": json.dumps(policy.eos_token_ids),
        "temperature": repr(policy.temperature),
        "tokenizer_digest": policy.tokenizer_digest,
        "max_slots": str(max_slots),
        "kernels": policy.kernels.name,
        "engine": engine,
        "architecture": type(policy.model).__name__,
        "tasks": json.dumps(tasks),
    }
    tokenizer = {} if tasks is None else tokenizer_files(policy.tokenizer)
    for outgoing, _ in channels.values():
        outgoing.send(Message("start", tokenizer, settings))
    return [RemoteEngine(outgoing, incoming) for outgoing, incoming in channels.values()]


def run_sampler(outgoing: Channel, incoming: Channel) -> None:
    """On a sampler's rank: build and serve one engine after the other, as the learner asks for them."""
    while (message := incoming.receive()).kind == "start":
        _serve(message, outgoing, incoming)


def _serve(message: Message, outgoing: Channel, incoming: Channel) -> None:
    told = message.text
    if told["device"] == "cuda":
        _see_own_gpu_alone()
    raw = json.loads(told["config"])
    config = transformers.AutoConfig.for_model(**raw)
    law: dict[str, Any] = {
        "eos_token_ids": tuple(json.loads(told["eos_token_ids"])),
        "temperature": float(told["temperature"]),
        "max_slots": int(told["max_slots"]),
        "tokenizer_digest": told["tokenizer_digest"],
        "version": -1,  # no published weights yet
    }
    if told["engine"] == "vllm":
        config.architectures = [told["architecture"]]
        on_gpu = {"exact": "triton"} if told["device"] == "cuda" else {}
        kernels = on_gpu.get(told["kernels"], told["kernels"])
        engine = _vllm_engine(config, law, dtype=told["dtype"], kernels=kernels)
    else:
        dtype = getattr(torch, told["dtype"])
        model, kernels = new_model(config, dtype=dtype, kernels=told["kernels"], device=told["device"])
        engine = TransformersEngine(
            model, **law, kernel_fingerprint=kernels.fingerprint, log_softmax=kernels.log_softmax
        )
    try:
        rewarded = _rewarded(message, json.loads(told["tasks"]))
    except RecipeError as error:
        outgoing.send(Message("error", text={"traceback": str(error)}))
        raise
    keep_heap()
    serve_engine(engine, outgoing, incoming, **rewarded)
    engine.close()


def _rewarded(message: Message, flags: dict[str, Any] | None) -> dict[str, Any]:
    """What ``serve_engine`` needs to reward groups of the tasks; nothing if there are none."""
    if flags is None:
        return {}
    tasks, tokenizer = load_tasks(**flags), tokenizer_from(message.tensors)
    if vocabulary_digest(tokenizer) != message.text["tokenizer_digest"]:
        raise RecipeError("a sampler's tokenizer must be the learner's, got another vocabulary")
    return {"interaction": SingleTurn(task_rewards(tokenizer, tasks)), "problem": tasks.problem}


def tokenizer_files(tokenizer: Any) -> dict[str, torch.Tensor]:
    """The files of a tokenizer by name, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {
            str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in Path(folder).rglob("*")
            if path.is_file()
        }


def tokenizer_from(files: Mapping[str, torch.Tensor]) -> Any:
    """The tokenizer of ``tokenizer_files``."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.numpy().tobytes())
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _see_own_gpu_alone() -> None:
    """Leave this rank, and the processes that it starts, the GPU of its number on this machine."""
    local = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)


def _vllm_engine(config: Any, law: dict[str, Any], *, dtype: str, kernels: Any) -> GenerationEngine:
    """VLLM reads its model's shape from a folder."""
    from rzero.collectors import VLLMEngine

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return VLLMEngine(folder, **law, kernels=kernels, engine_args={"dtype": dtype})
