"""Two workers on a CPU, over gloo: versions of every token, digests of every worker, all or none of them."""

import pytest

from rzero.collectors import EngineError, named_weights, weight_digests
from tests.collectors.conftest import full_forward_log_probs, request
from tests.vllm.conftest import SMALL, tiny
from tests.vllm.real import pytestmark  # noqa: F401

KEYS = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", [1, 2])  # of keys and values: each in both workers, or one in each
def test_two_workers(tmp_path, monkeypatch, heads):
    from rzero.collectors import VLLMEngine

    order = tmp_path / "order"
    monkeypatch.setenv("RZERO_TEST_SPOIL", str(order))
    monkeypatch.setattr(
        "rzero.collectors.vllm_core.WORKER_EXTENSION", "tests.vllm.spoiling.SpoilingExtension"
    )
    old, new = (tiny("Qwen2", seed=seed, num_key_value_heads=heads) for seed in (0, 1))
    old.save_pretrained(tmp_path)
    engine = VLLMEngine(
        tmp_path, eos_token_ids=(), max_slots=4, engine_args={**SMALL, "tensor_parallel_size": 2}
    )

    def holds(model, version):
        """Every worker holds the model's weights, and a token is drawn by them."""
        assert engine.version() == version
        assert engine.weight_digests() == weight_digests(named_weights(model))
        completion = engine.submit(request(version, max_new_tokens=10)).result()
        assert completion.policy_version.unique().tolist() == [version]
        expected = full_forward_log_probs(model, completion.request.prompt, completion.response)
        assert (completion.behavior_log_probs - expected).abs().max() < 1e-4

    def refused(match, digests=None, spoil=None):
        if spoil:
            order.write_text(spoil)
        with pytest.raises(EngineError, match=match):
            engine.swap(1, named_weights(new), digests or weight_digests(named_weights(new)))
        assert not order.exists()
        holds(old, 0)

    try:
        assert engine.context().tensor_parallel_size == 2
        holds(old, 0)
        refused(
            r"1 of \d+ tensors differ .* on arrival, first model.norm.weight.* \(worker 0 of 2\)",
            digests={**weight_digests(named_weights(new)), NORM: 0},
        )
        # Worker 1 alone is wrong: both go back to the old weights.
        refused(rf"1 of \d+ tensors differ .* after loading, first {NORM}.* \(worker 1 of 2\)", spoil=NORM)
        refused(rf"1 of \d+ tensors differ .* after loading, first {KEYS}", spoil=KEYS)
        refused(r"worker 1 cannot load\n \(worker 1 of 2\)", spoil="crash")
        engine.swap(1, named_weights(new), weight_digests(named_weights(new)))
        holds(new, 1)
    finally:
        engine.close()
