"""The TorchRL shell: keys, dispatch, layouts, networks and trainers."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.objectives import LossModule
from torchrl.trainers import DefaultOptimizationStepper, Trainer
from torchrl.trainers.algorithms.grpo import GRPOTrainer

from rzero.losses import ReinforceZeroLoss, importance_diagnostics, reinforce_loss
from tests.losses.batches import jagged, packed, padded, random_rows

KEYS = {
    "log_prob": ("learner_log_probs", "full"),
    "sample_log_prob": ("log_probs", "full"),
    "mask": ("masks", "all_assistant_mask"),
}
ARGUMENTS = {"log_prob": "log_probs", "sample_log_prob": "behavior_log_probs", "mask": "mask"}


def data_of(rows, layout=padded, keys=KEYS, advantage="advantage"):
    """A tensordict in TorchRL's layout."""
    tokens = layout(rows)
    batch_size = [] if layout is packed else [len(rows)]
    data = TensorDict({advantage: rows.advantages}, batch_size=batch_size)
    for role, key in keys.items():
        data[key] = tokens[ARGUMENTS[role]]
    if "cu_seqlens" in tokens:
        data["cu_seqlens"] = tokens["cu_seqlens"]
    return data


def expected_of(rows):
    tokens = padded(rows)
    return reinforce_loss(tokens["log_probs"], tokens["behavior_log_probs"], rows.advantages, tokens["mask"])


@pytest.mark.parametrize("layout", [padded, packed, jagged])
def test_it_is_the_function(layout):
    rows = random_rows(1)
    output = ReinforceZeroLoss()(data_of(rows, layout))
    torch.testing.assert_close(output.loss_objective, expected_of(rows))


def test_ragged_lazy_stacks_are_read():
    rows = random_rows(1)
    singles = [data_of(rows.select([row]))[0] for row in range(len(rows))]
    output = ReinforceZeroLoss()(lazy_stack(singles))
    torch.testing.assert_close(output.loss_objective, expected_of(rows))


class PadsLeft(TensorDictModuleBase):
    """An actor that pads ragged rows on the left and answers with a dense tensor, as TorchRL does."""

    in_keys = ("observed",)
    out_keys = (("log_probs", "full"),)

    def forward(self, tensordict):
        observed = tensordict.get("observed", as_padded_tensor=True, padding_side="left", padding_value=0.0)
        return TensorDict({("log_probs", "full"): observed}, batch_size=tensordict.batch_size)


def test_ragged_lazy_stacks_meet_an_actor_that_pads_left():
    rows = random_rows(1)
    singles = [data_of(rows.select([row]))[0] for row in range(len(rows))]
    for single, log_probs in zip(singles, rows.log_probs, strict=True):
        single["observed"] = log_probs
    output = ReinforceZeroLoss(PadsLeft())(lazy_stack(singles))
    torch.testing.assert_close(output.loss_objective, expected_of(rows))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 1, 1)])
def test_torchrls_shapes_of_an_advantage(shape):
    rows = random_rows(1)
    data = data_of(rows)
    data["advantage"] = rows.advantages.reshape(shape)
    torch.testing.assert_close(ReinforceZeroLoss()(data).loss_objective, expected_of(rows))


def test_the_scalars_are_those_of_the_diagnostics():
    rows = random_rows(1)
    output = ReinforceZeroLoss()(data_of(rows))
    found = importance_diagnostics(**packed(rows)).to_dict()
    for ours, theirs in (
        (output.ESS, "ess_fraction"),
        (output.kl_approx, "kl_k1"),
        (output.ratio_mean, "ratio_mean"),
        (output.ratio_max, "ratio_max"),
    ):
        assert ours.item() == pytest.approx(found[f"token/{theirs}"], rel=1e-5)
        assert not ours.requires_grad


@pytest.mark.parametrize("key", ["renamed", ("nested", "renamed"), ("deeply", "nested", "renamed")])
@pytest.mark.parametrize("role", ["log_prob", "sample_log_prob", "mask", "advantage", "cu_seqlens"])
def test_every_key_can_be_renamed_and_nested(role, key):
    rows = random_rows(1)
    loss = ReinforceZeroLoss()
    loss.set_keys(**{role: key})
    data = data_of(rows, packed)
    data.rename_key_({**KEYS, "advantage": "advantage", "cu_seqlens": "cu_seqlens"}[role], key)
    assert key in loss.in_keys
    torch.testing.assert_close(loss(data).loss_objective, expected_of(rows))
    loss.set_keys(**{role: None})
    assert key not in loss.in_keys


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        ReinforceZeroLoss().set_keys(old_log_prob="x")


def test_dispatch():
    rows = random_rows(1)
    tokens = padded(rows)
    values = ReinforceZeroLoss()(
        learner_log_probs_full=tokens["log_probs"],
        log_probs_full=tokens["behavior_log_probs"],
        advantage=rows.advantages,
        masks_all_assistant_mask=tokens["mask"],
    )
    assert len(values) == len(ReinforceZeroLoss().out_keys)
    torch.testing.assert_close(values[0], expected_of(rows))


def test_the_output_is_read_and_written_by_name():
    output = ReinforceZeroLoss()(data_of(random_rows(1)))
    assert torch.equal(output["loss_objective"], output.loss_objective)
    assert output.grad_norm is None
    output["grad_norm"] = torch.tensor(2.0)
    assert output.grad_norm == 2


@pytest.mark.parametrize("role", ["log_prob", "sample_log_prob", "mask"])
def test_a_missing_entry_is_named(role):
    data = data_of(random_rows(1)).exclude(KEYS[role])
    with pytest.raises(KeyError, match=f"must hold .*{role}; set_keys renames it"):
        ReinforceZeroLoss()(data)


def test_several_advantages_for_a_response_are_refused():
    data = data_of(random_rows(1))
    data["advantage"] = torch.zeros(len(data), 2)
    with pytest.raises(
        ValueError, match=r"advantage must hold one value for each response, got shape \(6, 2\)"
    ):
        ReinforceZeroLoss()(data)


def test_options_reach_the_function():
    rows = random_rows(1)
    data = data_of(rows)
    scaled = ReinforceZeroLoss(num_responses=4 * len(rows))(data).loss_objective
    torch.testing.assert_close(4 * scaled, expected_of(rows))
    data["log_probs", "full"] = torch.full_like(data["log_probs", "full"], 1.0)
    with pytest.raises(ValueError, match="behavior_log_probs must be finite and at most 0"):
        ReinforceZeroLoss()(data)
    ReinforceZeroLoss(check_values=False)(data)


def test_the_input_is_left_alone():
    rows = random_rows(1)
    data = data_of(rows).exclude(KEYS["log_prob"])
    data["observed"] = torch.where(data["masks", "all_assistant_mask"], padded(rows)["log_probs"], -1.0)
    before = set(data.keys(True, True))
    ReinforceZeroLoss(actor(rows))(data)
    assert set(data.keys(True, True)) == before
    torch.testing.assert_close(
        data["log_probs", "full"], padded(rows)["behavior_log_probs"], equal_nan=True, rtol=0, atol=0
    )


class Scaled(nn.Module):
    """A policy with one parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, observed):
        return observed * self.scale


def actor(rows):
    """Writes log-probs where TorchRL's wrappers write them: over the sampler's, in its copy."""
    return TensorDictModule(Scaled(), in_keys=["observed"], out_keys=[("log_probs", "full")])


def test_an_actor_network_provides_the_log_probs():
    rows = random_rows(1)
    loss = ReinforceZeroLoss(actor(rows))
    data = data_of(rows).exclude(KEYS["log_prob"])
    observed = padded(rows)["log_probs"]
    data["observed"] = torch.where(data["masks", "all_assistant_mask"], observed, -1.0)
    output = loss(data)
    torch.testing.assert_close(output.loss_objective, expected_of(rows))
    output.loss_objective.backward()
    (parameter,) = loss.parameters()
    assert parameter.grad != 0
    assert loss.in_keys[0] == "observed"


def test_a_transformers_wrapper_is_an_actor_network():
    # A real causal language model of TorchRL's own kind; its log-probs are the learner's, token by token.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torchrl.modules.llm import TransformersWrapper
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **size)).eval()
    vocabulary = Tokenizer(WordLevel({str(token): token for token in range(32)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="0", eos_token="1")
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    tokens = torch.randint(2, 32, (3, 6))
    sampled = torch.tensor([[False, False, True, True, True, True]]).expand(3, 6)
    learner = model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    learner = torch.cat([torch.zeros(3, 1), learner], dim=1)
    behavior = torch.where(sampled, learner.detach() - 0.1, torch.nan)
    data = TensorDict(
        {
            ("tokens", "full"): tokens,
            ("masks", "all_attention_mask"): torch.ones(3, 6, dtype=torch.bool),
            ("masks", "all_assistant_mask"): sampled,
            ("log_probs", "full"): behavior,
            "advantage": torch.tensor([1.0, -0.5, -0.5]),
        },
        batch_size=[3],
    )
    loss = ReinforceZeroLoss(wrapper)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        output = loss(data)
    expected = reinforce_loss(learner, behavior, data["advantage"], sampled)
    torch.testing.assert_close(output.loss_objective, expected)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(output.loss_objective, parameters)
    for gradient, theirs in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-6)


class FixedBatches(BaseCollector):
    """The least collector: the same batch over and over."""

    init_random_frames = 0

    def __init__(self, data, batches):
        super().__init__()
        self.data, self.batches = data, batches
        self.requested_frames_per_batch = len(data)

    def iterator(self):
        for _ in range(self.batches):
            yield self.data.clone()

    def shutdown(self, *args, **kwargs):
        pass

    def set_seed(self, seed, static_seed=False):
        return seed

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def generic_trainer(**options):
    return Trainer(optimization_stepper=DefaultOptimizationStepper(), clip_grad_norm=False, **options)


def grpo_trainer(**options):
    with pytest.warns(UserWarning, match="GRPOTrainer is an experimental"):
        return GRPOTrainer(log_rewards=False, **options)


@pytest.mark.parametrize("make_trainer", [generic_trainer, grpo_trainer])
def test_inside_torchrls_trainers(make_trainer):
    rows = random_rows(1)
    loss = ReinforceZeroLoss(actor(rows))
    assert isinstance(loss, LossModule)
    data = data_of(rows).exclude(KEYS["log_prob"])
    data["observed"] = torch.where(data["masks", "all_assistant_mask"], padded(rows)["log_probs"], -1.0)
    expected = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([expected], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        mask, behavior = data["masks", "all_assistant_mask"], data["log_probs", "full"]
        reinforce_loss(data["observed"] * expected, behavior, rows.advantages, mask).backward()
        optimizer.step()
    trainer = make_trainer(
        collector=FixedBatches(data, 3),
        total_frames=3 * len(rows),
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=0.01),
        clip_norm=None,
        progress_bar=False,
    )
    trainer.train()
    (parameter,) = loss.parameters()
    assert parameter != 1
    torch.testing.assert_close(parameter, expected)


def test_an_unknown_name_of_the_package():
    import rzero.losses

    with pytest.raises(AttributeError, match="no attribute 'PPOLoss'"):
        rzero.losses.PPOLoss  # noqa: B018
