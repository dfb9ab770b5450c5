"""The sampler ranks: told by the learner what to build, then serving an engine until it closes them."""

from __future__ import annotations

import json

import torch
import transformers

from recipes.policy import Policy
from rzero.collectors import Channel, RemoteEngine, TransformersEngine, serve_engine
from rzero.collectors.transport import Message


def start_samplers(
    policy: Policy, channels: dict[int, tuple[Channel, Channel]], *, max_slots: int
) -> list[RemoteEngine]:
    """On the learner's rank: have each sampler build an engine, still without its weights."""
    settings = {
        "config": policy.model.config.to_json_string(use_diff=False),
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "eos_token_ids": json.dumps(policy.eos_token_ids),
        "temperature": repr(policy.temperature),
        "tokenizer_digest": policy.tokenizer_digest,
        "max_slots": str(max_slots),
    }
    for outgoing, _ in channels.values():
        outgoing.send(Message("start", text=settings))
    return [RemoteEngine(outgoing, incoming) for outgoing, incoming in channels.values()]


def run_sampler(outgoing: Channel, incoming: Channel) -> None:
    """On a sampler's rank: build the engine and serve it."""
    told = incoming.receive().text
    raw = json.loads(told["config"])
    config = transformers.AutoConfig.for_model(**raw)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, told["dtype"]))
    engine = TransformersEngine(
        model,
        eos_token_ids=tuple(json.loads(told["eos_token_ids"])),
        temperature=float(told["temperature"]),
        max_slots=int(told["max_slots"]),
        tokenizer_digest=told["tokenizer_digest"],
        version=-1,  # no published weights yet
    )
    serve_engine(engine, outgoing, incoming)
    engine.close()
