"""The mistake of a user."""

from collections.abc import Mapping
from typing import Any


class RecipeError(ValueError):
    """The user asked for something that cannot be; the message is one line and says what to do."""


def require_least(config: Any, least: Mapping[str, float]) -> None:
    """Refuse a config whose named fields are below their bounds, by the flag's name."""
    for name, bound in least.items():
        if not getattr(config, name) >= bound:
            raise RecipeError(
                f"--{name.replace('_', '-')} must be at least {bound}, got {getattr(config, name)}"
            )
