"""The loss: golden values, gradients, splits and layouts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.losses import group_mean_advantages, reinforce_loss
from tests.losses.batches import (
    LAYOUTS,
    Rows,
    loss_and_gradients,
    packed,
    padded,
    random_rows,
    reference_loss,
    unhurried,
)

LN2 = math.log(2)


def value_and_gradient(probabilities, drawn, advantages, mask=None, **options):
    """Loss and gradient of [B, T] rows given as probabilities of learner and sampler."""
    log_probs = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    behavior = torch.tensor(drawn, dtype=torch.float64).log()
    mask = torch.ones_like(behavior, dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss = reinforce_loss(log_probs, behavior, torch.tensor(advantages, dtype=torch.float64), mask, **options)
    loss.backward()
    return loss.item(), log_probs.grad.tolist()


def test_golden_one_token():
    # w = 0.3 / 0.2 = 3/2; loss = -1.5 * 2 * ln 0.3, gradient -1.5 * 2.
    value, gradient = value_and_gradient([[0.3]], [[0.2]], [2.0])
    assert value == pytest.approx(-3 * math.log(0.3), rel=1e-15)
    assert gradient == [[pytest.approx(-3.0, rel=1e-15)]]


def test_golden_mean_over_each_response_first():
    # On policy. Row 0: T = 1, sum ln 1/2 = -ln 2, A = 1. Row 1: T = 2, ln 1/4 + ln 1/2 = -3 ln 2, A = -1.
    # -(1/2) (-ln 2 + 3/2 ln 2) = -(1/4) ln 2. A mean over all tokens would give -(1/3) (2 ln 2).
    # Gradient -A / (B T): -1/2 for the token of row 0, 1/4 for either token of row 1.
    value, gradient = value_and_gradient(
        [[0.5, 0.9], [0.25, 0.5]], [[0.5, 0.1], [0.25, 0.5]], [1.0, -1.0], [[True, False], [True, True]]
    )
    assert value == pytest.approx(-LN2 / 4, rel=1e-14)
    assert gradient == [[-0.5, 0.0], [0.25, 0.25]]


def test_golden_turns_of_one_response_share_one_length():
    # Sampled, tool, tool, sampled, tool: T = 2. w = (0.4 / 0.8, 0.6 / 0.2) = (1/2, 3); gradient -w A / T.
    value, gradient = value_and_gradient(
        [[0.4, 0.1, 0.1, 0.6, 0.1]], [[0.8, 0.2, 0.9, 0.2, 0.3]], [1.0], [[True, False, False, True, False]]
    )
    assert value == pytest.approx(-(math.log(0.4) / 2 + 3 * math.log(0.6)) / 2, rel=1e-14)
    assert gradient == [pytest.approx([-0.25, 0.0, 0.0, -1.5, 0.0], rel=1e-14)]


def test_golden_global_count():
    # Two rows of a step of 8: a quarter of what B = 2 gives. -1 / (8 * 1) each.
    value, gradient = value_and_gradient([[0.5], [0.5]], [[0.5], [0.5]], [1.0, 1.0], num_responses=8)
    assert value == pytest.approx(LN2 / 4, rel=1e-15)
    assert gradient == [[-0.125], [-0.125]]


def test_golden_a_response_without_tokens_stays_in_b():
    # B = 2 although row 1 has no token: gradient -1/2, not -1.
    value, gradient = value_and_gradient([[0.5], [0.5]], [[0.5], [0.5]], [1.0, 7.0], [[True], [False]])
    assert value == pytest.approx(LN2 / 2, rel=1e-15)
    assert gradient == [[-0.5], [0.0]]


def test_golden_huge_ratio():
    # ln pi = -1, ln mu = -41: w = e^40, the loss e^40, the gradient -e^40. Nothing in between.
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    loss = reinforce_loss(log_probs, torch.tensor([[-41.0]]), torch.tensor([1.0]), torch.tensor([[True]]))
    loss.backward()
    assert loss.item() == pytest.approx(2.3538526683702e17, rel=1e-6)
    assert log_probs.grad.item() == pytest.approx(-2.3538526683702e17, rel=1e-6)


def test_golden_equal_rewards_give_exactly_no_gradient():
    rewards = torch.full((3,), 0.1)
    log_probs = torch.tensor([[-1.0], [-2.0], [-3.0]], requires_grad=True)
    advantages = group_mean_advantages(rewards, torch.tensor([4, 4, 4]))
    reinforce_loss(
        log_probs, log_probs.detach() - 1, advantages, torch.ones(3, 1, dtype=torch.bool)
    ).backward()
    assert not log_probs.grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_every_layout_has_the_value_and_gradient_of_the_equation(layout, dtype, tolerance):
    rows = random_rows(1, dtype=dtype)
    expected, gradients = reference_loss(rows)
    value, found = loss_and_gradients(reinforce_loss, rows, layout)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=0)


@unhurried
@given(seed=st.integers(0, 2**31), layout=st.sampled_from(sorted(LAYOUTS)))
def test_layouts_agree_to_the_last_bit_of_the_gradient(seed, layout):
    rows = random_rows(seed)
    value, gradients = loss_and_gradients(reinforce_loss, rows, "padded")
    other_value, others = loss_and_gradients(reinforce_loss, rows, layout)
    assert other_value.item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, others, strict=True))


@unhurried
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_micro_batches_add_up(data, dtype):
    # Any partition of the rows, each part in a layout of its own.
    rows = random_rows(data.draw(st.integers(0, 2**31)), num_rows=7, dtype=dtype)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7))
    whole, gradients = loss_and_gradients(reinforce_loss, rows)
    total = torch.zeros_like(whole)
    for part in set(part_of):
        chosen = [row for row in range(7) if part_of[row] == part]
        layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
        value, found = loss_and_gradients(reinforce_loss, rows.select(chosen), layout, num_responses=7)
        total += value
        for row, gradient in zip(chosen, found, strict=True):
            assert torch.equal(gradient, gradients[row])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(total, whole, rtol=tolerance, atol=tolerance)


def test_local_counts_would_not_add_up():
    # The same split with the count of each part instead of the step's: 2 + 4 rows weigh 1/2 and 1/4, not 1/6.
    rows = random_rows(5)
    _, whole = loss_and_gradients(reinforce_loss, rows)
    _, part = loss_and_gradients(reinforce_loss, rows.select([0, 1]))
    torch.testing.assert_close(part[0], 3 * whole[0])


@unhurried
@given(seed=st.integers(0, 2**31), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0]))
def test_nothing_under_a_false_mask_matters(seed, junk):
    rows = random_rows(seed)
    replaced = Rows(
        [torch.where(m, v, junk) for v, m in zip(rows.log_probs, rows.masks, strict=True)],
        [torch.where(m, v, junk) for v, m in zip(rows.behavior_log_probs, rows.masks, strict=True)],
        rows.masks,
        rows.advantages,
    )
    for layout in ("padded", "packed"):
        value, gradients = loss_and_gradients(reinforce_loss, rows, layout)
        other_value, others = loss_and_gradients(reinforce_loss, replaced, layout)
        assert torch.equal(value, other_value)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, others, strict=True))


@pytest.mark.parametrize("shape", [(3, 4), (3, 0)])
def test_an_empty_mask_gives_zero_with_a_live_graph(shape):
    log_probs = torch.full(shape, math.nan, requires_grad=True)
    loss = reinforce_loss(
        log_probs, torch.full(shape, math.nan), torch.ones(3), torch.zeros(shape, dtype=torch.bool)
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(log_probs.grad, torch.zeros(shape))


def test_an_empty_rank_takes_part():
    log_probs = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    loss = reinforce_loss(
        log_probs, nothing, nothing, nothing.bool(), cu_seqlens=torch.tensor([0]), num_responses=4
    )
    loss.backward()
    assert loss.item() == 0
    assert log_probs.grad.shape == (0,)


@pytest.mark.parametrize("layout", ["padded", "packed", "jagged"])
def test_gradcheck(layout):
    # The weight is detached, so a difference quotient may not change it: mu moves along with pi.
    log_weights = torch.tensor([[0.3, -0.4, 0.1], [0.2, 0.5, -0.6]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    offsets = torch.tensor([0, 3, 6])

    def loss(log_probs):
        behavior = log_probs.detach() - log_weights
        if layout == "padded":
            return reinforce_loss(log_probs, behavior, advantages, mask)
        tokens = log_probs.flatten(), behavior.flatten(), mask.flatten()
        if layout == "packed":
            return reinforce_loss(*tokens[:2], advantages, tokens[2], cu_seqlens=offsets)
        nested = [torch.nested.nested_tensor_from_jagged(value, offsets) for value in tokens]
        return reinforce_loss(*nested[:2], advantages, nested[2])

    log_probs = torch.linspace(-3, -1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(loss, log_probs)


def test_the_detached_surrogate_has_the_gradient_of_the_undetached_ratio():
    rows = random_rows(11, dtype=torch.float64)
    tokens = padded(rows)
    log_probs = tokens["log_probs"].clone().requires_grad_()
    mask = tokens["mask"]
    difference = torch.where(mask, log_probs - tokens["behavior_log_probs"], -math.inf)
    ratio = torch.where(mask, difference, -math.inf).exp()
    objective = -(rows.advantages * ratio.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    (undetached,) = torch.autograd.grad(objective, log_probs)
    _, gradients = loss_and_gradients(reinforce_loss, rows, "padded")
    for ours, theirs, row_mask in zip(gradients, undetached, rows.masks, strict=True):
        torch.testing.assert_close(ours[row_mask], theirs[: len(row_mask)][row_mask], rtol=1e-13, atol=0)


def test_the_gradient_returns_in_the_dtype_of_the_log_probs():
    log_probs = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = reinforce_loss(log_probs, torch.tensor([[-1.5]]), torch.tensor([1.0]), torch.tensor([[True]]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert log_probs.grad.dtype == torch.bfloat16


def test_only_the_log_probs_are_differentiated():
    leaves = [torch.full((1, 2), -1.0, requires_grad=True) for _ in range(2)]
    advantages = torch.ones(1, requires_grad=True)
    reinforce_loss(*leaves, advantages, torch.ones(1, 2, dtype=torch.bool)).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert advantages.grad is None


def test_the_arguments_are_left_alone():
    tokens = packed(random_rows(2))
    before = {name: value.clone() for name, value in tokens.items()}
    advantages = random_rows(2).advantages
    mask, cu_seqlens = tokens["mask"], tokens["cu_seqlens"]
    reinforce_loss(tokens["log_probs"], tokens["behavior_log_probs"], advantages, mask, cu_seqlens=cu_seqlens)
    assert all(value.equal(before[name]) or value.isnan().any() for name, value in tokens.items())
    for name, value in tokens.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_unchecked_values_pass_through():
    # Switched off, a missing number poisons the loss instead of raising: never silently repaired.
    log_probs, behavior = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, math.nan]])
    loss = reinforce_loss(
        log_probs, behavior, torch.ones(1), torch.ones(1, 2, dtype=torch.bool), check_values=False
    )
    assert loss.isnan()
