"""The 128-bit fingerprint that ties a token, its probability and its weight version together."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

if sys.byteorder != "little":  # The digest is defined over little-endian bytes.
    raise ImportError("rzero.buffers: provenance digests need a little-endian machine")

PROVENANCE_FIELDS = {
    "token_ids": torch.int32,
    "behavior_log_probs": torch.float32,
    "policy_version": torch.int32,
}
"""The write-once token fields, in the order in which the digest reads them."""


def provenance_digest(token_ids: Tensor, behavior_log_probs: Tensor, policy_version: Tensor) -> Tensor:
    """Fingerprint one response where it was drawn, before its reward exists.

    The XXH3 hash of 128 bits, without a key, of the little-endian bytes of ``token_ids`` (int32), then
    ``behavior_log_probs`` (float32), then ``policy_version`` (int32). A shift, a pad, a re-tokenised text, an
    overwritten probability or another version changes it. It guards against accidents, not against an
    adversary, who could hash what he forged; so it is the hash that costs less than the copy it checks.

    Args:
        token_ids: int32 ``[T]``, prompt included.
        behavior_log_probs: float32 ``[T]``, nats; NaN wherever nothing was sampled.
        policy_version: int32 ``[T]``; -1 wherever nothing was sampled.

    Returns:
        int64 ``[2]``: the 16 bytes of the canonical form as two little-endian words.

    Raises:
        TypeError: if a dtype differs; nothing is cast, because a cast would hash other bytes than were drawn.
        ValueError: if the three are not one-dimensional tensors of one length.

    Reference:
        Y. Collet, XXH3_128bits, in the xxHash specification.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([5, 7, 9], dtype=torch.int32)
        >>> log_probs = torch.tensor([float("nan"), -0.5, -1.25])
        >>> version = torch.tensor([-1, 3, 4], dtype=torch.int32)
        >>> provenance_digest(tokens, log_probs, version).shape
        torch.Size([2])
    """
    fields = zip(PROVENANCE_FIELDS.items(), (token_ids, behavior_log_probs, policy_version), strict=True)
    arrays = []
    for (name, dtype), value in fields:
        if value.dtype != dtype:
            raise TypeError(f"provenance_digest: {name} must have dtype {dtype}, got {value.dtype}")
        if value.shape != token_ids.shape or value.ndim != 1:
            raise ValueError(
                f"provenance_digest: {name} must have shape [T] like token_ids, got {tuple(value.shape)} "
                f"beside {tuple(token_ids.shape)}"
            )
        arrays.append(value.detach().cpu().contiguous().numpy())
    return torch.from_numpy(digest_rows(arrays, [0], [token_ids.shape[0]])[0])


def digest_rows(arrays: Sequence[np.ndarray], starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
    """Fingerprint many responses that lie in flat arrays.

    Args:
        arrays: the contiguous columns ``[N]`` in the order of `PROVENANCE_FIELDS`.
        starts: first token of each response.
        stops: one past the last token of each response.

    Returns:
        int64 ``[B, 2]``.
    """
    tokens, log_probs, versions = (array.data for array in arrays)
    out = bytearray()
    for start, stop in zip(starts, stops, strict=True):
        state = xxhash.xxh3_128(tokens[start:stop])
        state.update(log_probs[start:stop])
        state.update(versions[start:stop])
        out += state.digest()
    return np.frombuffer(out, dtype=np.int64).reshape(-1, 2)
