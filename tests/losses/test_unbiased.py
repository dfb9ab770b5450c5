"""The estimator against brute force: 3 tokens, 4 symbols, every sequence enumerated, nothing sampled.

Notation: h is a history (the symbols so far), mu the sampler, pi the learner, R a reward that depends on the
whole sequence. Token importance weights correct the action at a stored history, not the distribution of
histories, so what the estimator estimates is the gradient, at theta, of

    J(theta) = (1/T) sum_t sum_h P_mu(h) sum_a pi_theta(a | h) Q_mu(h, a),   Q_mu(h, a) = E_mu[R | h, a]

with the sampler's histories and continuations held fixed. With pi = mu it is the policy gradient of E[R] / T.
"""

import itertools

import pytest
import torch
from torch import Tensor

from rzero.losses import group_mean_advantages, reinforce_loss

SYMBOLS, LENGTH = 4, 3
SEQUENCES = list(itertools.product(range(SYMBOLS), repeat=LENGTH))
HISTORIES = [
    history for length in range(LENGTH) for history in itertools.product(range(SYMBOLS), repeat=length)
]
ROW = {history: row for row, history in enumerate(HISTORIES)}

GENERATOR = torch.Generator().manual_seed(3)
THETA = torch.randn(len(HISTORIES), SYMBOLS, dtype=torch.float64, generator=GENERATOR)
DRIFT = 0.7 * torch.randn(len(HISTORIES), SYMBOLS, dtype=torch.float64, generator=GENERATOR)
REWARDS = torch.randn(len(SEQUENCES), dtype=torch.float64, generator=GENERATOR)


def sequence_log_probs(logits: Tensor) -> Tensor:
    """[64, 3]: log-probs of every token of every sequence under a table of logits, a row per history."""
    table = logits.log_softmax(-1)
    return torch.stack([torch.stack([table[ROW[s[:t]], s[t]] for t in range(LENGTH)]) for s in SEQUENCES])


def brute_force_gradient(mu: Tensor, rewards: Tensor) -> Tensor:
    """Gradient of J at THETA, by the definition of J and nothing of ours."""
    probability = {s: mu[i].sum().exp().item() for i, s in enumerate(SEQUENCES)}
    reward = dict(zip(SEQUENCES, rewards.tolist(), strict=True))
    theta = THETA.clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for history in HISTORIES:
        for action in range(SYMBOLS):
            # P_mu(h) Q_mu(h, a) = sum over continuations of P_mu(h, a, ...) R / mu(a | h).
            prefix = (*history, action)
            continued = [s for s in SEQUENCES if s[: len(prefix)] == prefix]
            joint = sum(probability[s] for s in continued)
            weighted = sum(probability[s] * reward[s] for s in continued)
            history_probability = sum(probability[s] for s in SEQUENCES if s[: len(history)] == history)
            action_value = history_probability * weighted / joint
            objective = objective + theta[ROW[history]].softmax(-1)[action] * action_value / LENGTH
    return torch.autograd.grad(objective, theta)[0]


@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["on policy", "off policy"])
def test_unbiased_for_fixed_histories(lag):
    mu = sequence_log_probs(THETA + lag * DRIFT)
    probability = mu.sum(-1).exp()
    theta = THETA.clone().requires_grad_()
    # The expectation over one drawn sequence: each enters with its probability, as an advantage scaled by it.
    loss = reinforce_loss(
        sequence_log_probs(theta),
        mu,
        REWARDS * probability * len(SEQUENCES),
        torch.ones(len(SEQUENCES), LENGTH, dtype=torch.bool),
    )
    loss.backward()
    torch.testing.assert_close(-theta.grad, brute_force_gradient(mu, REWARDS), rtol=1e-11, atol=1e-14)


def test_on_policy_it_is_the_policy_gradient():
    theta = THETA.clone().requires_grad_()
    expected_reward = (sequence_log_probs(theta).sum(-1).exp() * REWARDS).sum() / LENGTH
    (policy_gradient,) = torch.autograd.grad(expected_reward, theta)
    gradient = brute_force_gradient(sequence_log_probs(THETA), REWARDS)
    torch.testing.assert_close(gradient, policy_gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["on policy", "off policy"])
def test_the_group_mean_baseline_keeps_the_direction(lag):
    # Over all 4,096 pairs of sequences: subtracting the mean of n = 2, which contains the response itself,
    # gives (n - 1)/n = 1/2 of the gradient and changes nothing else, the other response being independent.
    mu = sequence_log_probs(THETA + lag * DRIFT)
    probability = mu.sum(-1).exp()
    first, second = torch.cartesian_prod(torch.arange(64), torch.arange(64)).unbind(-1)
    pairs = torch.stack([first, second], -1).flatten()
    group_id = torch.arange(64 * 64).repeat_interleave(2)
    advantages = group_mean_advantages(REWARDS[pairs], group_id, group_size=2)
    pair_probability = (probability[first] * probability[second]).repeat_interleave(2)
    theta = THETA.clone().requires_grad_()
    loss = reinforce_loss(
        sequence_log_probs(theta)[pairs],
        mu[pairs],
        advantages * pair_probability * 64 * 64,
        torch.ones(len(pairs), LENGTH, dtype=torch.bool),
    )
    loss.backward()
    expected = brute_force_gradient(mu, REWARDS) / 2
    torch.testing.assert_close(-theta.grad, expected, rtol=1e-10, atol=1e-14)


def test_without_the_weight_it_would_be_biased():
    # The negative control: the same expectation with mu replaced by pi in the denominator.
    mu = sequence_log_probs(THETA + DRIFT)
    theta = THETA.clone().requires_grad_()
    learner = sequence_log_probs(theta)
    scaled = REWARDS * mu.sum(-1).exp() * len(SEQUENCES)
    reinforce_loss(learner, learner.detach(), scaled, torch.ones(64, LENGTH, dtype=torch.bool)).backward()
    error = (-theta.grad - brute_force_gradient(mu, REWARDS)).norm() / theta.grad.norm()
    assert error > 0.1
