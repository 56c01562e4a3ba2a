"""Doors to other ecosystems: packages served to their trainers, and their environments played as our episodes.

| name | what it gives | extra |
|---|---|---|
| `TextEnv` | a package as a `gymnasium.Env` of texts | `gymnasium` |
| `make_app` | a package as an OpenEnv server | `openenv` |
| `OpenEnvPool` | an OpenEnv server's environment, with the methods of `envs.Pool` | `openenv` |
| `taskset` | the settings with which verifiers plays a served package through its OpenEnv taskset | of verifiers itself |
| `environment_factory` | a package as the environment factory of TRL's GRPOTrainer | of TRL itself |

Each is imported when it is first asked for, so nobody pays for what is not used. A package is of `envs.load_package(DIR)` or
`envs.builtin.load_builtin(NAME)`, a pool `envs.Pool(sandbox="require")`.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "TextEnv": ("gymnasium_env", "gymnasium"),
    "make_app": ("openenv_server", "openenv"),
    "OpenEnvPool": ("openenv_client", "openenv"),
    "taskset": ("verifiers_taskset", ""),
    "environment_factory": ("trl_tools", ""),
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """
    Raises:
      ImportError: the extra that the adapter needs is not installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"envs.adapters has no {name!r}; there are: {', '.join(__all__)}")
    module, extra = _PLACES[name]
    try:
        return getattr(importlib.import_module(f"envs.adapters.{module}"), name)
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").startswith("envs"):
            raise
        raise ImportError(f"envs.adapters.{name} needs {error.name}; pip install 'trace-jax[{extra}]'") from error
