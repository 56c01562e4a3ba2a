"""Environment packages and the workers that host them; knows nothing of models."""

from envs.base import Check, EnvironmentFault, Reply, SandboxError, Score, Start, ToolCall
from envs.package import Knob, Package, PackageError, load_package, parse_package, write_package
from envs.sandbox import Episode, Pool

__all__ = [
    "Check",
    "EnvironmentFault",
    "Episode",
    "Knob",
    "Package",
    "PackageError",
    "Pool",
    "Reply",
    "SandboxError",
    "Score",
    "Start",
    "ToolCall",
    "load_package",
    "parse_package",
    "write_package",
]
