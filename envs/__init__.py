"""Environment packages and the workers that host them; knows nothing of models."""

from envs.base import Ask, Check, EnvironmentFault, Reply, SandboxError, Score, Start, ToolCall, Verdict
from envs.harness import HarnessPool, Target
from envs.package import Knob, Package, PackageError, load_package, parse_package, write_package
from envs.sandbox import Episode, Pool

__all__ = [
    "Ask",
    "Check",
    "EnvironmentFault",
    "Episode",
    "HarnessPool",
    "Knob",
    "Package",
    "PackageError",
    "Pool",
    "Reply",
    "SandboxError",
    "Score",
    "Start",
    "Target",
    "ToolCall",
    "Verdict",
    "load_package",
    "parse_package",
    "write_package",
]
