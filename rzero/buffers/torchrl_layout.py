"""Packed batches in the key layout of TorchRL's language-model API, and back."""

from typing import Any, Literal, cast

import torch
from einops import rearrange
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from rzero.buffers.packing import PackedBatch, offsets, validate
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, FinishCode

Layout = Literal["lazy", "jagged", "padded"]
_NO_VERSION = torch.iinfo(torch.int32).max
_EXTRAS = ("rollout", "extras")
_ATTENTION = ("masks", "all_attention_mask")


def to_torchrl(batch: PackedBatch, *, layout: Layout, pad_token_id: int = 0) -> TensorDictBase:
    """Lay a batch out as TorchRL's language-model API expects it, so that GRPOLoss and friends can read it.

    Its keys, with the shape that one response has under each:

    * ``("tokens", "prompt" | "response" | "full")`` [T]: token ids, int64
    * ``("log_probs", "response" | "full")`` [T]: behaviour log-probs, NaN where nothing was sampled
    * ``("masks", "all_attention_mask")`` [T]: True on every token, False on pads
    * ``("masks", "all_assistant_mask")`` [T]: ``response_mask``
    * ``("next", "reward" | "done" | "terminated" | "truncated")`` [1]: always done; terminated if it stopped
    * ``"policy_version"`` []: the oldest weights in the response, int64; -1 if it holds no sampled token
    * ``("rollout", "policy_version")`` [T], ``("rollout", "extras", name)`` [T], and the row fields under
      ``("rollout", name)``: what makes `from_torchrl` lossless

    Args:
        batch: B responses.
        layout: ``"lazy"``: a lazy stack of rows of their own length. ``"jagged"``: nested tensors over the
            packed memory. ``"padded"``: dense ``[B, P + R]``, prompts padded on the left and responses on the
            right, as TorchRL pads; log-probs and other floats with NaN, versions with -1.
        pad_token_id: the token id where the padded layout has no token.

    Returns:
        A TensorDict ``[B]``. Lazy and jagged fields may share the batch's memory.

    Raises:
        ValueError: for another layout.
    """
    if layout not in ("lazy", "jagged", "padded"):
        raise ValueError(f"to_torchrl: layout must be 'lazy', 'jagged' or 'padded', got {layout!r}")
    entries = {**_row_entries(batch)}
    if layout == "padded":
        return TensorDict(
            {**entries, **_padded_entries(batch, pad_token_id)}, batch_size=[batch.num_responses]
        )
    if layout == "jagged":
        for key, (values, bounds) in _ragged_entries(batch).items():
            entries[key] = torch.nested.nested_tensor_from_jagged(values, bounds)
        return TensorDict(entries, batch_size=[batch.num_responses])
    pieces: dict[Any, Any] = dict(entries)
    for key, (values, bounds) in _ragged_entries(batch).items():
        pieces[key] = values.split(bounds.diff().tolist())
    return lazy_stack(
        [TensorDict({key: value[row] for key, value in pieces.items()}) for row in range(batch.num_responses)]
    )


def from_torchrl(td: TensorDictBase) -> PackedBatch:
    """Read a batch back from any layout of `to_torchrl`.

    Nothing is invented: data without the ``"rollout"`` fields, such as TorchRL's own, is refused, because its
    log-probs are not known to be those of the distribution that was sampled from.

    Args:
        td: a TensorDict ``[B]``.

    Returns:
        The batch, every value and digest checked.

    Raises:
        ValueError: if a field is missing, or a rule of `Rollout` is broken.
    """
    keys: dict[str, Any] = {
        "token_ids": ("tokens", "full"),
        "behavior_log_probs": ("log_probs", "full"),
        "response_mask": ("masks", "all_assistant_mask"),
        "policy_version": ("rollout", "policy_version"),
    }
    rows: dict[str, Any] = {name: ("rollout", name) for name in (*ROW_FIELDS, "digest")}
    present = set(td.keys(include_nested=True, leaves_only=True))
    missing = [key for key in (*keys.values(), *rows.values()) if key not in present]
    if missing:
        raise ValueError(f"from_torchrl: td must hold every key of to_torchrl, got none for {missing}")
    extras = sorted(key[2] for key in present if isinstance(key, tuple) and key[:2] == _EXTRAS)
    columns, lengths = _flat(td, {**keys, **{f"extras.{name}": (*_EXTRAS, name) for name in extras}})
    fields: dict[str, Any] = {name: columns[name].to(dtype) for name, dtype in TOKEN_FIELDS.items()}
    fields |= {name: td.get(key).clone() for name, key in rows.items()}
    if extras:
        found = {name: columns[f"extras.{name}"] for name in extras}
        fields["extras"] = TensorDict(cast(Any, found), batch_size=[int(sum(lengths))])
    return validate(PackedBatch(cu_seqlens=offsets(lengths), **fields), caller="from_torchrl")


def _row_entries(batch: PackedBatch) -> dict[Any, Tensor]:
    """The entries with one value a response, each ``[B, ...]``."""
    sampled = torch.where(batch.response_mask, batch.policy_version, _NO_VERSION).long()
    oldest = torch.full((batch.num_responses,), _NO_VERSION, device=sampled.device)
    oldest = oldest.scatter_reduce(0, _row_of_token(batch), sampled, "amin")
    stopped = rearrange(batch.finish_code == FinishCode.STOP, "b -> b 1")
    return {
        ("next", "reward"): rearrange(batch.reward, "b -> b 1"),
        ("next", "done"): torch.ones_like(stopped),
        ("next", "terminated"): stopped,
        ("next", "truncated"): ~stopped,
        "policy_version": torch.where(oldest == _NO_VERSION, -1, oldest),
        **{("rollout", name): batch.get(name) for name in (*ROW_FIELDS, "digest")},
    }


def _token_entries(batch: PackedBatch) -> dict[Any, Tensor]:
    """The entries with one value a token ``[N]``, over prompt and response, without the attention mask."""
    extras = {} if batch.extras is None else batch.extras
    return {
        ("tokens", "full"): batch.token_ids.long(),
        ("log_probs", "full"): batch.behavior_log_probs,
        ("masks", "all_assistant_mask"): batch.response_mask,
        ("rollout", "policy_version"): batch.policy_version,
        **{(*_EXTRAS, name): value for name, value in extras.items()},
    }


def _ragged_entries(batch: PackedBatch) -> dict[Any, tuple[Tensor, Tensor]]:
    """The token entries and their parts: flat values, and the offsets of the rows."""
    lengths = batch.prompt_length.long(), batch.response_length.long()
    places = torch.arange(batch.num_tokens, device=batch.token_ids.device)
    first = (batch.cu_seqlens[:-1] + batch.prompt_length)[_row_of_token(batch)]
    in_prompt = places < first
    prompts, responses = (_offsets(length) for length in lengths)
    full = {**_token_entries(batch), _ATTENTION: torch.ones_like(batch.response_mask)}
    entries = {key: (values, batch.cu_seqlens.long()) for key, values in full.items()}
    entries["tokens", "prompt"] = full["tokens", "full"][in_prompt], prompts
    entries["tokens", "response"] = full["tokens", "full"][~in_prompt], responses
    entries["log_probs", "response"] = full["log_probs", "full"][~in_prompt], responses
    return entries


def _padded_entries(batch: PackedBatch, pad_token_id: int) -> dict[Any, Tensor]:
    """The token entries and their parts, dense ``[B, P + R]``: every prompt ends at column P."""
    prompts, responses = (rearrange(x, "b -> b 1") for x in (batch.prompt_length, batch.response_length))
    width, total = int(prompts.max()), int(prompts.max() + responses.max())
    column = torch.arange(total, device=prompts.device)
    mask = (column >= width - prompts) & (column < width + responses)
    pads = {("tokens", "full"): pad_token_id, ("rollout", "policy_version"): -1}
    entries: dict[Any, Tensor] = {_ATTENTION: mask}
    for key, values in _token_entries(batch).items():
        pad = pads.get(key, torch.nan if values.is_floating_point() else 0)
        # The mask is read row by row, which is the order in which the tokens are packed.
        entries[key] = values.new_full(mask.shape, pad).masked_scatter_(mask, values)
    entries["tokens", "prompt"] = entries["tokens", "full"][:, :width]
    entries["tokens", "response"] = entries["tokens", "full"][:, width:]
    entries["log_probs", "response"] = entries["log_probs", "full"][:, width:]
    return entries


def _flat(td: TensorDictBase, keys: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """Read token entries of any layout as flat columns, and the rows' lengths."""
    if isinstance(td, LazyStackedTensorDict):
        rows = td.unbind(0)
        pieces = {name: [row.get(key) for row in rows] for name, key in keys.items()}
        lengths = [len(piece) for piece in next(iter(pieces.values()))]
        return {name: torch.cat(piece) for name, piece in pieces.items()}, lengths
    first = td.get(next(iter(keys.values())))
    if first.is_nested:
        return {name: td.get(key).values() for name, key in keys.items()}, first.offsets().diff().tolist()
    mask = td.get(_ATTENTION)
    return {name: td.get(key)[mask] for name, key in keys.items()}, mask.sum(1).tolist()


def _row_of_token(batch: PackedBatch) -> Tensor:
    lengths = batch.cu_seqlens.diff().long()
    return torch.arange(batch.num_responses, device=lengths.device).repeat_interleave(lengths)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
