"""Each objective against its gradient written out token by token in float64."""

import itertools
import json
import math
from typing import get_args

import numpy as np
import pytest
import torch

from recipes.config import Config, Objective, default_config, saved_config
from recipes.errors import RecipeError
from recipes.objectives import OBJECTIVES
from rzero.buffers import pack
from tests.buffers.responses import rollout
from tests.recipes.conftest import TINY
from tests.recipes.test_reinforce_zero import only_run

GROUP_SIZE, LENGTHS = 4, (3, 1, 5, 2, 4, 6, 2, 3)
REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0)
SHIFTS = (0.01, 0.4, -0.3, 0.02, 0.5, -0.02, -0.6, 0.3)  # of a response's log-ratios, so that all gates act


def batch_of(rows):
    return pack(
        [rollout(row, reward=REWARDS[row], prompt=10 + row % 3, versions=(3,) * LENGTHS[row]) for row in rows]
    )


def learner_log_probs(batch):
    """float32 [N]: what was recorded, shifted by response and, a little, by token; junk over prompts."""
    shift = torch.tensor([SHIFTS[uid] for uid in batch.uid.tolist()])
    per_token = shift.repeat_interleave(batch.cu_seqlens.diff())
    places = torch.arange(len(per_token)) - batch.cu_seqlens[:-1].repeat_interleave(batch.cu_seqlens.diff())
    shifted = batch.behavior_log_probs + per_token * (1 + 0.1 * (places % 3))
    return torch.where(batch.response_mask, shifted, torch.inf)


def derived_gradient(batch, log_probs, name):
    """d loss / d log pi of every token, from the formulas, one token after the other."""
    gradient, rewards = np.zeros(len(log_probs)), np.array(REWARDS)
    starts = batch.cu_seqlens.tolist()
    for row in range(8):
        group = rewards[4 * (row // 4) : 4 * (row // 4) + 4]
        baseline = rewards.mean() if name in ("batch_mean", "flash_reinforce") else group.mean()
        advantage = rewards[row] - baseline
        tokens = [t for t in range(starts[row], starts[row + 1]) if batch.response_mask[t]]
        mu = {t: float(batch.behavior_log_probs[t]) for t in tokens}
        pi = {t: float(log_probs[t]) for t in tokens}
        divergence = 0.0
        for t in tokens:
            p, q = math.exp(mu[t]), min(math.exp(pi[t]), 1 - 1e-6)
            divergence += (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))) / len(tokens)
        if name in ("trust_gate", "flash_reinforce") and divergence > 3e-3:
            continue
        for t in tokens:
            ratio = math.exp(pi[t] - mu[t])
            weight = 1.0 if name in ("no_importance_weight", "recomputed_behavior") else ratio
            clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
            if name == "ppo_clip" and clipped:
                weight = 0.0
            gradient[t] = -weight * advantage / (8 * len(tokens))
    return gradient


def gradient_of(name, share, whole):
    log_probs = learner_log_probs(share).requires_grad_()
    objective = OBJECTIVES[name]
    advantages = objective.advantages(share, whole, GROUP_SIZE)
    objective.loss(log_probs, share, advantages, whole.num_responses).backward()
    assert log_probs.grad is not None
    return log_probs.grad


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_the_derived_one(name):
    whole = batch_of(range(8))
    expected = derived_gradient(whole, learner_log_probs(whole), name)
    np.testing.assert_allclose(gradient_of(name, whole, whole).numpy(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_learners_have_the_gradient_of_one(name):
    whole = batch_of(range(8))
    parts = [gradient_of(name, batch_of(rows), whole) for rows in (range(4), range(4, 8))]
    torch.testing.assert_close(torch.cat(parts), gradient_of(name, whole, whole), rtol=1e-6, atol=1e-9)


def test_no_two_objectives_are_the_same_but_one_pair():
    """With one optimizer step a batch, a recomputed denominator is no denominator."""
    whole = batch_of(range(8))
    gradients = {name: gradient_of(name, whole, whole).numpy().round(7).tobytes() for name in OBJECTIVES}
    assert gradients["recomputed_behavior"] == gradients["no_importance_weight"]
    assert len(set(gradients.values())) == len(OBJECTIVES) - 1


def test_the_flag_names_every_objective():
    assert set(get_args(Objective)) == set(OBJECTIVES)


def test_the_gate_says_what_it_admits():
    """Whoever is refused has no gradient, and whoever is admitted has one where its advantage is not zero."""
    batch = batch_of(range(8))
    log_probs = learner_log_probs(batch)
    admitted = OBJECTIVES["trust_gate"].admits(log_probs, batch)
    assert 0 < admitted.sum() < len(admitted)
    free, gated = (derived_gradient(batch, log_probs, name) for name in ("reinforce_zero", "trust_gate"))
    for row, (first, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        assert np.array_equal(gated[first:end], free[first:end] if admitted[row] else 0 * free[first:end])


def test_the_mean_of_a_group_needs_two_responses():
    with pytest.raises(RecipeError, match="--group-size must be at least 2, got 1"):
        Config(group_size=1)
    assert Config(group_size=1, objective="flash_reinforce").group_size == 1


def test_an_ablation_trains_and_keeps_its_objective(start, tmp_path, monkeypatch):
    process = start("flash_reinforce.py", *TINY, "--nominal-lag", "2", "--updates", "3")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    run = only_run(tmp_path)
    assert json.loads((run / "summary.json").read_text())["lag"]["responses"] == 3 * 4  # one for each prompt
    assert saved_config(run).objective == "flash_reinforce"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shares = [row["admitted_fraction"] for row in rows if "update" in row]
    assert len(shares) == 3 and all(0 <= share <= 1 for share in shares) and shares[0] == 1.0
    monkeypatch.setattr("sys.argv", ["recipe", "--resume", str(run)])
    assert default_config(None).objective == "flash_reinforce"
    with pytest.raises(
        RecipeError, match=r"--objective is flash_reinforce in .* and cannot become batch_mean"
    ):
        Config(**{**vars(saved_config(run)), "resume": run, "objective": "batch_mean"})
