"""Numbers and foreign text as a reader sees them.

Text in a trajectory may be hostile. The template engine escapes it; here control characters, lone surrogates and characters that turn the
direction of writing become visible, and a megabyte of tool output becomes its beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

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


def marked(text: str, quote: str, limit: int) -> Markup:
    """About `limit` characters of the text, the quote marked in it: from the beginning, or where that would miss it, around it.

    Blanks and case may differ. Without the quote, or where it is not in the text, this is `clip`.
    """
    words = [re.escape(word) for word in quote.split()]
    found = re.search(r"\s+".join(words), text, re.IGNORECASE) if words else None
    if found is None:
        return escape(visible(clip(text, limit)))
    first = 0 if found.end() <= limit else max(0, found.start() - limit // 3)
    last = max(first + limit, found.end())
    before = f"{first:,} characters before … " if first else ""
    after = f" … and {len(text) - last:,} more characters" if last < len(text) else ""
    parts = (before + text[first : found.start()], text[found.start() : found.end()], text[found.end() : last] + after)
    return Markup("{}<mark>{}</mark>{}").format(*map(visible, parts))


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def percent_interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}\u00a0%"


def points(value: float) -> str:
    """A difference of two rates, with its sign."""
    return f"{100 * value:+.1f}".replace("-", "−")


def p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def number(value: float) -> str:
    """Three digits of a number, more of a large one."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def roughly(seconds: float) -> str:
    """A duration that fits a tile."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
