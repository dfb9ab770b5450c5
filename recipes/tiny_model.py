"""The default model: a tiny Llama over characters, warmed up by supervised learning and cached."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import string
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from recipes.tasks.reasoning import Problem, ReasoningTasks

Transcript = Callable[[Problem], Sequence[tuple[str, bool]]]
"""A worked example that follows the question: pieces of text, each with whether it is to be learned."""

WARM_UP_CURSOR = 5 * 10**8  # The supervised problems start here, far from where reinforcement starts.


def character_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A Hugging Face tokenizer of printable ASCII: one token a character, and ``<pad> <bos> <eos> <unk>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = [c for c in string.printable if c == "\n" or not c.isspace()] + [" "]
    vocabulary = {token: index for index, token in enumerate(special + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def encode_prompts(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of questions: by the tokenizer's chat template, else ``<bos> question newline``."""
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": question}] for question in questions]
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    texts = [question + "\n" for question in questions]
    return [[*start, *ids] for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def tiny_llama(
    vocab_size: int, *, hidden_size: int, layers: int, seed: int, head_size: int = 16
) -> transformers.LlamaForCausalLM:
    """A Llama from scratch, with seeded weights."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // head_size,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def answer_alone(problem: Problem) -> list[tuple[str, bool]]:
    """The transcript that is nothing but the reference answer."""
    return [(problem.answer, True)]


def warm_up(
    model: Any,
    tokenizer: Any,
    tasks: ReasoningTasks,
    *,
    steps: int,
    transcript: Transcript = answer_alone,
    batch_size: int = 128,
    lr: float = 3e-3,
) -> None:
    """Supervised learning, loss on what is to be learned alone, for a fixed number of seeded steps.

    The learning rate does not decay: a model that is still in motion is what reinforcement can improve.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = transformers.get_constant_schedule_with_warmup(optimizer, steps // 20)
    problems = tasks.stream(WARM_UP_CURSOR)
    model.train()
    progress = tqdm(range(steps), desc="warm-up", unit="step", dynamic_ncols=True)
    for _ in progress:
        batch = [next(problems) for _ in range(batch_size)]
        loss = model(**_supervised_batch(tokenizer, batch, transcript)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


def _supervised_batch(
    tokenizer: Any, problems: Sequence[Problem], transcript: Transcript
) -> dict[str, torch.Tensor]:
    rows, labels = [], []
    prompts = encode_prompts(tokenizer, [problem.question for problem in problems])
    for problem, prompt in zip(problems, prompts, strict=True):
        row, label = [*prompt], [-100] * len(prompt)
        for text, learned in transcript(problem):
            ids = tokenizer.encode(text, add_special_tokens=False)
            row += ids
            label += ids if learned else [-100] * len(ids)
        rows.append(torch.tensor([*row, tokenizer.eos_token_id]))
        labels.append(torch.tensor([*label, tokenizer.eos_token_id]))
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    padded_labels = pad(labels, batch_first=True, padding_value=-100)
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": padded_labels}


def cached_tiny_model(
    specs: Sequence[str],
    *,
    warm_up_steps: int,
    cache_dir: Path,
    transcript: Transcript = answer_alone,
    hidden_size: int = 64,
    layers: int = 2,
    head_size: int = 16,
) -> Path:
    """Folder of the warmed-up tiny model and its tokenizer, made on the first call.

    The folder's name is a digest of everything that decides its content: the tasks, sizes, steps, the code of
    this file, the tasks and the transcript, and the versions of torch and transformers. It appears by an
    atomic rename, never half-written.
    """
    from recipes.tasks import reasoning as tasks_module

    recipe = {"specs": list(specs), "hidden_size": hidden_size, "layers": layers, "steps": warm_up_steps}
    recipe["head_size"] = head_size
    versions = [torch.__version__, transformers.__version__]
    code = [Path(__file__).read_text(), inspect.getsource(tasks_module), inspect.getsource(transcript)]
    digest = hashlib.sha256(json.dumps([recipe, versions, code], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / f"tiny-llama-{digest}"
    if folder.exists():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    model = tiny_llama(len(tokenizer), hidden_size=hidden_size, layers=layers, seed=0, head_size=head_size)
    tasks = ReasoningTasks(specs, seed=0, held_out_size=256)
    warm_up(model, tokenizer, tasks, steps=warm_up_steps, transcript=transcript)
    staging = Path(tempfile.mkdtemp(dir=cache_dir))
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    try:
        staging.rename(folder)
    except OSError:  # Another run finished the same model first; its content is the same.
        shutil.rmtree(staging)
    return folder


def default_cache_dir() -> Path:
    """``$RZERO_CACHE``, or ``rzero`` in the user's cache folder."""
    if "RZERO_CACHE" in os.environ:
        return Path(os.environ["RZERO_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rzero"
