"""A text in the readings in which it may hide a value: spelt apart, backwards, in other letters, encoded, in words.

`tells` says whether a text holds a value in any of them. Each reading is one that a model undoes with ease. Ciphers, riddles and arithmetic
are none: whether a hint tells more than it should is also measured, over seeds, by `trace_jax.synthesize.hints`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import functools
import re
import unicodedata

_LEET = str.maketrans("01345789l@$!|", "oieastbgiasii")
_ALIKE = str.maketrans("авекмнорстухіѕјԁɡοανκρτυ", "abekmhopctyxisjdgoavkptu")  # Cyrillic and Greek letters that look Latin
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_ONES += "seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
# Words with a digit, ids and numbers. From their beginning alone: a long word without a digit costs its length then, not the square of it.
IDS = re.compile(r"(?<![\w@#.-])[\w@#.-]*\d[\w@#-]*")
_NUMBER = 10**9  # the largest that is read in words


def contains(text: str, value: str) -> bool:
    """Whether a value stands in a text as a word of its own."""
    if value.lower() not in text.lower():
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def distinct(value: str) -> bool:
    """Whether a value stands in a text hardly by chance."""
    return len(value) >= (3 if re.search(r"\d", value) else 8)


def shape(value: str) -> str:
    """4711 is like 1234, J7 like B2."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d", "0", value))


def tells(text: str, value: str) -> bool:
    """Whether a text holds a value: as it is, or, where it is one that no text holds by chance, in one of the readings."""
    if contains(text, value):
        return True
    plain, bare = _plain(text), _bare(_plain(value))
    if value.isdecimal() and 10 <= int(value) < _NUMBER:
        words = " ".join(re.findall(r"[a-z0-9]+", plain.replace(" and ", " ")))
        if any(contains(words, spelt) for spelt in (in_words(int(value)), " ".join(_ONES[int(digit)] for digit in value))):
            return True
    if not distinct(bare):
        return False
    readings = [_bare(plain), _bare(plain)[::-1], *map(_bare, _decoded(text))]
    if any(_stands(reading, bare) for reading in readings):
        return True
    return len(bare) >= 6 and _bare(plain.translate(_LEET)).find(bare.translate(_LEET)) >= 0


def in_words(number: int) -> str:
    """4711: four thousand seven hundred eleven."""
    for size, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {in_words(number % size)}" if number % size else ""
            return f"{in_words(number // size)} {name}{rest}"
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10 - 2] + (f" {_ONES[number % 10]}" if number % 10 else "")


@functools.lru_cache(4096)
def _plain(text: str) -> str:
    """Without accents, full-width forms, look-alikes, invisible characters and case."""
    text = unicodedata.normalize("NFKD", text).casefold().translate(_ALIKE)
    return "".join(c for c in text if not unicodedata.combining(c) and unicodedata.category(c) != "Cf")


@functools.lru_cache(4096)
def _bare(text: str) -> str:
    """Letters and digits alone: dashes, spaces, dots and what else may stand between them are gone."""
    return "".join(c for c in text if c.isalnum())


def _stands(text: str, value: str) -> bool:
    """Within a bare text words have no ends; but a number is none if more digits stand beside it."""
    left = r"(?<!\d)" if value[0].isdigit() else ""
    right = r"(?!\d)" if value[-1].isdigit() else ""
    return value in text and re.search(left + re.escape(value) + right, text) is not None


@functools.lru_cache(4096)
def _decoded(text: str) -> tuple[str, ...]:
    """ROT13, and the words that are base64 or hexadecimal of a text."""
    found = [_plain(codecs.encode(text, "rot13"))]
    for word in re.findall(r"[A-Za-z0-9+/_-]{4,}={0,2}", text):
        code = word.rstrip("=").translate(str.maketrans("-_", "+/"))
        for decode in (lambda c: base64.b64decode(c + "=" * (-len(c) % 4), validate=True), bytes.fromhex, base64.b32decode):
            try:
                plain = decode(code).decode()
            except (binascii.Error, ValueError):
                continue
            if plain.isprintable():
                found.append(_plain(plain))
    return tuple(found)
