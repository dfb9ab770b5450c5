"""The sampler ranks: told by the learner what to build, then serving an engine until it closes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import torch
import transformers

from recipes.policy import Policy, new_model
from rzero.collectors import Channel, RemoteEngine, TransformersEngine, serve_engine
from rzero.collectors.transport import ConnectionLost, Message


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
        "kernels": policy.kernels.name,
    }
    for outgoing, _ in channels.values():
        outgoing.send(Message("start", text=settings))
    return [RemoteEngine(outgoing, incoming) for outgoing, incoming in channels.values()]


def stop_samplers(channels: dict[int, tuple[Channel, Channel]]) -> None:
    """On the learner's rank, when all engines are closed: let the samplers' ranks end."""
    for outgoing, _ in channels.values():
        with contextlib.suppress(ConnectionLost):  # its rank has ended already
            outgoing.send(Message("stop"))


def run_sampler(outgoing: Channel, incoming: Channel) -> None:
    """On a sampler's rank: build and serve one engine after the other, as the learner asks for them."""
    while (message := incoming.receive()).kind == "start":
        _serve(message.text, outgoing, incoming)


def _serve(told: Mapping[str, str], outgoing: Channel, incoming: Channel) -> None:
    raw = json.loads(told["config"])
    config = transformers.AutoConfig.for_model(**raw)
    model, kernels = new_model(config, dtype=getattr(torch, told["dtype"]), kernels=told["kernels"])
    engine = TransformersEngine(
        model,
        eos_token_ids=tuple(json.loads(told["eos_token_ids"])),
        temperature=float(told["temperature"]),
        max_slots=int(told["max_slots"]),
        tokenizer_digest=told["tokenizer_digest"],
        kernel_fingerprint=kernels.fingerprint,
        log_softmax=kernels.log_softmax,
        version=-1,  # no published weights yet
    )
    serve_engine(engine, outgoing, incoming)
    engine.close()
