"""A package as the `environment_factory` of TRL's GRPOTrainer: an object whose public methods are the tools.

    trainer = GRPOTrainer(
        model, train_dataset=Dataset.from_list(rows(package, pool, range(1000))),
        environment_factory=environment_factory(package, pool),
        reward_funcs=closing_reward,           # for packages that listen to the agent's last words; else leave it out
    )

TRL makes the schemas from type hints and docstrings, so objects within arguments are plain `dict` there. It hands an environment the calls
only: `get_reward` scores them, `closing_reward` says the agent's last words to the scripted user first. Both are made from one package, and
`environment_factory(..., closing=True)` leaves `get_reward` out, since TRL would add the two.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

from envs.adapters.session import Session
from envs.arguments import follow
from envs.package import Package
from envs.sandbox import Pool

_KINDS = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": type(None)}


class _ToolEnvironment:
    """What the made classes share; TRL takes every public method but `reset` and `get_reward` for a tool."""

    def __init__(self, package: Package, pool: Pool, knobs: dict[str, Any] | None):
        self._session = Session(package, pool, knobs)
        self._over = False

    def reset(self, *, seed: int, **row: Any) -> None:
        """Begins the episode of a row of the dataset; what the agent sees first is the row's prompt."""
        self._over = False
        self._session.reset(int(seed))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._over:
            return "Error: the episode is over"
        step = self._session.step({"name": name, "arguments": arguments})
        self._over = step.done or step.truncated
        return step.text

    def _say(self, text: str) -> float:
        """The reward after the agent's last words."""
        if not self._over:
            self._session.step({"text": text})
            self._over = True
        return self._session.score()


def environment_factory(
    package: Package, pool: Pool, knobs: dict[str, Any] | None = None, *, closing: bool = False
) -> Callable[[], _ToolEnvironment]:
    """Makes environments with one method per tool of the package.

    Args:
      closing: the rewards come from `closing_reward` alone.

    Raises:
      EnvironmentFault: the package does not run.
      ValueError: a tool whose name cannot be a method's.
    """
    methods: dict[str, Any] = {}
    for function in (tool["function"] for tool in pool.function(package, "tools")):
        name = function["name"]
        if not name.isidentifier() or name.startswith("_") or name in ("reset", "get_reward"):
            raise ValueError(f"environment {package.name}: TRL takes no tool of the name {name!r}; rename it")
        methods[name] = _method(function)
    if not closing:
        methods["get_reward"] = lambda self: self._session.score()
    made = type(f"{package.name.title().replace('_', '')}Tools", (_ToolEnvironment,), methods)
    return lambda: made(package, pool, knobs)


def closing_reward(completions: list[Any], environments: list[_ToolEnvironment], **_: Any) -> list[float]:
    """A reward function of TRL: the last message of each conversation is said to the scripted user, then the episode is scored."""
    said = [
        one if isinstance(one, str) else next((m["content"] for m in reversed(one) if m["role"] == "assistant"), "") for one in completions
    ]
    return [environment._say(text or "") for environment, text in zip(environments, said, strict=True)]


def rows(package: Package, pool: Pool, seeds: Iterable[int], knobs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The dataset: `{"prompt": messages, "seed"}`, one row a seed. Raises EnvironmentFault."""
    found = []
    for seed in seeds:
        start = pool.open(package, seed, knobs).reset()
        system = [{"role": "system", "content": start.system}] if start.system else []
        found.append({"prompt": system + start.messages, "seed": seed})
    return found


def _method(function: dict[str, Any]) -> Callable[..., str]:
    """A tool as a method, with the signature and the docstring from which its schema can be made again."""
    root = function["parameters"]
    properties, required = root.get("properties", {}), root.get("required", [])

    def method(self: _ToolEnvironment, *positional: Any, **arguments: Any) -> str:
        bound = signature.bind(self, *positional, **arguments).arguments
        return self._call(function["name"], {key: value for key, value in bound.items() if key != "self"})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    keys = sorted(properties, key=lambda key: key not in required)
    hints = {key: _hint(properties[key], root) if key in required else _hint(properties[key], root) | None for key in keys}
    parameters = [inspect.Parameter("self", kind)]
    for key in keys:
        default = inspect.Parameter.empty if key in required else None
        parameters.append(inspect.Parameter(key, kind, default=default, annotation=hints[key]))
    signature = inspect.Signature(parameters, return_annotation=str)
    about = [f"    {key}: {' '.join(str(properties[key].get('description') or key).split())}" for key in keys]
    method.__name__ = method.__qualname__ = function["name"]
    method.__signature__ = signature
    method.__annotations__ = {**hints, "return": str}
    method.__doc__ = "\n".join([function.get("description") or function["name"], "", *(["Args:", *about] if about else [])])
    return method


def _hint(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The type hint that is made into this schema again; what hints cannot say becomes `dict`."""
    schema = follow(schema, root)
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    kinds = schema.get("type", "object")
    variants = schema.get("anyOf") or [{**schema, "type": kind} for kind in (kinds if isinstance(kinds, list) else ())]
    if variants:
        return functools.reduce(operator.or_, (_hint(variant, root) for variant in variants))
    if kinds == "array":
        return list[_hint(schema["items"], root)] if "items" in schema else list
    return _KINDS.get(kinds, dict)
