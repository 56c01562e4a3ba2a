"""The packages of the wheel; everything else is in pyproject.toml.

`configs/` and `prompts/` are folders at the top of the repository, but they ship inside `trace_jax`, since a wheel that installs top-level
packages of those names would collide with others. `trace_jax.config.data_folder` finds them in both places.
"""

import pathlib

from setuptools import find_namespace_packages, setup

HERE = pathlib.Path(__file__).parent
data = [name for name in ("configs", "prompts") if (HERE / name).is_dir()]

setup(
    # namespace: folders that hold data only (an environment package, a checkpoint) are packages to setuptools too
    packages=find_namespace_packages(include=[f"{name}{sub}" for name in ("trace_jax", "rl", "model", "envs") for sub in ("", ".*")])
    + [f"trace_jax.{name}{sub}" for name in data for sub in ("", *(f".{folder}" for folder in find_namespace_packages(HERE / name)))],
    package_dir={f"trace_jax.{name}": name for name in data},
)
