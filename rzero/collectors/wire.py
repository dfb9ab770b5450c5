"""Requests, completions and whole groups as flat tensors, for messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rzero.buffers import FinishCode
from rzero.collectors.engine import Completion, GenerationRequest
from rzero.collectors.interaction import GroupRequest, PlayedGroup
from rzero.collectors.pack_completions import Fields, group_fields, split_groups
from rzero.collectors.prompt import Prompt

_REQUEST_FIELDS = ("uid", "group_id", "prompt_id", "sample_index", "max_new_tokens", "seed", "trace")
_COMPLETION_FIELDS = ("finish_code", "context_id", "t_submit_ns", "t_first_ns", "t_done_ns")


Requests = tuple[GenerationRequest, ...]


def encode_requests(groups: Sequence[Requests]) -> dict[str, Tensor]:
    """Requests as flat tensors."""
    requests = [request for group in groups for request in group]
    return {
        "group_size": torch.tensor([len(group) for group in groups]),
        "request": torch.tensor([[getattr(r, name) for name in _REQUEST_FIELDS] for r in requests]),
        "prompt": torch.tensor([token for r in requests for token in r.prompt], dtype=torch.int32),
        "prompt_length": torch.tensor([len(r.prompt) for r in requests]),
    }


def decode_requests(tensors: Mapping[str, Tensor]) -> list[Requests]:
    """The inverse of ``encode_requests``."""
    prompts = tensors["prompt"].split(tensors["prompt_length"].tolist())
    requests = (
        _request(tuple(prompt.tolist()), row)
        for prompt, row in zip(prompts, tensors["request"].tolist(), strict=True)
    )
    return [tuple(islice(requests, size)) for size in tensors["group_size"].tolist()]


def _request(prompt: tuple[int, ...], numbers: Sequence[int]) -> GenerationRequest:
    named: dict[str, int] = dict(zip(_REQUEST_FIELDS, numbers, strict=True))
    trace = bool(named.pop("trace"))
    return GenerationRequest(prompt=prompt, trace=trace, **named)


def encode_completions(groups: Sequence[Sequence[Completion]]) -> dict[str, Tensor]:
    """Completions as flat tensors; the requests stay with the learner, only a group's first uid travels."""
    completions = [completion for group in groups for completion in group]
    return {
        "first_uid": torch.tensor([group[0].request.uid for group in groups]),
        "completion": torch.tensor(
            [[int(getattr(c, name)) for name in _COMPLETION_FIELDS] for c in completions]
        ),
        "length": torch.tensor([len(c.response) for c in completions]),
        "response": torch.cat([c.response for c in completions]),
        "behavior_log_probs": torch.cat([c.behavior_log_probs for c in completions]),
        "policy_version": torch.cat([c.policy_version for c in completions]),
        "digest": torch.stack([c.digest for c in completions]),
        **{f"trace/{i}/{name}": rows for i, c in enumerate(completions) for name, rows in c.trace.items()},
    }


def decode_completions(
    tensors: Mapping[str, Tensor], requests: Sequence[GenerationRequest]
) -> list[Completion]:
    """The inverse of ``encode_completions``, given the requests of all groups, in their order."""
    lengths = tensors["length"].tolist()
    columns = [tensors[name].split(lengths) for name in ("response", "behavior_log_probs", "policy_version")]
    traces: list[dict[str, Tensor]] = [{} for _ in requests]
    for key in tensors:
        if key.startswith("trace/"):
            _, index, name = key.split("/", 2)
            traces[int(index)][name] = tensors[key]
    rows = zip(
        requests, *columns, tensors["completion"].tolist(), tensors["digest"].unbind(), traces, strict=True
    )
    return [
        Completion(
            request=request,
            response=response,
            behavior_log_probs=behavior_log_probs,
            policy_version=policy_version,
            finish_code=FinishCode(finish_code),
            context_id=context_id,
            t_submit_ns=t_submit_ns,
            t_first_ns=t_first_ns,
            t_done_ns=t_done_ns,
            digest=digest,
            trace=trace,
        )
        for (
            request,
            response,
            behavior_log_probs,
            policy_version,
            (finish_code, context_id, t_submit_ns, t_first_ns, t_done_ns),
            digest,
            trace,
        ) in rows
    ]


def encode_group_requests(groups: Sequence[GroupRequest]) -> dict[str, Tensor]:
    """Groups to be played where the engine is, which knows their problems by id."""
    return {
        "group": torch.tensor(
            [[g.group_id, g.prompt.prompt_id, g.size, g.max_new_tokens, g.seed] for g in groups]
        ),
        "prompt": torch.tensor([token for g in groups for token in g.prompt.token_ids], dtype=torch.int32),
        "prompt_length": torch.tensor([len(g.prompt.token_ids) for g in groups]),
    }


def decode_group_requests(tensors: Mapping[str, Tensor], problem: Callable[[int], Any]) -> list[GroupRequest]:
    """The inverse of ``encode_group_requests``, given the problem of each prompt's id."""
    prompts = tensors["prompt"].split(tensors["prompt_length"].tolist())
    return [
        GroupRequest(
            group_id=group_id,
            prompt=Prompt(prompt_id=prompt_id, token_ids=tuple(tokens.tolist()), problem=problem(prompt_id)),
            size=size,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        for tokens, (group_id, prompt_id, size, max_new_tokens, seed) in zip(
            prompts, tensors["group"].tolist(), strict=True
        )
    ]


def encode_played(groups: Sequence[PlayedGroup]) -> dict[str, Tensor]:
    """Played groups, packed."""
    fields = group_fields(
        [c for group, _ in groups for c in group], [r for _, rewards in groups for r in rewards]
    )
    tensors = {name: torch.from_numpy(field) for name, field in fields.items()}
    return {"size": torch.tensor([len(group) for group, _ in groups]), **tensors}


def decode_played(tensors: Mapping[str, Tensor]) -> list[Fields]:
    """Each of the groups of ``encode_played``, still packed."""
    fields = {name: tensor.numpy() for name, tensor in tensors.items() if name != "size"}
    return split_groups(fields, sizes=tensors["size"].tolist())
