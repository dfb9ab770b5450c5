"""align: the logits of a token have one value in every layout, cache and batch, whatever the family."""

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from rzero.kernels import align, huggingface, linear_log_probs, log_softmax
from tests.kernels.bits import differing
from tests.kernels.models import VOCABULARY, batch, make, padded, real, with_cache

FAMILIES = ["llama", "qwen2", "qwen3"]
DTYPES = [torch.float32, torch.bfloat16]


# Each layout gives the logits of real tokens [n, V] and what they must equal, those of one padded forward.


def decode(model, ids, lengths, seed):
    """Token by token: every position is a decoding step."""
    rows, length = ids.shape
    stepped = with_cache(model, ids, list(range(1, length + 1)), DynamicCache())
    return stepped.flatten(0, 1), padded(model, ids, torch.full((rows,), length)).flatten(0, 1)


def chunks(model, ids, lengths, seed):
    """A prefill cut anywhere, in a cache that grows and in one of fixed size."""
    rows, length = ids.shape
    cuts = torch.randint(1, length + 1, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    cuts = sorted({*cuts, length})
    static = StaticCache(model.config, max_cache_len=length + 1 + seed % 9)
    pieces = [with_cache(model, ids, cuts, cache) for cache in (DynamicCache(), static)]
    whole = padded(model, ids, torch.full((rows,), length))
    return torch.cat(pieces).flatten(0, 1), torch.cat([whole, whole]).flatten(0, 1)


def alone(model, ids, lengths, seed):
    """One row without the others and without padding."""
    row = seed % len(ids)
    n = int(lengths[row])
    logits = model(input_ids=ids[row : row + 1, :n], use_cache=False).logits[0]
    return logits, padded(model, ids, lengths)[row, :n]


def permuted(model, ids, lengths, seed):
    """The rows in another order, half of them in another batch."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    kept, whole = real(lengths, ids.shape[1])[order], padded(model, ids, lengths)[order]
    halves = [
        padded(model, ids[part], lengths[part]) for part in order.split(-(-len(order) // 2)) if len(part)
    ]
    return torch.cat(halves)[kept], whole[kept]


def padded_on_the_right(model, ids, lengths, seed):
    """More padding, of other tokens."""
    kept = real(lengths, ids.shape[1])
    other = torch.where(kept, ids, (ids + 1) % VOCABULARY)
    longer = padded(model, torch.cat([other, other[:, : 1 + seed % 40]], 1), lengths)
    return longer[:, : ids.shape[1]][kept], padded(model, ids, lengths)[kept]


def padded_on_the_left(model, ids, lengths, seed):
    length = ids.shape[1]
    kept = real(lengths, length)
    left = torch.stack([row.roll(length - int(n)) for row, n in zip(ids, lengths, strict=True)])
    mask = kept.flip(1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    shifted = model(input_ids=left, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return shifted[kept.flip(1)], padded(model, ids, lengths)[kept]


def packed(model, ids, lengths, seed):
    """End to end in one row, told by offsets."""
    kept = real(lengths, ids.shape[1])
    cuts = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    logits = model(
        input_ids=ids[kept][None],
        position_ids=torch.arange(ids.shape[1]).expand_as(ids)[kept][None],
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        cu_seq_lens_q=cuts,
        cu_seq_lens_k=cuts,
        use_cache=False,
    ).logits[0]
    return logits, padded(model, ids, lengths)[kept]


def packed_by_position(model, ids, lengths, seed):
    """End to end in one row; transformers finds the sequences by their positions."""
    kept = real(lengths, ids.shape[1])
    positions = torch.arange(ids.shape[1]).expand_as(ids)[kept][None]
    logits = model(input_ids=ids[kept][None], position_ids=positions, use_cache=False).logits[0]
    return logits, padded(model, ids, lengths)[kept]


def cached_prefix(model, ids, lengths, seed):
    """A cached beginning that all rows share, computed once beside other rows: hit against miss."""
    rows, length = ids.shape
    cut = 1 + seed % max(1, length - 1)
    start = ids[:1, :cut]
    cache = DynamicCache()
    others = torch.cat([ids[1:, :cut].flip(1), start])
    model(input_ids=others, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(torch.full((rows,), len(others) - 1))
    miss = torch.cat([start.expand(rows, -1), ids[:, cut:]], 1)
    hit = model(input_ids=miss[:, cut:], past_key_values=cache, use_cache=True).logits
    return hit.flatten(0, 1), padded(model, miss, torch.full((rows,), length))[:, cut:].flatten(0, 1)


def two_threads(model, ids, lengths, seed):
    kept, before = real(lengths, ids.shape[1]), torch.get_num_threads()
    one = padded(model, ids, lengths)[kept]
    try:
        torch.set_num_threads(2)
        return padded(model, ids, lengths)[kept], one
    finally:
        torch.set_num_threads(before)


LAYOUTS = [
    decode,
    chunks,
    alone,
    permuted,
    padded_on_the_right,
    padded_on_the_left,
    packed,
    packed_by_position,
    cached_prefix,
    two_threads,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(2, 60),
    st.sampled_from(FAMILIES),
    st.sampled_from(DTYPES),
)
@settings(max_examples=8, deadline=None)
def test_one_value_in_every_layout(layout, seed, rows, length, family, dtype):
    model = make(family, dtype=dtype, seed=seed)
    ids, lengths = batch(seed, rows, length)
    with align(model), torch.no_grad():
        got, want = layout(model, ids, lengths, seed)
    assert differing(got, want) == 0


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_one_value_in_batches_of_many_rows(rows):
    model = make("llama")
    ids, lengths = batch(rows, rows, 9)
    with align(model), torch.no_grad():
        assert differing(*alone(model, ids, lengths, rows - 1)) == 0


# With torch's kernels one thread and two give the same bits at these sizes, so there the fault is made.
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x is not two_threads], ids=lambda f: f.__name__)
def test_torchs_own_kernels_fail_the_comparison(layout):
    model = make("llama")
    ids, lengths = batch(1, 9, 60)
    lengths[1] = 3  # few rows of a small product take another path
    with torch.no_grad():
        assert sum(differing(*layout(model, ids, lengths, seed)) for seed in range(1, 9)) > 0


def test_a_sum_cut_by_threads_is_found(monkeypatch):
    def cut(x, weight, bias=None):
        parts = zip(
            x.chunk(torch.get_num_threads(), -1), weight.chunk(torch.get_num_threads(), 1), strict=True
        )
        return sum(part @ columns.t() for part, columns in parts)

    monkeypatch.setattr(huggingface, "linear", cut)
    model = make("llama")
    with align(model), torch.no_grad():
        assert differing(*two_threads(model, *batch(1, 9, 60), 0)) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_continuous_batching(dtype):
    aligned = make("qwen3", dtype=dtype)
    with align(aligned), torch.no_grad():
        check_slots(aligned)


def check_slots(aligned):
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


def by_rows(x, w, b=None):
    """A product that sums in another order for few rows; torch's own does so on most CPUs, not on all."""
    if x.shape[:-1].numel() > 8:
        return torch.nn.functional.linear(x, w, b)
    half = w.shape[1] // 2
    return torch.nn.functional.linear(x[..., :half], w[:, :half]) + torch.nn.functional.linear(
        x[..., half:], w[:, half:], b
    )


def attention_by_rows(q, k, v, *, scale, mask, rounded_kv):
    """Attention by torch for many queries, by its formula for one."""
    if q.shape[2] > 1:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    k, v = (einops.repeat(x, "b h t d -> b (h g) t d", g=q.shape[1] // x.shape[1]) for x in (k, v))
    scores = scale * q @ k.mT if mask is None else (scale * q @ k.mT).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("op", ["linear", "linear_joined", "gated_mlp", "attention"])
def test_one_op_that_varies_shows(monkeypatch, op):
    """The negative control: if bits of an op depend on the number of rows, decode differs from prefill."""
    silu = torch.nn.functional.silu
    varying = {
        "linear": by_rows,
        "linear_joined": lambda x, ws, bs: torch.cat([by_rows(x, w) for w in ws], -1),
        "gated_mlp": lambda x, g, u, d: by_rows(silu(by_rows(x, g)) * by_rows(x, u), d),
        "attention": attention_by_rows,
    }
    model = make("llama")
    monkeypatch.setattr(huggingface, op, varying[op])
    with align(model), torch.no_grad():
        assert sampled_tokens_that_differ(model, rows=3, length=60, seed=1)[0] > 0
