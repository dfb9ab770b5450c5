"""What is vLLM's own in VLLMEngine: spans, aborts, pauses, prefix caches, and what is refused."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from rzero.buffers import FinishCode
from rzero.collectors import EngineError, InFlightPolicy, named_weights, weight_digests
from tests.collectors.conftest import digest_of, full_forward_log_probs, llama, request
from tests.vllm.conftest import tiny
from tests.vllm.real import pytestmark  # noqa: F401


def swap_to(engine, version, seed):
    weights = named_weights(llama(seed))
    engine.swap(version, weights, weight_digests(weights))


def when_step(engine, count, monkeypatch, act):
    """Have ``act`` run in a thread of its own while vLLM makes its ``count``-th step; returns the threads."""
    steps, threads = [], []
    original = engine._core.step

    def step():
        steps.append(1)
        outputs = original()
        if len(steps) == count:
            thread = threading.Thread(target=act)
            thread.start()
            threads.append(thread)
            boundary = engine._boundary
            with boundary.condition:  # go on once it has been asked for; it is granted after this token
                boundary.condition.wait_for(lambda: boundary.wanted or boundary.draining)
        return outputs

    monkeypatch.setattr(engine._core, "step", step)
    return threads


@pytest.mark.parametrize("in_flight", InFlightPolicy)
def test_a_swap_after_token_two_of_five(make_engine, monkeypatch, in_flight):
    """Fault 1 of the field: versions read around a call instead of stamped at the boundary."""
    engine = make_engine(llama(0), eos_token_ids=(), version=3, in_flight=in_flight)
    threads = when_step(engine, 2, monkeypatch, lambda: swap_to(engine, 4, seed=1))
    completion = engine.submit(request(0, max_new_tokens=5)).result()
    threads[0].join()
    old, new = (
        full_forward_log_probs(llama(seed), completion.request.prompt, completion.response) for seed in (0, 1)
    )
    recorded = completion.behavior_log_probs.double()
    finish_first = in_flight is InFlightPolicy.FINISH_FIRST
    assert completion.policy_version.tolist() == ([3, 3, 3, 3, 3] if finish_first else [3, 3, 4, 4, 4])
    assert torch.equal(completion.digest, digest_of(completion))
    assert (recorded - old)[: 5 if finish_first else 2].abs().max() < 1e-5
    if not finish_first:
        assert (recorded - old)[2:].abs().min() > 1e-4
        from_new = (recorded - new)[2:].abs()
        kept = in_flight is InFlightPolicy.KEEP_CACHE  # keys and values of the old weights
        assert from_new.min() > 1e-4 if kept else from_new.max() < 1e-5


def cached_pages(engine):
    scheduler = engine._core._engine.engine_core.engine_core.scheduler
    return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def test_no_response_that_starts_after_a_swap_sees_older_keys(make_engine, monkeypatch):
    prompt = tuple([1] + [3 + i % 20 for i in range(100)])
    engine = make_engine(
        llama(0), eos_token_ids=(), max_slots=2, engine_args={"block_size": 32, "max_num_batched_tokens": 32}
    )
    engine.submit(request(0, prompt=prompt)).result()
    assert engine.cached_tokens() == 0
    engine.submit(request(1, prompt=prompt)).result()
    assert engine.cached_tokens() == 96
    assert cached_pages(engine) > 0
    swap_to(engine, 1, seed=1)
    assert cached_pages(engine) == 0  # nothing is running that needs them
    engine.submit(request(2, prompt=prompt)).result()
    assert engine.cached_tokens() == 96

    # While the swap comes, one response samples, one is in the middle of its prompt, and one waits.
    threads = when_step(engine, 3, monkeypatch, lambda: swap_to(engine, 2, seed=2))
    sampling = engine.submit(request(3, prompt=prompt[:20], max_new_tokens=20))
    futures = [engine.submit(request(4 + i, prompt=(5, *prompt))) for i in range(2)]
    assert sampling.result().policy_version.unique().tolist() == [1, 2]
    threads[0].join()
    for completion in [future.result() for future in futures]:
        assert completion.policy_version.unique().tolist() == [2]
        expected = full_forward_log_probs(llama(2), completion.request.prompt, completion.response)
        assert (completion.behavior_log_probs - expected).abs().max() < 1e-5


def test_an_abort_returns_what_was_drawn(make_engine, monkeypatch):
    engine = make_engine(eos_token_ids=(), version=7, max_slots=2)
    threads = when_step(engine, 4, monkeypatch, lambda: engine.abort({0, 2}))
    engine.pause()
    futures = [engine.submit(request(i, max_new_tokens=9)) for i in range(3)]
    engine.resume()
    sampled, neighbour, waiting = [future.result(timeout=60) for future in futures]
    threads[0].join()
    assert {c.finish_code for c in (sampled, waiting)} == {FinishCode.ABORT}
    assert (len(sampled.response), len(waiting.response)) == (4, 0)
    assert sampled.policy_version.tolist() == [7, 7, 7, 7]
    assert torch.equal(sampled.digest, digest_of(sampled))
    assert neighbour.finish_code is FinishCode.LENGTH
    for completion in (sampled, neighbour):
        expected = full_forward_log_probs(llama(), completion.request.prompt, completion.response)
        assert (completion.behavior_log_probs - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("mode", "code", "length"),
    [("keep", None, 0), ("wait", FinishCode.LENGTH, 9), ("abort", FinishCode.ABORT, 3)],
)
def test_pause_modes(make_engine, monkeypatch, mode, code, length):
    engine = make_engine(eos_token_ids=(), max_slots=1)
    threads = when_step(engine, 3, monkeypatch, lambda: engine.pause(mode))
    first, second = (engine.submit(request(i, max_new_tokens=9)) for i in range(2))
    while not threads:
        pass
    threads[0].join()
    assert not second.done()
    if code is None:
        assert not first.done()
    else:
        assert first.done()
        assert (first.result().finish_code, len(first.result().response)) == (code, length)
    engine.resume()
    assert [len(f.result().response) for f in (first, second)] == [length or 9, 9]


def test_freed_slots_stay_empty_while_responses_end(make_engine, monkeypatch):
    engine = make_engine(eos_token_ids=(), max_slots=2)
    threads = when_step(engine, 3, monkeypatch, lambda: engine.pause("wait"))
    engine.pause()
    lengths = [9, 5, 9]
    long, short, waiting = (engine.submit(request(i, max_new_tokens=lengths[i])) for i in range(3))
    engine.resume()
    while not threads:
        pass
    threads[0].join()
    assert [future.done() for future in (long, short, waiting)] == [True, True, False]
    engine.resume()
    assert len(waiting.result().response) == 9


def test_a_swap_that_would_wait_for_ever_is_refused(make_engine, monkeypatch):
    engine = make_engine(eos_token_ids=(), in_flight=InFlightPolicy.FINISH_FIRST)
    threads = when_step(engine, 2, monkeypatch, engine.pause)
    future = engine.submit(request(0))
    while not threads:
        pass
    threads[0].join()
    with pytest.raises(RuntimeError, match=r"VLLMEngine.swap: the engine must not be paused while half-"):
        swap_to(engine, 1, seed=1)
    engine.resume()
    assert future.result().policy_version.tolist() == [0] * 6


def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(make_engine):
    engine = make_engine(max_slots=8)
    together = [f.result() for f in [engine.submit(request(i, seed=100 - 60 * i)) for i in range(8)]]
    for completion in together:
        assert torch.equal(engine.submit(completion.request).result().response, completion.response)
    assert len({tuple(c.response.tolist()) for c in together}) > 1


def test_temperature_is_part_of_the_recorded_distribution(make_engine):
    engine = make_engine(temperature=0.5)
    completion = engine.submit(request(0, max_new_tokens=20)).result()
    prompt, response = completion.request.prompt, completion.response
    expected = full_forward_log_probs(llama(), prompt, response, temperature=0.5)
    assert (completion.behavior_log_probs - expected).abs().max() < 1e-5
    assert engine.context().temperature == 0.5
    assert engine.context().log_prob_mode == "processed"


def test_requests_that_vllm_would_choke_on_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"prompt tokens must be from 0 to 28, got 29"):
        engine.submit(request(0, prompt=(1, 29)))
    with pytest.raises(ValueError, match=r"at most max_model_len = 128 together, got 131"):
        engine.submit(request(2, prompt=(1, 2, 3), max_new_tokens=128))


def span(version, start, end):
    from vllm.outputs import WeightVersionSpan

    return WeightVersionSpan(version, start, end)


def completion_output(**changes):
    from vllm.outputs import CompletionOutput

    fields = {
        "index": 0,
        "text": "",
        "token_ids": [5, 6],
        "cumulative_logprob": None,
        "finish_reason": "stop",
    }
    fields |= {"logprobs": [{9: Logprob(-9.0), 5: Logprob(-0.5)}, {6: Logprob(-0.25), 5: Logprob(-3.0)}]}
    fields |= {"weight_versions": [span("3", 0, 1), span("4", 1, 2)]}
    return CompletionOutput(**{**fields, **changes})


class Logprob:
    def __init__(self, logprob):
        self.logprob = logprob


def test_evidence_is_read_or_refused():
    from rzero.collectors.vllm_outputs import evidence_of

    response, log_probs, versions = evidence_of(completion_output())
    assert response.tolist() == [5, 6]
    assert log_probs.tolist() == [-0.5, -0.25]
    assert versions.tolist() == [3, 4]
    with pytest.raises(EngineError, match="log-probability of every sampled token, got none"):
        evidence_of(completion_output(logprobs=None))
    with pytest.raises(EngineError, match="got none of token 1"):
        evidence_of(completion_output(logprobs=[{5: Logprob(-0.5)}, {7: Logprob(-0.25)}]))
    with pytest.raises(EngineError, match="got none of token 1"):
        evidence_of(completion_output(logprobs=[{5: Logprob(-0.5)}]))
    with pytest.raises(EngineError, match="weight version of all 2 tokens"):
        evidence_of(completion_output(weight_versions=[span("3", 0, 1)]))
    with pytest.raises(EngineError, match="weight version of all 2 tokens, got None"):
        evidence_of(completion_output(weight_versions=None))
    with pytest.raises(EngineError, match="version numbers, got 'default'"):
        evidence_of(completion_output(weight_versions=[span("default", 0, 2)]))


def test_refusals(make_engine, monkeypatch):
    with pytest.raises(ValueError, match=r"temperature must be >= 0\.01, got 0"):
        make_engine(temperature=0)
    with pytest.raises(ValueError, match=r"max_slots must be >= 1, got 0"):
        make_engine(max_slots=0)
    with pytest.raises(ValueError, match=r"transfer must be .* got 'ipc'"):
        make_engine(transfer="ipc")
    with pytest.raises(ValueError, match=r"own_process must be True with transfer='nccl'"):
        make_engine(transfer="nccl")
    with pytest.raises(ValueError, match=r"must be 'shared_memory' where vLLM runs on a CPU, got 'nccl'"):
        make_engine(transfer="nccl", own_process=True)
    with pytest.raises(ValueError, match=r"must leave \['enforce_eager', 'logprobs_mode'\] to VLLMEngine"):
        make_engine(engine_args={"logprobs_mode": "raw_logprobs", "enforce_eager": False})
    with pytest.raises(ValueError, match=r"kernels must be one of \('exact', 'triton'\), got 'fast'"):
        make_engine(kernels="fast")
    with pytest.raises(ValueError, match=r"must be 'exact', which compute on device 'cpu', got 'triton'"):
        make_engine(kernels="triton")
    with pytest.raises(ValueError, match=r"lora_config must be None"):
        make_engine(engine_args={"enable_lora": True})
    with pytest.raises(TypeError, match="got GemmaForCausalLM at the root"):
        make_engine(tiny("Gemma"))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(TypeError, match=r"DynamicNTK\w+ at 'model.layers.0.self_attn.rotary_emb'"):
        make_engine(tiny(rope_parameters=dynamic))
    monkeypatch.setattr("rzero.kernels.vllm_align.VLLM_VERSIONS", ("0.31.0",))
    with pytest.raises(RuntimeError, match=r"version of vLLM must be one of \('0.31.0',\), got '0.32.0'"):
        make_engine()


def test_what_vllm_keeps_once_a_process_is_not_shared(make_engine, monkeypatch):
    from rzero.collectors import vllm_core
    from rzero.kernels.vllm_align import align_vllm

    own = {"VLLM_DIST_IDENT": ""}  # vLLM's own
    environment = {**os.environ, **own}
    make_engine()
    assert {**os.environ, **own} == environment
    with pytest.raises(RuntimeError, match=r"at most one engine may run inside a process"):
        vllm_core.VLLMCore._refuse_second_state(SimpleNamespace(_own_process=False))
    with pytest.raises(EngineError, match=r"kernels 'exact' must be under every worker"):
        monkeypatch.setattr(vllm_core, "_plugin", lambda: lambda: lambda: None)
        make_engine()
    monkeypatch.undo()
    undo = align_vllm("exact")
    with pytest.raises(EngineError, match=r"vLLM must compute with its own kernels, got \['exact-"):
        make_engine(kernels="native")
    undo()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=r"own_process must be True where torch.distributed is init"):
        make_engine()
    torch.distributed.destroy_process_group()


def test_the_fingerprint_is_of_the_kernels_on_the_model_s_device(make_engine, monkeypatch):
    monkeypatch.setattr("rzero.kernels.vllm_align.kernel_fingerprint", lambda device: f"kernels of {device}")
    assert make_engine().context().kernel_fingerprint == "kernels of cpu"


def test_weights_must_be_published_first(make_engine):
    engine = make_engine(version=-1)
    with pytest.raises(RuntimeError, match="weights must be published first"):
        engine.submit(request(0))
    swap_to(engine, 0, seed=1)
    completion = engine.submit(request(0)).result()
    expected = full_forward_log_probs(llama(1), completion.request.prompt, completion.response)
    assert (completion.behavior_log_probs - expected).abs().max() < 1e-5
