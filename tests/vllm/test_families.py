"""Every supported family: bits equal to the aligned model of Hugging Face, weights right after a publish."""

import resource

import pytest
import torch

from rzero.audit import audit
from rzero.collectors import EngineError, named_weights, weight_digests
from rzero.kernels import align, kernel_fingerprint, log_softmax
from tests.collectors.conftest import full_forward_log_probs, request
from tests.vllm.conftest import tiny
from tests.vllm.real import pytestmark  # noqa: F401

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}


def in_bfloat16(model):
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16()
    model.model.rotary_emb.inv_freq = frequencies  # as from_pretrained leaves them
    return model


MODELS = {
    "Llama": lambda: tiny(),
    "Llama, tied": lambda: tiny(tie_word_embeddings=True),
    "Llama, llama3 rope": lambda: tiny(rope_parameters=LLAMA3),
    "Llama, bfloat16": lambda: in_bfloat16(tiny(num_key_value_heads=2)),
    "Qwen2, biases": lambda: tiny("Qwen2"),
    "Qwen3, norms of heads, tied": lambda: tiny("Qwen3", tie_word_embeddings=True),
}
PROMPTS = [[1, *((3 + i * j * 7) % 100 for j in range(i * 5 % 60))] for i in range(16)]


def audited(engine, model, version):
    return audit(
        engine,
        model,
        PROMPTS,
        version=version,
        temperature=1.0,
        kernel_fingerprint=kernel_fingerprint(),
        max_new_tokens=12,
        log_softmax=log_softmax,
    )


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_differs_before_and_after_a_publish(make_engine, name):
    model = MODELS[name]()
    align(model)
    engine = make_engine(model)
    assert engine.context().dtype == str(model.dtype).removeprefix("torch.")
    assert audited(engine, model, 0).exact
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.swap(1, named_weights(model), weight_digests(named_weights(model)))
    report = audited(engine, model, 1)
    assert report.exact, str(report)
    assert report.tokens > 100
    with torch.no_grad():
        for parameter in model.parameters():  # no checksum tells a stale rounded copy from this
            parameter.copy_(parameter.flip(0))
    engine.swap(2, named_weights(model), weight_digests(named_weights(model)))
    report = audited(engine, model, 2)
    assert report.exact, str(report)


@pytest.mark.parametrize("kernels", ["exact", "native"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3, norms of heads, tied", "Qwen2, biases"])
def test_each_tensor_arrives(make_engine, name, kernels):
    """Fault 5 of the field: each parameter is perturbed in turn, published and read back, twice."""
    model = MODELS[name]()
    engine = make_engine(model, kernels=kernels)
    version = 0
    assert engine.weight_digests() == weight_digests(named_weights(model))
    for _ in range(2):
        for name, parameter in model.named_parameters():
            before = weight_digests(named_weights(model))
            with torch.no_grad():
                parameter.view(-1)[7:9] = torch.tensor([-0.0, 0.25 + version])
            digests = weight_digests(named_weights(model))
            assert [key for key in digests if digests[key] != before[key]] == [name]
            version += 1
            engine.swap(version, named_weights(model), digests)
            assert engine.weight_digests() == digests
    completion = engine.submit(request(0, max_new_tokens=8)).result()
    expected = full_forward_log_probs(model, completion.request.prompt, completion.response)
    assert completion.policy_version.unique().tolist() == [version]
    torch.testing.assert_close(completion.behavior_log_probs.double(), expected, atol=1e-4, rtol=0)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr("rzero.collectors.vllm_transfer.SHARED_MEMORY", folder)
    return folder


@pytest.mark.parametrize("kernels", ["exact", "native"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_kept(make_engine, kernels, shared_memory):
    model, other = tiny(), named_weights(tiny(seed=1))
    engine = make_engine(model, kernels=kernels)

    def refused(weights, digests, match):
        with pytest.raises(EngineError, match=match):
            engine.swap(1, weights, digests)
        assert engine.version() == 0
        assert engine.weight_digests() == weight_digests(named_weights(model))

    name = "model.layers.1.self_attn.k_proj.weight"
    refused({k: v for k, v in other.items() if k != name}, weight_digests(other), "k_proj.weight")
    refused(
        {**other, name: other[name][:-1]}, weight_digests(other), r"must be torch.float32 \(32, 64\), got"
    )
    refused({**other, name: other[name].bfloat16()}, weight_digests(other), r"got torch.bfloat16")
    refused({**other, name: other[name] + 1}, weight_digests(other), "1 of 21 tensors differ .* on arrival")
    engine.swap(0, named_weights(model), weight_digests(named_weights(model)))
    assert not list(shared_memory.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        refused(
            other,
            weight_digests(other),
            r"the weights must fit into a file .*/shared/rzero-\w+\.safetensors, got",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(shared_memory.iterdir())
    completion = engine.submit(request(0, max_new_tokens=8)).result()
    expected = full_forward_log_probs(model, completion.request.prompt, completion.response)
    torch.testing.assert_close(completion.behavior_log_probs.double(), expected, atol=1e-4, rtol=0)


def test_a_tensor_that_vllm_spoils_is_found_and_the_old_ones_restored(make_engine, monkeypatch):
    import rzero.collectors.vllm_worker as worker

    model, other = tiny(), named_weights(tiny(seed=1))
    engine = make_engine(model)
    original = worker.WorkerExtension._rzero_reload
    spoil = [True]

    def reload(self, weights):
        weights = dict(weights)
        if spoil.pop() if spoil else False:
            weights["model.norm.weight"] = weights["model.norm.weight"] + 1
        original(self, weights)

    monkeypatch.setattr(worker.WorkerExtension, "_rzero_reload", reload)
    with pytest.raises(EngineError, match=r"1 of 21 tensors differ .* after loading, first model.norm"):
        engine.swap(1, other, weight_digests(other))
    assert engine.weight_digests() == weight_digests(named_weights(model))
    assert engine.version() == 0


def test_an_engine_that_lost_its_weights_stops(make_engine, monkeypatch):
    import rzero.collectors.vllm_worker as worker

    engine, other = make_engine(tiny()), named_weights(tiny(seed=1))
    future = engine.submit(request(0, max_new_tokens=200))

    def reload(self, weights):
        raise OSError("nothing can be loaded")

    monkeypatch.setattr(worker.WorkerExtension, "_rzero_reload", reload)
    with pytest.raises(EngineError, match="nothing can be loaded"):
        engine.swap(1, other, weight_digests(other))
    with pytest.raises(EngineError, match="nothing can be loaded"):
        future.result(timeout=60)
    with pytest.raises(EngineError, match=r"VLLMEngine.submit: the engine has failed"):
        engine.submit(request(1))
