"""What runs inside vLLM's workers: loading weights from shared memory, and reading back what computes.

Imports vLLM. ``VLLMEngine`` names ``WorkerExtension`` to vLLM, whose workers then inherit from it; results
and arguments are plain strings, numbers and lists, which vLLM serialises safely.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rzero.collectors.engine import EngineError
from rzero.collectors.hashing import tensor_digest
from rzero.collectors.vllm_rpc import answering


class WorkerExtension:
    """Methods for ``collective_rpc``, by name."""

    model_runner: Any
    reload_weights: Any
    device: Any
    _rzero_old: Mapping[str, Tensor]

    @answering
    def rzero_prepare(self) -> dict[str, str]:
        """Get ready for seeded requests, and say what computes here: ``device`` and ``kernels``."""
        if torch.device(self.device).type == "cpu":
            keep_seeds_of_partial_prompts(self.model_runner)
        kernels = getattr(self.model_runner.get_model(), "rzero_kernels", "")
        return {"device": torch.device(self.device).type, "kernels": kernels}

    @answering
    def rzero_check(self, path: str, digests: dict[str, int]) -> None:
        """Check the weights of a file before they are loaded, and put the old ones aside.

        Args:
            path: A file of safetensors in shared memory.
            digests: Of the weights as the learner holds them, by name.

        Raises:
            EngineError: If names, shapes or dtypes are not the model's, or the file has other digests.
        """
        held = held_weights(self.model_runner.get_model())
        old = {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
        _refuse_other_weights(_read(path), old, digests)
        self._rzero_old = old

    @answering
    def rzero_load(self, path: str) -> None:
        """Load weights that ``rzero_check`` let pass."""
        self._rzero_reload(_read(path))

    @answering
    def rzero_compare(self, digests: dict[str, int]) -> None:
        """Compare what this worker, with its share of all others, computes with.

        Raises:
            EngineError: If a tensor has another digest.
        """
        wrong = _differing(held_weights(self.model_runner.get_model()), digests)
        if wrong:
            raise EngineError(
                f"VLLMEngine.swap: {len(wrong)} of {len(digests)} tensors differ from the learner's "
                f"after loading, first {wrong[0]}; the old weights were restored"
            )

    @answering
    def rzero_end(self, restore: bool) -> None:
        """Give up the old weights, or load them again."""
        old, self._rzero_old = self._rzero_old, {}
        if restore:
            self._rzero_reload(old)

    def _rzero_reload(self, weights: Mapping[str, Tensor]) -> None:
        model = self.model_runner.get_model()
        self.reload_weights(weights_iterator=list(weights.items()))
        _repack_tied_heads(model)
        model.__dict__["rzero_negative_zeros"] = {
            name: negative
            for name, tensor in weights.items()
            if bool((negative := (tensor == 0) & tensor.signbit()).any())
        }

    @answering
    def rzero_digests(self) -> dict[str, int]:
        """One 64-bit digest per tensor, by the learner's names, of the weights that compute."""
        held = held_weights(self.model_runner.get_model())
        return {name: tensor_digest(tensor) for name, tensor in held.items()}


def _read(path: str) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def held_weights(model: Any) -> dict[str, Tensor]:
    """The weights of vLLM's model under the names and in the shapes that they have in a checkpoint.

    Merged projections are taken apart, the padding of the vocabulary is left out, tied weights appear once,
    a weight that vLLM has repacked is read back by multiplying the unit matrix with it, and the shards of
    tensor-parallel workers, who must all call this, are put together.

    Raises:
        EngineError: If a tied head computes with other weights than the embedding.
    """
    held: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            tensor = _computing(module) if parameter_name == "weight" else parameter.detach()
            if isinstance(module, VocabParallelEmbedding):
                tensor = _whole(tensor, 0)[: module.org_vocab_size]
            first = seen.setdefault(id(parameter), module_name)
            if first != module_name:
                if not torch.equal(tensor, held[f"{first}.{parameter_name}"]):
                    raise EngineError(f"VLLMEngine: {module_name} must compute with the weights of {first}")
                continue
            held |= _taken_apart(model, module_name, module, parameter_name, tensor)
    for name, negative in model.__dict__.get("rzero_negative_zeros", {}).items():
        lost = negative.to(held[name].device) & (held[name] == 0)  # the product loses the sign
        held[name] = torch.where(lost, -0.0, held[name])
    return held


def _taken_apart(
    model: Any, name: str, module: Any, parameter_name: str, tensor: Tensor
) -> dict[str, Tensor]:
    parent, _, leaf = name.rpartition(".")
    parts = model.packed_modules_mapping.get(leaf)
    if parts is None:
        sharded = isinstance(module, RowParallelLinear) and parameter_name == "weight"
        return {f"{name}.{parameter_name}": _whole(tensor, 1) if sharded else tensor}
    copies = [1, *[getattr(module, "num_kv_head_replicas", 1)] * (len(parts) - 1)]
    rows = tensor.split(module.output_partition_sizes)
    return {
        f"{parent}.{part}.{parameter_name}": _whole(own, 0, copies=count)
        for part, own, count in zip(parts, rows, copies, strict=True)
    }


def _whole(shard: Tensor, dimension: int, *, copies: int = 1) -> Tensor:
    """What all workers of a tensor-parallel group hold together.

    Each shard is in ``copies`` of them; a worker takes the set with its own copy, so that together they see
    every copy.
    """
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return shard
    shards = tensor_model_parallel_all_gather(shard.contiguous(), dimension).chunk(size, dimension)
    return torch.cat(shards[get_tensor_model_parallel_rank() % copies :: copies], dimension)


def _computing(module: Any) -> Tensor:
    """The weight [N, K] that a layer computes with, also if vLLM keeps it only in a packed form."""
    weight = module.weight.detach()
    if not hasattr(module, "cpu_linear"):
        return weight
    columns = (
        module.embedding_dim
        if isinstance(module, VocabParallelEmbedding)
        else module.input_size_per_partition
    )
    unit = torch.eye(columns, dtype=weight.dtype)
    return module.quant_method.apply(module, unit).t().contiguous()


def _repack_tied_heads(model: Any) -> None:
    """A head that shares the embedding's parameter keeps its old packed copy when vLLM reloads on a CPU."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _refuse_other_weights(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], digests: Mapping[str, int]
) -> None:
    if new.keys() != old.keys() or new.keys() != digests.keys():
        odd = sorted((new.keys() ^ old.keys()) | (new.keys() ^ digests.keys()))
        raise EngineError(
            f"VLLMEngine.swap: weights must name exactly the model's tensors, differing in {odd[:5]}"
        )
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise EngineError(
                f"VLLMEngine.swap: {name} must be {old[name].dtype} {tuple(old[name].shape)}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
    wrong = _differing(new, digests)
    if wrong:
        raise EngineError(
            f"VLLMEngine.swap: {len(wrong)} of {len(digests)} tensors differ from the learner's on arrival, "
            f"first {wrong[0]}; the old weights were kept"
        )


def _differing(weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> list[str]:
    return [name for name, tensor in weights.items() if tensor_digest(tensor) != digests[name]]


def keep_seeds_of_partial_prompts(runner: Any) -> None:
    """Let vLLM's CPU runner take chunked prompts with seeds.

    A step over a part of a prompt draws a token that is thrown away, and vLLM then sets the request's
    generator back by an offset, which generators on a CPU do not have: it raises. Such requests draw from
    the common generator instead, so that their own stays where it was.
    """
    original = runner.sample_tokens

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        partial = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        kept = {index: generators.pop(index) for index in partial if index in generators}
        try:
            return original(*args, **kwargs)
        finally:
            generators.update(kept)

    runner.sample_tokens = MethodType(sample_tokens, runner)
