"""A run's folder and its checkpoints: what is saved, and how a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch

from recipes.config import Config
from recipes.errors import RecipeError
from recipes.learners import Learners
from recipes.run.folder import new_run_folder
from recipes.run.log import RunLog
from rzero.checkpoint import Checkpointer, CheckpointError, RNGState, TrainingState

KEPT = 2  # checkpoints, beside the best one


@final
class RunCheckpoints:
    """The checkpoints of one run, in its folder; every learner makes the same calls.

    Args:
        config: Of the run.
        learners: Who saves and loads together.
        model: Its weights, optimizer and schedule are saved.
        optimizer: See ``model``.
        schedule: See ``model``.

    Raises:
        RecipeError: If another process works in the folder, or it cannot be written.
    """

    def __init__(
        self,
        config: Config,
        learners: Learners,
        model: Any,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self._config, self._learners = config, learners
        new = config.resume is None and learners.first
        folder = new_run_folder(config.runs, f"lag{config.nominal_lag}") if new else config.resume
        self.folder = Path(learners.agree(None if folder is None or not learners.first else str(folder)))
        self._training = {"training": TrainingState(model, optimizer), "schedule": schedule}
        self._checkpointer: Checkpointer | None = None
        self._in_work: Future[Any] | None = None
        if config.checkpoint_every or config.resume is not None:
            with _as_mistake_of_the_user():
                self._checkpointer = Checkpointer(
                    self.folder / "checkpoints",
                    keep_last=None if config.record else KEPT,
                    config=_plain(asdict(config)),
                    group=learners.saving_group,
                )

    def resume_training(self) -> int:
        """Load model, optimizer, schedule and random numbers.

        Returns:
            The version they have; 0 in a new run.

        Raises:
            RecipeError: If no checkpoint is whole, or the last one is beyond the run's end.
        """
        if self._config.resume is None or self._checkpointer is None:
            return 0
        with _as_mistake_of_the_user():
            version = self._checkpointer.latest()
            if version is None:
                raise RecipeError(f"--resume: {self.folder} has no whole checkpoint to go on from")
            if version > self._config.updates:
                raise RecipeError(
                    f"--updates must be at least the {version} that {self.folder} has done, "
                    f"got {self._config.updates}"
                )
            self._checkpointer.load(version, self._training, rank_state={"rng": RNGState()})
        return version

    def resume_collecting(self, version: int, log: RunLog) -> None:
        """Load what only the first learner has: the collector with all that is in work, and the log."""
        if self._config.resume is not None and self._checkpointer is not None:
            self._checkpointer.load(version, {}, rank_state={"collector": log.collector, "log": log})

    def save_soon(self, version: int, log: RunLog | None) -> None:
        """Have what is in work copied in the background while the learner updates, if it is time to save.

        Whatever completes until then is sampled again after a restart; it must not be if time is to decide
        nothing.
        """
        if log is not None and self._due(version) and not self._config.deterministic:
            self._in_work = log.collector.snapshot()

    def save(self, version: int, log: RunLog | None) -> None:
        """Save everything if it is time to, while the samplers work; returns when it is copied."""
        if self._checkpointer is None or not self._due(version):
            return
        own: dict[str, Any] = {"rng": RNGState()}
        if log is not None:
            own |= {"collector": self._in_work or log.collector.snapshot(), "log": log}
        self._in_work = None
        score = None if log is None else log.accuracies.get(version)
        with _as_mistake_of_the_user():
            self._checkpointer.save(version, self._training, rank_state=own, score=score)

    def _due(self, version: int) -> bool:
        every = self._config.checkpoint_every
        if not every or version == 0:
            return bool(every and self._config.record)
        return version == self._config.updates or version % every == 0

    def close(self) -> None:
        """Return when the last checkpoint is on the device."""
        if self._checkpointer is not None:
            with _as_mistake_of_the_user():
                self._checkpointer.close()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in config.items()}


@contextmanager
def _as_mistake_of_the_user() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise RecipeError(str(error)) from error
