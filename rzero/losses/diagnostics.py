"""What the importance ratios look like before anything is filtered: is the sampler still close enough?"""

import math
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import torch
from torch import Tensor

from rzero.losses.advantages import count_zero_variance_groups
from rzero.losses.checks import check_lag, locate
from rzero.losses.histogram import NUM_BINS, bin_index, quantile
from rzero.losses.layout import TokenBatch, open_tokens
from rzero.losses.values import require_offsets

__all__ = ["ImportanceDiagnostics", "RatioStatistics", "importance_diagnostics"]

_CHUNK = 1 << 16
_LARGEST_LOG_RATIO = math.log(torch.finfo(torch.float64).max)


@dataclass(frozen=True, kw_only=True)
class RatioStatistics:
    """Sums over ratios r = pi / mu and x = log r, a row per lag; two records add up.

    Attributes:
        count: [L] float64, ratios that entered the sums.
        nonfinite: [L] float64, ratios left out because x or exp(x) is not finite: 0 in a healthy run.
        ratio_sum: [L] float64, sum of r.
        ratio_square_sum: [L] float64, sum of r^2.
        k1_sum: [L] float64, sum of -x.
        k3_sum: [L] float64, sum of r - 1 - x.
        histogram: [L, NUM_BINS] float64, how many x fell into each bin of :mod:`rzero.losses.histogram`.
        max_log_ratio: [L] float64, largest x, -inf where nothing was counted.
    """

    count: Tensor
    nonfinite: Tensor
    ratio_sum: Tensor
    ratio_square_sum: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    histogram: Tensor
    max_log_ratio: Tensor

    def __add__(self, other: "RatioStatistics") -> "RatioStatistics":
        """Statistics of both sets of ratios."""
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["max_log_ratio"] = torch.maximum(self.max_log_ratio, other.max_log_ratio)
        return RatioStatistics(**merged)

    def at_lag(self, index: int) -> "RatioStatistics":
        """The statistics of one lag alone."""
        return RatioStatistics(**{f.name: getattr(self, f.name)[index : index + 1] for f in fields(self)})

    def means(self) -> dict[str, float]:
        """Counts, means and the largest ratio over all lags together; NaN where nothing was counted."""
        sums = (self.count, self.nonfinite, self.ratio_sum, self.ratio_square_sum, self.k1_sum, self.k3_sum)
        count, nonfinite, total, square, k1, k3 = torch.stack(sums).sum(1).tolist()
        ess = total * total / square if square else math.nan
        return {
            "count": count,
            "nonfinite": nonfinite,
            "ratio_mean": total / count if count else math.nan,
            "ratio_second_moment": square / count if count else math.nan,
            "ratio_max": _exp(float(self.max_log_ratio.max())) if count else math.nan,
            "ess": ess,
            "ess_fraction": ess / count if count else math.nan,
            "kl_k1": k1 / count if count else math.nan,
            "kl_k3": k3 / count if count else math.nan,
        }

    def to_dict(self) -> dict[str, float]:
        """``means`` and quantiles."""
        means, histogram = self.means(), self.histogram.sum(0)
        top = min(quantile(histogram, 0.999), float(self.max_log_ratio.max()))
        quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
        return {
            **means,
            "ratio_p999": _exp(top) if means["count"] else math.nan,
            **{
                f"abs_log_ratio_{name}": quantile(histogram, q, absolute=True)
                for name, q in quantiles.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class ImportanceDiagnostics:
    """Mergeable record of :func:`importance_diagnostics`: ``a + b`` describes both micro-batches.

    Attributes:
        tokens: statistics of the token ratios, by the token's lag.
        responses: statistics of the whole-response ratios, by the largest lag of the response's tokens.
        max_lag: None if not split by lag, else the lag from which on all share the last row.
        num_groups: 0-d float64, groups seen; 0 without rewards and group_id.
        num_zero_variance_groups: 0-d float64, those of them whose rewards are all equal.
    """

    tokens: RatioStatistics
    responses: RatioStatistics
    max_lag: int | None
    num_groups: Tensor
    num_zero_variance_groups: Tensor

    def __add__(self, other: "ImportanceDiagnostics") -> "ImportanceDiagnostics":
        """Diagnostics of both batches of tokens."""
        if self.max_lag != other.max_lag:
            raise ValueError(
                f"ImportanceDiagnostics: max_lag must agree to be merged, "
                f"got {self.max_lag} and {other.max_lag}"
            )
        return ImportanceDiagnostics(
            tokens=self.tokens + other.tokens,
            responses=self.responses + other.responses,
            max_lag=self.max_lag,
            num_groups=self.num_groups + other.num_groups,
            num_zero_variance_groups=self.num_zero_variance_groups + other.num_zero_variance_groups,
        )

    merge = __add__

    def to_dict(self) -> dict[str, float]:
        """Plain floats for a logger, under token/, response/, groups/; populated lags under token/lag_k/."""
        report = {}
        for level, statistics in (("token", self.tokens), ("response", self.responses)):
            report |= {f"{level}/{key}": value for key, value in statistics.to_dict().items()}
            if self.max_lag is None:
                continue
            for lag in (statistics.count + statistics.nonfinite).nonzero().flatten().tolist():
                label = f"lag_{lag}_or_more" if lag == self.max_lag else f"lag_{lag}"
                one = statistics.at_lag(lag).to_dict()
                report |= {f"{level}/{label}/{key}": value for key, value in one.items()}
        report["groups/count"] = float(self.num_groups)
        report["groups/zero_variance"] = float(self.num_zero_variance_groups)
        return report


@torch.no_grad()
def importance_diagnostics(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    lag: Tensor | None = None,
    max_lag: int = 64,
    rewards: Tensor | None = None,
    group_id: Tensor | None = None,
) -> ImportanceDiagnostics:
    """Ratio moments, effective sample size and KL estimates, per token and per response, split by lag.

        x_it = log pi_theta(a_it | h_it) - log mu(a_it | h_it)      r_it = exp(x_it)      a token's ratio
        x_i  = sum_t x_it                                           r_i  = exp(x_i)       a response's ratio

        ESS = (sum r)^2 / sum r^2      k1 = mean(-x)      k3 = mean(r - 1 - x)      both estimate KL(mu || pi)

    Everything counted by the mask enters, before any gate or filter; nothing raises on values: what is not
    finite is left out of the sums and counted. Sums are kept in float64, so that records of micro-batches and
    ranks add up to the record of the whole.

    Args:
        log_probs: [B, T], [N] with cu_seqlens, or nested; floating, nats; no gradient is taken.
        behavior_log_probs: same shape; log mu as recorded.
        mask: same shape, bool; True counts.
        cu_seqlens: [B + 1] integer row offsets of packed tokens.
        lag: learner_version - policy_version, integer, shaped like the tokens, or else [B]; ignored where
            mask is False.
        max_lag: lags from here on share one row, so that records of all ranks have one shape.
        rewards: [B] floating, to count groups whose rewards are all equal; with whole groups only.
        group_id: [B] integer, together with rewards.

    Returns:
        A record to add, reduce (:func:`rzero.losses.all_reduce_diagnostics`) and log (``to_dict``).

    Raises:
        ValueError: shapes, offsets or devices that disagree, a negative max_lag, a negative lag on a counted
            token, rewards without group_id or the reverse.
        TypeError: a wrong dtype.

    Example:
        Learner log-probs [0, ln 2] against behaviour [0, 0]: ratios 1 and 2, so the mean is 1.5, the second
        moment (1 + 4) / 2, and ESS (1 + 2)^2 / (1 + 4).

        >>> log_probs, mask = torch.tensor([[1.0, 2.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> report = importance_diagnostics(log_probs, torch.zeros(1, 2), mask).to_dict()
        >>> [round(report[f"token/{key}"], 4) for key in ("ratio_mean", "ratio_second_moment", "ess")]
        [1.5, 2.5, 1.8]
    """
    function = "importance_diagnostics"
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    require_offsets(function, batch)
    if max_lag < 0:
        raise ValueError(f"{function}: max_lag must be at least 0, got {max_lag}")
    log_ratio = batch.log_ratio(masked=0.0, dtype=torch.float64)
    # Without lag everything shares row 0, as if all lags were 0 and the last row the only one.
    last_lag = 0 if lag is None else max_lag
    token_lag = _token_lag(function, batch, lag).clamp(max=last_lag)
    sampled = batch.tokens_per_row() > 0
    num_groups, num_zero_variance_groups = _count_groups(function, rewards, group_id, batch.num_rows)
    return ImportanceDiagnostics(
        tokens=_chunked(
            log_ratio.flatten(), token_lag.flatten(), batch.mask.flatten(), num_lags=last_lag + 1
        ),
        responses=_statistics(
            batch.sum_rows(log_ratio), batch.max_rows(token_lag), sampled, num_lags=last_lag + 1
        ),
        max_lag=None if lag is None else max_lag,
        num_groups=log_ratio.new_tensor(num_groups),
        num_zero_variance_groups=log_ratio.new_tensor(num_zero_variance_groups),
    )


def _chunked(log_ratio: Tensor, lag: Tensor, counted: Tensor, *, num_lags: int) -> RatioStatistics:
    """Statistics of many log ratios, a cache-sized piece at a time: faster, and little memory."""
    pieces = zip(*(values.split(_CHUNK) for values in (log_ratio, lag, counted)), strict=True)
    return reduce(add, (_statistics(*piece, num_lags=num_lags) for piece in pieces))


def _statistics(log_ratio: Tensor, lag: Tensor, counted: Tensor, *, num_lags: int) -> RatioStatistics:
    """Sums of the counted ones of a flat list of log ratios, each into the row of its lag."""
    usable = counted & (log_ratio > -math.inf) & (log_ratio < _LARGEST_LOG_RATIO)
    x = torch.where(usable, log_ratio, 0.0)
    ratio = x.exp()
    # One row more takes what does not enter a sum, and is cut off: no selection, hence no synchronisation.
    row, nonfinite_row = (torch.where(chosen, lag, num_lags) for chosen in (usable, counted & ~usable))
    zeros = x.new_zeros(num_lags + 1)
    ones = torch.ones_like(x)
    cells = x.new_zeros((num_lags + 1) * NUM_BINS)
    return RatioStatistics(
        count=zeros.index_add(0, row, ones)[:-1],
        nonfinite=zeros.index_add(0, nonfinite_row, ones)[:-1],
        ratio_sum=zeros.index_add(0, row, ratio)[:-1],
        ratio_square_sum=zeros.index_add(0, row, ratio.square())[:-1],
        k1_sum=zeros.index_add(0, row, -x)[:-1],
        k3_sum=zeros.index_add(0, row, x.expm1() - x)[:-1],
        histogram=cells.index_add(0, row * NUM_BINS + bin_index(x), ones).view(-1, NUM_BINS)[:-1],
        max_log_ratio=torch.full_like(zeros, -math.inf).scatter_reduce(0, row, x, "amax")[:-1],
    )


def _token_lag(function: str, batch: TokenBatch, lag: Tensor | None) -> Tensor:
    """The lag of each token, int64; 0 where mask is False, and everywhere if there is none."""
    nothing = torch.zeros_like(batch.mask, dtype=torch.int64)
    if lag is None:
        return nothing
    if lag.is_nested:
        lag = lag.values()
    check_lag(function, lag, mask=batch.mask, num_rows=batch.num_rows)
    if lag.shape != batch.mask.shape:
        lag = batch.spread(lag)
    lag = torch.where(batch.mask, lag.long(), nothing)
    if bool((lag < 0).any()):
        flat = int((lag < 0).flatten().int().argmax())
        row, token = locate(flat, lag, batch.cu_seqlens)
        raise ValueError(
            f"{function}: lag must not be negative on a counted token, got {int(lag.flatten()[flat])} "
            f"at row {row}, token {token}"
        )
    return lag


def _count_groups(
    function: str, rewards: Tensor | None, group_id: Tensor | None, num_rows: int
) -> tuple[float, float]:
    """How many groups there are, and in how many all rewards are equal."""
    if rewards is None and group_id is None:
        return 0.0, 0.0
    if rewards is None or group_id is None:
        raise ValueError(f"{function}: rewards and group_id must be given together, got one of them")
    if rewards.shape != (num_rows,):
        raise ValueError(f"{function}: rewards must have shape ({num_rows},), got {tuple(rewards.shape)}")
    groups, zero_variance = count_zero_variance_groups(rewards, group_id)
    return float(groups), float(zero_variance)


def _exp(x: float) -> float:
    """exp, inf where Python would raise."""
    return math.inf if x >= _LARGEST_LOG_RATIO else math.exp(x)
