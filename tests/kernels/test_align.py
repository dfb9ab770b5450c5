"""align puts the kernels under a model and takes them away again, and refuses what it does not know."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from rzero.kernels import align, kernel_fingerprint
from rzero.kernels.exact import weights
from tests.kernels.bits import differing
from tests.kernels.models import batch, make, padded, with_cache


def test_hooks_still_run_and_change_no_bit():
    model = make("llama")
    ids, lengths = batch(8, 3, 10)
    seen = []
    with align(model), torch.no_grad():
        whole = padded(model, ids, lengths)
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
        assert differing(padded(model, ids, lengths), whole) == 0
    expected = {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    assert expected - set(seen) == {f"model.layers.{i}.mlp.act_fn" for i in range(2)}


def test_nothing_of_the_model_changes_and_undo_restores(tmp_path):
    model = make("llama", tie_word_embeddings=True)
    ids, lengths = batch(10, 3, 10)
    names = [name for name, _ in model.named_parameters()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        native = padded(model, ids, lengths)
        handle = align(model)
        assert handle.fingerprint == kernel_fingerprint()
        ours = padded(model, ids, lengths)
        assert differing(ours, native) > 0
        assert [name for name, _ in model.named_parameters()] == names
        assert set(model.state_dict()) == set(state)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation == "sdpa"
        assert differing(padded(loaded, ids, lengths), native) == 0
        handle.undo()
        handle.undo()
        assert differing(padded(model, ids, lengths), native) == 0
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_alignments_nest_and_survive_exceptions():
    model = make("llama")
    ids, lengths = batch(11, 2, 6)
    with torch.no_grad():
        native = padded(model, ids, lengths)
        outer = align(model)
        ours = padded(model, ids, lengths)
        with pytest.raises(ZeroDivisionError), align(model), align(model.model):
            assert differing(padded(model, ids, lengths), ours) == 0
            raise ZeroDivisionError
        assert differing(padded(model, ids, lengths), ours) == 0
        inner = align(model)
        outer.undo()
        assert differing(padded(model, ids, lengths), ours) == 0
        inner.undo()
        assert differing(padded(model, ids, lengths), native) == 0


def test_models_that_share_a_configuration():
    first, second = make("llama"), make("llama", seed=1)
    second.config = second.model.config = first.config
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    ids, lengths = batch(12, 2, 8)
    with torch.no_grad():
        one = align(first)
        alone = padded(first, ids, lengths)
        other = align(second)
        one.undo()
        assert first.config._attn_implementation == "rzero"
        other.undo()
        assert first.config._attn_implementation == "sdpa"
        with align(first):
            assert differing(padded(first, ids, lengths), alone) == 0


def test_a_deep_copy_is_aligned_and_independent():
    model = make("llama")
    ids, lengths = batch(13, 2, 8)
    with align(model), torch.no_grad():
        ours = padded(model, ids, lengths)
        twin = copy.deepcopy(model)
        assert differing(padded(twin, ids, lengths), ours) == 0
        twin.model.norm.weight.mul_(2.0)
        assert differing(padded(model, ids, lengths), ours) == 0


def test_rounded_weights_go_with_the_model():
    gc.collect()
    before = len(weights._entries)
    model = make("llama")
    ids, lengths = batch(14, 2, 8)
    with align(model), torch.no_grad():
        padded(model, ids, lengths)
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not model.model.embed_tokens.weight]
    held = {id(entry): weakref.ref(entry.rounded) for entry, *_ in map(weights._entries.get, matrices)}
    assert sum(ref().untyped_storage().nbytes() for ref in held.values()) == 8 * sum(
        p.numel() for p in matrices
    )
    del model, matrices
    gc.collect()
    assert all(ref() is None for ref in held.values()) and len(weights._entries) == before


class LoraLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def replace_linear(model):
    model.model.layers[1].self_attn.v_proj = LoraLinear(32, 16, bias=False)


def replace_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def replace_norm(model):
    model.model.norm = nn.RMSNorm(32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_linear, r"got LoraLinear at 'model.layers.1.self_attn.v_proj'"),
        (replace_activation, r"got GELU at 'model.layers.0.mlp.act_fn'"),
        (replace_norm, r"got RMSNorm at 'model.norm'"),
    ],
)
def test_an_unsupported_module_is_named_and_nothing_changes(change, message):
    model = make("llama")
    change(model)
    with pytest.raises(TypeError, match=message):
        align(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_unsupported_models_and_uses_are_refused():
    with pytest.raises(TypeError, match=r"got GPT2LMHeadModel at the root$"):
        align(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
        )
    dynamic = make("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(TypeError, match=r"rope_type must be one of .*, got 'dynamic' at 'model.rotary_emb'"):
        align(dynamic)
    model = make("llama", attention_dropout=0.1)
    ids, lengths = batch(15, 2, 5)
    with align(model):
        with pytest.raises(ValueError, match=r"attention dropout must be 0, got 0.1"):
            padded(model.train(), ids, lengths)
        model.eval()
        with pytest.raises(
            TypeError, match=r"a 4D attention_mask must have dtype torch.bool, got torch.float32"
        ):
            model(input_ids=ids, attention_mask=torch.zeros(2, 1, 5, 5))
        model.config._attn_implementation = "sdpa"
        with pytest.raises(
            RuntimeError, match=r"_attn_implementation must stay 'rzero' until undo\(\), got 'sdpa'"
        ):
            padded(model, ids, lengths)
        model.config._attn_implementation = "rzero"


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}]
)
def test_fixed_rope_scalings_agree_with_transformers(rope):
    model = make("llama", rope_parameters={"rope_theta": 1e4, **rope})
    ids, lengths = batch(16, 2, 30)
    with torch.no_grad():
        native = padded(model, ids, lengths)
        with align(model):
            assert torch.allclose(padded(model, ids, lengths), native, atol=1e-4)
            whole = padded(model, ids, torch.full((2,), 30))
            assert differing(with_cache(model, ids, [1, 2, 29, 30], DynamicCache()), whole) == 0


def test_sliding_windows():
    model = make("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert "sliding_attention" in model.config.layer_types
    ids, _ = batch(17, 3, 25)
    with torch.no_grad():
        native = padded(model, ids, torch.full((3,), 25))
        with align(model):
            whole = padded(model, ids, torch.full((3,), 25))
            assert torch.allclose(whole, native, atol=1e-4)
            assert (
                differing(
                    with_cache(model, ids, [4, *range(5, 26)], DynamicCache(config=model.config)), whole
                )
                == 0
            )
