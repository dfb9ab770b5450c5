"""Fails closed: every refusal names function, argument, row and token, in every layout."""

import math

import pytest
import torch

from rzero.losses import (
    flash_reinforce_loss,
    importance_diagnostics,
    importance_weights,
    reinforce_loss,
    sequence_trust_mask,
)
from rzero.losses.checks import locate
from tests.losses.batches import LAYOUTS, Rows


def call(function, tokens, advantages, **options):
    """Any of the functions, given what it takes."""
    if function is flash_reinforce_loss:
        options = {"delta": 1.0, **options}
    elif function is sequence_trust_mask:
        return function(**tokens, delta=1.0, **options)
    elif function is importance_weights:
        return function(**tokens, **options)
    tokens = dict(tokens)
    leading = [tokens.pop(name) for name in ("log_probs", "behavior_log_probs")]
    return function(*leading, advantages, tokens.pop("mask"), **tokens, **options)


LOSSES = [reinforce_loss, flash_reinforce_loss]
CHECKED = [*LOSSES, importance_weights, sequence_trust_mask]
GOOD = torch.tensor([0.5, -0.5])


def two_rows(*, learner=-1.0, sampler=-1.5, counted=True):
    """Lengths 2 and 4; token 2 of row 1 is the odd one. What does not count is junk already."""
    log_probs = [torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -2.0, learner, -1.0])]
    behavior = [torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -2.0, sampler, -1.0])]
    masks = [torch.tensor([True, False]), torch.tensor([True, True, counted, True])]
    return Rows(log_probs, behavior, masks, GOOD)


@pytest.mark.parametrize("layout", ["padded", "packed", "jagged"])
@pytest.mark.parametrize("function", CHECKED)
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"sampler": math.nan},
            "behavior_log_probs must be finite and at most 0 on a counted token, got nan",
        ),
        (
            {"sampler": -math.inf},
            "behavior_log_probs must be finite and at most 0 on a counted token, got -inf",
        ),
        (
            {"sampler": math.inf},
            "behavior_log_probs must be finite and at most 0 on a counted token, got inf",
        ),
        ({"sampler": 1e-3}, "behavior_log_probs must be finite and at most 0 on a counted token, got 0.001"),
        ({"learner": math.nan}, "log_probs must be finite on a counted token, got nan"),
        ({"learner": -math.inf}, "log_probs must be finite on a counted token, got -inf"),
        ({"learner": math.inf}, "log_probs must be finite on a counted token, got inf"),
    ],
)
def test_unusable_numbers(function, layout, numbers, message):
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}.* at row 1, token 2"):
        call(function, LAYOUTS[layout](two_rows(**numbers)), GOOD)
    # The same number where nothing is counted is nobody's business.
    call(function, LAYOUTS[layout](two_rows(**numbers, counted=False)), GOOD)


@pytest.mark.parametrize("layout", ["padded", "packed", "jagged"])
@pytest.mark.parametrize("function", [*LOSSES, importance_weights])
def test_overflow_is_an_error_and_never_a_clamp(function, layout):
    # ln(3.4e38) = 88.7: e^88 is a float32, e^89 is not.
    call(function, LAYOUTS[layout](two_rows(learner=0.0, sampler=-88.0)), GOOD)
    options = {"delta": math.inf} if function is flash_reinforce_loss else {}
    with pytest.raises(ValueError, match=rf"^{function.__name__}: .*less than 88.7.* at row 1, token 2"):
        call(function, LAYOUTS[layout](two_rows(learner=0.0, sampler=-89.0)), GOOD, **options)


@pytest.mark.parametrize("function", CHECKED)
def test_checks_can_be_switched_off(function):
    call(function, LAYOUTS["packed"](two_rows(sampler=math.nan)), GOOD, check_values=False)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("function", LOSSES)
def test_unchecked_losses_never_ask_for_a_value(function, layout):
    # On the meta device there are no values: whatever would wait for one on a GPU fails here.
    tokens = {name: value.to("meta") for name, value in LAYOUTS[layout](two_rows()).items()}
    tokens["log_probs"].requires_grad_()
    call(function, tokens, GOOD.to("meta"), num_responses=8, check_values=False).backward()
    assert tokens["log_probs"].grad.is_meta


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_advantages_must_be_finite(function, bad):
    with pytest.raises(
        ValueError, match=f"^{function.__name__}: advantages must be finite, got {bad} at row 1"
    ):
        call(function, LAYOUTS["padded"](two_rows()), torch.tensor([0.5, bad]))


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize(
    ("num_responses", "error", "message"),
    [
        (0, ValueError, "num_responses must be at least 1, got 0"),
        (-4, ValueError, "num_responses must be at least 1, got -4"),
        (1, ValueError, "num_responses must count every response of the optimizer step, at least the 2"),
        (2.0, TypeError, "num_responses must be an int, got float"),
        (True, TypeError, "num_responses must be an int, got bool"),
    ],
)
def test_num_responses(function, num_responses, error, message):
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        call(function, LAYOUTS["padded"](two_rows()), GOOD, num_responses=num_responses)


def test_an_empty_rank_needs_the_global_count():
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="num_responses must be at least 1, got 0; a rank without responses"):
        reinforce_loss(nothing, nothing, nothing, nothing.bool(), cu_seqlens=torch.tensor([0]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, ValueError, r"mask must have shape \(2, 4\)"),
        (
            {"behavior_log_probs": torch.zeros(2, 3)},
            ValueError,
            r"behavior_log_probs must have shape \(2, 4\)",
        ),
        (
            {"behavior_log_probs": torch.zeros(2, 4, device="meta")},
            ValueError,
            "behavior_log_probs must be on cpu",
        ),
        ({"behavior_log_probs": None}, TypeError, "behavior_log_probs must be a tensor, got NoneType"),
        ({"mask": torch.ones(2, 4)}, TypeError, "mask must be bool .*, got torch.float32"),
        ({"log_probs": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "log_probs must be floating"),
        (
            {"behavior_log_probs": torch.zeros(2, 4, dtype=torch.int64)},
            TypeError,
            "behavior_log_probs must be floating",
        ),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, ValueError, r"log_probs must be \[N\] beside cu_seqlens"),
    ],
)
@pytest.mark.parametrize("function", [*CHECKED, importance_diagnostics])
def test_padded_arguments(function, changes, error, message):
    tokens = {**LAYOUTS["padded"](two_rows()), **changes}
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        function(**tokens) if function is importance_diagnostics else call(function, tokens, GOOD)


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (
            torch.tensor([0, 2, 5]),
            ValueError,
            r"must start at 0, never decrease and end at N = 6, got \[0, 2, 5\]",
        ),
        (
            torch.tensor([1, 2, 6]),
            ValueError,
            r"must start at 0, never decrease and end at N = 6, got \[1, 2, 6\]",
        ),
        (
            torch.tensor([0, 7, 6]),
            ValueError,
            r"must start at 0, never decrease and end at N = 6, got \[0, 7, 6\]",
        ),
        (torch.tensor([0.0, 2.0, 6.0]), TypeError, "must be int32 or int64, got torch.float32"),
        (torch.tensor([[0, 2, 6]]), ValueError, r"must have shape \[B \+ 1\], got \(1, 3\)"),
        (torch.zeros(0, dtype=torch.int64), ValueError, r"must have shape \[B \+ 1\], got \(0,\)"),
        (torch.tensor([0, 2, 6], device="meta"), ValueError, "must be on cpu"),
    ],
)
@pytest.mark.parametrize("function", [*CHECKED, importance_diagnostics])
def test_packed_offsets(function, cu_seqlens, error, message):
    tokens = {**LAYOUTS["packed"](two_rows()), "cu_seqlens": cu_seqlens}
    with pytest.raises(error, match=f"^{function.__name__}: cu_seqlens {message}"):
        function(**tokens) if function is importance_diagnostics else call(function, tokens, GOOD)


@pytest.mark.parametrize("function", [*LOSSES, sequence_trust_mask, importance_diagnostics])
def test_packed_tokens_need_offsets(function):
    tokens = LAYOUTS["packed"](two_rows())
    del tokens["cu_seqlens"]
    with pytest.raises(
        ValueError, match=rf"^{function.__name__}: log_probs must have shape \[B, T\], or \[N\] together"
    ):
        function(**tokens) if function is importance_diagnostics else call(function, tokens, GOOD)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize(
    ("advantages", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"must have shape \(2,\), one for each response, got \(3,\)"),
        (torch.zeros(2, 1), ValueError, r"must have shape \(2,\), one for each response, got \(2, 1\)"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "must be floating, got torch.int64"),
        (torch.zeros(2, device="meta"), ValueError, "must be on cpu"),
    ],
)
def test_advantages(function, advantages, error, message):
    with pytest.raises(error, match=f"^{function.__name__}: advantages {message}"):
        call(function, LAYOUTS["padded"](two_rows()), advantages)


def test_tokens_are_located_across_empty_rows():
    # Rows of 0, 2, 0 and 3 tokens: flat token 2 is the first of row 3.
    cu_seqlens = torch.tensor([0, 0, 2, 2, 5])
    found = [locate(flat, torch.zeros(5), cu_seqlens) for flat in range(5)]
    assert found == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
    assert locate(6, torch.zeros(2, 4), None) == (1, 2)


def test_nested_arguments_must_agree():
    tokens = LAYOUTS["jagged"](two_rows())
    with pytest.raises(ValueError, match="mask must be nested exactly when log_probs is"):
        call(reinforce_loss, {**tokens, "mask": tokens["mask"].values()}, GOOD)
    with pytest.raises(ValueError, match="cu_seqlens must be None with nested tensors"):
        call(reinforce_loss, {**tokens, "cu_seqlens": tokens["mask"].offsets()}, GOOD)
    other = torch.nested.nested_tensor_from_jagged(tokens["mask"].values(), torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="mask must have the row lengths of log_probs"):
        call(reinforce_loss, {**tokens, "mask": other}, GOOD)
    holey = torch.nested.narrow(
        torch.zeros(2, 4), dim=1, start=torch.tensor([0, 0]), length=torch.tensor([2, 4]), layout=torch.jagged
    )
    with pytest.raises(ValueError, match="log_probs must be a contiguous nested tensor"):
        call(reinforce_loss, {**tokens, "log_probs": holey}, GOOD)
