"""The packages that come with trace-jax: the target `desk` and one environment per capability of the library.

They share the text of `desk/world.py`; each adds its own `tasks.py`. What a worker gets, and what `synthesize` writes into the workdir, is
one self-contained `environment.py`.
"""

from __future__ import annotations

import functools
import pathlib

from envs.package import Package, parse_package

_ROOT = pathlib.Path(__file__).parent
LIBRARY = tuple(sorted(path.parent.name for path in (_ROOT / "library").glob("*/package.json")))


def load_builtin(name: str) -> Package:
    """The target `desk`, or the library environment of a capability.

    Raises:
      KeyError: no such package comes with trace-jax.
    """
    if name != "desk" and name not in LIBRARY:
        raise KeyError(f"no built-in environment {name!r}; there are: desk, {', '.join(LIBRARY)}")
    folder = _ROOT / "desk" if name == "desk" else _ROOT / "library" / name
    world = (_ROOT / "desk" / "world.py").read_text()
    return parse_package((folder / "package.json").read_text(), world + "\n\n" + (folder / "tasks.py").read_text(), str(folder))


def is_builtin(package: Package) -> bool:
    """Whether a package's code is that of one of these, wherever it was loaded from and whatever its knobs are set to."""
    return package.source in _sources()


@functools.cache
def _sources() -> frozenset[str]:
    return frozenset(load_builtin(name).source for name in ("desk", *LIBRARY))
