"""Real tiny models and requests for the tests of the collectors."""

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers

from rzero.buffers import provenance_digest
from rzero.collectors import Completion, GenerationRequest, TransformersEngine

VOCABULARY = 29
EOS = 2


def llama(seed: int = 0, **settings) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,  # far from uniform, so that a wrong distribution shows
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def request(
    uid: int, *, prompt: tuple[int, ...] = (1, 5, 7, 9), max_new_tokens: int = 6, seed: int | None = None
):
    return GenerationRequest(
        uid=uid,
        group_id=uid // 4,
        prompt_id=uid // 4,
        sample_index=uid % 4,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        seed=uid if seed is None else seed,
    )


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TransformersEngine]]:
    engines: list[TransformersEngine] = []

    def make(model: transformers.PreTrainedModel | None = None, **settings) -> TransformersEngine:
        engine = TransformersEngine(
            llama() if model is None else model, **{"eos_token_ids": (EOS,), **settings}
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def full_forward_log_probs(model, prompt, response, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a response by one plain forward over the whole row: the derivation the engine must agree
    with."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, response.long()[:, None])[:, 0]


def digest_of(completion: Completion) -> torch.Tensor:
    """The digest a completion must carry, put together by hand."""
    prompt = completion.request.prompt
    return provenance_digest(
        torch.cat([torch.tensor(prompt, dtype=torch.int32), completion.response]),
        torch.cat([torch.full((len(prompt),), torch.nan), completion.behavior_log_probs]),
        torch.cat([torch.full((len(prompt),), -1, dtype=torch.int32), completion.policy_version]),
    )
