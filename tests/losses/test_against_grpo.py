"""TorchRL's GRPOLoss on the same numbers, in the limit where both must agree, and where they part."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives.llm import GRPOLoss

from rzero.losses import ReinforceZeroLoss, reinforce_loss
from tests.losses.batches import padded, random_rows


class GivenLogProbs(nn.Module):
    """The smallest thing GRPOLoss takes for an actor: a distribution whose log-probs and mask are given."""

    in_keys = ("tokens",)

    def __init__(self, log_probs, mask):
        super().__init__()
        self.log_probs, self.mask = log_probs, mask

    def get_dist(self, tensordict, **kwargs):
        return self

    def log_prob(self, tokens):
        return self.log_probs


def both(rows, *, clip_epsilon=(1 - 1e-6, 1e6)):
    """Gradients of GRPOLoss without an active clip, averaged per response, and of ours."""
    tokens = padded(rows)
    mask, behavior = tokens["mask"], tokens["behavior_log_probs"]
    theirs, ours = (tokens["log_probs"].clone().requires_grad_() for _ in range(2))
    grpo = GRPOLoss(
        GivenLogProbs(theirs, mask),
        clip_epsilon=clip_epsilon,
        aggregation="prompt_mean",
        entropy_bonus=False,
        masking_strategy="generic",
    )
    data = TensorDict(
        {
            ("tokens", "full"): torch.zeros(mask.shape, dtype=torch.int64),
            ("log_probs", "full"): behavior,
            ("masks", "all_assistant_mask"): mask,
            "advantage": rows.advantages[:, None, None],
        },
        batch_size=[len(rows)],
    )
    output = grpo(data)
    output.loss_objective.sum().backward()
    reinforce_loss(ours, behavior, rows.advantages, mask).backward()
    return theirs.grad, ours.grad, output, data


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_gradients_agree_where_nothing_clips(dtype, tolerance):
    theirs, ours, _, _ = both(random_rows(21, num_rows=8, longest=12, dtype=dtype))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert ours.any()


def test_they_part_where_a_ratio_is_clipped():
    theirs, ours, output, _ = both(random_rows(21, num_rows=8, longest=12), clip_epsilon=0.2)
    assert output.clip_fraction > 0
    assert not torch.allclose(ours, theirs)


def test_they_part_over_a_missing_behavior_log_prob():
    # GRPOLoss drops the token and divides by one token less; we refuse the batch.
    rows = random_rows(21, num_rows=8, longest=12)
    longest = max(range(8), key=lambda row: int(rows.masks[row].sum()))
    rows.behavior_log_probs[longest][int(rows.masks[longest].int().argmax())] = math.nan
    with pytest.raises(ValueError, match=f"behavior_log_probs must be finite .* at row {longest}"):
        both(rows)


def test_the_shell_reports_the_effective_sample_size_of_grpo():
    rows = random_rows(21, num_rows=8, longest=12)
    _, _, output, data = both(rows)
    ours = ReinforceZeroLoss()(data.set(("learner_log_probs", "full"), padded(rows)["log_probs"]))
    torch.testing.assert_close(ours.ESS, output.ESS)
    # kl_approx of GRPOLoss averages over the padding too; ours is over counted tokens.
    mask = padded(rows)["mask"]
    torch.testing.assert_close(ours.kl_approx * mask.sum() / mask.numel(), output.kl_approx)
