"""The reference of all config fields, docs/config.md: `python -m trace_jax.reference >docs/config.md`.

It says what the dataclasses of `trace_jax.config` say, so that the document cannot differ from the program; a test holds the two together.
`trace-jax COMMAND --help` shows the same fields in a line each.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from trace_jax.config import Config, config_names, data_folder, load_config
from trace_jax.config.fields import fields, type_name

HEAD = """# Config fields

Written by `python -m trace_jax.reference >docs/config.md`; do not edit.

A field is set with `--config.FIELD=VALUE`, or in a config of your own, a Python file with a function `get_config` that returns a
`trace_jax.config.Config`. `none` stands for no value, a list has commas between, a JSON object is written as such. An interval is
`[low, high]`, and with a round bracket without its end. `trace-jax COMMAND --help` prints the same in short.

**Changes** says whether a run may go on with another value. The other fields belong to what is in the workdir: a command that is given
another value there is refused, and needs a workdir of its own.
"""
COLUMNS = "| field | default | type | allowed | changes | what it is |\n|---|---|---|---|---|---|\n"


def shown(value: Any) -> str:
    """A value as it is typed after `--config.FIELD=`."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def allowed(spec: dataclasses.Field) -> str:
    """The range or the choices of a field; empty where its type says all."""
    limits = spec.metadata["allowed"]
    return "|".join(limits) if isinstance(limits, tuple) else limits


def reference() -> str:
    """The whole document."""
    config = Config()
    sections = [spec for spec in dataclasses.fields(Config) if dataclasses.is_dataclass(spec.type)]
    parts = [HEAD, *_section("The run", "Fields without a section.", [row for row in fields(config) if "." not in row[0]])]
    for spec in sections:
        rows = list(fields(getattr(config, spec.name), f"{spec.name}."))
        parts += _section(f"`{spec.name}`", spec.type.__doc__, rows)
    parts += [
        "\n## What the configs set\n\nEverything else is as above. The docstring of a config has its command, hardware, time and result.\n"
    ]
    for name in config_names():
        parts += ["\n", *(f"{line}\n" for line in _wrapped(f"**`{name}`**: {_summary(name)}")), "\n"]
        parts += [f"{line}\n" for line in _wrapped(", ".join(f"`{field}={text}`" for field, text in _differences(name)))]
    return "".join(parts)


def _section(title: str, about: str, rows: list[tuple[str, dataclasses.Field, Any]]) -> Iterator[str]:
    yield "\n".join(["", f"## {title}", "", *_wrapped(_escaped(" ".join(about.split()))), "", COLUMNS])
    for name, spec, value in rows:
        cells = [f"`{name}`", _code(shown(value)), type_name(spec.type), _code(allowed(spec)), "yes" if spec.metadata["changes"] else "no"]
        yield f"| {' | '.join([*cells, _escaped(spec.metadata['help'])])} |\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)


def _summary(name: str) -> str:
    """The first sentence of a config's docstring."""
    text = ast.get_docstring(ast.parse((data_folder("configs") / f"{name}.py").read_text())) or ""
    return _escaped(" ".join(text.partition("\n\n")[0].split()))


def _differences(name: str) -> Iterator[tuple[str, str]]:
    """The fields in which a config differs from the defaults."""
    for (field, _, default), (_, _, value) in zip(fields(Config()), fields(load_config(name)), strict=True):
        if value != default and field != "name":
            yield field, shown(value)


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def _escaped(text: str) -> str:
    for sign in "|<*":
        text = text.replace(sign, f"\\{sign}")
    return text


if __name__ == "__main__":
    print(reference(), end="")
