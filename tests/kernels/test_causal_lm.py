import pytest
import torch
import transformers

from rzero.kernels import causal_lm
from rzero.kernels.causal_lm import causal_lm_log_probs


def llama(**settings):
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()


PROMPTS = [[1, 4, 6, 9, 2], [3], [1, 4, 6, 9, 2], [5, 5, 7], [3], [1, 4]]
RESPONSES = [[7, 8], [9, 10, 11, 12], [7], [13, 14, 15], [9, 9], [2, 2, 2, 2, 2]]


def packed():
    rows = [torch.tensor(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    masks = [torch.arange(len(p) + len(r)) >= len(p) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    prompt_length = torch.tensor([len(p) for p in PROMPTS])
    return torch.cat(rows).int(), lengths.cumsum(0), torch.cat(masks), prompt_length


def row_by_row(model, temperature):
    """One plain forward a row, in a loop: the derivation."""
    log_probs, entropies = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        scores = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
        picked = scores[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        entropy = -(scores.exp() * scores).sum(-1)[:-1]
        zeros = torch.zeros(len(prompt), dtype=torch.double)
        log_probs.append(torch.cat([zeros, picked[len(prompt) - 1 :]]))
        entropies.append(torch.cat([zeros, entropy[len(prompt) - 1 :]]))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("worth", [1, 512])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_values_and_gradients_are_those_of_rows_computed_alone(shared, implementation, worth, monkeypatch):
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", worth)
    model = llama()
    model.set_attn_implementation(implementation)
    ids, cu_seqlens, mask, prompt_length = packed()
    weights = torch.linspace(-1, 1, len(ids)).double()
    got, entropies = causal_lm_log_probs(
        model, ids, cu_seqlens, mask, temperature=0.7, prompt_length=prompt_length if shared else None
    )
    got_grads = torch.autograd.grad((got * weights).sum(), list(model.parameters()))
    expected, expected_entropies = row_by_row(model, 0.7)
    expected_grads = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    # The scores pass through float32, as in the sampler.
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropies.double(), expected_entropies.detach(), atol=2e-6, rtol=0)
    for one, other in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert not entropies.requires_grad


def shapes_of_calls(*, shared):
    model, shapes = llama(), []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, cu_seqlens, mask, prompt_length = packed()
    prompt_length = prompt_length if shared else None
    causal_lm_log_probs(model, ids, cu_seqlens, mask, temperature=1.0, prompt_length=prompt_length)
    return shapes


def test_equal_prompts_are_computed_once():
    # Beginnings without their last tokens: [1, 4, 6, 9], [], [5, 5], [1]; the ends hold 1 + 5 tokens at most.
    assert shapes_of_calls(shared=True) == [(4, 4), (6, 6)]


def test_rows_of_like_length_are_computed_together(monkeypatch):
    # The ends hold 3, 5, 2, 4, 3, 6 tokens, by falling length 6, 5, 4, 3, 3, 2. A cut before the second saves
    # 5 x 1 tokens, before the third 4 x 2, the fourth 3 x 3, the fifth 2 x 3, the sixth 1 x 4: the fourth.
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 9)
    assert shapes_of_calls(shared=True) == [(4, 4), (3, 6), (3, 3)]
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 10)
    assert shapes_of_calls(shared=True) == [(4, 4), (6, 6)]
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 1)
    assert shapes_of_calls(shared=False) == [(6, 7)]  # one call, as FSDP2 needs it


def test_tokens_of_other_turns_are_not_scored():
    model = llama()
    ids, cu_seqlens, mask, prompt_length = packed()
    mask[int(cu_seqlens[1]) + 2] = False  # a tool's token inside the second row
    got, _ = causal_lm_log_probs(model, ids, cu_seqlens, mask, temperature=1.0, prompt_length=prompt_length)
    expected, _ = row_by_row(model, 1.0)
    torch.testing.assert_close(got.double(), torch.where(mask, expected, 0.0), atol=2e-6, rtol=0)


def test_a_token_that_nothing_precedes_cannot_be_scored():
    ids, cu_seqlens, mask, prompt_length = packed()
    mask[0] = True
    with pytest.raises(ValueError, match="mask must be False at the first token of a row"):
        causal_lm_log_probs(llama(), ids, cu_seqlens, mask, temperature=1.0)
    mask[0], mask[3] = False, True
    with pytest.raises(ValueError, match="mask must be False at every token of a prompt"):
        causal_lm_log_probs(llama(), ids, cu_seqlens, mask, temperature=1.0, prompt_length=prompt_length)
