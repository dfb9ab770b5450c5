"""Diagnostics: golden values, and records that add up."""

import functools
import itertools
import math
import operator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.losses import importance_diagnostics
from tests.losses.batches import LAYOUTS, Rows, packed, random_rows, unhurried


def report(log_ratios, *, masks=None, **options):
    """to_dict of rows given by their log ratios (behaviour log-probs 0, padded with junk)."""
    masks = masks or [[True] * len(row) for row in log_ratios]
    width = max(map(len, log_ratios))
    padding = [width - len(row) for row in log_ratios]
    log_probs = torch.tensor(
        [[*row, *[math.nan] * more] for row, more in zip(log_ratios, padding, strict=True)]
    )
    mask = torch.tensor([[*row, *[False] * more] for row, more in zip(masks, padding, strict=True)])
    return importance_diagnostics(
        log_probs.double(), torch.zeros_like(mask).double(), mask, **options
    ).to_dict()


def pick(found, prefix, *names):
    return [found[f"{prefix}/{name}"] for name in names]


LN2, LN3 = math.log(2), math.log(3)


def test_golden_two_tokens():
    # Ratios 1 and 2: mean 3/2, second moment 5/2, ESS 3^2 / 5. k1 = -(0 + ln 2)/2, k3 = (0 + 2 - 1 - ln 2)/2.
    found = report([[0.0, LN2]])
    names = [
        "count",
        "ratio_mean",
        "ratio_second_moment",
        "ratio_max",
        "ess",
        "ess_fraction",
        "kl_k1",
        "kl_k3",
    ]
    assert pick(found, "token", *names) == pytest.approx(
        [2, 1.5, 2.5, 2, 1.8, 0.9, -LN2 / 2, (1 - LN2) / 2], rel=1e-7
    )


def test_golden_responses_are_products_of_their_tokens():
    # Row 0: 2 * 3 = 6, row 1: 1/2. Mean 13/4, second moment (36 + 1/4)/2, ESS (13/2)^2 / (145/4) = 169/145.
    # k1 = -(ln 6 - ln 2)/2 = -(ln 3)/2, k3 = (6 - 1 - ln 6 + 1/2 - 1 + ln 2)/2 = (4.5 - ln 3)/2.
    found = report([[LN2, LN3], [-LN2]])
    names = ["count", "ratio_mean", "ratio_second_moment", "ratio_max", "ess", "kl_k1", "kl_k3"]
    expected = [2, 3.25, 18.125, 6, 169 / 145, -LN3 / 2, (4.5 - LN3) / 2]
    assert pick(found, "response", *names) == pytest.approx(expected, rel=1e-6)


def test_golden_agreement_reads_exactly_zero():
    found = report([[0.0, 0.0], [0.0]])
    assert pick(found, "token", "ess_fraction", "kl_k1", "kl_k3", "abs_log_ratio_p999", "ratio_max") == [
        1,
        0,
        0,
        0,
        1,
    ]
    assert pick(found, "response", "ess_fraction", "kl_k1", "ratio_p999") == [1, 0, 1]


def test_golden_tail_quantile():
    # Of 1,000 tokens two have ratio 2: the 999th smallest is 2. With one of them it is 1.
    assert report([[0.0] * 998 + [LN2] * 2])["token/ratio_p999"] == pytest.approx(2, rel=0.012 * LN2)
    assert report([[0.0] * 999 + [LN2]])["token/ratio_p999"] == 1


def test_golden_lags():
    # Lag 0: ratios 1, 1. Lag 2: ratios 1, 3, so ESS 16/10. A response has its largest lag: rows at 2 and 2.
    found = report([[0.0, LN3], [0.0, 0.0]], lag=torch.tensor([[0, 2], [2, 0]]))
    assert pick(found, "token", "lag_0/ess", "lag_0/count", "lag_2/ess", "lag_2/ratio_max") == pytest.approx(
        [2, 2, 1.6, 3], rel=1e-6
    )
    assert "token/lag_1/ess" not in found
    assert pick(found, "response", "lag_2/count", "lag_2/ratio_mean") == pytest.approx([2, 2], rel=1e-6)


def test_ess_falls_with_lag():
    # What one plots: noise that grows with lag. Log-normal ratios of width s have ESS / n = exp(-s^2).
    generator = torch.Generator().manual_seed(0)
    lag = torch.arange(4).repeat_interleave(20_000)
    log_ratio = 0.3 * lag * torch.randn(80_000, generator=generator, dtype=torch.float64)
    found = importance_diagnostics(
        log_ratio[None], torch.zeros(1, 80_000), torch.ones(1, 80_000, dtype=torch.bool), lag=lag[None]
    ).to_dict()
    for step in range(4):
        assert found[f"token/lag_{step}/ess_fraction"] == pytest.approx(
            math.exp(-((0.3 * step) ** 2)), abs=0.05
        )


def test_lags_from_max_lag_on_share_a_row():
    found = report([[0.0, LN3, LN2]], lag=torch.tensor([[1, 2, 9]]), max_lag=2)
    assert found["token/lag_2_or_more/count"] == 2
    assert found["token/lag_1/count"] == 1


def test_a_lag_per_response_is_that_of_its_tokens():
    rows = random_rows(6)
    per_row = torch.tensor([3, 0, 2, 1, 1, 0])
    for layout in ("padded", "packed"):
        tokens = LAYOUTS[layout](rows)
        if layout == "padded":
            per_token = per_row[:, None].expand_as(tokens["mask"])
        else:
            per_token = per_row.repeat_interleave(tokens["cu_seqlens"].diff())
        by_row = importance_diagnostics(**tokens, lag=per_row).to_dict()
        by_token = importance_diagnostics(**tokens, lag=per_token).to_dict()
        assert by_row == pytest.approx(by_token, nan_ok=True)


def test_unusable_numbers_are_counted_and_left_out():
    found = report([[0.0, math.nan, LN2], [math.inf], [-math.inf], [800.0], [0.0]])
    assert pick(found, "token", "count", "nonfinite", "ratio_mean") == pytest.approx([3, 4, 4 / 3], rel=1e-6)
    assert pick(found, "response", "count", "nonfinite", "ratio_mean") == [1, 4, 1]


def test_what_is_masked_is_not_looked_at():
    found = report([[0.0, math.nan, LN2], [math.inf]], masks=[[True, False, True], [False]])
    assert pick(found, "token", "count", "nonfinite", "ratio_mean") == pytest.approx([2, 0, 1.5], rel=1e-6)
    # A response without a counted token has no ratio.
    assert pick(found, "response", "count", "ratio_mean") == pytest.approx([1, 2], rel=1e-6)


def test_nothing_is_filtered_before_the_effective_sample_size():
    # One ratio of e^40 among a hundred of 1 leaves an effective sample of one.
    assert report([[0.0] * 100 + [40.0]])["token/ess"] == pytest.approx(1, abs=1e-9)


def test_hopeless_responses_do_not_break_the_report():
    # A response of ratio e^700: its square is no float64, so the effective sample size is unknown, not wrong.
    found = report([[350.0, 350.0], [0.0]])
    assert pick(found, "response", "count", "nonfinite") == [2, 0]
    assert math.isnan(found["response/ess"])
    assert found["response/ratio_max"] == pytest.approx(math.exp(700))


def test_zero_variance_groups():
    rewards, group_id = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([3, 3, 8, 8])
    found = report([[0.0]] * 4, rewards=rewards, group_id=group_id)
    assert pick(found, "groups", "count", "zero_variance") == [2, 1]


def random_report_inputs(seed, num_rows=7):
    rows = random_rows(seed, num_rows=num_rows)
    generator = torch.Generator().manual_seed(seed)
    lags = [torch.randint(-1, 5, (len(mask),), generator=generator) for mask in rows.masks]
    return rows, [torch.where(mask, lag.clamp(min=0), -1) for mask, lag in zip(rows.masks, lags, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_numpy(layout):
    rows, _ = random_report_inputs(2)
    found = importance_diagnostics(**LAYOUTS[layout](rows)).to_dict()
    per_row = [
        (learner[mask].double() - sampler[mask].double()).numpy()
        for learner, sampler, mask in zip(rows.log_probs, rows.behavior_log_probs, rows.masks, strict=True)
    ]
    levels = {"token": np.concatenate(per_row), "response": np.array([x.sum() for x in per_row if len(x)])}
    for level, x in levels.items():
        ratio = np.exp(x)
        expected = {
            "count": len(x),
            "nonfinite": 0,
            "ratio_mean": ratio.mean(),
            "ratio_second_moment": (ratio**2).mean(),
            "ratio_max": ratio.max(),
            "ess": ratio.sum() ** 2 / (ratio**2).sum(),
            "kl_k1": -x.mean(),
            "kl_k3": (ratio - 1 - x).mean(),
        }
        assert pick(found, level, *expected) == pytest.approx(list(expected.values()), rel=1e-12)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            exact = np.quantile(np.abs(x), q, method="inverted_cdf")
            assert found[f"{level}/abs_log_ratio_{name}"] == pytest.approx(exact, rel=0.012)


@unhurried
@given(data=st.data())
def test_records_of_any_split_add_up(data):
    rows, lags = random_report_inputs(data.draw(st.integers(0, 2**31)))
    rewards, group_id = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5]), torch.tensor([0, 0, 1, 1, 2, 2, 2])
    whole = importance_diagnostics(
        **packed(rows), lag=torch.cat(lags), max_lag=3, rewards=rewards, group_id=group_id
    )
    cuts = sorted(data.draw(st.sets(st.sampled_from([2, 4]))))
    bounds = [0, *cuts, 7]
    parts = [
        importance_diagnostics(
            **packed(rows.select(list(range(start, end)))),
            lag=torch.cat(lags[start:end]),
            max_lag=3,
            rewards=rewards[start:end],
            group_id=group_id[start:end],
        )
        for start, end in itertools.pairwise(bounds)
    ]
    merged = functools.reduce(operator.add, parts)
    assert merged.to_dict() == pytest.approx(whole.to_dict(), rel=1e-12, nan_ok=True)
    assert parts[0].merge(parts[0]).tokens.count.sum() == 2 * parts[0].tokens.count.sum()


def test_records_of_different_shape_do_not_add_up():
    one, other = (
        importance_diagnostics(
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            torch.tensor([[True]]),
            lag=torch.tensor([[1]]),
            max_lag=max_lag,
        )
        for max_lag in (2, 3)
    )
    with pytest.raises(ValueError, match="max_lag must agree to be merged, got 2 and 3"):
        one + other


def test_an_empty_rank_reports_nothing():
    nothing = torch.zeros(0)
    found = importance_diagnostics(nothing, nothing, nothing.bool(), cu_seqlens=torch.tensor([0])).to_dict()
    assert pick(found, "token", "count", "nonfinite") == [0, 0]
    assert math.isnan(found["token/ess"])


def test_no_gradient_and_plain_floats():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    record = importance_diagnostics(log_probs, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert not record.tokens.ratio_sum.requires_grad
    assert all(type(value) is float for value in record.to_dict().values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"lag": torch.tensor([[0, 0], [0, -2]])},
            ValueError,
            "lag must not be negative .*, got -2 at row 1, token 1",
        ),
        (
            {"lag": torch.zeros(2, dtype=torch.int64), "max_lag": -1},
            ValueError,
            "max_lag must be at least 0, got -1",
        ),
        ({"lag": torch.zeros(2, 2)}, TypeError, "lag must be integer, got torch.float32"),
        (
            {"lag": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"lag must have shape \(2, 2\) like the tokens",
        ),
        ({"lag": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "lag must be on cpu"),
        ({"rewards": torch.zeros(2)}, ValueError, "rewards and group_id must be given together"),
        (
            {"rewards": torch.zeros(3), "group_id": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"rewards must have shape \(2,\), got \(3,\)",
        ),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=f"^importance_diagnostics: {message}"):
        importance_diagnostics(
            torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), **options
        )


def test_a_lag_under_a_false_mask_is_ignored():
    rows = Rows([torch.zeros(2)], [torch.zeros(2)], [torch.tensor([True, False])], torch.zeros(1))
    found = importance_diagnostics(**packed(rows), lag=torch.tensor([1, -5])).to_dict()
    assert found["token/lag_1/count"] == 1
