"""What a run leaves behind: JSON lines, TorchRL's loggers, a summary and figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger
from tqdm import tqdm

from rzero.audit import AuditReport
from rzero.buffers import PackedBatch
from rzero.collectors import AsyncRolloutCollector, LagReport, Scheduler, Simulation, WorkloadMeter, simulate
from rzero.losses import ImportanceDiagnostics, importance_diagnostics

PREDICTED_UPDATES = 400


def new_run_folder(root: Path, name: str) -> Path:
    """``root/name-DATE-TIME``, created; a number is added if two runs start in one second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        folder = root / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise RuntimeError(f"new_run_folder: {root} must have room for a run, got 1000 of {stem}")


class RunLog:
    """Writes one run's measurements as they come and sums them up at the end.

    Args:
        config: A dataclass with ``runs``, ``nominal_lag``, ``updates`` and ``tensorboard``; saved as
            ``config.json``.
        collector: Where the batches come from; it is asked how busy the samplers are.
        scheduler: Makes a fresh scheduler of the run's kind, for the prediction.
    """

    def __init__(
        self, config: Any, collector: AsyncRolloutCollector, scheduler: Callable[[], Scheduler]
    ) -> None:
        name = f"lag{config.nominal_lag}"
        self.folder = new_run_folder(config.runs, name)
        (self.folder / "config.json").write_text(json.dumps(asdict(config), indent=2, default=str) + "\n")
        self._metrics = (self.folder / "metrics.jsonl").open("a", buffering=1)
        self._loggers: list[Logger] = [CSVLogger("csv", log_dir=str(self.folder))]
        if config.tensorboard:
            self._loggers.append(TensorboardLogger("tensorboard", log_dir=str(self.folder)))
        self.lag = LagReport(nominal_lag=config.nominal_lag)
        self._diagnostics: ImportanceDiagnostics | None = None
        self._wait = self._wait_seconds = self._evaluation_seconds = 0.0
        self.collector, self._scheduler = collector, scheduler
        self._meter = WorkloadMeter()
        self._busy_start, self._busy_in_evaluation = collector.busy_seconds(), 0.0
        self._start = self._step_start = time.perf_counter()
        self._tokens = self._updates = 0
        self._audits: list[dict[str, Any]] = []
        self._held_out: dict[int, float] = {}
        self._bar = tqdm(total=config.updates, unit="update", dynamic_ncols=True, mininterval=1, desc=name)

    def waiting(self, batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """The same batches, with the time that the learner waits for each counted."""
        iterator = iter(batches)
        while True:
            started = time.perf_counter()
            batch = next(iterator)
            self._wait = time.perf_counter() - started
            self._wait_seconds += self._wait
            yield batch

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Leave the time of a block out of all that is measured."""
        started, busy = time.perf_counter(), self.collector.busy_seconds()
        yield
        self._evaluation_seconds += time.perf_counter() - started
        self._busy_in_evaluation += self.collector.busy_seconds() - busy
        self._step_start = time.perf_counter()

    def update(
        self,
        learner_version: int,
        batch: PackedBatch,
        *,
        log_probs: Tensor,
        entropies: Tensor,
        loss: Tensor,
        grad_norm: Tensor,
    ) -> None:
        """Measure one update.

        Args:
            learner_version: Version that was updated.
            batch: What it was trained on.
            log_probs: [N], the learner's.
            entropies: [N], of the learner's distributions.
            loss: Scalar.
            grad_norm: Scalar, before clipping.
        """
        train_seconds = time.perf_counter() - self._step_start - self._wait
        self._step_start = time.perf_counter()
        self._meter.update(batch, train_seconds=train_seconds)
        mask = batch.response_mask
        self.lag.update(batch.policy_version, mask, batch.cu_seqlens, learner_version=learner_version)
        lag = torch.where(mask, learner_version - batch.policy_version, 0)
        diagnostics = importance_diagnostics(
            log_probs.detach(),
            batch.behavior_log_probs,
            mask,
            cu_seqlens=batch.cu_seqlens,
            rewards=batch.reward,
            group_id=batch.group_id,
        )
        self._diagnostics = diagnostics if self._diagnostics is None else self._diagnostics + diagnostics
        ratios = diagnostics.to_dict()
        tokens = int(mask.sum())
        self._tokens += tokens
        self._updates += 1
        row = {
            "update": learner_version,
            "reward": float(batch.reward.mean()),
            "loss": float(loss.detach()),
            "grad_norm": float(grad_norm),
            "entropy": float(entropies.sum()) / tokens,
            "lag_mean": float(lag.sum()) / tokens,
            "lag_max": int(lag.max()),
            "ratio_mean": ratios["token/ratio_mean"],
            "ratio_second_moment": ratios["token/ratio_second_moment"],
            "ratio_max": ratios["token/ratio_max"],
            "ess_fraction": ratios["token/ess_fraction"],
            "kl_k3": ratios["token/kl_k3"],
            "zero_variance_groups": ratios["groups/zero_variance"],
            "response_length": tokens / batch.num_responses,
            "wait_seconds": self._wait,
            "train_seconds": train_seconds,
            "sampler_idle": self.sampler_idle_share(),
        }
        self._write(row, step=learner_version)
        self._bar.set_postfix(
            reward=f"{row['reward']:.3f}",
            lag=f"{row['lag_mean']:.2f}",
            tokens_per_s=f"{self._tokens / self.seconds():.0f}",
            refresh=False,
        )
        self._bar.update()

    def held_out(self, version: int, accuracy: float) -> None:
        """Note the held-out accuracy of the weights of a version."""
        self._held_out[version] = accuracy
        self._write({"version": version, "held_out_accuracy": accuracy}, step=version)
        self._bar.write(f"version {version}: held-out accuracy {accuracy:.3f}", file=sys.stderr)

    def audit(self, version: int, reports: Sequence[AuditReport]) -> None:
        """Note what an audit of each sampler found."""
        for sampler, report in enumerate(reports):
            self._audits.append({"version": version, "sampler": sampler, **report.to_dict()})
            self._bar.write(f"version {version}: audit of sampler {sampler}: {report}", file=sys.stderr)

    def seconds(self) -> float:
        """Wall time so far without evaluation."""
        return max(1e-9, time.perf_counter() - self._start - self._evaluation_seconds)

    def sampler_idle_share(self) -> float:
        """Share of the time without evaluation in which the samplers had nothing to sample."""
        busy = self.collector.busy_seconds() - self._busy_start - self._busy_in_evaluation
        return min(1.0, max(0.0, 1.0 - busy / self.seconds()))

    def prediction(self) -> Simulation:
        """What the run's own timings predict: a fresh scheduler of its kind under a virtual clock."""
        publisher = self.collector.publisher
        workload = self._meter.workload(
            engines=len(self.collector.engines), publish_seconds=publisher.mean_seconds()
        )
        if self._updates < PREDICTED_UPDATES:  # The run's own beginning is a part of what it measured.
            return simulate(self._scheduler(), workload, updates=self._updates, warmup=0)
        return simulate(self._scheduler(), workload, updates=PREDICTED_UPDATES)

    def finish(self) -> dict[str, Any]:
        """Write ``summary.json`` and the figures, print the summary and return it."""
        from recipes.figures import draw_run

        self._bar.close()
        prediction = self.prediction()
        self.lag.predicted = prediction.lag.means()
        lag = self.lag.to_dict()
        assert self._diagnostics is not None
        ratios = self._diagnostics.to_dict()
        versions = sorted(self._held_out)
        summary = {
            "updates": self._updates,
            "held_out_accuracy_before": self._held_out[versions[0]],
            "held_out_accuracy_after": self._held_out[versions[-1]],
            "held_out_accuracy": self._held_out,
            "lag": lag,
            "ratio_mean": ratios["token/ratio_mean"],
            "ratio_second_moment": ratios["token/ratio_second_moment"],
            "ratio_max": ratios["token/ratio_max"],
            "ess_fraction": ratios["token/ess_fraction"],
            "learner_idle_share": self._wait_seconds / self.seconds(),
            "sampler_idle_share": self.sampler_idle_share(),
            "updates_per_second": self._updates / self.seconds(),
            "predicted_updates_per_second": 1 / prediction.step_seconds,
            "publish_seconds": self.collector.publisher.mean_seconds(),
            "tokens_per_second": self._tokens / self.seconds(),
            "seconds": self.seconds(),
            "evaluation_seconds": self._evaluation_seconds,
            "engines": len(self.collector.engines),
            "audits": self._audits,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._metrics.close()
        draw_run(self.folder)
        print(summary_text(summary, self.folder), flush=True)
        return summary

    def _write(self, row: dict[str, float], *, step: int) -> None:
        self._metrics.write(json.dumps(row) + "\n")
        for logger in self._loggers:
            for name, value in row.items():
                logger.log_scalar(name, value, step=step)


def summary_text(summary: dict[str, Any], folder: Path) -> str:
    """The summary as a person reads it."""
    lag = summary["lag"]["token_mean"]["per_token"]
    before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
    return "\n".join(
        [
            "",
            f"  updates              {summary['updates']} in {summary['seconds']:.0f} s, "
            f"{summary['updates_per_second']:.2f} a second (evaluation, "
            f"{summary['evaluation_seconds']:.0f} s, excluded)",
            f"  held-out accuracy    {before:.3f} before, {after:.3f} after "
            f"({100 * (after - before):+.1f} points)",
            f"  lag per token        nominal {summary['lag']['nominal_lag']}; "
            f"measured mean {lag['mean']:.2f}, p50 {lag['p50']:.0f}, "
            f"p95 {lag['p95']:.0f}, max {lag['max']:.0f}; "
            f"predicted mean {summary['lag']['predicted']['token_mean']:.2f}",
            f"  importance ratio     mean {summary['ratio_mean']:.4f}, second moment "
            f"{summary['ratio_second_moment']:.4f}, max {summary['ratio_max']:.2f}, "
            f"effective sample size {summary['ess_fraction']:.3f}",
            f"  idle                 learner {summary['learner_idle_share']:.1%}, "
            f"samplers {summary['sampler_idle_share']:.1%}",
            f"  sampled tokens       {summary['tokens_per_second']:.0f} a second",
            f"  run folder           {folder}",
        ]
    )
