"""The lag report counts exactly, adds up, and refuses what has no lag."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.collectors.lag import LagReport, segment_lags, token_lags


def packed(rows: list[list[int | None]]):
    """One list of versions per response, None where the token was not sampled."""
    flat = [version for row in rows for version in row]
    version = torch.tensor([-1 if v is None else v for v in flat], dtype=torch.int32)
    mask = torch.tensor([v is not None for v in flat], dtype=torch.bool)
    offsets = torch.tensor(np.cumsum([0] + [len(row) for row in rows]), dtype=torch.int32)
    return version, mask, offsets


def report_of(*batches: tuple[list[list[int | None]], int]) -> LagReport:
    report = LagReport(nominal_lag=2)
    for rows, learner_version in batches:
        report.update(*packed(rows), learner_version=learner_version)
    return report


# A version is drawn as a lag below 7, so that it is never above the learner's.
ROWS = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=9), max_size=6)
BATCHES = st.lists(st.tuples(ROWS, st.integers(7, 12)), max_size=4)


def test_golden_response_over_a_swap():
    # Engine at version 3, swap to 4 after token 2 of 5, trained on at learner version 6; one prompt token.
    # Lags 3, 3, 2, 2, 2: start 3, end 2, token-mean 12 / 5 = 2.4, to the nearest sixteenth 38 / 16 = 2.375.
    summary = report_of(([[None, 3, 3, 4, 4, 4]], 6)).to_dict()
    assert summary["start"]["per_response"]["histogram"] == [0, 0, 0, 1]
    assert summary["start"]["per_token"]["histogram"] == [0, 0, 0, 5]
    assert summary["end"]["per_response"]["histogram"] == [0, 0, 1]
    assert summary["end"]["per_token"]["histogram"] == [0, 0, 5]
    assert summary["token_mean"]["per_token"]["histogram"] == [0, 0, 3, 2]
    assert summary["token_mean"]["per_token"]["mean"] == 2.4
    assert summary["token_mean"]["per_response"]["histogram"] == [0] * 38 + [1]
    assert summary["token_mean"]["per_response"]["p50"] == 2.375
    assert summary["token_mean"]["per_response"]["mean"] == pytest.approx(2.4, abs=1e-6)
    assert (summary["responses"], summary["tokens"], summary["empty_responses"]) == (1, 5, 0)


def test_long_responses_weigh_more_per_token():
    # Responses of 1 token at lag 0 and of 3 tokens at lag 4: 4 / 2 per response, 12 / 4 per token.
    summary = report_of(([[9], [5, 5, 5]], 9)).to_dict()
    for name in ("start", "end", "token_mean"):
        assert summary[name]["per_response"]["mean"] == 2.0
        assert summary[name]["per_token"]["mean"] == 3.0


def test_tool_tokens_between_turns_are_ignored():
    # The version of a masked token may be anything, also newer than the learner.
    version = torch.tensor([1, 99, -7, 2])
    mask = torch.tensor([True, False, False, True])
    lags = token_lags(version, mask, torch.tensor([0, 4]), learner_version=2)
    assert (lags.start.tolist(), lags.end.tolist(), lags.length.tolist()) == ([1], [0], [2])


@settings(max_examples=150, deadline=None)
@given(BATCHES)
def test_report_agrees_with_counting_by_hand(batches):
    report = report_of(*batches).to_dict()
    responses = []
    for rows, learner_version in batches:
        for row in rows:
            lags = [learner_version - version for version in row if version is not None]
            responses.append(lags)
    filled = [lags for lags in responses if lags]
    assert report["responses"] == len(filled)
    assert report["empty_responses"] == len(responses) - len(filled)
    assert report["tokens"] == sum(map(len, filled))
    values = {
        ("start", "per_response"): [lags[0] for lags in filled],
        ("start", "per_token"): [lags[0] for lags in filled for _ in lags],
        ("end", "per_response"): [lags[-1] for lags in filled],
        ("end", "per_token"): [lags[-1] for lags in filled for _ in lags],
        ("token_mean", "per_token"): [lag for lags in filled for lag in lags],
    }
    for (name, weighting), expected in values.items():
        check_statistics(report[name][weighting], expected)
    means = [Fraction(sum(lags), len(lags)) for lags in filled]
    nearest = [float((16 * mean + Fraction(1, 2)).__floor__()) / 16 for mean in means]
    fine = report["token_mean"]["per_response"]
    assert fine["p95"] == (np.quantile(nearest, 0.95, method="inverted_cdf") if nearest else None)
    assert fine["max"] == max(nearest, default=None)
    if means:
        assert fine["mean"] == pytest.approx(float(sum(means) / len(means)), abs=1e-6)


def check_statistics(found: dict, expected: list[int]) -> None:
    if not expected:
        assert found == {"mean": None, "p50": None, "p95": None, "p99": None, "max": None, "histogram": []}
        return
    assert found["histogram"] == np.bincount(expected).tolist()
    assert found["mean"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert found["max"] == max(expected)
    for percent in (50, 95, 99):
        # NumPy computes percent / 100 * n in floating point; give it the exact rank instead.
        rank = -(-percent * len(expected) // 100)
        assert found[f"p{percent}"] == sorted(expected)[rank - 1]


@settings(max_examples=60, deadline=None)
@given(BATCHES, BATCHES)
def test_ranks_add_up_to_the_whole(first, second):
    whole = report_of(*first, *second)
    one, two = report_of(*first), report_of(*second)
    size = max(one.counts().shape[1], two.counts().shape[1])
    summed = LagReport(nominal_lag=2)
    summed.add_counts(one.counts(size=size) + two.counts(size=size))
    two.merge(one)
    assert whole.to_dict() == two.to_dict() == summed.to_dict()


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(7, 12))
def test_segments_equal_their_tokens(rows, learner_version):
    rows = [[version for version in row if version is not None] for row in rows]
    rows = [row for row in rows if row]
    by_token = report_of((rows, learner_version))
    versions, counts, offsets = [], [], [0]
    for row in rows:
        runs = np.flatnonzero(np.diff(row, prepend=-1))
        versions += [row[start] for start in runs]
        counts += np.diff(runs, append=len(row)).tolist()
        offsets.append(len(versions))
    by_segment = LagReport(nominal_lag=2)
    arrays = [torch.tensor(values, dtype=torch.int64) for values in (versions, counts, offsets)]
    by_segment.add(segment_lags(*arrays, learner_version=learner_version))
    assert by_segment.to_dict() == by_token.to_dict()


def test_the_report_is_json_and_a_table():
    report = LagReport(nominal_lag=2, predicted={"start": 2.5, "token_mean": 3.25})
    report.update(*packed([[1, 1, 2]]), learner_version=4)
    assert json.loads(report.to_json()) == report.to_dict()
    assert report.means() == {"start": 3.0, "end": 2.0, "token_mean": pytest.approx(8 / 3)}
    table = report.table().splitlines()
    assert "1 responses and 3 tokens; nominal 2" in table[0]
    assert table[2].split() == ["start", "per", "response", "3.00", "3.00", "3.00", "3.00", "3.00", "2.50"]
    assert table[-1].split() == ["token-mean", "per", "token", "2.67", "3.00", "3.00", "3.00", "3.00", "3.25"]
    assert LagReport(nominal_lag=0).table().count("-") > 20


def test_a_report_hands_out_copies():
    report = report_of(([[1, 2]], 4))
    before = report.to_dict()
    report.counts().zero_()
    assert report.to_dict() == before


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ([3, -1, 3], "policy_version must be known for every sampled token, got -1 at position 1"),
        ([3, 4, 6], "lag must not be negative, got policy_version 6 at position 2 with learner_version 5"),
    ],
)
def test_missing_and_future_versions_are_refused(version, message):
    report = LagReport(nominal_lag=0)
    arguments = torch.tensor(version), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=message):
        report.update(*arguments, learner_version=5)
    assert report.responses == 0


def test_shapes_and_dtypes_are_checked():
    version, mask, offsets = torch.tensor([1, 1]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"policy_version must be .*int32.* got torch\.float32"):
        token_lags(version.float(), mask, offsets, learner_version=1)
    with pytest.raises(TypeError, match=r"response_mask must be torch\.bool, got torch\.int64"):
        token_lags(version, mask.long(), offsets, learner_version=1)
    with pytest.raises(ValueError, match=r"response_mask must have shape \(2,\) .* got \(1,\)"):
        token_lags(version, mask[:1], offsets, learner_version=1)
    with pytest.raises(ValueError, match=r"policy_version must have one dimension, got shape \(1, 2\)"):
        token_lags(version[None], mask, offsets, learner_version=1)
    for wrong in ([0, 1], [1, 2], [0, 2, 1, 2], []):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 2"):
            token_lags(version, mask, torch.tensor(wrong, dtype=torch.int64), learner_version=1)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        segment_lags(version, torch.tensor([1, 0]), offsets, learner_version=1)
    report = LagReport(nominal_lag=0)
    with pytest.raises(
        ValueError, match=r"counts must be int64 of shape \(22, 2 or more\), got torch\.int64"
    ):
        report.add_counts(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="size must be at least 2, got 1"):
        report.counts(size=1)
