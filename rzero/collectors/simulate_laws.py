"""Laws that a simulated run is made of: how long responses are, and how fast an engine draws them.

A length law takes a NumPy generator and a number of responses and returns their lengths in tokens, int64, at
least 1. A rate law takes the number of sequences that one engine decodes together and returns the tokens per
second that *each* of them gets. Any function of that form will do.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

LengthLaw = Callable[[np.random.Generator, int], np.ndarray]
RateLaw = Callable[[int], float]

__all__ = [
    "LengthLaw",
    "RateLaw",
    "constant_length",
    "constant_rate",
    "empirical_length",
    "exponential_length",
    "lognormal_length",
    "measured_rate",
    "step_rate",
]


def constant_length(tokens: int) -> LengthLaw:
    """Every response has the same length.

    Example:
        >>> constant_length(7)(np.random.default_rng(0), 3)
        array([7, 7, 7])
    """
    _require("constant_length", "tokens", tokens, least=1)
    return lambda rng, size: np.full(size, tokens, dtype=np.int64)


def exponential_length(mean: float, *, limit: int | None = None) -> LengthLaw:
    """Exponential lengths, rounded up: a stop token of constant probability.

    Args:
        mean: Mean before rounding and cutting, in tokens.
        limit: Longest response allowed; longer ones are cut there, as by `max_new_tokens`.
    """
    _require("exponential_length", "mean", mean, least=1)
    return lambda rng, size: _whole(rng.exponential(mean, size), limit)


def lognormal_length(mean: float, *, cv: float, limit: int | None = None) -> LengthLaw:
    """Log-normal lengths, the usual shape of reasoning traces.

    Args:
        mean: Mean before rounding and cutting, in tokens.
        cv: Standard deviation over mean, before cutting.
        limit: Longest response allowed; longer ones are cut there, as by `max_new_tokens`.

    Example:
        >>> lengths = lognormal_length(1000, cv=0.8)(np.random.default_rng(0), 100_000)
        >>> round(float(lengths.mean()), -1), round(float(lengths.std() / lengths.mean()), 1)
        (1000.0, 0.8)
    """
    _require("lognormal_length", "mean", mean, least=1)
    _require("lognormal_length", "cv", cv, least=0)
    variance = math.log1p(cv**2)
    location = math.log(mean) - variance / 2
    return lambda rng, size: _whole(rng.lognormal(location, math.sqrt(variance), size), limit)


def empirical_length(lengths: Sequence[int]) -> LengthLaw:
    """Lengths drawn again, with replacement, from those of a real run.

    Example:
        >>> sorted(set(empirical_length([3, 5])(np.random.default_rng(0), 100).tolist()))
        [3, 5]
    """
    values = np.asarray(lengths, dtype=np.int64)
    if values.ndim != 1 or len(values) == 0 or values.min() < 1:
        raise ValueError(f"empirical_length: lengths must be at least one positive number, got {lengths!r}")
    return lambda rng, size: rng.choice(values, size)


def constant_rate(tokens_per_second: float) -> RateLaw:
    """A sequence is as fast in company as alone.

    Example:
        >>> constant_rate(50.0)(256)
        50.0
    """
    if not tokens_per_second > 0:
        raise ValueError(f"constant_rate: tokens_per_second must be positive, got {tokens_per_second}")
    return lambda concurrency: tokens_per_second


def step_rate(*, step_seconds: float, sequence_seconds: float) -> RateLaw:
    """One decoding step takes step_seconds + n * sequence_seconds and gives each of n sequences one token.

    The first term is reading the weights, the second the caches and the arithmetic. The engine as a whole
    draws n / (step_seconds + n * sequence_seconds) tokens per second, at most 1 / sequence_seconds.

    Example:
        >>> rate = step_rate(step_seconds=0.008, sequence_seconds=0.00002)
        >>> round(rate(1)), round(rate(400)), round(400 * rate(400))
        (125, 62, 25000)
    """
    if step_seconds < 0 or sequence_seconds < 0 or step_seconds + sequence_seconds <= 0:
        raise ValueError(
            "step_rate: step_seconds and sequence_seconds must not be negative, nor both be 0, "
            f"got {step_seconds} and {sequence_seconds}"
        )
    return lambda concurrency: 1.0 / (step_seconds + concurrency * sequence_seconds)


def measured_rate(concurrency: Sequence[float], tokens_per_second: Sequence[float]) -> RateLaw:
    """Rates measured at some concurrencies, the time per step interpolated between and held beyond.

    Args:
        concurrency: Rising numbers of sequences.
        tokens_per_second: What each sequence got at that concurrency.

    Example:
        >>> rate = measured_rate([1, 101], [100.0, 50.0])
        >>> rate(1), round(rate(51), 1), rate(500)
        (100.0, 66.7, 50.0)
    """
    points, rates = np.asarray(concurrency, dtype=np.float64), np.asarray(tokens_per_second, dtype=np.float64)
    if points.ndim != 1 or points.shape != rates.shape or len(points) == 0:
        raise ValueError(
            "measured_rate: concurrency and tokens_per_second must be lists of one length, "
            f"got shapes {points.shape} and {rates.shape}"
        )
    if (np.diff(points) <= 0).any() or (rates <= 0).any():
        raise ValueError(
            f"measured_rate: concurrency must rise and rates be positive, got {points} and {rates}"
        )
    return lambda n: float(1.0 / np.interp(n, points, 1.0 / rates))


def _whole(lengths: np.ndarray, limit: int | None) -> np.ndarray:
    whole = np.maximum(1, np.ceil(lengths)).astype(np.int64)
    return whole if limit is None else np.minimum(whole, limit)


def _require(function: str, name: str, value: float, *, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{function}: {name} must be at least {least}, got {value}")
