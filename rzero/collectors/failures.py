"""Groups that are lost without ending the run: raised with a reason, counted by it, reported."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LOG = logging.getLogger(__name__)


class GroupFailed(Exception):
    """A group is lost and counted; the run goes on with the others.

    A reward function or an environment may raise it too: any other exception of a reward function ends the
    run.

    Args:
        reason: A few words, the same for all failures of this kind; failures are counted by it.
        message: What happened to this group.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class FailureCounts:
    """How many groups failed, by reason, and whether any still succeeds.

    The first failure of each reason is logged with its traceback.

    Args:
        patience: So many failures with no success between them end the run.
    """

    def __init__(self, *, patience: int) -> None:
        self._patience, self._in_a_row = patience, 0
        self.by_reason: Counter[str] = Counter()
        self._last: dict[str, GroupFailed] = {}

    def add(self, error: GroupFailed) -> None:
        """Count one.

        Raises:
            RuntimeError: From the failure, if nothing but failures came of late.
        """
        if not self.by_reason[error.reason]:
            _LOG.warning("a group failed; the next ones of this kind are only counted", exc_info=error)
        self.by_reason[error.reason] += 1
        self._last[error.reason] = error
        self._in_a_row += 1
        if self._in_a_row >= self._patience:
            raise RuntimeError(f"{self._in_a_row} groups in a row failed, the last by {error}") from error

    def succeeded(self) -> None:
        """A group was completed."""
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"by_reason": dict(self.by_reason), "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count on from what ``state_dict`` returned."""
        self.by_reason, self._in_a_row = Counter(state_dict["by_reason"]), state_dict["in_a_row"]

    def __str__(self) -> str:
        """E.g. ``2 groups failed by reward timeout, the last: ...``; empty if none did."""
        return "; ".join(
            f"{count} groups failed by {reason}"
            + (f", the last: {self._last[reason]}" if reason in self._last else "")
            for reason, count in self.by_reason.items()
        )
