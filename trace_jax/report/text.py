"""Numbers and foreign text as a reader sees them.

Text in a trajectory may be hostile. The template engine escapes it; here control characters, lone surrogates and characters that turn the
direction of writing become visible, and a megabyte of tool output becomes its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_DIRECTIONS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},  # pictures of the control characters
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD),
    **{code: f"\\u{code:04x}" for code in _DIRECTIONS},
}


def visible(text: str) -> str:
    """The text with every character that a page would hide, obey or could not encode made visible."""
    return text.translate(_VISIBLE)


def clip(text: str, limit: int) -> str:
    """The first `limit` characters, and how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]} … and {len(text) - limit:,} more characters"


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def percent_interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def points(value: float) -> str:
    """A difference of two rates, with its sign."""
    return f"{100 * value:+.1f}".replace("-", "−")


def p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
