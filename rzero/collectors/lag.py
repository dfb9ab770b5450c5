"""The lag that trained tokens really had: lag = learner_version - policy_version, counted exactly.

Three lags of a response, and two ways to weigh them:

    * start: of its first sampled token; end: of its last; token-mean: mean over its tokens. Weights may
      change inside a response, so start >= end.
    * per response: every response counts once. Per token: every token counts once (its response's start or
      end lag; for token-mean, the token's own). Long responses are older, so the two differ.

A report holds nothing but integer counts, so reports of ranks and of runs add up in any order.
"""

import json
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from rzero.collectors.token_lags import Lags, segment_lags, token_lags

__all__ = ["LagReport", "Lags", "segment_lags", "token_lags"]

# Token-means of responses are fractions: counted in sixteenths, and summed in units of 2**-20.
GRID = 16
SUM_UNIT = 2**20

# Rows of the tensor of counts; the token-mean per response owns GRID rows, the last one holds totals.
WEIGHTINGS = ("per_response", "per_token")
EXACT = (("start", "per_response"), ("start", "per_token"), ("end", "per_response"), ("end", "per_token"))
TOKEN_ROW = len(EXACT)
MEAN_ROW = TOKEN_ROW + 1
TOTAL_ROW = MEAN_ROW + GRID
NUM_ROWS = TOTAL_ROW + 1


@final
class LagReport:
    """Accumulates the lags of trained batches, beside the configured and the predicted lag.

    Args:
        nominal_lag: The configured lag.
        predicted: Predicted means by name (`start`, `end`, `token_mean`), e.g. `simulate(...).lag.means()`.

    Example:
        >>> report = LagReport(nominal_lag=1, predicted={"token_mean": 1.5})
        >>> version = torch.tensor([3, 3, 4, 4, 4], dtype=torch.int32)
        >>> report.update(version, version >= 0, torch.tensor([0, 5]), learner_version=5)
        >>> report.means()
        {'start': 2.0, 'end': 1.0, 'token_mean': 1.4}
        >>> report.merge(report); report.to_dict()["start"]["per_token"]["histogram"]
        [0, 0, 10]
    """

    def __init__(self, *, nominal_lag: int, predicted: Mapping[str, float] | None = None) -> None:
        """Starts with no response; see the class for the arguments."""
        self.nominal_lag = nominal_lag
        self.predicted = dict(predicted) if predicted is not None else None
        self._counts = torch.zeros(NUM_ROWS, 2, dtype=torch.int64)

    def update(
        self, policy_version: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, learner_version: int
    ) -> None:
        """Adds one packed training batch; arguments and errors are those of `token_lags`."""
        self.add(token_lags(policy_version, response_mask, cu_seqlens, learner_version=learner_version))

    def add(self, lags: Lags) -> None:
        """Adds the lags of some responses."""
        start, end, length = lags.start.numpy(), lags.end.numpy(), lags.length.numpy()
        token, count, total = lags.token.numpy(), lags.count.numpy(), lags.total.numpy()
        size = 1 + int(max(start.max(initial=0), token.max(initial=0)))
        self._grow(size + 1)
        counts = self._counts.numpy()
        ones = np.ones_like(length)
        for row, (lag, weight) in enumerate([(start, ones), (start, length), (end, ones), (end, length)]):
            np.add.at(counts[row], lag, weight)
        np.add.at(counts[TOKEN_ROW], token, count)
        # Round to the nearest sixteenth, halves up, in integers.
        step = (2 * GRID * total + length) // (2 * length)
        np.add.at(counts, (MEAN_ROW + step % GRID, step // GRID), ones)
        counts[TOTAL_ROW, 0] += ((SUM_UNIT * total + length // 2) // length).sum()
        counts[TOTAL_ROW, 1] += lags.empty

    def merge(self, other: "LagReport") -> None:
        """Adds what another report counted, e.g. of another rank."""
        self.add_counts(other.counts())

    def counts(self, *, size: int | None = None) -> Tensor:
        """Everything counted so far as one int64 tensor, which adds up over ranks.

        Args:
            size: Number of columns, at least that of this report; ranks agree on the largest before they add.
                None: this report's own.

        Returns:
            [22, size] int64, a copy.

        Raises:
            ValueError: If `size` is too small to hold the largest lag.
        """
        own = self._counts.shape[1]
        if size is not None and size < own:
            raise ValueError(f"LagReport.counts: size must be at least {own}, got {size}")
        if size in (None, own):
            return self._counts.clone()
        return torch.nn.functional.pad(self._counts, (0, size - own))

    def add_counts(self, counts: Tensor) -> None:
        """Adds a tensor that `counts` returned, or a sum of several.

        Raises:
            ValueError: If it cannot come from a report.
        """
        if (
            counts.ndim != 2
            or counts.shape[0] != NUM_ROWS
            or counts.shape[1] < 2
            or counts.dtype != torch.int64
        ):
            raise ValueError(
                f"LagReport.add_counts: counts must be int64 of shape ({NUM_ROWS}, 2 or more), "
                f"got {counts.dtype} of shape {tuple(counts.shape)}"
            )
        self._grow(counts.shape[1])
        self._counts[:, : counts.shape[1]] += counts.cpu()

    @property
    def responses(self) -> int:
        """Responses with at least one sampled token."""
        return int(self._counts[0].sum())

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return int(self._counts[TOKEN_ROW].sum())

    def means(self) -> dict[str, float]:
        """Mean start and end lag per response, and mean lag per token: three numbers to compare runs by."""
        summary = self.to_dict()
        return {
            "start": summary["start"]["per_response"]["mean"],
            "end": summary["end"]["per_response"]["mean"],
            "token_mean": summary["token_mean"]["per_token"]["mean"],
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers, strings, lists and dicts, ready for JSON.

        A quantile is the smallest lag at or below which that share of the counts lies. Statistics of an empty
        report are None. The histogram of token-means per response has bins of 1/16, all others of 1.
        """
        counts = self._counts
        report: dict[str, Any] = {"start": {}, "end": {}, "token_mean": {}}
        for row, (name, weighting) in enumerate(EXACT):
            report[name][weighting] = _describe(counts[row], grid=1)
        fine = _describe(counts[MEAN_ROW:TOTAL_ROW].T.flatten(), grid=GRID)
        if self.responses:
            fine["mean"] = int(counts[TOTAL_ROW, 0]) / SUM_UNIT / self.responses
        report["token_mean"] = {
            "per_response": fine,
            "per_token": _describe(counts[TOKEN_ROW], grid=1),
        }
        return report | {
            "nominal_lag": self.nominal_lag,
            "predicted": self.predicted,
            "responses": self.responses,
            "empty_responses": int(counts[TOTAL_ROW, 1]),
            "tokens": self.tokens,
        }

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def table(self) -> str:
        """A short text table for people."""
        summary = self.to_dict()
        predicted = self.predicted or {}
        lines = [
            f"lag in updates over {self.responses:,} responses and {self.tokens:,} tokens; "
            f"nominal {self.nominal_lag}",
            f"{'':24}{'mean':>8}{'p50':>8}{'p95':>8}{'p99':>8}{'max':>8}{'predicted':>11}",
        ]
        for name, weighting in [(name, w) for name in ("start", "end", "token_mean") for w in WEIGHTINGS]:
            values = [summary[name][weighting][key] for key in ("mean", "p50", "p95", "p99", "max")]
            cells = "".join(f"{'-' if value is None else format(value, '.2f'):>8}" for value in values)
            shown = (
                weighting == ("per_token" if name == "token_mean" else "per_response") and name in predicted
            )
            label = f"{name.replace('_', '-')} {weighting.replace('_', ' ')}"
            lines.append(f"{label:24}{cells}{format(predicted[name], '.2f') if shown else '':>11}".rstrip())
        return "\n".join(lines)

    def _grow(self, size: int) -> None:
        missing = max(0, size - self._counts.shape[1])
        self._counts = torch.nn.functional.pad(self._counts, (0, missing))


def _describe(counts: Tensor, *, grid: int) -> dict[str, Any]:
    total = int(counts.sum())
    if total == 0:
        return {"mean": None, "p50": None, "p95": None, "p99": None, "max": None, "histogram": []}
    histogram = counts[: int(counts.nonzero()[-1]) + 1].tolist()
    weighted = sum(lag * count for lag, count in enumerate(histogram))
    running = counts.cumsum(0)
    # Ranks in integers: ceil(percent * total / 100).
    ranks = {percent: -(-percent * total // 100) for percent in (50, 95, 99)}
    quantiles = {f"p{percent}": int((running < rank).sum()) / grid for percent, rank in ranks.items()}
    return {
        "mean": weighted / grid / total,
        **quantiles,
        "max": (len(histogram) - 1) / grid,
        "histogram": histogram,
    }
