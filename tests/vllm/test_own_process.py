"""VLLMEngine with vLLM's engine core in a process of its own."""

import os
import signal

import psutil
import pytest
import torch

from rzero.audit import audit
from rzero.buffers import FinishCode
from rzero.collectors import (
    EngineError,
    EngineLost,
    InFlightPolicy,
    named_weights,
    weight_digests,
)
from rzero.kernels import align, kernel_fingerprint, log_softmax
from tests.collectors.conftest import digest_of, full_forward_log_probs, request
from tests.vllm.conftest import SMALL, tiny
from tests.vllm.real import pytestmark  # noqa: F401


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from rzero.collectors import VLLMEngine

    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    engine = VLLMEngine(
        folder,
        eos_token_ids=(),
        kernels="exact",
        max_slots=8,
        in_flight=InFlightPolicy.RECOMPUTE_CACHE,
        engine_args=SMALL,
    )
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ  # nothing below needs it
    yield engine
    engine.close()


def swap_to(engine, version, seed):
    weights = named_weights(tiny(seed=seed))
    engine.swap(version, weights, weight_digests(weights))


def test_no_bit_differs(engine):
    model = tiny()
    align(model)
    prompts = [[1, *range(3, 4 + i % 60), 5] for i in range(24)]
    report = audit(
        engine,
        model,
        prompts,
        version=0,
        temperature=1.0,
        kernel_fingerprint=kernel_fingerprint(),
        max_new_tokens=12,
        log_softmax=log_softmax,
    )
    assert report.exact, str(report)


def test_a_publish_during_generation_leaves_right_segments(engine):
    futures = [engine.submit(request(i, max_new_tokens=150)) for i in range(12)]
    while not any(slot.tokens for slot in list(engine._slots._slots.values())):
        pass
    swap_to(engine, 1, seed=1)
    completions = [future.result() for future in futures]
    assert any(c.policy_version.unique().tolist() == [0, 1] for c in completions)
    assert completions[-1].policy_version.unique().tolist() == [1]  # it waited for a slot
    for c in completions:
        prompt, response = c.request.prompt, c.response
        old, new = (full_forward_log_probs(tiny(seed=seed), prompt, response) for seed in (0, 1))
        expected = torch.where(c.policy_version == 0, old, new)
        assert (c.behavior_log_probs - expected).abs().max() < 1e-4
        assert (c.policy_version.diff() >= 0).all()
        assert torch.equal(c.digest, digest_of(c))


def test_a_wrong_digest_is_refused(engine):
    weights = named_weights(tiny(seed=2))
    digests = weight_digests(weights)
    digests["model.norm.weight"] += 1
    before, version = engine.weight_digests(), engine.version()
    with pytest.raises(EngineError, match=r"1 of 21 tensors differ .* model\.norm\.weight"):
        engine.swap(version + 1, weights, digests)
    assert (engine.weight_digests(), engine.version()) == (before, version)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_modes(engine, mode):
    futures = [engine.submit(request(100 + i, max_new_tokens=60)) for i in range(12)]
    while not any(slot.tokens for slot in list(engine._slots._slots.values())):
        pass
    engine.pause(mode)
    done = [future.result() for future in futures if future.done()]
    assert not futures[-1].done()
    engine.resume()
    completions = [future.result() for future in futures]
    aborted = [c for c in completions if c.finish_code is FinishCode.ABORT]
    assert len(done) == {"keep": 0, "wait": 8, "abort": 8}[mode]
    assert len(aborted) == (8 if mode == "abort" else 0)
    assert all(len(c.response) == 60 for c in completions if c.finish_code is FinishCode.LENGTH)
    assert all(len(c.policy_version) == len(c.response) < 60 for c in aborted)


def test_a_killed_engine_core_is_lost_and_says_so(engine):
    """Last: the engine is gone afterwards."""
    future = engine.submit(request(200, max_new_tokens=200))
    for child in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        future.result(timeout=60)
    with pytest.raises(EngineLost, match="the engine has failed"):
        engine.submit(request(201))
    with pytest.raises(EngineLost):
        engine.pause()
