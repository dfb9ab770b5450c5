"""Many responses in flat tensors, without padding."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from rzero.buffers.digest import PROVENANCE_FIELDS, digest_rows
from rzero.buffers.records import DTYPES, ROW_FIELDS, TOKEN_FIELDS, Rollout, check_layout, check_rows

_INT32_MAX = torch.iinfo(torch.int32).max
_INTEGERS = [name for name in ROW_FIELDS if name != "reward"]
_NARROW = {name for name in _INTEGERS if ROW_FIELDS[name] is not torch.int64}
_NUMPY_DTYPES = {name: torch.empty((), dtype=dtype).numpy().dtype for name, dtype in ROW_FIELDS.items()}


class PackedBatch(TensorClass["nocast"]):
    """B responses with N tokens in all: flat token fields, row offsets, row fields.

    Response b owns tokens ``cu_seqlens[b] : cu_seqlens[b + 1]`` of every token field. The fields mean what
    they mean in `Rollout`. Construction checks dtypes and shapes; `validate` checks every value and every
    digest, and whatever enters a buffer passes it.

    Args:
        token_ids: int32 ``[N]``.
        behavior_log_probs: float32 ``[N]`` nats.
        response_mask: bool ``[N]``.
        policy_version: int32 ``[N]``.
        cu_seqlens: int32 or int64 ``[B + 1]``, from 0 to N.
        uid: int64 ``[B]``, and so on for each of `ROW_FIELDS`.
        group_id: int64 ``[B]``.
        prompt_id: int64 ``[B]``.
        sample_index: int32 ``[B]``.
        prompt_length: int32 ``[B]``.
        response_length: int32 ``[B]``.
        reward: float32 ``[B]``.
        finish_code: int8 ``[B]``.
        context_id: int64 ``[B]``.
        seed: int64 ``[B]``.
        t_submit_ns: int64 ``[B]``.
        t_first_ns: int64 ``[B]``.
        t_done_ns: int64 ``[B]``.
        digest: int64 ``[B, 2]``.
        extras: further token fields ``[N]`` under names of their own, such as the learner's ``log_probs``;
            never evidence. None if there are none.
    """

    token_ids: Tensor
    behavior_log_probs: Tensor
    response_mask: Tensor
    policy_version: Tensor
    cu_seqlens: Tensor
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
    extras: TensorDict | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        check_packed(dict(self.items()))

    @property
    def num_responses(self) -> int:
        """B."""
        return self.uid.shape[0]

    @property
    def num_tokens(self) -> int:
        """N, prompts included."""
        return self.token_ids.shape[0]


def pack(rollouts: Sequence[Rollout]) -> PackedBatch:
    """Lay responses end to end.

    Args:
        rollouts: at least one response.

    Returns:
        A batch on the CPU that owns its memory.

    Raises:
        ValueError: if there is no response.
        TypeError: if an item is not a `Rollout`.
    """
    records = []
    for rollout in rollouts:
        if not isinstance(rollout, Rollout):
            raise TypeError(f"pack: rollouts must hold Rollouts, got {type(rollout).__name__}")
        records.append(dict(rollout.items()))
    return _batch(gather(records, caller="pack"))


def pack_fields(responses: Sequence[Mapping[str, Any]]) -> PackedBatch:
    """Lay responses end to end that are plain mappings of the fields of `Rollout`.

    This spares a producer of many responses the records. Values and digests are checked when the batch
    enters a buffer, or by `validate`.

    Args:
        responses: at least one response; a row field is a number, or a tensor of its dtype. All or none have
            ``extras``, a mapping of further token fields.

    Returns:
        A batch on the CPU that owns its memory.

    Raises:
        ValueError: if there is no response, a field has another shape, or its dtype cannot hold a number.
        TypeError: if a field is missing or has another dtype.
    """
    return _batch(gather(responses, caller="pack_fields"))


def gather(records: Sequence[Mapping[str, Any]], *, caller: str) -> dict[str, Any]:
    """Lay responses end to end as plain arrays, without rounding, wrapping or promoting anything.

    Args:
        records: see `pack_fields`.
        caller: the name that a message begins with.

    Returns:
        The fields of `PackedBatch` as new arrays; ``cu_seqlens`` int64, ``extras`` a dict.
    """
    if len(records) == 0:
        raise ValueError(f"{caller}: must have at least one response, got none")
    try:
        lengths = [record["token_ids"].numel() for record in records]
        fields: dict[str, Any] = {
            name: _column([record[name] for record in records], name, lengths, caller)
            for name in TOKEN_FIELDS
        }
        fields["extras"] = {
            name: _column([record["extras"][name] for record in records], name, lengths, caller)
            for name in records[0].get("extras") or ()
        }
        fields["digest"] = torch.stack([record["digest"] for record in records]).cpu().numpy()
        for names, kinds in ((_INTEGERS, "iu"), (("reward",), "iuf")):
            fields |= _numbers([[record[name] for name in names] for record in records], names, kinds, caller)
    except KeyError as error:
        raise TypeError(f"{caller}: every response must have the field {error}, got one without") from None
    fields["cu_seqlens"] = np.zeros(len(records) + 1, np.int64)
    np.cumsum(lengths, out=fields["cu_seqlens"][1:])
    return fields


def _column(values: list[Tensor], name: str, lengths: list[int], caller: str) -> np.ndarray:
    """Join one token field of all responses, without letting torch promote a dtype."""
    dtype = TOKEN_FIELDS.get(name, values[0].dtype)
    if any(value.dtype is not dtype for value in values):
        raise TypeError(f"{caller}: {name} must have dtype {dtype}, got {[value.dtype for value in values]}")
    if list(map(torch.numel, values)) != lengths:
        raise ValueError(f"{caller}: {name} must have {lengths} tokens, got {list(map(torch.numel, values))}")
    column = torch.cat(values)
    if column.ndim != 1:
        raise ValueError(f"{caller}: {name} must have shape [T], got {tuple(values[0].shape)}")
    return column.detach().cpu().numpy()


def _numbers(table: list[list[Any]], names: Sequence[str], kinds: str, caller: str) -> dict[str, np.ndarray]:
    """Turn row fields, one line of the table a response, into arrays."""
    for name, value in zip(names, table[0], strict=True):
        if isinstance(value, Tensor) and (value.dtype is not ROW_FIELDS[name] or value.ndim):
            raise TypeError(f"{caller}: {name} must be a {ROW_FIELDS[name]} number, got {value!r:.80}")
    numbers = np.array(table)
    if numbers.dtype.kind not in kinds or numbers.ndim != 2:
        raise TypeError(f"{caller}: {', '.join(names)} must be numbers of kind {kinds}, got {table[0]}")
    columns = {}
    for name, column in zip(names, numbers.T, strict=True):
        columns[name] = column.astype(_NUMPY_DTYPES[name])
        if name in _NARROW and np.count_nonzero(columns[name] != column):
            raise ValueError(f"{caller}: {name} must fit {ROW_FIELDS[name]}, got {column.tolist()}")
    return columns


def _batch(fields: dict[str, Any]) -> PackedBatch:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(fields[name]) for name in (*TOKEN_FIELDS, *ROW_FIELDS, "digest")
    }
    extras = {name: torch.from_numpy(column) for name, column in fields["extras"].items()}
    return PackedBatch(
        **tensors,
        cu_seqlens=offsets(np.diff(fields["cu_seqlens"])),
        extras=TensorDict(cast(Any, extras), batch_size=[len(fields["token_ids"])]) if extras else None,
    )


def unpack(batch: PackedBatch) -> list[Rollout]:
    """Take a batch apart; every response is checked again and owns its memory.

    Args:
        batch: B responses. Extras, which no `Rollout` holds, stay behind.

    Returns:
        B records, in order.

    Raises:
        ValueError: if a value or a digest does not hold.
    """
    fields: dict[str, Any] = dict(batch.items())
    rollouts = []
    for row, (start, stop) in enumerate(pairwise(fields["cu_seqlens"].tolist())):
        record: dict[str, Any] = {name: fields[name][start:stop].clone() for name in TOKEN_FIELDS}
        record |= {name: fields[name][row].clone() for name in (*ROW_FIELDS, "digest")}
        rollouts.append(Rollout(**record))
    return rollouts


def validate(batch: PackedBatch, *, caller: str = "validate") -> PackedBatch:
    """Hold a batch against every rule of `Rollout`, digest included.

    Args:
        batch: B responses, on any device.
        caller: the name that a message begins with.

    Returns:
        The batch itself.

    Raises:
        ValueError: naming the field, the uid and the token of the first violation.
    """
    fields: dict[str, Any] = dict(batch.items())
    check_packed(fields)
    check_rows(
        {name: fields[name].cpu().contiguous().numpy() for name in TOKEN_FIELDS},
        {name: fields[name].cpu().contiguous().numpy() for name in (*ROW_FIELDS, "digest")},
        fields["cu_seqlens"].cpu().numpy().astype(np.int64),
        caller=caller,
    )
    return batch


def digests_match(batch: PackedBatch) -> np.ndarray:
    """Recompute every digest: bool ``[B]``, False where evidence changed since the response was drawn."""
    columns = [batch.get(name).cpu().contiguous().numpy() for name in PROVENANCE_FIELDS]
    bounds = batch.cu_seqlens.tolist()
    return (digest_rows(columns, bounds[:-1], bounds[1:]) == batch.digest.cpu().numpy()).all(1)


def offsets(lengths: Sequence[int] | np.ndarray) -> Tensor:
    """Turn B lengths into B + 1 offsets: int32, or int64 where int32 is too small."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return torch.from_numpy(bounds if bounds[-1] > _INT32_MAX else bounds.astype(np.int32))


def check_packed(fields: dict[str, Any]) -> None:
    """Check dtypes, shapes and offsets of a packed batch."""
    num_tokens = _leading(fields.get("token_ids"))
    num_rows = _leading(fields.get("uid"))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_FIELDS, (num_tokens,))
    shapes |= dict.fromkeys(ROW_FIELDS, (num_rows,))
    shapes["digest"] = (num_rows, 2)
    check_layout(fields, shapes, caller="PackedBatch")
    cu_seqlens = fields.get("cu_seqlens")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"PackedBatch: cu_seqlens must be an int32 or int64 tensor, got {cu_seqlens!r:.80}")
    if cu_seqlens.shape != (num_rows + 1,):
        raise ValueError(
            f"PackedBatch: cu_seqlens must have shape {(num_rows + 1,)}, got {tuple(cu_seqlens.shape)}"
        )
    bounds = cu_seqlens.cpu().numpy()
    if num_rows == 0 or bounds[0] != 0 or bounds[-1] != num_tokens or (bounds[1:] <= bounds[:-1]).any():
        raise ValueError(
            f"PackedBatch: cu_seqlens must rise strictly from 0 to {num_tokens} in at least one step, "
            f"got {bounds[:8].tolist()} ... {bounds[-3:].tolist()}"
        )
    extras = fields.get("extras")
    if extras is not None:
        for name, value in extras.items():
            if name in DTYPES or value.shape != (num_tokens,):
                raise ValueError(
                    f"PackedBatch: extras must be new names of shape {(num_tokens,)}, "
                    f"got {name!r} of shape {tuple(value.shape)}"
                )


def _leading(value: Any) -> int:
    """The length of a tensor; 0 for what is none, which `check_layout` then names."""
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else 0
