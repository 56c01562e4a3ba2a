"""An environment package on disk: `package.json` says what it is, `environment.py` is the code that a worker runs.

The host reads the code as text and looks at its syntax tree, it never executes it. The gate of this file (size, imports, names) keeps
careless packages out; it is no security boundary. What runs the code is `envs.sandbox`; an environment whose verdict depends on running
code that the agent wrote has `programs()` too, see `envs.sandbox.programs`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any

MAX_SOURCE_BYTES = 400_000  # the largest code-repair worlds are tens of kilobytes
REQUIRED_NAMES = ("TOOLS", "Environment", "oracle", "hint")
FIELDS = {"name": str, "capability": str, "target": str, "version": str, "knobs": dict, "max_turns": int, "rationale": str}

# Modules of the standard library that compute and nothing else (no clock, files, processes, network): an episode depends on its seed alone.
ALLOWED_MODULES = frozenset(
    "__future__ abc ast base64 bisect calendar collections copy csv dataclasses datetime decimal difflib enum fractions functools hashlib "
    "heapq html io itertools json math numbers operator random re statistics string textwrap typing unicodedata zlib".split()
)
FORBIDDEN_NAMES = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open"})


class PackageError(ValueError):
    """A package that cannot be used; one line that names the file, the field and the fix."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """One difficulty setting, a number in [min, max]; whole numbers only where default, min and max are whole."""

    default: int | float
    min: int | float
    max: int | float

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.default, self.min, self.max))


@dataclasses.dataclass(frozen=True)
class Package:
    """An environment package.

    Attributes:
      name, capability, target, version: as in package.json; `capability` is empty for a target.
      knobs: difficulty settings by name.
      max_turns: how many turns of the agent an episode may have.
      rationale: why what is learned here helps in the target.
      source: the text of environment.py.
      path: the folder it came from, for messages.
    """

    name: str
    capability: str
    target: str
    version: str
    knobs: dict[str, Knob]
    max_turns: int
    rationale: str
    source: str
    path: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        """The content of package.json."""
        return {key: getattr(self, key) for key in FIELDS} | {"knobs": {key: dataclasses.asdict(knob) for key, knob in self.knobs.items()}}

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of both files; the formatting of package.json does not matter."""
        return hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode() + b"\0" + self.source.encode()).hexdigest()

    def resolve_knobs(self, knobs: dict[str, Any] | None = None) -> dict[str, int | float]:
        """All knobs: the given ones, checked, and the defaults of the others.

        Raises:
          PackageError: an unknown knob, or a value outside its range.
        """
        given = knobs or {}
        for name, value in given.items():
            knob = self.knobs.get(name)
            if knob is None:
                raise PackageError(f"environment {self.name}: no knob {name!r}; there are: {', '.join(self.knobs) or 'none'}")
            if not _is_number(value) or not knob.min <= value <= knob.max or (knob.whole and not isinstance(value, int)):
                kind = "a whole number" if knob.whole else "a number"
                raise PackageError(f"environment {self.name}: knob {name} = {value!r} must be {kind} from {knob.min} to {knob.max}")
        return {name: given.get(name, knob.default) for name, knob in self.knobs.items()}


def load_package(path: str | os.PathLike[str]) -> Package:
    """Reads and checks a package's folder without running its code.

    Raises:
      PackageError: a file is missing or not what the contract asks for.
    """
    folder = pathlib.Path(path)
    texts = []
    for name in ("package.json", "environment.py"):
        try:
            texts.append((folder / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise PackageError(f"{folder / name}: {error.strerror}; a package is a folder with package.json and environment.py") from None
        except UnicodeDecodeError as error:
            raise PackageError(f"{folder / name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return parse_package(*texts, str(folder))


def parse_package(meta: str | dict[str, Any], source: str, path: str = "") -> Package:
    """A package from the content of its two files; `path` is for messages.

    Raises:
      PackageError: as `load_package`.
    """
    where = f"{path}/package.json" if path else "package.json"
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
            json.dumps(meta, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PackageError(f"{where}: holds half of a surrogate pair, which is no text; write whole characters") from None
        except (ValueError, RecursionError) as error:
            raise PackageError(f"{where}: not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise PackageError(f"{where}: must be an object with the fields {', '.join(FIELDS)}")
    for field in sorted(meta.keys() - FIELDS.keys()):
        raise PackageError(f"{where}: unknown field {field!r}; remove it, the fields are {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if field not in meta:
            raise PackageError(f"{where}: field {field!r} is missing; add it")
        if not isinstance(meta[field], kind) or isinstance(meta[field], bool):
            names = {str: "a string", dict: "an object", int: "a whole number"}
            raise PackageError(f"{where}: {field} = {meta[field]!r} must be {names[kind]}")
    for field in ("name", "target"):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", meta[field]):
            raise PackageError(f"{where}: {field} = {meta[field]!r} must be snake_case")
    if meta["capability"] and not re.fullmatch(r"[a-z][a-z0-9_]*", meta["capability"]):
        raise PackageError(f"{where}: capability = {meta['capability']!r} must be snake_case, or empty for a target")
    if meta["max_turns"] < 1:
        raise PackageError(f"{where}: max_turns = {meta['max_turns']} must be at least 1")
    knobs = {name: _parse_knob(knob, f"{where}: knobs.{name}") for name, knob in meta["knobs"].items()}
    check_source(source, f"{path}/environment.py" if path else "environment.py")
    return Package(**{**meta, "knobs": knobs}, source=source, path=path)


def check_source(source: str, where: str = "environment.py") -> None:
    """The static gate: size, syntax, imports, names that no environment needs, names that every environment has.

    Raises:
      PackageError: with the line and the fix.
    """
    if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise PackageError(f"{where}: larger than {MAX_SOURCE_BYTES} bytes; make tasks from the seed instead of listing them")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PackageError(f"{where}: not Python: {str(error) or 'nested too deeply'}") from None
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            if module.split(".")[0] not in ALLOWED_MODULES:
                raise PackageError(f"{where}:{node.lineno}: import of {module!r}; allowed are {', '.join(sorted(ALLOWED_MODULES))}")
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            raise PackageError(f"{where}:{node.lineno}: {node.id!r} may not be used in an environment; remove it")
    present = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            present.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            present.update(target.id for target in targets if isinstance(target, ast.Name))
    for name in REQUIRED_NAMES:
        if name not in present:
            raise PackageError(f"{where}: {name} is missing; define it at the top level")


def write_package(path: str | os.PathLike[str], meta: dict[str, Any], source: str) -> Package:
    """Checks a package and writes its two files, each whole or not at all, package.json last; other files of the folder stay.

    Raises:
      PackageError: as `load_package`; nothing is written then.
      OSError: the folder cannot be written.
    """
    package = parse_package(meta, source, str(path))
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("environment.py", source), ("package.json", json.dumps(package.meta, indent=2, ensure_ascii=False) + "\n")):
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, folder / name)
        except BaseException:
            os.unlink(temporary)
            raise
    return package


def _parse_knob(knob: Any, where: str) -> Knob:
    if not isinstance(knob, dict) or set(knob) != {"default", "min", "max"}:
        raise PackageError(f'{where}: must be {{"default", "min", "max"}}')
    for key, value in knob.items():
        if not _is_number(value):
            raise PackageError(f"{where}.{key} = {value!r} must be a finite number")
    if not knob["min"] <= knob["default"] <= knob["max"]:
        raise PackageError(f"{where}: min {knob['min']} <= default {knob['default']} <= max {knob['max']} does not hold")
    return Knob(**knob)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # not NaN, and no int beyond floats
