"""Players that need no model: the oracle, and those that must not succeed. A certificate compares what they earn.

A player is a generator made from `(seed, start)`: it yields actions `{"name", "arguments"}` or `{"text"}` and is sent the `Reply` to each.
What it does depends on its arguments alone, so the same player can be compared between workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from envs.base import EnvironmentFault, Reply, Score, Start
from envs.package import Package
from envs.sandbox import Pool

Action = dict[str, Any]
Player = Callable[[int, Start], Generator[Action, Reply, None]]

SPAM_CALLS = 200  # far beyond any step limit, since one turn may hold many calls
SPAM_VALUES = 24
VERDICTS = 3  # how often the verifier is asked about the same episode


@dataclasses.dataclass
class Play:
    """One finished episode. `scores` are the verdicts on the same final state; `fault` ended it early."""

    seed: int
    start: Start | None = None
    steps: list[tuple[Action, Reply]] = dataclasses.field(default_factory=list)
    scores: list[Score] = dataclasses.field(default_factory=list)
    fault: EnvironmentFault | None = None

    @property
    def reward(self) -> float | None:
        return self.scores[0].reward if self.scores else None


def play(
    pool: Pool, package: Package, seeds: Sequence[int], player: Player, *, knobs: dict | None = None, turns: int | None = None
) -> list[Play]:
    """Plays all seeds side by side, one batch a turn, until the episode is over, the player stops, or it has acted `turns` times."""
    plays = [Play(seed) for seed in seeds]
    episodes = [pool.open(package, seed, knobs) for seed in seeds]
    acting: dict[int, Generator[Action, Reply, None]] = {}
    actions: dict[int, Action] = {}

    def take(index: int, reply: Reply | None) -> None:
        """The player's next action, if it has one and may act."""
        actions.pop(index, None)
        if turns is None or len(plays[index].steps) < turns:
            try:
                actions[index] = acting[index].send(reply)
            except StopIteration:
                pass

    for index, answer in enumerate(pool.batch([(episode, "reset", ()) for episode in episodes])):
        if isinstance(answer, EnvironmentFault):
            plays[index].fault = answer
        else:
            plays[index].start = answer
            acting[index] = player(plays[index].seed, answer)
            take(index, None)
    while actions:
        order = list(actions)
        for index, answer in zip(order, pool.batch([(episodes[index], *_request(actions[index])) for index in order]), strict=True):
            if isinstance(answer, EnvironmentFault):
                plays[index].fault = answer
                del actions[index]
                continue
            plays[index].steps.append((actions[index], answer))
            if answer.done:
                del actions[index]
            else:
                take(index, answer)
    whole = [index for index, one in enumerate(plays) if one.fault is None]
    verdicts = pool.batch([(episodes[index], "score", ()) for index in whole for _ in range(VERDICTS)])
    for index, answer in zip([index for index in whole for _ in range(VERDICTS)], verdicts, strict=True):
        if isinstance(answer, EnvironmentFault):
            plays[index].fault, plays[index].scores = answer, []
        else:
            plays[index].scores.append(answer)
    return plays


def _request(action: Action) -> tuple[str, tuple]:
    return ("respond", (action["text"],)) if "text" in action else ("call", (action["name"], action["arguments"]))


def recite(scripts: dict[int, list[Action]]) -> Player:
    """Plays a list of actions per seed: the oracle's."""

    def player(seed: int, start: Start) -> Generator[Action, Reply, None]:
        yield from (action for action in scripts[seed])  # a generator, since a list cannot be sent replies

    return player


def nothing(seed: int, start: Start) -> Generator[Action, Reply, None]:
    """Ends without a word: the episode is scored as it began."""
    yield from ()


def say(text: str) -> Player:
    """Says the same text, whatever comes back."""

    def player(seed: int, start: Start) -> Generator[Action, Reply, None]:
        while True:
            yield {"text": text}

    return player


def echo(seed: int, start: Start) -> Generator[Action, Reply, None]:
    """Says everything it was told."""
    while True:
        yield {"text": start_text(start)}


def at_random(tools: list[dict], turns: int) -> Player:
    """Random tools with random arguments that fit the schema, and a closing word on the last turn."""

    def player(seed: int, start: Start) -> Generator[Action, Reply, None]:
        rng = random.Random(f"random {seed}")
        for _ in range(turns - 1 if tools else 0):
            function = rng.choice(tools)["function"]
            yield {"name": function["name"], "arguments": sample_value(function["parameters"], rng)}
        yield {"text": "All done."}

    return player


def spam(tools: list[dict]) -> Player:
    """Calls every tool with whatever it has seen, in the prompt and in results, then says all that it has seen.

    First every tool without arguments, then every tool of one argument with the values of the prompt, so that lists and look-ups are read
    before the rest; then a shuffle of all tools with all values, up to SPAM_CALLS calls.
    """

    def player(seed: int, start: Start) -> Generator[Action, Reply, None]:
        rng = random.Random("spam")  # not of the seed: what comes back differs between seeds only if their worlds do
        seen = [start_text(start)]
        made = set()
        for phase in (0, 1, None):
            values = _values(" ".join(seen))
            calls = [call for tool in tools for call in _plausible_calls(tool["function"], values, rng, phase)]
            rng.shuffle(calls)
            for call in calls:
                if repr(call) not in made and len(made) < SPAM_CALLS:
                    made.add(repr(call))
                    reply = yield call
                    seen.append(reply.text or "")
        yield {"text": " ".join(seen)[-20_000:]}

    return player


def start_text(start: Start) -> str:
    """All that the agent is told before it acts."""
    return "\n".join([start.system, *(message["content"] for message in start.messages)])


def _values(text: str) -> list[str]:
    """What in a text may be an argument: words, those that look like ids, numbers or addresses first, latest first."""
    words = list(dict.fromkeys(word.strip(".,:;!?'\"()[]{}") for word in reversed(text.split())))
    words += re.findall(r'"([^"\n]{1,60})"', text)
    named = [word for word in words if re.search(r"[\d_@#]", word)]
    return list(dict.fromkeys(word for word in named + words if word))[:SPAM_VALUES]


def _plausible_calls(function: dict, values: list[str], rng: random.Random, phase: int | None) -> list[Action]:
    """Calls of a tool with the values; those of `phase` required arguments only, None for all."""
    properties = function["parameters"].get("properties", {})
    required = function["parameters"].get("required", [])
    if phase is not None and len(required) != phase:
        return []
    choices = [_plausible_values(properties[key], values, rng) for key in required]
    size = 1
    for choice in choices:
        size *= len(choice)
    if size <= SPAM_CALLS:
        combinations = list(itertools.product(*choices))
    else:
        combinations = [tuple(rng.choice(choice) for choice in choices) for _ in range(SPAM_CALLS)]
    return [{"name": function["name"], "arguments": dict(zip(required, combination, strict=True))} for combination in combinations]


def _plausible_values(schema: dict, values: list[str], rng: random.Random) -> list[Any]:
    kind = schema.get("type")
    if "enum" in schema:
        return list(schema["enum"])
    if kind == "boolean":
        return [True, False]
    if kind in ("integer", "number"):
        numbers = [float(value) for value in values if re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", value)]
        return ([int(number) for number in numbers if number == int(number)] if kind == "integer" else numbers) or [0, 1]
    if kind == "array":
        return [[value] for value in _plausible_values(schema.get("items", {}), values, rng)]
    if kind == "object":
        return [
            {key: rng.choice(_plausible_values(inner, values, rng)) for key, inner in schema.get("properties", {}).items()}
            for _ in range(4)
        ]
    return values or [""]


def sample_value(schema: dict, rng: random.Random) -> Any:
    """A random value that fits a JSON schema of the kinds that tools use; optional properties appear half of the time."""
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return sample_value(rng.choice(schema["anyOf"]), rng)
    if kind == "object":
        required = schema.get("required", [])
        return {
            key: sample_value(inner, rng) for key, inner in schema.get("properties", {}).items() if key in required or rng.random() < 0.5
        }
    if kind == "array":
        low = schema.get("minItems", 0)
        return [sample_value(schema.get("items", {}), rng) for _ in range(rng.randint(low, schema.get("maxItems", low + 3)))]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 1000)
        return rng.randint(int(low), int(max(low, high))) if kind == "integer" else rng.uniform(low, max(low, high))
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=rng.randint(1, 8)))
