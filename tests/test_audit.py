import threading

import pytest
import torch

from rzero.audit import AuditRefused, audit
from rzero.collectors import named_weights, weight_digests
from rzero.collectors.tracing import row_checksums, traced
from rzero.kernels import align, causal_lm, huggingface, kernel_fingerprint, log_softmax
from tests.collectors.conftest import llama, make_engine  # noqa: F401  (a fixture)

PROMPTS = [[1, *range(3, 4 + i % 7), 5] for i in range(24)]
EXACT = {"kernel_fingerprint": kernel_fingerprint(), "log_softmax": log_softmax}


def aligned(seed=0, **settings):
    model = llama(seed, **settings)
    align(model)
    return model


def run(engine, model, **changes):
    settings = {"version": 0, "temperature": 1.0, "max_new_tokens": 12, **EXACT, **changes}
    return audit(engine, model, PROMPTS, **settings)


def test_exact_kernels_give_every_token_the_same_bits(make_engine):  # noqa: F811
    engine = make_engine(aligned(), max_slots=7, temperature=0.7, **EXACT)
    report = run(engine, aligned(), temperature=0.7)
    assert report.exact, str(report)
    assert report.tokens > 100
    assert (report.mismatching, report.max_ulp, report.max_abs, report.kl, report.left_out) == (
        0,
        0,
        0.0,
        0.0,
        0,
    )
    assert report.traced_modules > 10


def test_native_kernels_do_not(make_engine):  # noqa: F811
    native = {"kernel_fingerprint": "native", "log_softmax": lambda logits: torch.log_softmax(logits, -1)}
    report = run(make_engine(llama(), max_slots=7, **native), llama(), **native)
    assert not report.exact
    assert report.mismatching > 0
    assert 0 < report.max_abs < 1e-4
    assert report.kl >= 0
    assert report.first_difference is not None


F = torch.nn.functional


def torchs_rope(x, cosines, sines):
    half = x.shape[-1] // 2
    cosines, sines = cosines[..., :half].bfloat16().float(), sines[..., half:].bfloat16().float()
    a, b = x.split(half, -1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


# What a user would write with torch. Native rope has the same bits as ours, so it gets tables of bfloat16,
# a fault that models in half precision have.
TORCHS_OWN = {
    "linear": F.linear,
    "linear_joined": lambda x, weights, biases: torch.cat(
        [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1
    ),
    "gated_mlp": lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    "silu_mul": lambda gate, up: F.silu(gate) * up,
    "rms_norm": lambda x, weight, *, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
    "rope_table": lambda frequencies, *, length, scaling: (
        torch.outer(torch.arange(length), frequencies).repeat(1, 2).cos() * scaling,
        (torch.outer(torch.arange(length), frequencies).sin() * scaling).repeat(1, 2)
        * torch.tensor([-1.0, 1.0]).repeat_interleave(len(frequencies)),
    ),
    "rope": torchs_rope,
    "attention": lambda q, k, v, *, scale, mask, rounded_kv: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, scale=scale, enable_gqa=True
    ),
}
FIRST = {
    "linear": "model.layers.0.self_attn.o_proj:linear",
    "linear_joined": "model.layers.0.self_attn:linear_joined",
    "gated_mlp": "model.layers.0.mlp:gated_mlp",
    "silu_mul": "model.layers.0.mlp:silu_mul",
    "rms_norm": "model.layers.0.input_layernorm:rms_norm",
    "rope_table": "model.rotary_emb:rope_table",
    "rope": "model.layers.0.self_attn:rope",
    "attention": "model.layers.0.self_attn:attention",
}


@pytest.mark.parametrize("op", TORCHS_OWN)
def test_one_op_of_torchs_own_in_the_sampler_is_named(make_engine, monkeypatch, op):  # noqa: F811
    """The negative control of each op: the engine's thread computes it with torch, the trainer does not."""
    ours = getattr(huggingface, op)

    def by_thread(*args, **kwargs):
        sampling = threading.current_thread() is engine._thread
        return (TORCHS_OWN[op] if sampling else ours)(*args, **kwargs)

    settings = {"mlp_bias": True} if op == "silu_mul" else {}  # without biases silu_mul is part of gated_mlp
    engine = make_engine(aligned(**settings), max_slots=7, **EXACT)
    monkeypatch.setattr(huggingface, op, by_thread)
    report = run(engine, aligned(**settings))
    assert not report.exact and report.mismatching > 0
    assert report.first_difference == FIRST[op]
    assert f"first difference in {FIRST[op]}" in str(report)
    monkeypatch.setattr(huggingface, op, ours)
    assert run(make_engine(aligned(**settings), max_slots=7, **EXACT), aligned(**settings)).exact


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp", "model.norm", "lm_head"]
)
def test_one_module_of_torchs_own_is_named(make_engine, name):  # noqa: F811
    """A single module of the sampler computes with torch's kernels: the layer is named too."""
    model = aligned()
    del model.get_submodule(name).forward  # the aligned forward is an instance attribute, torch's the class's
    report = run(make_engine(model, max_slots=7, **EXACT), aligned())
    assert not report.exact and report.first_difference == name


@pytest.mark.parametrize("factor", [None, 1 + 1e-6])
def test_torchs_own_log_softmax_is_named(make_engine, factor):  # noqa: F811
    def log_softmax_of_engine(x):
        return torch.log_softmax(x, -1) if factor is None else log_softmax(x * factor)

    own = {"kernel_fingerprint": EXACT["kernel_fingerprint"], "log_softmax": log_softmax_of_engine}
    report = run(make_engine(aligned(), **own), aligned())
    assert report.first_difference == "log_softmax"
    assert not report.exact
    assert report.mismatching > (0 if factor is None else report.tokens // 2)


def test_auditing_takes_the_steps_that_sampling_takes(make_engine, monkeypatch):  # noqa: F811
    """Tracing must not change which ops run: an audit of other kernels than those of training is none."""
    calls = []
    for op in TORCHS_OWN:
        ours = getattr(huggingface, op)
        monkeypatch.setattr(
            huggingface,
            op,
            lambda *args, op=op, ours=ours, **kwargs: calls.append(op) or ours(*args, **kwargs),
        )
    model, ids = aligned(), torch.tensor([[1, 4, 5]])
    model(input_ids=ids)
    plain = calls.copy()
    calls.clear()
    with traced(model) as trace:
        model(input_ids=ids)
    # The table of rope is made once.
    assert calls == [op for op in plain if op != "rope_table"] and "gated_mlp" in calls
    assert {name.split(":")[1] for name in trace if ":" in name} == {*calls, "rope_table", "input"}


def test_a_learner_that_computes_prompts_once_is_compared_too(make_engine, monkeypatch):  # noqa: F811
    """Other logits behind shared prompts, which whole rows do not have."""
    ours = causal_lm._forward

    def other(*args, shared):
        return ours(*args, shared=shared) * (1 + 1e-5 * shared)

    engine = make_engine(aligned(), **EXACT)
    monkeypatch.setattr(causal_lm, "_forward", other)
    report = run(engine, aligned())
    assert not report.exact and report.mismatching > 0 and report.first_difference is None


def test_what_disagrees_is_refused_and_named(make_engine):  # noqa: F811
    engine = make_engine(aligned(), temperature=0.7, tokenizer_digest="a", **EXACT)
    with pytest.raises(
        AuditRefused, match=r"temperature of engine and trainer must agree, got 0\.7 and 1\.0"
    ):
        run(engine, aligned())
    with pytest.raises(AuditRefused, match="kernel_fingerprint of engine and trainer must agree"):
        run(engine, aligned(), temperature=0.7, kernel_fingerprint="other")
    with pytest.raises(
        AuditRefused, match="tokenizer_digest of engine and trainer must agree, got 'a' and 'b'"
    ):
        run(engine, aligned(), temperature=0.7, tokenizer_digest="b")
    with pytest.raises(AuditRefused, match="the engine must hold version 3, got 0"):
        run(engine, aligned(), temperature=0.7, version=3)
    other = aligned()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
    with pytest.raises(
        AuditRefused, match=r"1 of \d+ tensors differ, first model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        run(engine, other, temperature=0.7)
    with pytest.raises(ValueError, match="prompts must hold at least one prompt"):
        audit(engine, aligned(), [], version=0, temperature=0.7, max_new_tokens=1, **EXACT)


def test_after_an_update_and_a_publish_it_is_exact_again(make_engine):  # noqa: F811
    engine, learner = make_engine(aligned(), **EXACT), aligned()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
    learner(input_ids=torch.tensor([[1, 4, 5]]), labels=torch.tensor([[1, 4, 5]])).loss.backward()
    optimizer.step()
    with pytest.raises(AuditRefused, match="weights of engine and trainer must agree"):
        run(engine, learner)
    weights = named_weights(learner)
    engine.swap(1, weights, weight_digests(weights))
    report = run(engine, learner, version=1)
    assert report.exact, str(report)


def test_what_a_model_computes_between_its_modules_shows_in_the_input_of_the_next(make_engine):  # noqa: F811
    native = {"kernel_fingerprint": "native", "log_softmax": lambda logits: torch.log_softmax(logits, -1)}
    theirs = llama().double()  # so precise that what torch's kernels add is small beside what is changed
    theirs.model.layers[1].self_attn.scaling *= 1.001
    with traced(theirs) as changed, torch.no_grad():
        theirs(input_ids=torch.tensor([[1, 4, 5]]))
    with traced(ours := llama().double()) as plain, torch.no_grad():
        ours(input_ids=torch.tensor([[1, 4, 5]]))
    first = next(name for name in plain if not torch.equal(plain[name], changed[name]))
    assert first == "model.layers.1.self_attn.o_proj:input"
    report = run(make_engine(theirs.float(), max_slots=1, **native), llama(), **native)
    assert not report.exact and report.first_difference is not None


class SwapsHalfway:
    """An engine whose weights are replaced between the first and the second half of the requests."""

    def __init__(self, engine, weights):
        self.engine, self.weights, self.futures = engine, weights, []

    def submit(self, request):
        if len(self.futures) == len(PROMPTS) // 2:
            self.futures[0].result()
            self.engine.swap(1, self.weights, weight_digests(self.weights))
        self.futures.append(self.engine.submit(request))
        return self.futures[-1]

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_what_other_weights_drew_is_left_out_by_version(make_engine):  # noqa: F811
    learner = aligned(seed=1)
    engine = make_engine(aligned(), max_slots=7, **EXACT)  # half-sampled responses go on with the new weights
    report = run(SwapsHalfway(engine, named_weights(learner)), aligned())
    assert report.exact, str(report)
    assert report.tokens > 0 and report.left_out >= len(PROMPTS) // 2


def test_checksums_see_single_bits_and_the_sign_of_zero():
    rows = torch.tensor([[1.0, 0.0], [1.0, -0.0], [0.0, 1.0], [1.0, 0.0]])
    sums = row_checksums(rows)
    assert sums[0] == sums[3]
    assert len(sums.unique()) == 3


def test_tracing_leaves_no_hook_behind():
    model = llama()
    with traced(model) as trace:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert trace["model.embed_tokens"].shape == (1, 3)
    assert list(trace)[-1] == "lm_head"
    assert not any(module._forward_hooks for module in model.modules())
