"""Two workers on a CPU, over gloo: versions of every token, digests of every worker."""

import pytest

from rzero.collectors import EngineError, named_weights, weight_digests
from tests.collectors.conftest import full_forward_log_probs, request
from tests.vllm.conftest import SMALL, tiny
from tests.vllm.real import pytestmark  # noqa: F401


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", [1, 2])  # of keys and values: each in both workers, or one in each
def test_two_workers(tmp_path, heads):
    from rzero.collectors import VLLMEngine

    models = [tiny("Qwen2", seed=seed, num_key_value_heads=heads) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path)
    engine = VLLMEngine(
        tmp_path, eos_token_ids=(), max_slots=4, engine_args={**SMALL, "tensor_parallel_size": 2}
    )
    try:
        assert engine.context().tensor_parallel_size == 2
        for version, model in enumerate(models):
            weights = named_weights(model)
            if version:
                wrong = {**weight_digests(weights), "model.norm.weight": 0}
                with pytest.raises(EngineError, match=r"1 of \d+ tensors differ"):
                    engine.swap(version, weights, wrong)
                engine.swap(version, weights, weight_digests(weights))
            assert engine.weight_digests() == weight_digests(weights)
            completion = engine.submit(request(version, max_new_tokens=10)).result()
            assert completion.policy_version.unique().tolist() == [version]
            expected = full_forward_log_probs(model, completion.request.prompt, completion.response)
            assert (completion.behavior_log_probs - expected).abs().max() < 1e-4
    finally:
        engine.close()
