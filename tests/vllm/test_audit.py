"""The audit through real vLLM: every sampled token has the trainer's bits, whatever vLLM does with it."""

import pytest
import torch

from rzero.audit import AUDIT_UIDS, audit
from rzero.collectors import named_weights, weight_digests
from rzero.kernels import align, kernel_fingerprint, log_softmax
from tests.collectors.conftest import request
from tests.vllm.conftest import tiny
from tests.vllm.real import pytestmark  # noqa: F401

# Steps of 80 tokens, and pages for about a third of what 64 responses need.
TIGHT = {"max_num_batched_tokens": 80, "block_size": 32, "kv_cache_memory_bytes": 96 * 32 * 512}
PROMPTS = [[1, *((3 + i * j * 7) % 100 for j in range(i * 11 % 113))] for i in range(130)]
PROMPTS += PROMPTS[:80]  # prefix hits


@pytest.fixture
def preemptions(monkeypatch) -> list[str]:
    """Names of the requests that vLLM preempted."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: list[str] = []
    original = Scheduler._preempt_request

    def count(self, request, *args, **kwargs):
        seen.append(request.request_id)
        return original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    return seen


def train_and_publish(model, engine, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor([prompt[:8] for prompt in PROMPTS if len(prompt) >= 8])
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        weights = named_weights(model)
        engine.swap(step + 1, weights, weight_digests(weights))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_no_bit_differs(make_engine, preemptions, temperature):
    model = tiny()
    align(model)
    engine = make_engine(model, temperature=temperature, max_slots=64, engine_args=TIGHT, eos_token_ids=())
    for uid in range(24):  # drawn by older weights, so that their caches lie about
        engine.submit(request(uid, prompt=tuple(PROMPTS[uid + 3]), max_new_tokens=20))
    train_and_publish(model, engine, 5)
    neighbours = [request(100 + i, prompt=tuple(PROMPTS[i]), max_new_tokens=90) for i in range(30)]
    futures = [engine.submit(neighbour) for neighbour in neighbours]
    engine.abort({neighbour.uid for neighbour in neighbours[::2]})
    settings = {
        "version": 5,
        "temperature": temperature,
        "kernel_fingerprint": kernel_fingerprint(),
        "max_new_tokens": 52,
        "log_softmax": log_softmax,
    }
    report = audit(engine, model, PROMPTS, seed=int(100 * temperature), **settings)
    assert report.exact, str(report)
    assert report.tokens >= 10_000
    assert report.left_out == 0
    assert preemptions
    assert any(name.startswith(str(AUDIT_UIDS)[:6]) for name in preemptions)
    assert engine.cached_tokens() > 0
    assert all(future.done() for future in futures[::2])


def test_vllms_own_kernels_differ(make_engine):
    """The negative control: the same audit without the plugin."""
    model = tiny()
    align(model)
    engine = make_engine(model, kernels="native", max_slots=64, engine_args=TIGHT, eos_token_ids=())
    train_and_publish(model, engine, 5)
    report = audit(
        engine,
        model,
        PROMPTS[:40],
        version=5,
        temperature=1.0,
        kernel_fingerprint=engine.context().kernel_fingerprint,
        max_new_tokens=20,
        log_softmax=log_softmax,
    )
    assert not report.exact
    assert report.mismatching > report.tokens // 4
    assert 0 < report.max_abs < 1e-3
