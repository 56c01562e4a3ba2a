"""The packages that come with trace-jax: the target `desk`, and for several targets an environment per capability, the library.

    envs/library/<target>/<capability>/     package.json and tasks.py

A worker gets one self-contained `environment.py`, and so does the workdir. Here packages of a target share their text: the package is its
`tasks.py`, in which every line `# include: PATH` stands for a file, named from the folder of the file that includes it, and
`# tools: NAMES`, which may go on in the next comment line, for those tools out of the target's `tools.json`.
"""

from __future__ import annotations

import json
import pathlib
import re

from envs.package import Package, parse_package

_ROOT = pathlib.Path(__file__).parent
_LIBRARY = _ROOT / "library"
TARGETS = tuple(sorted({path.parent.parent.name for path in _LIBRARY.glob("*/*/package.json")}))


def library(target: str) -> tuple[str, ...]:
    """The capabilities that the library has environments for, of one target; none for a target that it does not know."""
    return tuple(sorted(path.parent.name for path in _LIBRARY.glob("*/*/package.json") if path.parent.parent.name == target))


def builtin_names() -> tuple[str, ...]:
    """What `load_builtin` knows: the target, the desk's capabilities by their names alone, and all as <target>/<capability>."""
    return ("desk", *library("desk"), *(f"{target}/{capability}" for target in TARGETS for capability in library(target)))


def load_builtin(name: str, target: str = "desk") -> Package:
    """The target `desk`, or the library environment of a capability; <target>/<capability> says both.

    Raises:
      KeyError: no such package comes with trace-jax.
    """
    if name == "desk":
        folder = _ROOT / "desk"
    else:
        target, capability = name.split("/", 1) if "/" in name else (target, name)
        if capability not in library(target):
            raise KeyError(f"no built-in environment {target}/{capability}; there are: {', '.join(builtin_names())}")
        folder = _LIBRARY / target / capability
    source = _assemble(folder / "tasks.py")
    source = re.sub(r"^# tools:(( .+\n#?)+)", lambda found: _tools(target, found[1].replace("#", " ").split()), source, flags=re.M)
    return parse_package((folder / "package.json").read_text(encoding="utf-8"), source, str(folder))


def target_tools(target: str) -> list[dict] | None:
    """The tool schemas of a target that the library has them of, as its agents see them."""
    path = _LIBRARY / target / "tools.json"
    return json.loads(path.read_text(encoding="utf-8")) if target in TARGETS and path.exists() else None


def is_builtin(package: Package) -> bool:
    """Whether a package's code is that of one of these, wherever it was loaded from and whatever its knobs are set to."""
    name = f"{package.target}/{package.capability}" if package.capability else package.target
    return name in builtin_names() and load_builtin(name).source == package.source


def _assemble(path: pathlib.Path) -> str:
    """The text of a file with all that it includes."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^# include: (.+)\n", lambda found: _assemble(path.parent / found[1]), text, flags=re.M)


def _tools(target: str, names: list[str]) -> str:
    """`TOOLS` as Python text: one schema a line, as JSON."""
    schemas = {tool["function"]["name"]: tool for tool in target_tools(target) or []}
    lines = ",\n".join(json.dumps(schemas[name]) for name in names)
    return f'TOOLS = json.loads(r"""[\n{lines}\n]""")\n'
