import threading
from concurrent.futures import CancelledError

import pytest
import torch
import transformers

from rzero.buffers import FinishCode
from rzero.collectors import EngineError, InFlightPolicy, named_weights, weight_digests
from rzero.collectors.transformers_engine import sample_tokens
from tests.collectors.conftest import EOS, VOCABULARY, digest_of, full_forward_log_probs, llama, request


def test_recorded_log_probs_are_those_of_a_plain_forward(make_engine):
    model = llama()
    engine = make_engine(model, max_slots=3)  # fewer slots than requests: freed slots are refilled
    prompts = [tuple([1] + [3 + (i * j) % 20 for j in range(1 + i % 5)]) for i in range(10)]
    futures = [
        engine.submit(request(i, prompt=prompt, max_new_tokens=3 + i % 7)) for i, prompt in enumerate(prompts)
    ]
    for prompt, future in zip(prompts, futures, strict=True):
        completion = future.result()
        expected = full_forward_log_probs(model, prompt, completion.response)
        torch.testing.assert_close(completion.behavior_log_probs.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_attention_implementations(make_engine, implementation):
    model = llama()
    model.set_attn_implementation(implementation)
    completion = make_engine(model).submit(request(0)).result()
    expected = full_forward_log_probs(model, request(0).prompt, completion.response)
    torch.testing.assert_close(completion.behavior_log_probs.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
    ],
)
def test_other_families(make_engine, config, model_class):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if config is not transformers.GPT2Config:
        sizes["intermediate_size"] = 48
    if config in (transformers.Qwen2Config, transformers.Qwen3Config):
        sizes["num_key_value_heads"] = 2
    settings = config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=EOS, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(settings).eval()
    engine = make_engine(model)
    for completion in [engine.submit(request(i, prompt=(1, 4, 6)[: 1 + i])).result() for i in range(3)]:
        expected = full_forward_log_probs(model, completion.request.prompt, completion.response)
        torch.testing.assert_close(completion.behavior_log_probs.double(), expected, atol=1e-5, rtol=0)


def test_temperature_is_part_of_the_recorded_distribution(make_engine):
    # Golden: logits [2, 1, 0] at T = 0.5 are [4, 2, 0]; log p_0 = -ln(1 + e^-2 + e^-4) = -0.142932, whereas
    # the untempered -ln(1 + e^-1 + e^-2) = -0.407606 would describe another sampler.
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[:3] = torch.tensor([2.0, 1.0, 0.0])
    model.register_forward_hook(lambda m, i, out: setattr(out, "logits", out.logits + logits) or out)
    engine = make_engine(model, temperature=0.5)
    completions = [engine.submit(request(i, max_new_tokens=40)).result() for i in range(4)]
    tokens = torch.cat([c.response for c in completions])
    recorded = torch.cat([c.behavior_log_probs for c in completions])[tokens == 0]
    assert len(recorded) > 20
    torch.testing.assert_close(recorded, torch.full_like(recorded, -0.142932), atol=1e-6, rtol=0)


def test_sampled_frequencies_follow_the_recorded_probabilities():
    # 40,000 draws from p = (0.5, 0.3, 0.15, 0.05): the standard error of a frequency is at most 0.0025.
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    u = (torch.arange(40_000).double() + 0.5) / 40_000
    tokens = sample_tokens(p.log().expand(40_000, 4), u)
    torch.testing.assert_close(tokens.bincount() / 40_000, p, atol=1e-4, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    log_probs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, 3)
    u = torch.tensor([2.0**-49, 0.5, 1 - 2.0**-49], dtype=torch.float64)
    assert sample_tokens(log_probs, u).tolist() == [1, 1, 1]


def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(make_engine):
    crowd = make_engine(llama(), max_slots=8)
    alone = make_engine(llama(), max_slots=1)
    together = [f.result() for f in [crowd.submit(request(i, seed=100 + i)) for i in range(8)]]
    for completion in together:
        again = alone.submit(completion.request).result()
        assert torch.equal(again.response, completion.response)
    assert len({tuple(c.response.tolist()) for c in together}) > 1  # other seeds, other tokens


def test_finish_codes(make_engine):
    engine = make_engine()
    completions = [engine.submit(request(i, max_new_tokens=5)).result() for i in range(40)]
    codes = {c.finish_code for c in completions}
    assert codes == {FinishCode.STOP, FinishCode.LENGTH}
    for c in completions:
        assert (c.response[-1] == EOS) == (c.finish_code == FinishCode.STOP)
        assert (c.response[:-1] != EOS).all()
        assert len(c.response) == 5 or c.finish_code == FinishCode.STOP
        assert c.t_submit_ns <= c.t_first_ns <= c.t_done_ns
        assert torch.equal(c.digest, digest_of(c))


def swap_after_the_second_token(make_engine, in_flight):
    """One response of five tokens, weights 3 -> 4 asked for while the second is drawn; what came back."""
    model = llama(0)
    engine = make_engine(model, eos_token_ids=(), version=3, in_flight=in_flight)
    weights = named_weights(llama(1))
    decode_steps, swapping = [], []

    def swap_during_the_second_token(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            return  # a prefill
        decode_steps.append(1)
        if len(decode_steps) == 2:
            swapping.append(threading.Thread(target=engine.swap, args=(4, weights, weight_digests(weights))))
            swapping[0].start()
            with (
                engine._boundary.condition
            ):  # go on once the swap has been asked for; it is granted after this token
                engine._boundary.condition.wait_for(
                    lambda: engine._boundary.wanted or engine._boundary.draining
                )

    model.register_forward_pre_hook(swap_during_the_second_token, with_kwargs=True)
    completion = engine.submit(request(0, max_new_tokens=5)).result()
    swapping[0].join()
    assert engine.version() == 4
    old, new = (
        full_forward_log_probs(llama(seed), completion.request.prompt, completion.response) for seed in (0, 1)
    )
    recorded = completion.behavior_log_probs.double()
    return completion.policy_version.tolist(), (recorded - old).abs(), (recorded - new).abs()


def test_a_swap_after_token_two_of_five_gives_two_segments(make_engine):
    """Fault 1 of the field: versions read around a call instead of stamped at the boundary."""
    versions, from_old, from_new = swap_after_the_second_token(make_engine, InFlightPolicy.KEEP_CACHE)
    assert versions == [3, 3, 4, 4, 4]
    assert from_old[:2].max() < 1e-5
    assert from_old[2:].min() > 1e-4  # drawn by the new weights ...
    assert from_new[2:].min() > 1e-4  # ... over keys and values of the old ones


def test_a_recomputed_cache_forgets_the_old_weights(make_engine):
    versions, from_old, from_new = swap_after_the_second_token(make_engine, InFlightPolicy.RECOMPUTE_CACHE)
    assert versions == [3, 3, 4, 4, 4]
    assert from_old[:2].max() < 1e-5
    assert from_new[2:].max() < 1e-5


def test_finishing_first_gives_one_segment(make_engine):
    versions, from_old, _ = swap_after_the_second_token(make_engine, InFlightPolicy.FINISH_FIRST)
    assert versions == [3, 3, 3, 3, 3]
    assert from_old.max() < 1e-5


def test_what_waits_while_finishing_first_starts_with_the_new_weights(make_engine):
    engine = make_engine(llama(0), max_slots=2, eos_token_ids=(), in_flight=InFlightPolicy.FINISH_FIRST)
    futures = [engine.submit(request(i, max_new_tokens=30)) for i in range(6)]
    weights = named_weights(llama(1))
    engine.swap(1, weights, weight_digests(weights))
    versions = [set(future.result().policy_version.tolist()) for future in futures]
    assert versions[-1] == {1}
    assert all(len(seen) == 1 for seen in versions)


def test_a_swap_with_a_wrong_digest_keeps_weights_and_version(make_engine):
    model = llama(0)
    engine = make_engine(model, version=3)
    weights = named_weights(llama(1))
    digests = weight_digests(weights)
    digests["model.norm.weight"] += 1
    with pytest.raises(EngineError, match=r"1 of \d+ tensors differ.*model\.norm\.weight"):
        engine.swap(4, weights, digests)
    assert engine.version() == 3
    assert weight_digests(named_weights(model)) == weight_digests(named_weights(llama(0)))
    assert engine.submit(request(0)).result().policy_version.unique().tolist() == [3]


def test_nothing_is_drawn_while_paused(make_engine):
    engine = make_engine()
    engine.pause()
    future = engine.submit(request(0))
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    engine.resume()
    assert len(future.result().response) > 0


def test_an_exception_in_the_model_reaches_every_future(make_engine):
    model = llama()
    engine = make_engine(model)

    def break_down(module, args, kwargs):
        raise FloatingPointError("the model broke down")

    model.register_forward_pre_hook(break_down, with_kwargs=True)
    futures = []
    with pytest.raises((FloatingPointError, EngineError), match="broke down"):
        for i in range(1000):
            futures.append(engine.submit(request(i)))
            futures[-1].result()
    assert all(isinstance(f.exception(), FloatingPointError) for f in futures)
    with pytest.raises(EngineError, match="has failed: the model broke down"):
        engine.submit(request(1000))


def test_closing_cancels_what_is_in_flight(make_engine):
    engine = make_engine(eos_token_ids=())
    engine.pause()
    future = engine.submit(request(0))
    engine.close()
    assert isinstance(future.exception(), CancelledError)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(request(1))


def test_refusals(make_engine):
    with pytest.raises(ValueError, match=r"temperature must be > 0, got 0"):
        make_engine(temperature=0)
    with pytest.raises(ValueError, match=r"max_slots must be >= 1, got 0"):
        make_engine(max_slots=0)
    with pytest.raises(RuntimeError, match="weights must be published first"):
        make_engine(version=-1).submit(request(0))
    sliding = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    with pytest.raises(ValueError, match=r"full attention in every layer, got .*sliding_attention"):
        make_engine(transformers.Qwen2ForCausalLM(sliding))


def test_the_context_names_the_law_of_sampling(make_engine):
    context = make_engine(temperature=0.7, tokenizer_digest="abc", kernel_fingerprint="k").context()
    assert (context.temperature, context.top_p, context.kernel_fingerprint) == (0.7, 1.0, "k")
    assert (
        make_engine(temperature=0.7).context().context_id != make_engine(temperature=1.0).context().context_id
    )
