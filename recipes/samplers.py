"""The sampler ranks: told by the learner what to build, then serving an engine until it closes them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from recipes.launch import keep_heap
from recipes.policy import Policy, new_model
from rzero.collectors import Channel, GenerationEngine, RemoteEngine, TransformersEngine, serve_engine
from rzero.collectors.transport import Message


def start_samplers(
    policy: Policy,
    channels: dict[int, tuple[Channel, Channel]],
    *,
    max_slots: int,
    engine: str = "transformers",
) -> list[RemoteEngine]:
    """On the learner's rank: have each sampler build an engine, still without its weights."""
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
    }
    for outgoing, _ in channels.values():
        outgoing.send(Message("start", text=settings))
    return [RemoteEngine(outgoing, incoming) for outgoing, incoming in channels.values()]


def run_sampler(outgoing: Channel, incoming: Channel) -> None:
    """On a sampler's rank: build and serve one engine after the other, as the learner asks for them."""
    while (message := incoming.receive()).kind == "start":
        _serve(message.text, outgoing, incoming)


def _serve(told: Mapping[str, str], outgoing: Channel, incoming: Channel) -> None:
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
    keep_heap()
    serve_engine(engine, outgoing, incoming)
    engine.close()


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
