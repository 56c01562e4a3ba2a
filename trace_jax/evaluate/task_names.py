"""Many tasks in one line of a message."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def by_number(name: str) -> tuple[int, str]:
    """Sorts names that end in numbers by these, as long as they begin alike."""
    return len(name), name
