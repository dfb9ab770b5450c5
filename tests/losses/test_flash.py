"""FlashREINFORCE: the gate, and the loss behind it, against the published formula."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.losses import batch_mean_advantages, flash_reinforce_loss, reinforce_loss, sequence_trust_mask
from tests.losses.batches import LAYOUTS, loss_and_gradients, random_rows, reference_loss, unhurried


def published_divergence(mu, pi):
    """d = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) of two probabilities, clamped to [1e-6, 1 - 1e-6]."""
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (mu, pi))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def published_gate(rows, delta):
    """m_i in Python floats."""
    kept = []
    for learner, sampler, mask in zip(rows.log_probs, rows.behavior_log_probs, rows.masks, strict=True):
        divergences = [
            published_divergence(mu, pi)
            for mu, pi in zip(
                sampler[mask].double().exp().tolist(), learner[mask].double().exp().tolist(), strict=True
            )
        ]
        kept.append(math.fsum(divergences) / max(len(divergences), 1) <= delta)
    return kept


def admits(mu, pi, delta):
    """The gate's answer for one row of tokens given as probabilities."""
    log_probs, behavior = (torch.tensor([x], dtype=torch.float64).log() for x in (pi, mu))
    return sequence_trust_mask(
        log_probs, behavior, torch.ones_like(behavior, dtype=torch.bool), delta=delta
    ).item()


@pytest.mark.parametrize(
    ("mu", "pi", "divergence"),
    [
        # p = 1/2: d = 1/2 ln(1/(4 q (1 - q))), so 1/2 ln(1 / 0.96) at 0.6, the same at 0.4: two-sided.
        ([0.5], [0.6], 0.5 * math.log(1 / 0.96)),
        ([0.5], [0.4], 0.5 * math.log(1 / 0.96)),
        # 0.9 ln(9/8) + 0.1 ln(1/2)
        ([0.9], [0.8], 0.9 * math.log(9 / 8) - 0.1 * math.log(2)),
        # The mean over the tokens, not their sum: the second token agrees and halves it.
        ([0.5, 0.3], [0.6, 0.3], 0.25 * math.log(1 / 0.96)),
        # Certain tokens are clamped: p = q = 1 - 1e-6 is agreement, and 1 against 1/2 is finite.
        ([1.0], [1.0], 0.0),
        ([1.0], [0.5], (1 - 1e-6) * math.log(2 * (1 - 1e-6)) + 1e-6 * math.log(2e-6)),
        # 1e-9 counts as 1e-6, so it agrees with 1e-7.
        ([1e-9], [1e-7], 0.0),
    ],
)
def test_golden_divergence(mu, pi, divergence):
    assert admits(mu, pi, divergence + 1e-12)
    if divergence:
        assert not admits(mu, pi, divergence - 1e-12)


def test_the_threshold_is_inclusive():
    # Agreement has d = 0 exactly, and 0 <= 0.
    assert admits([0.3, 0.7], [0.3, 0.7], 0.0)


def test_infinite_delta_admits_everything():
    assert admits([0.999], [0.001], math.inf)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("delta", [1e-2, 3e-2, 5e-2])
def test_gate_agrees_with_the_published_formula(layout, delta):
    rows = random_rows(8, num_rows=12)
    trusted = sequence_trust_mask(**LAYOUTS[layout](rows), delta=delta)
    assert trusted.dtype == torch.bool
    assert trusted.tolist() == published_gate(rows, delta)
    assert 1 < trusted.sum() < 12, "the test needs rows on both sides"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_has_the_gradient_of_the_published_objective(layout):
    # J = (1/B) sum_i (m_i A_i / T_i) sum_t pi / mu, differentiated by hand: m w A / (B T). The loss is -J.
    rows = random_rows(8, num_rows=12, dtype=torch.float64)
    trusted = published_gate(rows, 2e-2)
    _, gradients = reference_loss(rows, detached=False)
    _, found = loss_and_gradients(flash_reinforce_loss, rows, layout, delta=2e-2)
    for ours, theirs, kept in zip(found, gradients, trusted, strict=True):
        torch.testing.assert_close(ours, theirs if kept else torch.zeros_like(theirs), rtol=1e-12, atol=0)


@unhurried
@given(seed=st.integers(0, 2**31), layout=st.sampled_from(sorted(LAYOUTS)), delta=st.floats(0, 0.2))
def test_a_rejected_response_contributes_nothing_and_stays_in_b(seed, layout, delta):
    rows = random_rows(seed)
    trusted = published_gate(rows, delta)
    zeroed = replace(rows, advantages=rows.advantages * torch.tensor(trusted))
    value, gradients = loss_and_gradients(flash_reinforce_loss, rows, layout, delta=delta)
    expected, others = loss_and_gradients(reinforce_loss, zeroed, layout)
    torch.testing.assert_close(value, expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, others, strict=True))


def test_infinite_delta_is_the_plain_loss():
    rows = random_rows(4)
    value, gradients = loss_and_gradients(flash_reinforce_loss, rows, delta=math.inf)
    plain, others = loss_and_gradients(reinforce_loss, rows)
    assert torch.equal(value, plain)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, others, strict=True))


def test_a_ratio_may_overflow_only_where_it_is_not_used():
    # Row 0 agrees, row 1 is e^100 off: rejected without being exponentiated, refused when admitted.
    log_probs = torch.tensor([[-1.0], [-0.5]], requires_grad=True)
    behavior, mask = torch.tensor([[-1.0], [-100.5]]), torch.ones(2, 1, dtype=torch.bool)
    advantages = batch_mean_advantages(torch.tensor([1.0, 0.0]))
    flash_reinforce_loss(log_probs, behavior, advantages, mask, delta=3e-3).backward()
    assert log_probs.grad.tolist() == [[-0.25], [0.0]]
    with pytest.raises(ValueError, match=r"^flash_reinforce_loss: .*overflows.* at row 1, token 0"):
        flash_reinforce_loss(log_probs, behavior, advantages, mask, delta=math.inf)


@pytest.mark.parametrize("delta", [-1e-3, math.nan])
def test_a_senseless_delta_is_refused(delta):
    tokens = LAYOUTS["padded"](random_rows(0))
    with pytest.raises(ValueError, match=r"^sequence_trust_mask: delta must be at least 0"):
        sequence_trust_mask(**tokens, delta=delta)
    with pytest.raises(ValueError, match=r"^flash_reinforce_loss: delta must be at least 0"):
        loss_and_gradients(flash_reinforce_loss, random_rows(0), delta=delta)


def test_an_unchecked_missing_number_is_never_admitted():
    trusted = sequence_trust_mask(
        torch.tensor([[-1.0]]),
        torch.tensor([[math.nan]]),
        torch.tensor([[True]]),
        delta=1.0,
        check_values=False,
    )
    assert not trusted.any()
