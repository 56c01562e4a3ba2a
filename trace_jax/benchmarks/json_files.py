"""JSON files of any size, and what is wrong with one in a line that names it.

Result files grow to hundreds of megabytes. `stream` gives the values at one place of a file one after the other, `opening` looks at its
beginning only; neither holds the file. Damage is an `InputError`. What a file says is quoted nowhere but where it is known to be no
setting, since settings hold keys: of what is damaged the message gives the place, not the text.
"""

from __future__ import annotations

import contextlib
import decimal
import io
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeVar

import ijson

from trace_jax.agents.redaction import redact, shorten
from trace_jax.errors import InputError

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
_OTHERS = {  # the first bytes of what is no JSON text, and what helps
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it with zstd -d",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
# what reading a value of an unexpected type raises
_MALFORMED = (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError)


def opening(path: pathlib.Path, most: int = 1 << 20) -> set[str]:
    """The places that have values in the first bytes of a file, such as "info.num_trials" and, of a list, "item.reward".

    Empty for what is no JSON. Where the beginning is damaged, the places before the damage.
    """
    found: set[str] = set()
    with open_text(path) as file, contextlib.suppress(ijson.JSONError):
        for place, _, _ in ijson.parse(io.BytesIO(file.read(most)), buf_size=1 << 10):
            found.add(place)
    return found - {""}


def stream(path: pathlib.Path, place: str) -> Iterator[Any]:
    """The values at a place of the file in their order, "simulations.item" for the elements of a list; numbers are int or float.

    The file is read to its end, so that what is wrong behind the last value is found.

    Raises:
      InputError: the file cannot be read, is not UTF-8 or is no JSON.
    """
    with open_text(path) as file:
        values = ijson.items(file, place)
        while True:
            try:
                value = next(values, _END)
            except ijson.JSONError as error:
                # its first line says what is wrong, the others quote the file; damaged text comes as the repr of bytes
                what = str(error).removeprefix("b'").replace("\\n", "\n").splitlines()[0]
                raise InputError(
                    f"{path}: not valid JSON before byte {file.tell()} ({what}); the file is cut short or damaged, copy it again"
                ) from None
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror})") from None
            if value is _END:
                return
            with in_form(f"{path}: {place}", "JSON"):
                value = _plain(value)
            yield value


def value(path: pathlib.Path, place: str) -> Any:
    """The first value at a place, None if there is none; "" is the whole file. Raises as `stream`."""
    with contextlib.closing(stream(path, place)) as values:
        return next(values, None)


def need(mapping: Any, key: str, where: str) -> Any:
    """A field that must be there; raises InputError."""
    if not isinstance(mapping, Mapping) or key not in mapping:
        raise InputError(f"{where}: field {key!r} is missing; the file is not a complete result file")
    return mapping[key]


def field(mapping: Mapping[str, Any], key: str, kind: type[T], needed: bool = False) -> T:
    """A field of a known type; an empty value of it where the field is null or, if it is not needed, missing.

    Raises:
      KeyError, TypeError: which `in_form` turns into an InputError.
    """
    value = mapping[key] if needed else mapping.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"{key} is of type {type(value).__name__}, not {kind.__name__}")
    return value


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, which OpenAI messages carry as text; what is no JSON object is kept as text under "malformed"."""
    try:
        arguments = json.loads(text or "{}")
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()  # what could not be stored again is no JSON either
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"malformed": text}


@contextlib.contextmanager
def in_form(where: str, program: str) -> Iterator[None]:
    """Turns what a field of another type, or a part that is missing deep inside, raises into an InputError."""
    try:
        yield
    except _MALFORMED as error:
        why = redact(shorten(f"{type(error).__name__}: {error}"))
        raise InputError(f"{where}: not in the form that {program} writes ({why}); export it again") from error


@contextlib.contextmanager
def open_text(path: pathlib.Path) -> Iterator[BinaryIO]:
    """The file behind its byte order mark; raises InputError for what is no UTF-8 text by its first bytes."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    with file:
        head = file.read(4)
        for first, what in _OTHERS.items():
            if head.startswith(first):
                raise InputError(f"{path}: {what}, and give the file that comes out")
        file.seek(len(_BOM) if head.startswith(_BOM) else 0)
        yield file


_END = object()


def _plain(value: Any) -> Any:
    """A value whose fractions are floats; ijson keeps them exact."""
    if isinstance(value, decimal.Decimal):
        if not math.isfinite(number := float(value)):
            raise ValueError("a number is too large")
        return number
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value
