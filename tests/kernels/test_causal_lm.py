import pytest
import torch
import transformers

from rzero.kernels import causal_lm, log_softmax
from rzero.kernels.align import align
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
RESPONSES = [[7, 8], [9, 10, 11, 12], [7], [13, 14, 15], [8, 9], [2, 2, 2, 2, 2]]


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


@pytest.mark.parametrize(("worth", "tree"), [(1, 3), (512, 0), (512, 128)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_values_and_gradients_are_those_of_rows_computed_alone(
    shared, implementation, worth, tree, monkeypatch
):
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", worth)
    monkeypatch.setattr(causal_lm, "TREE_TOKENS", tree)
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


def shapes_of_calls(model=None, *, shared=True):
    model, shapes = model or llama(), []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, cu_seqlens, mask, prompt_length = packed()
    prompt_length = prompt_length if shared else None
    causal_lm_log_probs(model, ids, cu_seqlens, mask, temperature=1.0, prompt_length=prompt_length)
    return shapes


def test_equal_prompts_are_computed_once():
    # Prompts of 5, 1, 3 and 2 tokens; responses of 2 and 1, 4 and 2, 3, 5, all but their last tokens.
    assert shapes_of_calls() == [(4, max(5 + 1 + 0, 1 + 3 + 1, 3 + 2, 2 + 4))]


def test_long_responses_are_not_put_behind_one_prompt(monkeypatch):
    monkeypatch.setattr(causal_lm, "TREE_TOKENS", 3)
    assert shapes_of_calls() == [(5, 6)]  # the 3 + 1 tokens of the second prompt's responses are too many


@pytest.mark.parametrize("cannot", ["eager", "window"])
def test_attention_that_takes_no_such_mask_computes_rows_alone(cannot):
    model = llama()
    if cannot == "eager":
        model.set_attn_implementation("eager")
    else:
        model.config.sliding_window = 4
    assert shapes_of_calls(model) == [(6, 7)]


def test_rows_of_like_length_are_computed_together(monkeypatch):
    # Rows alone, but the last tokens: 6, 4, 5, 5, 2, 6; by falling length 6, 6, 5, 5, 4, 2. A cut before the
    # third saves 4 x 1 tokens, before the fifth 2 x 2; then 5, 5, 4, 2: a cut before the last 1 x 3.
    monkeypatch.setattr(causal_lm, "TREE_TOKENS", 0)
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 3)
    assert shapes_of_calls() == [(2, 6), (3, 5), (1, 2)]
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 4)
    assert shapes_of_calls() == [(2, 6), (4, 5)]
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 5)
    assert shapes_of_calls() == [(6, 6)]
    monkeypatch.setattr(causal_lm, "WORTH_A_CALL", 1)
    assert shapes_of_calls(shared=False) == [(6, 7)]  # one call, as FSDP2 needs it


@pytest.mark.parametrize("tree", [0, 3, 128])
def test_exact_kernels_give_a_row_the_same_bits_alone_and_behind_a_shared_prompt(tree, monkeypatch):
    monkeypatch.setattr(causal_lm, "TREE_TOKENS", tree)
    model = llama().float()
    align(model)
    ids, cu_seqlens, mask, prompt_length = packed()
    alone, shared = (
        causal_lm_log_probs(
            model, ids, cu_seqlens, mask, temperature=0.7, prompt_length=prompts, log_softmax=log_softmax
        )[0]
        for prompts in (None, prompt_length)
    )
    assert torch.equal(alone, shared) and alone.abs().sum() > 0


def test_recomputing_activations_changes_no_gradient():
    ids, cu_seqlens, mask, prompt_length = packed()
    grads = []
    for recompute in (False, True):
        model = llama()
        if recompute:
            model.gradient_checkpointing_enable()
            model.train()  # or nothing is recomputed
        log_probs, _ = causal_lm_log_probs(
            model, ids, cu_seqlens, mask, temperature=1.0, prompt_length=prompt_length
        )
        grads.append(torch.autograd.grad(log_probs.sum(), list(model.parameters())))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


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
