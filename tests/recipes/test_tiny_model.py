import torch
import transformers

from recipes.tasks.reasoning import ReasoningTasks
from recipes.tiny_model import cached_tiny_model, character_tokenizer, encode_prompts, tiny_llama, warm_up


def test_the_tokenizer_reads_characters_and_gives_them_back():
    tokenizer = character_tokenizer()
    text = "Calculate 5 - 3.\n(x) ~"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
    assert encode_prompts(tokenizer, ["1"])[0][0] == tokenizer.bos_token_id


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    assert [tokenizer.decode(ids) for ids in encode_prompts(tokenizer, ["7", "8"])] == ["<7>!", "<8>!"]


def test_warm_up_is_seeded_and_learns():
    tokenizer = character_tokenizer()
    losses = []
    for _ in range(2):
        model = tiny_llama(len(tokenizer), hidden_size=32, layers=1, seed=0)
        tasks = ReasoningTasks(["basic_arithmetic"], seed=0, held_out_size=8)
        warm_up(model, tokenizer, tasks, steps=12, batch_size=16)
        ids = torch.tensor(encode_prompts(tokenizer, ["Calculate 1 + 1."]))
        losses.append(model(input_ids=ids).logits)
    assert torch.equal(losses[0], losses[1])
    untrained = tiny_llama(len(tokenizer), hidden_size=32, layers=1, seed=0)
    assert not torch.allclose(losses[0], untrained(input_ids=ids).logits, atol=0.1)


def test_the_model_is_made_once_and_named_by_its_content(tmp_path):
    folder = cached_tiny_model(["chain_sum"], warm_up_steps=2, cache_dir=tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert cached_tiny_model(["chain_sum"], warm_up_steps=2, cache_dir=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert cached_tiny_model(["chain_sum"], warm_up_steps=3, cache_dir=tmp_path) != folder
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("tiny-llama")) == []
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.decode(loaded.encode("a b", add_special_tokens=False)) == "a b"
