"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNKNOWN = "n/a"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or the sign for what is not known."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"
