"""align: a token's logits have one value in every layout, cache and batch; and it can be taken away again."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache, StaticCache

from rzero.kernels import align, huggingface, kernel_fingerprint, linear_log_probs, log_softmax
from rzero.kernels.exact import weights
from tests.kernels.bits import differing
from tests.kernels.models import VOCABULARY, batch, make, padded, real, with_cache

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture(params=[(f, d) for f in FAMILIES for d in (torch.float32, torch.bfloat16)], ids=str)
def aligned(request):
    family, dtype = request.param
    model = make(family, dtype=dtype)
    with align(model), torch.no_grad():
        yield model


def test_decode_token_by_token(aligned):
    ids, _ = batch(0, 5, 23)
    whole = padded(aligned, ids, torch.full((5,), 23))
    assert differing(with_cache(aligned, ids, list(range(1, 24)), DynamicCache()), whole) == 0


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 60), st.data())
@settings(max_examples=15, deadline=None)
def test_any_cut_of_prefill_and_decode_in_any_cache(seed, rows, length, data):
    model = make("llama", seed=seed)
    ids, _ = batch(seed, rows, length)
    cuts = sorted({*data.draw(st.lists(st.integers(1, length - 1), max_size=5)), length})
    with align(model), torch.no_grad():
        whole = padded(model, ids, torch.full((rows,), length))
        assert differing(with_cache(model, ids, cuts, DynamicCache()), whole) == 0
        static = StaticCache(model.config, max_cache_len=length + 7)
        assert differing(with_cache(model, ids, cuts, static), whole) == 0


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_any_batch_order_and_padding(seed, rows, length):
    model = make("qwen3", seed=seed)
    ids, lengths = batch(seed, rows, length)
    kept = real(lengths, length)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    with align(model), torch.no_grad():
        whole = padded(model, ids, lengths)
        assert (
            differing(padded(model, ids[order], lengths[order])[kept[order]], whole[order][kept[order]]) == 0
        )
        n = int(lengths[-1])
        assert differing(model(input_ids=ids[-1:, :n], use_cache=False).logits[0], whole[-1, :n]) == 0
        other = torch.where(kept, ids, (ids + 1) % VOCABULARY)
        longer = torch.cat([other, other], 1)
        assert differing(padded(model, longer, lengths)[:, :length][kept], whole[kept]) == 0
        left = torch.stack([row.roll(length - int(n)) for row, n in zip(ids, lengths, strict=True)])
        mask = kept.flip(1).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        shifted = model(input_ids=left, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert differing(shifted[kept.flip(1)], whole[kept]) == 0


def test_packed_sequences(aligned):
    ids, lengths = batch(2, 6, 19)
    kept = real(lengths, 19)
    whole = padded(aligned, ids, lengths)[kept]
    positions = torch.arange(19).expand(6, 19)[kept][None]
    cuts = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    packed = aligned(
        input_ids=ids[kept][None],
        position_ids=positions,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        cu_seq_lens_q=cuts,
        cu_seq_lens_k=cuts,
        use_cache=False,
    ).logits[0]
    assert differing(packed, whole) == 0
    found = aligned(input_ids=ids[kept][None], position_ids=positions, use_cache=False).logits[0]
    assert differing(found, whole) == 0  # transformers finds the sequences by their positions


def test_slots_of_continuous_batching(aligned):
    """4D bool masks, positions per row, and a cache that returns padded keys: as an engine decodes."""
    ids, lengths = batch(3, 4, 15)
    whole = padded(aligned, ids, torch.full((4,), 15))
    caches = [DynamicCache() for _ in range(4)]
    for cache, row, n in zip(caches, ids, lengths, strict=True):
        aligned(input_ids=row[None, :n], past_key_values=cache, use_cache=True)

    class Slots:
        """Keys and values [slots, heads, Tmax, D] with garbage where a slot holds nothing."""

        def __init__(self):
            shape = list(caches[0].layers[0].keys.shape)
            self.keys, self.values = (
                [torch.full((4, shape[1], 20, shape[3]), fill, dtype=aligned.dtype) for _ in caches[0].layers]
                for fill in (float("nan"), 1e30)
            )
            for slot, cache in enumerate(caches):
                for layer, held in enumerate(cache.layers):
                    self.keys[layer][slot, :, : lengths[slot]] = held.keys[0]
                    self.values[layer][slot, :, : lengths[slot]] = held.values[0]
            self.at = lengths.clone()

        def get_seq_length(self, layer_idx=0):
            return 20

        def update(self, keys, values, layer_idx):
            for held, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
                held[torch.arange(4), :, self.at] = new[:, :, 0]
            return self.keys[layer_idx], self.values[layer_idx]

    slots = Slots()
    for _ in range(5):
        at = slots.at.clamp(max=14)
        visible = (torch.arange(20) <= slots.at[:, None])[:, None, None]
        logits = aligned(
            input_ids=ids[torch.arange(4), at][:, None],
            attention_mask=visible,
            position_ids=slots.at[:, None],
            past_key_values=slots,
            use_cache=True,
        ).logits
        inside = slots.at < 15
        assert differing(logits[inside, 0], whole[torch.arange(4), at][inside]) == 0
        slots.at = (slots.at + 1).clamp(max=19)


def sampled_tokens_that_differ(model, *, rows: int, length: int, seed: int) -> tuple[int, int]:
    """Sample with a cache at temperature 0.8, score with one forward: tokens that differ, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, VOCABULARY, (rows, 3), generator=generator)
    cache, ids, recorded = DynamicCache(), prompts, []
    step = prompts
    for _ in range(length):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        scores = log_softmax(logits.float() / 0.8)
        step = torch.multinomial(scores.exp(), 1, generator=generator)
        recorded.append(scores.gather(1, step))
        ids = torch.cat([ids, step], 1)
    hidden = model.model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1])).last_hidden_state
    scored, _ = linear_log_probs(hidden[:, 2:], model.lm_head.weight, ids[:, 3:], temperature=0.8)
    return differing(scored, torch.cat(recorded, 1)), rows * length


def test_ten_thousand_sampled_tokens():
    model = make("llama")
    with align(model), torch.no_grad():
        assert sampled_tokens_that_differ(model, rows=128, length=80, seed=0) == (0, 10240)
    with torch.no_grad():  # the negative control: torch's own kernels under the same comparison
        assert sampled_tokens_that_differ(model, rows=32, length=20, seed=0)[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_million_sampled_tokens(family):
    model, differ, total = make(family), 0, 0
    with align(model), torch.no_grad():
        for seed in range(14):
            more = sampled_tokens_that_differ(model, rows=256, length=94 + seed, seed=seed)
            differ, total = differ + more[0], total + more[1]
    assert differ == 0 and total > 340_000  # three families: more than a million


@pytest.mark.parametrize("op", ["linear", "linear_joined", "gated_mlp", "attention"])
def test_one_op_of_torchs_own_shows(monkeypatch, op):
    """The negative control of each op whose native form varies: decode no longer equals prefill."""
    native = nn.functional
    own = {
        "linear": lambda x, w, b=None: native.linear(x, w, b),
        "linear_joined": lambda x, ws, bs: torch.cat([native.linear(x, w) for w in ws], -1),
        "gated_mlp": lambda x, g, u, d: native.linear(
            native.silu(native.linear(x, g)) * native.linear(x, u), d
        ),
        "attention": lambda q, k, v, *, scale, mask, rounded_kv: native.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, scale=scale, enable_gqa=True
        ),
    }
    model = make("llama")
    monkeypatch.setattr(huggingface, op, own[op])
    with align(model), torch.no_grad():
        assert sampled_tokens_that_differ(model, rows=3, length=60, seed=1)[0] > 0


def test_logits_are_as_accurate_as_torchs():
    for family in FAMILIES:
        model = make(family)
        ids, lengths = batch(4, 6, 30)
        kept = real(lengths, 30)
        with torch.no_grad():
            exact = padded(copy.deepcopy(model).double(), ids, lengths)[kept]
            native = padded(model, ids, lengths)[kept]
            with align(model):
                ours = padded(model, ids, lengths)[kept]
        assert float((ours - exact).norm()) < 1.5 * float((native - exact).norm())


def gradients(model, ids, lengths):
    model.zero_grad()
    scores = torch.log_softmax(padded(model, ids, lengths).float(), -1)[:, :-1]
    chosen = scores.gather(-1, ids[:, 1:, None])[..., 0]
    chosen[real(lengths, ids.shape[1])[:, 1:]].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def worst(got, want):
    return max(float((got[k].double() - want[k].double()).norm() / want[k].double().norm()) for k in want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_as_accurate_as_torchs_and_repeatable(family, tied):
    model = make(family, tie_word_embeddings=tied)
    ids, lengths = batch(5, 6, 20)
    exact = gradients(copy.deepcopy(model).double(), ids, lengths)
    native = gradients(model, ids, lengths)
    with align(model):
        ours, again = gradients(model, ids, lengths), gradients(model, ids, lengths)
    assert set(ours) == set(native) and worst(ours, exact) < 1.5 * worst(native, exact) + 1e-7
    assert all(differing(ours[k], again[k]) == 0 for k in ours)


def test_gradients_through_a_shared_prefix():
    """Keys and values of a cache carry gradients: as a learner that computes prompts once."""
    model = make("llama")
    ids, _ = batch(6, 3, 12)

    def through(cut):
        model.zero_grad()
        cache = DynamicCache() if cut else None
        start = model(input_ids=ids[:, :cut], past_key_values=cache, use_cache=True).logits if cut else None
        end = model(input_ids=ids[:, cut:], past_key_values=cache, use_cache=bool(cut)).logits
        logits = end if start is None else torch.cat([start, end], 1)
        torch.log_softmax(logits, -1).gather(-1, ids[:, :, None]).sum().backward()
        return logits, {name: p.grad.clone() for name, p in model.named_parameters()}

    with align(model):
        (whole, expected), (cached, got) = through(0), through(7)
    assert differing(whole, cached) == 0
    assert worst(got, expected) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant):
    model = make("qwen2")
    ids, lengths = batch(7, 4, 16)
    with align(model):
        plain = gradients(model.train(), ids, lengths)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        checkpointed = gradients(model, ids, lengths)
    assert all(differing(plain[k], checkpointed[k]) == 0 for k in plain)


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


@pytest.mark.parametrize("fused", [False, True])
def test_no_stale_weights_after_training_steps_and_loads(fused):
    model = make("llama")
    ids, lengths = batch(9, 2, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    with align(model):
        for _ in range(3):
            gradients(model, ids, lengths)
            optimizer.step()
            with torch.no_grad():
                twin = make("llama", seed=99)
                twin.load_state_dict(model.state_dict())
                with align(twin):
                    assert differing(padded(model, ids, lengths), padded(twin, ids, lengths)) == 0
        other = make("llama", seed=5)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        with align(other), torch.no_grad():
            assert differing(padded(model, ids, lengths), padded(other, ids, lengths)) == 0


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


def fsdp_rank(rank: int, world: int, store: str, align_first: bool) -> None:
    """Three steps of a sharded model beside an unsharded one with the same weights: equal bits each time."""
    warnings.simplefilter("error", UserWarning)
    file = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=file, rank=rank, world_size=world)
    model, plain = (make("llama", tie_word_embeddings=True) for _ in range(2))
    align(plain)
    if align_first:
        align(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if not align_first:
        align(model)
    ids, lengths = batch(18, 3, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits = padded(model, ids, lengths)
        with torch.no_grad():
            assert differing(logits, padded(plain, ids, lengths)) == 0
            # Few rows: the sharded weights are gathered anew, behind the version counter's back.
            assert differing(padded(model, ids[:1], lengths[:1]), logits[:1]) == 0
        logits.log_softmax(-1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("align_first", [True, False])
def test_a_fully_sharded_model_of_one_rank(tmp_path, align_first):
    fsdp_rank(0, 1, str(tmp_path / "store"), align_first)


@pytest.mark.slow
def test_a_fully_sharded_model_of_two_ranks(tmp_path):
    torch.multiprocessing.spawn(fsdp_rank, args=(2, str(tmp_path / "store"), True), nprocs=2)
