"""What the plugin refuses: options and modules of vLLM under which the bits would not be the trainer's."""

import pytest
from torch import nn

from tests.vllm.conftest import tiny
from tests.vllm.real import pytestmark  # noqa: F401


@pytest.fixture
def config(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    tiny().save_pretrained(tmp_path)
    return EngineArgs(
        model=str(tmp_path), dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()


OPTIONS = {
    "enforce_eager": ("compilation_config", "mode", 3),
    "world_size": ("parallel_config", "world_size", 2),
    "quantization": ("model_config", "quantization", "fp8"),
    "lora_config": ("", "lora_config", object()),
    "speculative_config": ("", "speculative_config", object()),
    "kv_transfer_config": ("", "kv_transfer_config", object()),
    "kv_cache_dtype": ("cache_config", "cache_dtype", "fp8"),
}


def test_options_are_refused_by_their_name(config, monkeypatch):
    from rzero.kernels.vllm_checks import refuse_unsupported_config

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    refuse_unsupported_config(config)
    for name, (part, attribute, value) in OPTIONS.items():
        owner = getattr(config, part) if part else config
        before = getattr(owner, attribute)
        object.__setattr__(owner, attribute, value)
        with pytest.raises(ValueError, match=rf"align_vllm: {name} must be"):
            refuse_unsupported_config(config)
        object.__setattr__(owner, attribute, before)
    config.model_config.hf_config.head_dtype = "bfloat16"
    with pytest.raises(ValueError, match=r"head_dtype must be torch.float32, got torch.bfloat16"):
        refuse_unsupported_config(config)
    config.model_config.hf_config.head_dtype = "float32"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER\) must be False, got True"):
        refuse_unsupported_config(config)


def test_modules_are_refused_by_their_name(config):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from rzero.kernels.vllm_checks import refuse_unsupported_model

    def rotary(**changes):
        import torch

        fields = {"head_size": 32, "rotary_dim": 32, "max_position_embeddings": 64, "base": 1e4}
        fields |= {"is_neox_style": True, "dtype": torch.float32}
        return RotaryEmbedding(**{**fields, **changes})

    with set_current_vllm_config(config):
        good = [SiluAndMul(), RMSNorm(64), LogitsProcessor(103), rotary()]
        bad = [
            LogitsProcessor(103, soft_cap=30.0),
            LogitsProcessor(103, scale=0.5),
            RMSNorm(64, has_weight=False),
            RMSNorm(64, var_hidden_size=32),
            rotary(rotary_dim=16),
            rotary(is_neox_style=False),
            nn.Linear(2, 2),
        ]
    counted = {"SiluAndMul": 1, "RMSNorm": 1, "rotary embedding": 1}
    assert refuse_unsupported_model(nn.ModuleList(good)) == counted
    for module in bad:
        with pytest.raises(TypeError, match=rf"got {type(module).__name__} at '4'"):
            refuse_unsupported_model(nn.ModuleList([*good, module]))


@pytest.mark.parametrize(
    "option",
    [{"alibi_slopes": [1.0]}, {"sliding_window": 4}, {"logits_soft_cap": 30.0}, {"attn_type": "encoder"}],
)
def test_attention_of_another_kind_is_refused(option):
    from rzero.kernels.vllm_attention import PagedAttention

    with pytest.raises(TypeError, match=rf"align_vllm: attention with {next(iter(option))} is not supported"):
        PagedAttention(2, 32, 1.0, 1, **option)


def test_a_truncated_distribution_is_refused():
    import torch

    from rzero.kernels.vllm_layers import sampler_forward

    forward = sampler_forward(lambda *_: pytest.fail("nothing must be drawn"))
    for k, p in [(torch.tensor([5]), None), (None, torch.tensor([0.9]))]:
        with pytest.raises(ValueError, match="top_k and top_p must be off"):
            forward(None, torch.zeros(1, 7), {}, k, p)
