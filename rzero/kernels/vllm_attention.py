"""Attention over vLLM's paged cache by our ``attention_paged``, for all requests of a step at once.

Imports vLLM; ``align_vllm`` has vLLM choose ``PagedBackend`` for every attention layer.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from rzero.kernels.dispatch import attention_paged, round_kv


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests that are attended together: those with one new token each, or those with more.

    Attributes:
        tokens: Where their new tokens stand in the step.
        page_table: int [B, W].
        cu_seqlens_q: int [B + 1].
        seqlens_k: int [B].
    """

    tokens: slice
    page_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor


@dataclass(frozen=True, kw_only=True)
class PagedMetadata(AttentionMetadata):
    """What all attention layers of a step share.

    Attributes:
        num_actual_tokens: New tokens of the step, without padding.
        page: int [T], the page that each new token's key and value go to.
        place: int [T], the place in it.
        parts: The requests, split so that padding to the longest query costs little.
    """

    num_actual_tokens: int
    page: Tensor
    place: Tensor
    parts: tuple[Requests, ...]


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes ``PagedMetadata`` once a step."""

    reorder_batch_threshold = 1  # requests with one new token come first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """From what vLLM says about the step."""
        common = common_attn_metadata
        starts, total = common.query_start_loc_cpu[: common.num_reqs + 1], common.num_actual_tokens
        decoding = int((starts.diff() <= 1).long().cumprod(0).sum())
        bounds = [(0, decoding), (decoding, common.num_reqs)]
        slots = common.slot_mapping[:total]
        return PagedMetadata(
            num_actual_tokens=total,
            page=slots // self.block_size,
            place=slots % self.block_size,
            parts=tuple(_requests(common, starts, first, last) for first, last in bounds if first < last),
        )


def _requests(common: CommonAttentionMetadata, starts: Tensor, first: int, last: int) -> Requests:
    offset = int(starts[first])
    return Requests(
        tokens=slice(offset, int(starts[last])),
        page_table=common.block_table_tensor[first:last],
        cu_seqlens_q=common.query_start_loc[first : last + 1] - offset,
        seqlens_k=common.seq_lens[first:last],
    )


class PagedAttention(AttentionImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
        }
        for name, value in unsupported.items():
            if value:
                raise TypeError(f"align_vllm: attention with {name} is not supported, got {value!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            layer: Not used.
            query: [T, H, D], padding included.
            key: [T, G, D].
            value: [T, G, D].
            kv_cache: [P, G, S, 2 D], values behind keys.
            attn_metadata: None while vLLM measures memory.
            output: [T, H, D], written to.
            output_scale: Not supported.
            output_block_scale: Not supported.
        """
        if output_scale is not None or output_block_scale is not None:
            raise TypeError("align_vllm: attention with quantised output is not supported")
        if attn_metadata is None:
            return output.zero_()
        meta, total = attn_metadata, attn_metadata.num_actual_tokens
        rounded = round_kv(torch.stack([key[:total], value[:total]], dim=2))
        kv_cache[meta.page, :, meta.place] = rounded.flatten(2)
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        for part in meta.parts:
            output[part.tokens] = attention_paged(
                query[part.tokens],
                keys,
                values,
                page_table=part.page_table,
                cu_seqlens_q=part.cu_seqlens_q,
                seqlens_k=part.seqlens_k,
                scale=self.scale,
                rounded_kv=True,
            )
        return output


class PagedBackend(AttentionBackend):
    """What vLLM asks about before it makes the layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """What vLLM calls backends that it does not bring."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        """The layer."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """What a step's layers share."""
        return PagedMetadataBuilder
