"""The record of one sampled response, and the rules that make it evidence."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor

from rzero.buffers.digest import PROVENANCE_FIELDS, digest_rows


class FinishCode(IntEnum):
    """How a response ended: by its end token, at its length limit, or cut off from outside."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


_ABORT, _LAST_CODE = int(FinishCode.ABORT), int(max(FinishCode))  # numpy compares plain numbers faster.

TOKEN_FIELDS = {
    "token_ids": torch.int32,
    "behavior_log_probs": torch.float32,
    "response_mask": torch.bool,
    "policy_version": torch.int32,
}
"""Fields with one entry a token, prompt included."""

ROW_FIELDS = {
    "uid": torch.int64,
    "group_id": torch.int64,
    "prompt_id": torch.int64,
    "sample_index": torch.int32,
    "prompt_length": torch.int32,
    "response_length": torch.int32,
    "reward": torch.float32,
    "finish_code": torch.int8,
    "context_id": torch.int64,
    "seed": torch.int64,
    "t_submit_ns": torch.int64,
    "t_first_ns": torch.int64,
    "t_done_ns": torch.int64,
}
"""Fields with one number a response; `digest`, with two, stands beside them."""

DTYPES = {**TOKEN_FIELDS, **ROW_FIELDS, "digest": torch.int64}
"""The dtype of every field."""


class Rollout(TensorClass["nocast", "frozen"]):
    """One response with its evidence. It exists only if it is complete and consistent.

    Index t of every token field concerns token t, and the prompt is included. No field has a default,
    nothing is cast or repaired, and every copy (`clone`, `to`, unpickling) is checked again. `make_rollout`
    takes plain numbers for the row fields.

    Args:
        token_ids: int32 ``[T]``, >= 0.
        behavior_log_probs: float32 ``[T]`` nats, the probability with which the token was really drawn:
            finite and <= 0 where ``response_mask`` is True, NaN elsewhere.
        response_mask: bool ``[T]``, True where a token was sampled; False on the whole prompt.
        policy_version: int32 ``[T]``, the weights that drew the token; -1 where nothing was sampled.
        uid: int64, unique in the run, >= 0 like all other ids.
        group_id: int64; the responses of a group are compared with one another.
        prompt_id: int64.
        sample_index: int32, which response of its group it is.
        prompt_length: int32, >= 1.
        response_length: int32; ``prompt_length + response_length = T``.
        reward: float32, finite.
        finish_code: int8, a `FinishCode`. Only an aborted response may hold no sampled token.
        context_id: int64, see `SamplingContext`.
        seed: int64.
        t_submit_ns: int64, wall clock; ``t_submit_ns <= t_first_ns <= t_done_ns``.
        t_first_ns: int64.
        t_done_ns: int64.
        digest: int64 ``[2]``, `provenance_digest` of the token fields, taken where the tokens were drawn.

    Raises:
        TypeError: if a field is not a tensor of its dtype.
        ValueError: if a shape, a range or the digest does not hold.
    """

    token_ids: Tensor
    behavior_log_probs: Tensor
    response_mask: Tensor
    policy_version: Tensor
    uid: Tensor
    group_id: Tensor
    prompt_id: Tensor
    sample_index: Tensor
    prompt_length: Tensor
    response_length: Tensor
    reward: Tensor
    finish_code: Tensor
    context_id: Tensor
    seed: Tensor
    t_submit_ns: Tensor
    t_first_ns: Tensor
    t_done_ns: Tensor
    digest: Tensor

    def __post_init__(self) -> None:
        """Check the fields."""
        fields: dict[str, Any] = dict(self.items())
        length = _checked_length(fields)
        columns = {name: fields[name].cpu().contiguous().numpy() for name in TOKEN_FIELDS}
        rows = {name: fields[name].cpu().numpy()[None] for name in (*ROW_FIELDS, "digest")}
        check_rows(columns, rows, np.array([0, length]), caller="Rollout")

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle through the constructor, which TensorClass's own way would pass by."""
        return _from_fields, (dict(self.items()),)


def make_rollout(
    *,
    token_ids: Tensor,
    behavior_log_probs: Tensor,
    response_mask: Tensor,
    policy_version: Tensor,
    digest: Tensor,
    **numbers: int | float | Tensor,
) -> Rollout:
    """Build a `Rollout` from token tensors and plain numbers.

    Args:
        token_ids: int32 ``[T]``.
        behavior_log_probs: float32 ``[T]``.
        response_mask: bool ``[T]``.
        policy_version: int32 ``[T]``.
        digest: int64 ``[2]``.
        **numbers: each of `ROW_FIELDS`, as a Python number or as a tensor of its dtype.

    Returns:
        The checked record.

    Raises:
        TypeError: if a field is missing, unknown, or a tensor of another dtype.
        ValueError: see `Rollout`; also for a number that its dtype cannot hold.
    """
    if unknown := numbers.keys() - ROW_FIELDS.keys():
        raise TypeError(f"make_rollout: fields must be those of Rollout, got {sorted(unknown)}")
    rows = {}
    for name, value in numbers.items():
        if not isinstance(value, Tensor):
            if ROW_FIELDS[name].is_floating_point:
                value = torch.tensor(float(value), dtype=ROW_FIELDS[name])
            else:
                limits = torch.iinfo(ROW_FIELDS[name])
                if int(value) != value or not limits.min <= value <= limits.max:
                    raise ValueError(f"make_rollout: {name} must fit {ROW_FIELDS[name]}, got {value!r}")
                value = torch.tensor(int(value), dtype=ROW_FIELDS[name])
        rows[name] = value
    return Rollout(
        token_ids=token_ids,
        behavior_log_probs=behavior_log_probs,
        response_mask=response_mask,
        policy_version=policy_version,
        digest=digest,
        **rows,
    )


def _from_fields(fields: dict[str, Any]) -> Rollout:
    return Rollout(**fields)


def segments(rollout: Rollout) -> list[tuple[int, int, int]]:
    """Which weights drew which part of a response.

    Args:
        rollout: one response.

    Returns:
        ``(start, end, version)`` for each maximal run of sampled tokens of one version; indices count from
        the first token after the prompt. A response begun by version 3 and swapped to version 4 after its
        second token gives ``[(0, 2, 3), (2, 5, 4)]``. Tokens that were not sampled belong to no segment.
    """
    version = rollout.policy_version[int(rollout.prompt_length) :].cpu().numpy()
    edges = np.flatnonzero(np.diff(version)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(version)]
    return [
        (start, end, int(version[start]))
        for start, end in zip(starts, ends, strict=True)
        if start < end and version[start] >= 0
    ]


def check_rows(columns: Mapping[str, np.ndarray], rows: Any, cu_seqlens: np.ndarray, *, caller: str) -> None:
    """Hold packed responses against every rule of `Rollout`, digest included; dtypes and shapes are given.

    Args:
        columns: `TOKEN_FIELDS`, each ``[N]``, contiguous.
        rows: `ROW_FIELDS`, each ``[B]``, and ``digest`` ``[B, 2]``.
        cu_seqlens: ``[B + 1]`` offsets, from 0 to N, strictly increasing.
        caller: the name that the message begins with.

    Raises:
        ValueError: naming the field, the uid and the token of the first violation.
    """

    def reject(broken: np.ndarray, name: str, rule: str) -> None:
        if np.count_nonzero(broken):
            row = int(broken.argmax())
            raise ValueError(f"{caller}: {name} must {rule}, got {rows[name][row]} at uid {rows['uid'][row]}")

    for name in ("uid", "group_id", "prompt_id", "context_id", "sample_index", "t_submit_ns"):
        reject(rows[name] < 0, name, "be >= 0")
    reject(rows["prompt_length"] < 1, "prompt_length", "be >= 1")
    reject(rows["response_length"] < 0, "response_length", "be >= 0")
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    reject(
        rows["prompt_length"] + rows["response_length"] != lengths,
        "response_length",
        "be the number of tokens less prompt_length",
    )
    reject(~np.isfinite(rows["reward"]), "reward", "be finite")
    reject(rows["finish_code"].view(np.uint8) > _LAST_CODE, "finish_code", "be a FinishCode, 0 to 2")
    reject(rows["t_first_ns"] < rows["t_submit_ns"], "t_first_ns", "not precede t_submit_ns")
    reject(rows["t_done_ns"] < rows["t_first_ns"], "t_done_ns", "not precede t_first_ns")
    _check_tokens(columns, rows, cu_seqlens, caller)
    bounds = cu_seqlens.tolist()
    digests = digest_rows([columns[name] for name in PROVENANCE_FIELDS], bounds[:-1], bounds[1:])
    reject((digests != rows["digest"]).any(1), "digest", "be the provenance_digest of the token fields")


def _check_tokens(columns: Mapping[str, np.ndarray], rows: Any, cu_seqlens: np.ndarray, caller: str) -> None:
    """Check the token fields value by value."""

    def reject(broken: np.ndarray, name: str, rule: str) -> None:
        if np.count_nonzero(broken):
            token = int(broken.argmax())
            row = int(np.searchsorted(cu_seqlens, token, side="right")) - 1
            raise ValueError(
                f"{caller}: {name} must {rule}, got {columns[name][token]} "
                f"at token {token - int(cu_seqlens[row])} of uid {rows['uid'][row]}"
            )

    mask, log_probs, version = (
        columns[name] for name in ("response_mask", "behavior_log_probs", "policy_version")
    )
    reject(columns["token_ids"] < 0, "token_ids", "be >= 0")
    reject(
        np.isnan(log_probs) == mask,
        "behavior_log_probs",
        "be a number where response_mask is True and NaN elsewhere",
    )
    reject(log_probs > 0, "behavior_log_probs", "be <= 0")
    reject(log_probs == -np.inf, "behavior_log_probs", "be finite")
    reject((version >= 0) != mask, "policy_version", "be >= 0 where response_mask is True and -1 elsewhere")
    reject(version < -1, "policy_version", "be -1 where response_mask is False")
    starts = cu_seqlens[:-1]
    spans = np.stack((starts, starts + rows["prompt_length"]), axis=1).reshape(-1)
    spans = spans[spans < len(mask)]  # The last response may be empty.
    in_prompt = np.logical_or.reduceat(mask, spans)[::2]
    if np.count_nonzero(in_prompt):
        uid = rows["uid"][in_prompt.argmax()]
        raise ValueError(f"{caller}: response_mask must be False on the prompt, got True in uid {uid}")
    unsampled = ~np.logical_or.reduceat(mask, starts) & (rows["finish_code"] != _ABORT)
    if np.count_nonzero(unsampled):
        uid = rows["uid"][unsampled.argmax()]
        raise ValueError(f"{caller}: response_mask must be True somewhere unless aborted, got uid {uid}")


def _checked_length(fields: dict[str, Any]) -> int:
    """Check dtypes and shapes of one response and return T."""
    tokens = fields.get("token_ids")
    length = tokens.shape[0] if isinstance(tokens, Tensor) and tokens.ndim else 0
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_FIELDS, (length,))
    shapes |= dict.fromkeys(ROW_FIELDS, ())
    shapes["digest"] = (2,)
    check_layout(fields, shapes, caller="Rollout")
    if length == 0:
        raise ValueError("Rollout: token_ids must hold at least the prompt, got 0 tokens")
    return length


def check_layout(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, caller: str) -> None:
    """Check that each field is a tensor of its dtype and of the shape that is named for it."""
    for name, shape in shapes.items():
        value = fields.get(name)
        if not isinstance(value, Tensor) or value.dtype != DTYPES[name]:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{caller}: {name} must be a tensor of dtype {DTYPES[name]}, got {got}")
        if value.shape != shape:
            raise ValueError(f"{caller}: {name} must have shape {shape}, got {tuple(value.shape)}")
