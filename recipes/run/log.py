"""What a run leaves behind: JSON lines, TorchRL's loggers, a summary and figures."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger
from tqdm import tqdm

from recipes.errors import RecipeError
from recipes.run.folder import new_run_folder, write_config
from recipes.run.summary import summary_text
from rzero.audit import AuditReport
from rzero.buffers import PackedBatch
from rzero.collectors import AsyncRolloutCollector, LagReport, Scheduler, Simulation, WorkloadMeter, simulate
from rzero.losses import ImportanceDiagnostics, importance_diagnostics
from rzero.losses.diagnostics import RatioStatistics

PREDICTED_UPDATES = 400
RATIO_NAMES = ("ratio_mean", "ratio_second_moment", "ratio_max", "ess_fraction", "kl_k3")


class RunLog:
    """Writes one run's measurements as they come and sums them up at the end.

    Args:
        config: A dataclass with ``runs``, ``nominal_lag``, ``updates``, ``tensorboard`` and ``max_slots``;
            saved as ``config.json``.
        collector: Where the batches come from; it is asked how busy the samplers are.
        scheduler: Makes a fresh scheduler of the run's kind, for the prediction.
        folder: The run's own; None makes one.
    """

    def __init__(
        self,
        config: Any,
        collector: AsyncRolloutCollector,
        scheduler: Callable[[], Scheduler],
        *,
        folder: Path | None = None,
    ) -> None:
        name = f"lag{config.nominal_lag}"
        self.folder = folder or new_run_folder(config.runs, name)
        write_config(self.folder, config)
        self._metrics = (self.folder / "metrics.jsonl").open("a", buffering=1)
        for logger in ("csv", "tensorboard"):  # of a run that is resumed: written again from the metrics
            shutil.rmtree(self.folder / logger, ignore_errors=True)
        self._loggers: list[Logger] = [CSVLogger("csv", log_dir=str(self.folder))]
        if config.tensorboard:
            self._loggers.append(TensorboardLogger("tensorboard", log_dir=str(self.folder)))
        self.lag = LagReport(nominal_lag=config.nominal_lag)
        self._diagnostics: ImportanceDiagnostics | None = None
        self._wait = self._wait_seconds = self._evaluation_seconds = 0.0
        self.collector, self._scheduler = collector, scheduler
        self._meter, self._slots = WorkloadMeter(), config.max_slots
        # Seconds from a publish to the next batch.
        self._leads: deque[float] = deque(maxlen=PREDICTED_UPDATES)
        self._busy_start, self._busy_in_evaluation = collector.busy_seconds(), 0.0
        self._start = self._step_start = time.perf_counter()
        self._tokens = self._updates = 0
        self._audits: list[dict[str, Any]] = []
        self.accuracies: dict[int, float] = {}  # of held-out problems, by version
        self._bar = tqdm(total=config.updates, unit="update", dynamic_ncols=True, mininterval=1, desc=name)

    def waiting(self, batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """The same batches, with the time that the learner waits for each counted."""
        iterator = iter(batches)
        while True:
            started = time.perf_counter()
            if self._updates:
                self._leads.append(started - self._step_start)
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
        admitted: Tensor | None = None,
    ) -> None:
        """Measure one update.

        Args:
            learner_version: Version that was updated.
            batch: What it was trained on.
            log_probs: [N], the learner's.
            entropies: [N], of the learner's distributions.
            loss: Scalar.
            grad_norm: Scalar, before clipping.
            admitted: bool [B], the responses that the loss counted; None: all.
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
        ratios = diagnostics.tokens.means()
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
            **{name: ratios[name] for name in RATIO_NAMES},
            "zero_variance_groups": float(diagnostics.num_zero_variance_groups),
            "response_length": tokens / batch.num_responses,
            "admitted_fraction": 1.0 if admitted is None else float(admitted.float().mean()),
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
        self.accuracies[version] = accuracy
        self._write({"version": version, "held_out_accuracy": accuracy}, step=version)
        self._bar.write(f"version {version}: held-out accuracy {accuracy:.3f}", file=sys.stderr)

    def audit(self, version: int, reports: Sequence[AuditReport]) -> None:
        """Note what an audit of each sampler found."""
        for sampler, report in enumerate(reports):
            self._audits.append({"version": version, "sampler": sampler, **report.to_dict()})
            self._bar.write(f"version {version}: audit of sampler {sampler}: {report}", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        """Everything measured so far, and how far the file of metrics goes."""
        return {
            "metrics_bytes": self._metrics.tell(),
            "lag": self.lag.counts(),
            "diagnostics": None if self._diagnostics is None else _sums(self._diagnostics),
            "meter": self._meter.state_dict(),
            "wait_seconds": self._wait_seconds,
            "seconds": self.seconds(),
            "evaluation_seconds": self._evaluation_seconds,
            "busy_seconds": self._busy_seconds(),
            "tokens": self._tokens,
            "updates": self._updates,
            "audits": self._audits,
            "accuracies": self.accuracies,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: what was written later is cut off, and will be measured again.

        Raises:
            RecipeError: If the file of metrics is shorter than it was.
        """
        self._cut_metrics(state_dict["metrics_bytes"])
        self.lag = LagReport(nominal_lag=self.lag.nominal_lag)
        self.lag.add_counts(state_dict["lag"])
        if state_dict["diagnostics"] is not None:
            sums: dict[str, Any] = dict(state_dict["diagnostics"])
            sums |= {level: RatioStatistics(**sums[level]) for level in ("tokens", "responses")}
            self._diagnostics = ImportanceDiagnostics(**sums)
        self._meter.load_state_dict(state_dict["meter"])
        self._wait_seconds = state_dict["wait_seconds"]
        self._evaluation_seconds = state_dict["evaluation_seconds"]
        self._start = time.perf_counter() - state_dict["seconds"] - self._evaluation_seconds
        self._busy_start = self.collector.busy_seconds() - state_dict["busy_seconds"]
        self._busy_in_evaluation = 0.0
        self._tokens, self._updates = state_dict["tokens"], state_dict["updates"]
        self._audits, self.accuracies = state_dict["audits"], state_dict["accuracies"]
        self._bar.update(self._updates)
        self._step_start = time.perf_counter()

    def _cut_metrics(self, size: int) -> None:
        path = self.folder / "metrics.jsonl"
        if path.stat().st_size < size:
            raise RecipeError(
                f"{path} must have at least the {size} bytes that the checkpoint knows, "
                f"got {path.stat().st_size}"
            )
        self._metrics.truncate(size)
        for row in map(json.loads, path.read_text().splitlines()):
            self._log(row, step=row["update"] if "update" in row else row["version"])

    def seconds(self) -> float:
        """Wall time so far without evaluation."""
        return max(1e-9, time.perf_counter() - self._start - self._evaluation_seconds)

    def sampler_idle_share(self) -> float:
        """Share of the time without evaluation in which the samplers had nothing to sample."""
        return min(1.0, max(0.0, 1.0 - self._busy_seconds() / self.seconds()))

    def _busy_seconds(self) -> float:
        return self.collector.busy_seconds() - self._busy_start - self._busy_in_evaluation

    def prediction(self) -> Simulation:
        """What the run's own timings predict: a fresh scheduler of its kind under a virtual clock."""
        publisher = self.collector.publisher
        lead = sum(self._leads) / max(1, len(self._leads))
        submit_seconds, reward_seconds = self.collector.seconds_outside()
        publish_seconds = max(0.0, publisher.mean_seconds() - lead)  # as the simulated one begins later
        workload = self._meter.workload(
            engines=len(self.collector.engines),
            publish_seconds=publish_seconds,
            acknowledge_seconds=min(submit_seconds, publish_seconds),  # a message one way as the other
            submit_seconds=submit_seconds,
            reward_seconds=reward_seconds,
            engine_slots=self._slots,
        )
        if self._updates < PREDICTED_UPDATES:  # The run's own beginning is a part of what it measured.
            return simulate(self._scheduler(), workload, updates=self._updates, warmup=0)
        return simulate(self._scheduler(), workload, updates=PREDICTED_UPDATES)

    def finish(self) -> dict[str, Any]:
        """Write ``summary.json`` and the figures, print the summary and return it."""
        from recipes.run.figures import draw_run

        self._bar.close()
        prediction = self.prediction()
        self.lag.predicted = prediction.lag.means()
        lag, versions = self.lag.to_dict(), sorted(self.accuracies)
        assert self._diagnostics is not None
        ratios = self._diagnostics.to_dict()
        summary = {
            "updates": self._updates,
            "held_out_accuracy_before": self.accuracies[versions[0]],
            "held_out_accuracy_after": self.accuracies[versions[-1]],
            "held_out_accuracy": self.accuracies,
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
        self._log(row, step=step)

    def _log(self, row: dict[str, float], *, step: int) -> None:
        for logger in self._loggers:
            for name, value in row.items():
                logger.log_scalar(name, value, step=step)


def _sums(diagnostics: ImportanceDiagnostics) -> dict[str, Any]:
    """The tensors and numbers that diagnostics consist of."""
    levels = {level: dict(vars(getattr(diagnostics, level))) for level in ("tokens", "responses")}
    return vars(diagnostics) | levels
