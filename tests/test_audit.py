import pytest
import torch

from rzero.audit import AuditRefused, audit
from rzero.collectors import named_weights, weight_digests
from rzero.collectors.tracing import row_checksums, traced
from rzero.kernels import align, kernel_fingerprint, log_softmax
from tests.collectors.conftest import llama, make_engine  # noqa: F401  (a fixture)

PROMPTS = [[1, *range(3, 4 + i % 7), 5] for i in range(24)]
EXACT = {"kernel_fingerprint": kernel_fingerprint(), "log_softmax": log_softmax}


def aligned(seed=0):
    model = llama(seed)
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


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp", "model.norm", "lm_head"]
)
def test_one_operation_of_torchs_own_is_named(make_engine, name):  # noqa: F811
    """The negative control: a single module of the sampler computes with torch's kernels."""
    model = aligned()
    module = model.get_submodule(name)
    del module.forward  # the aligned forward is an instance attribute; the class's own is torch's
    report = run(make_engine(model, max_slots=7, **EXACT), aligned())
    assert not report.exact
    assert report.first_difference is not None
    assert report.first_difference.startswith(name)


def test_a_difference_behind_the_modules_is_counted(make_engine):  # noqa: F811
    own = {
        "kernel_fingerprint": EXACT["kernel_fingerprint"],
        "log_softmax": lambda x: log_softmax(x * (1 + 1e-6)),
    }
    report = run(make_engine(aligned(), **own), aligned())
    assert report.first_difference is None
    assert not report.exact
    assert report.mismatching > report.tokens // 2


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
