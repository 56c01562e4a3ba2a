"""Keys, addresses and account names, taken out of texts that may end in a file: error messages, the last words of a command, tracebacks.

What is secret comes from the environment (its values are looked for as they are), or from a server or a command that quotes it back (known
by its form).
"""

from __future__ import annotations

import os
import re
import urllib.parse

HIDDEN = "[redacted]"

_KEYS = re.compile(r".*_(API_KEY|AUTH_TOKEN|ACCESS_TOKEN|TOKEN|SECRET|SECRET_KEY|PASSWORD)")
_ACCOUNT = ("OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID", "ANTHROPIC_BASE_URL")
_SHORTEST = 6  # characters of a value that is looked for; "none" or "EMPTY", the keys of servers without keys, are words of any text
_KEY_LENGTH = 12

_FORMS = [
    (re.compile(r"\b([A-Za-z][\w+.-]*://)[^\s/@'\"]+@"), rf"\1{HIDDEN}@"),  # user and password of a URL
    (re.compile(r"\bBearer\s+[^\s'\",;]+", re.IGNORECASE), f"Bearer {HIDDEN}"),
    (
        re.compile(r"(openai[-_](?:organization|project)|authorization|(?:x-)?api[-_]key|(?:set-)?cookie)(['\"]?\s*[:=]\s*b?['\"]?)"
                   r"(?:Basic\s+)?[^\s'\",;}\])]+", re.IGNORECASE),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"\b(?:sk|rk|pk)-[\w*.-]*[\w*]|\b(?:sk|gsk|xai|hf)[-_](?=\w*\d)\w{10,}|\bAIza[\w-]{10,}"), HIDDEN),
    (
        re.compile(r"\b((?:access|session|refresh)_token|\w*secret|password|passwd)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",;}\])]+", re.IGNORECASE),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"\borg-\w[\w-]*"), HIDDEN),
    (re.compile(r"\b(?:proj_|user-)(?=\w*[\dA-Z]|\w{16})\w+"), HIDDEN),  # not `user-agent`, nor the `proj_weight` of a traceback
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), HIDDEN),  # an e-mail address
]  # fmt: skip


def redact(text: str, *more: str) -> str:
    """The text without secrets.

    Args:
      more: values that are secret too, such as those of a reply's headers.
    """
    for value in sorted({*_values(), *filter(None, more)}, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return text


def without_keys(text: str) -> str:
    """The text without the values of the environment's API keys. An answer is kept as it came but for these; what is too short for a key
    may be a word of it."""
    for name, value in os.environ.items():
        if name.endswith("_API_KEY") and len(value) >= _KEY_LENGTH:
            text = text.replace(value, HIDDEN)
    return text


def shorten(text: str, most: int = 300) -> str:
    """One line of at most so many characters, its middle left out."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _values() -> set[str]:
    values = {value for name, value in os.environ.items() if name in _ACCOUNT or _KEYS.fullmatch(name)}
    for name in _ACCOUNT:
        if name.endswith("_URL") and (url := os.environ.get(name)):
            host = urllib.parse.urlsplit(url).netloc
            values |= {url.rstrip("/"), host, host.rpartition("@")[2]}
    return {value for value in values if len(value) >= _SHORTEST}
