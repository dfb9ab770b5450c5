"""From what a run measured of itself to the `Workload` that predicts it."""

import heapq
from collections import deque
from collections.abc import Mapping
from itertools import cycle, pairwise
from typing import Any, final

import numpy as np
import torch

from rzero.buffers import PackedBatch
from rzero.collectors.simulate import Workload
from rzero.collectors.simulate_laws import RateLaw, empirical_length, measured_rate

BINS = 8
_ROW_BYTES = 3 * 8  # of a response
POINTS = 8  # instants of a response's life at which the sequences beside it are counted


@final
class WorkloadMeter:
    """Keeps the timings of the newest batches and makes a `Workload` of them.

    A response lives from its submission to its last token, so that what an engine does before the first token
    counts as sampling; but the time in which it waits for a slot is the simulated engine's to find again.

    Args:
        batches: How many of the newest batches are kept.

    Raises:
        ValueError: If `batches` is not positive.
    """

    def __init__(self, *, batches: int = 256) -> None:
        """Starts without a measurement; see the class for the argument."""
        if batches < 1:
            raise ValueError(f"WorkloadMeter: batches must be at least 1, got {batches}")
        self._rows: deque[bytes] = deque(maxlen=batches)  # int64 [3, B]: joined without giving the lock away
        self._train_seconds: deque[float] = deque(maxlen=batches)
        self._group_size = 1

    def update(self, batch: PackedBatch, *, train_seconds: float) -> None:
        """Note one update.

        Args:
            batch: What was trained on, with the times of its engines' clocks.
            train_seconds: From the moment at which the learner took the batch until it asked for the next.
        """
        columns = (batch.t_submit_ns, batch.t_done_ns, batch.response_length.long())
        self._rows.append(torch.stack(columns).numpy().tobytes())
        self._train_seconds.append(train_seconds)
        self._group_size = batch.num_responses // len(batch.group_id.unique())

    def state_dict(self) -> dict[str, Any]:
        """All that is kept."""
        return {
            "times": torch.frombuffer(bytearray().join(self._rows), dtype=torch.int64)
            if self._rows
            else None,
            "sizes": [len(rows) // _ROW_BYTES for rows in self._rows],
            "train_seconds": list(self._train_seconds),
            "group_size": self._group_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep what ``state_dict`` returned instead."""
        data = b"" if state_dict["times"] is None else state_dict["times"].numpy().tobytes()
        ends = np.cumsum([0, *state_dict["sizes"]]) * _ROW_BYTES
        rows = (data[start:end] for start, end in pairwise(ends.tolist()))
        self._rows = deque(rows, maxlen=self._rows.maxlen)
        self._train_seconds = deque(state_dict["train_seconds"], maxlen=self._train_seconds.maxlen)
        self._group_size = state_dict["group_size"]

    def workload(
        self,
        *,
        engines: int,
        publish_seconds: float,
        acknowledge_seconds: float = 0.0,
        submit_seconds: float = 0.0,
        reward_seconds: float = 0.0,
        engine_slots: int | None = None,
    ) -> Workload:
        """What was measured: lengths and rates of the engines, and the times of the updates, again and again.

        Args:
            engines: Number of engines, which shared the responses evenly.
            publish_seconds: Mean time of a publish, which overlaps with the next update.
            acknowledge_seconds: The part at its end in which the engines have the weights already.
            submit_seconds: Mean time of a group on the way to its engine.
            reward_seconds: Mean time from a group's last token to its rewards.
            engine_slots: Sequences that one engine decodes together at most; None: no limit.

        Raises:
            RuntimeError: If no batch was measured.
        """
        if not self._rows:
            raise RuntimeError("WorkloadMeter.workload: at least one update must be measured first, got none")
        rows = [np.frombuffer(row, np.int64).reshape(3, -1) for row in self._rows]
        submit_ns, done_ns, lengths = np.concatenate(rows, axis=1)
        submit, done = ((ns - submit_ns.min()) * 1e-9 for ns in (submit_ns, done_ns))
        train_seconds = cycle(self._train_seconds)  # one after the other: their jitter is a part of the lag
        return Workload(
            length_law=empirical_length(lengths),
            rate_law=_rate_law(_slot_times(submit, done, engines, engine_slots), done, lengths, engines),
            train_seconds=lambda tokens: next(train_seconds),
            group_size=self._group_size,
            engines=engines,
            engine_slots=engine_slots,
            publish_seconds=publish_seconds,
            acknowledge_seconds=acknowledge_seconds,
            overlap_publish=True,
            submit_seconds=submit_seconds,
            reward_seconds=reward_seconds,
        )


def _slot_times(submit: np.ndarray, done: np.ndarray, engines: int, slots: int | None) -> np.ndarray:
    """When each response got a slot: first come, first served, as soon as one that had one was done."""
    if slots is None:
        return submit
    start, held = submit.copy(), []
    for index in np.argsort(submit, kind="stable"):
        if len(held) == slots * engines:
            start[index] = max(start[index], heapq.heappop(held))
        heapq.heappush(held, done[index])
    return start


def _rate_law(start: np.ndarray, done: np.ndarray, lengths: np.ndarray, engines: int) -> RateLaw:
    """Tokens per second of a sequence against the sequences on its engine, from times in seconds."""
    # At the ends of the record some of the sequences beside a response are not in it.
    first, last = np.quantile(done, (1 / 3, 2 / 3))
    inner = (done >= first) & (done <= last)
    seconds = np.maximum(done - start, 1e-9)[inner]
    instants = start[inner, None] + seconds[:, None] * (np.arange(POINTS) + 0.5) / POINTS
    alive = np.searchsorted(np.sort(start), instants, "right") - np.searchsorted(
        np.sort(done), instants, "right"
    )
    concurrency = alive.mean(axis=1) / engines
    edges = np.unique(np.quantile(concurrency, np.linspace(0, 1, BINS + 1)))
    place = np.searchsorted(edges[1:-1], concurrency, "right")
    used = np.unique(place)
    points = [np.average(concurrency[place == k], weights=seconds[place == k]) for k in used]
    rates = [lengths[inner][place == k].sum() / seconds[place == k].sum() for k in used]
    return measured_rate(points, rates)
