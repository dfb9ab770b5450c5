"""TorchRL reads our batches, and we read them back bit by bit; foreign data is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.objectives.llm import GRPOLoss

from rzero.buffers import from_torchrl, pack, pack_fields, provenance_digest, to_torchrl
from tests.buffers.responses import assert_same, fields, rollout
from tests.buffers.test_packing import shapes

LAYOUTS = ["lazy", "jagged", "padded"]
NAN = float("nan")


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15, deadline=None)
@given(sizes=shapes, extras=st.booleans())
def test_every_layout_comes_back_bit_by_bit(layout, sizes, extras):
    records = [fields(uid, prompt=prompt, versions=versions) for uid, (prompt, versions) in enumerate(sizes)]
    if extras:
        for record in records:
            length = len(record["token_ids"])
            record["extras"] = {"log_probs": torch.arange(length) / 3, "turn": torch.ones(length).short()}
    batch = pack_fields(records)
    td = to_torchrl(batch, layout=layout, pad_token_id=7)
    assert td.batch_size == (len(sizes),)
    again = from_torchrl(td)
    assert_same(again, batch)


def two():
    return pack(
        [rollout(1, prompt=1, versions=(4, 5, 5)), rollout(2, prompt=3, versions=(6,), finish_code=1)]
    )


def test_the_padded_layout_pads_prompts_left_and_responses_right():
    batch = two()
    td = to_torchrl(batch, layout="padded", pad_token_id=7)
    first, second = batch.token_ids[:4].tolist(), batch.token_ids[4:].tolist()
    assert td["tokens", "full"].tolist() == [[7, 7, *first], [*second, 7, 7]]
    assert td["tokens", "prompt"].tolist() == [[7, 7, first[0]], second[:3]]
    assert td["tokens", "response"].tolist() == [first[1:], [second[3], 7, 7]]
    assert td["tokens", "full"].dtype == torch.int64
    log_probs = td["log_probs", "full"].nan_to_num(9.0)
    one, other = batch.behavior_log_probs[1:4].tolist(), batch.behavior_log_probs[7].item()
    assert log_probs.tolist() == [[9.0, 9.0, 9.0, *one], [9.0, 9.0, 9.0, other, 9.0, 9.0]]
    assert td["masks", "all_attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert td["masks", "all_assistant_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0]]
    assert td["rollout", "policy_version"].tolist() == [[-1, -1, -1, 4, 5, 5], [-1, -1, -1, 6, -1, -1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_torchrls_keys(layout):
    td = to_torchrl(two(), layout=layout)
    assert td["policy_version"].tolist() == [4, 6]
    assert td["next", "reward"].tolist() == [[1.0], [2.0]]
    assert td["next", "done"].tolist() == [[True], [True]]
    assert td["next", "terminated"].tolist() == [[True], [False]]
    assert td["next", "truncated"].tolist() == [[False], [True]]
    assert isinstance(td, LazyStackedTensorDict) == (layout == "lazy")
    assert td.get(("tokens", "response"))[0].dtype == torch.int64 if layout != "lazy" else True
    for row, (prompt, response) in enumerate(((1, 3), (3, 1))):
        if layout != "padded":
            assert td[row]["tokens", "prompt"].shape == (prompt,)
            assert td[row]["tokens", "response"].shape == (response,)
            assert td[row]["log_probs", "response"].isfinite().all()
            assert td[row]["masks", "all_assistant_mask"].shape == (prompt + response,)


def test_an_aborted_response_has_no_version():
    nothing = torch.full((3,), NAN), torch.full((3,), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
    names = ("behavior_log_probs", "policy_version", "response_mask")
    aborted = rollout(3, versions=(-1,), finish_code=2, **dict(zip(names, nothing, strict=True)))
    assert to_torchrl(pack([aborted, rollout(4)]), layout="padded")["policy_version"].tolist() == [-1, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evidence_that_was_altered_on_the_way_is_refused(layout):
    td = to_torchrl(two(), layout=layout)
    place = td.unbind(0)[0] if layout == "lazy" else td
    log_probs = place.get(("log_probs", "full"))
    (log_probs.values() if log_probs.is_nested else log_probs).nan_to_num_(0.0)
    with pytest.raises(
        ValueError, match=r"from_torchrl: behavior_log_probs must be a number .* NaN elsewhere"
    ):
        from_torchrl(td)


def test_nothing_is_invented_for_foreign_data():
    foreign = TensorDict(
        {("tokens", "full"): torch.zeros(2, 5), ("log_probs", "full"): torch.zeros(2, 5)}, [2]
    )
    with pytest.raises(
        ValueError, match=r"td must hold every key of to_torchrl, got none for .*'policy_version'"
    ):
        from_torchrl(foreign)
    for key in (
        ("rollout", "digest"),
        ("rollout", "policy_version"),
        ("log_probs", "full"),
        ("rollout", "uid"),
    ):
        with pytest.raises(ValueError, match=f"got none for .*{key[1]}"):
            from_torchrl(to_torchrl(two(), layout="padded").exclude(key))


def test_there_are_three_layouts():
    with pytest.raises(ValueError, match="layout must be 'lazy', 'jagged' or 'padded', got 'dense'"):
        to_torchrl(two(), layout="dense")


def tiny_actor():
    """A real language model under TorchRL's own wrapper."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torchrl.modules.llm import TransformersWrapper
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)).eval()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0})), pad_token="<pad>"
    )
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    return model, actor


@pytest.mark.parametrize("layout", ["lazy", "padded"])
def test_grpo_reads_it(layout):
    # The behaviour log-probs are those of the actor plus ln 2: every ratio is 1/2, within the clip,
    # so the loss is the mean over sampled tokens of -advantage / 2.
    model, actor = tiny_actor()
    records = [fields(uid, prompt=2 + uid, versions=(1,) * (5 - uid)) for uid in range(3)]
    for record in records:
        logits = model(record["token_ids"].long()[None]).logits[0, :-1].log_softmax(-1)
        drawn = logits.gather(-1, record["token_ids"][1:, None].long())[:, 0].detach()
        record["behavior_log_probs"][record["prompt_length"] :] = drawn[record["prompt_length"] - 1 :] + LN2
        record["digest"] = provenance_digest(
            record["token_ids"], record["behavior_log_probs"], record["policy_version"]
        )
    td = to_torchrl(pack_fields(records), layout=layout)
    advantages = torch.tensor([1.0, -2.0, 3.0])
    width = td.get(("tokens", "full"), as_padded_tensor=True).shape[1]
    td["advantage"] = advantages[:, None, None].expand(3, width, 1).clone()
    loss = GRPOLoss(actor, entropy_bonus=False, masking_strategy="rlhf", clip_epsilon=(0.9, 0.9))(td)
    lengths = torch.tensor([5.0, 4.0, 3.0])
    torch.testing.assert_close(loss.loss_objective, -(advantages * lengths).sum() / lengths.sum() / 2)


LN2 = 0.6931472
