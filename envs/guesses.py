"""Guesses at what a verifier is careless about: scripts that know nothing of the seed, and solutions whose content was exchanged.

Of a package that pays for a word, a number, a length or a count, the word stands in the package, or the verifier asks for it when it is
given something else. So the words are taken from the text of the package, the numbers also as lengths, and `listen` hands the package texts
that write down what they are compared with. Each guess is tried once, with the verifier asked after every step; one that is paid is played
again on other seeds, where chance, or an answer that was right for one seed, does not help.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from envs.arguments import fill
from envs.base import EnvironmentFault
from envs.checks import CheckResult, summary
from envs.package import Package
from envs.probes import Action, Cast, play, play_all, recite
from envs.readings import shape
from envs.timed import TimedPool

MEAN_BAR, SUCCESS_BAR = 0.5, 0.05  # as of the other players
WORDS = 192  # tried one by one, those that something is compared with first; all are said in one text
TOGETHER = 24  # words that are passed as arguments in one episode
LONGEST = 5_000  # characters of a text that is said for its length
WORD = 200  # characters of a word of the package
TEXT = 20_000  # characters of one text
FOLLOWED = 20  # seeds on which a guess that was paid is played again
LISTENED = 3  # seeds on which the package is listened to
_SAID = ("qzx", "All done.", "")  # to a package that is listened to

Script = list[Action]


# Words


def words(package: Package, tools: list[dict], told: Iterable[str] = ()) -> list[str]:
    """Texts and numbers of the package, the ones that something is compared with first, then those of `told` (prompts, names of checks)."""
    compared: list[Any] = []
    others: list[Any] = []
    seen: set[ast.AST] = set()  # once is enough of what stands within another comparison
    for node in ast.walk(ast.parse(package.source)):
        if not isinstance(node, ast.Compare | ast.MatchValue) and not (isinstance(node, ast.Call) and _asks(node.func)):
            others += _constants([node])
        elif node not in seen:
            below = list(ast.walk(node))
            seen.update(below)
            compared += _constants(below)
    patterns = [value for value in dict.fromkeys(compared) if isinstance(value, str) and re.search(r"[\\\[(|.*+?^$]", value)]
    compared += [sample for pattern in patterns for sample in matches(pattern)]
    texts = [str(value) for value in [*compared, *others] if not isinstance(value, int) or abs(value) < 10**WORD]
    texts += [word for text in [*told, json.dumps(tools)] for word in re.findall(r"[\w@#.-]{3,}", text)]
    return list(dict.fromkeys(text for text in texts if text.strip() and len(text) <= WORD))


def _asks(function: ast.expr) -> bool:
    """Whether a method compares."""
    asking = "startswith|endswith|find|index|count|search|match|fullmatch|issubset|intersection|get"
    return isinstance(function, ast.Attribute) and re.fullmatch(asking, function.attr) is not None


def _constants(nodes: Iterable[ast.AST]) -> list[Any]:
    """Texts and numbers among nodes; "open" + "sesame" is one."""
    found = []
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = node.left, node.right
            if all(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
                value = "".join(part.value for part in parts)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            found.append(value)
    return found


def matches(pattern: str, most: int = 6) -> list[str]:
    """A few short texts that a regular expression may match, one for each branch; none for what is no expression.

    They are put together, never searched: the package wrote the expression, and a hard one would hold this process for ever.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # many a text that is compared is no expression
            return _branches(list(re._parser.parse(pattern)), most)
    except (re.error, RecursionError, OverflowError):
        return []


def _branches(parts: list, most: int) -> list[str]:
    """Each part of a parsed expression gives some texts; they are put together."""
    texts = [""]
    for kind, value in parts:
        name = str(kind)
        if name == "LITERAL":
            own = [chr(value)]
        elif name == "IN":
            own = [next((c for c in _characters(value) if re.fullmatch(_class(value), c)), "x")]
        elif name in ("ANY", "NOT_LITERAL"):
            own = ["x"]
        elif name == "BRANCH":
            own = [text for branch in value[1] for text in _branches(list(branch), most)]
        elif name in ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT", "ATOMIC_GROUP"):
            inner = value if name == "ATOMIC_GROUP" else value[-1]
            times = max(1, min(value[0], 50)) if "REPEAT" in name else 1
            own = [text * times for text in _branches(list(inner), most) if len(text) * times <= WORD]
        else:
            own = [""]  # anchors, looks around, references
        texts = [text + end for text in texts for end in own if len(text) + len(end) <= WORD][:most]
    return texts


def _characters(parts: list) -> str:
    """Usual ones, and those that a set of characters names."""
    named = [value if str(kind) == "LITERAL" else value[0] for kind, value in parts if str(kind) in ("LITERAL", "RANGE")]
    return "a1 ._-" + "".join(map(chr, named))


def _class(parts: list) -> str:
    """A set of characters as text again; only what `\\d`, `\\w` and ranges need."""
    known = {"CATEGORY_DIGIT": "\\d", "CATEGORY_WORD": "\\w", "CATEGORY_SPACE": "\\s"}
    text = ""
    for kind, value in parts:
        name = str(kind)
        if name == "LITERAL":
            text += re.escape(chr(value))
        elif name == "RANGE":
            text += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        elif name == "CATEGORY":
            text += known.get(str(value), "")
        elif name == "NEGATE":
            text += "^"
    return f"[{text}]" if text.strip("^") else "."


_DOOR = "heard"
# Runs in the worker behind the package's own text; `hint` is the door through which the host gets at what was heard.
_LISTEN = """

def _certificate_listen(environment):
    import json
    heard = {}

    def note(*values):
        for value in values:
            if isinstance(value, (tuple, list, set, frozenset)):
                note(*value)
            elif isinstance(value, str) and 0 < len(value) <= 200 and len(heard) < 2000:
                heard.setdefault(str(value))

    class Text(str):
        __hash__ = str.__hash__

    def asks(name):
        plain = getattr(str, name)
        def method(self, *arguments):
            note(*arguments)
            return wrap(plain(self, *arguments))
        return method

    def gives(name):
        plain = getattr(str, name)
        return lambda self, *arguments: wrap(plain(self, *arguments))

    def wrap(value):
        if type(value) is str:
            return Text(value)
        if type(value) is list:
            return [wrap(item) for item in value]
        if type(value) is tuple:
            return tuple(wrap(item) for item in value)
        if type(value) is dict:
            return {wrap(key): wrap(item) for key, item in value.items()}
        return value

    asking = "__eq__ __ne__ __contains__ startswith endswith find rfind index count partition rpartition removeprefix removesuffix"
    for name in asking.split():
        setattr(Text, name, asks(name))
    for name in "lower upper strip lstrip rstrip casefold title capitalize swapcase split splitlines replace __getitem__ __add__".split():
        setattr(Text, name, gives(name))

    class Listening(environment):
        def call(self, name, arguments):
            return super().call(wrap(name), wrap(arguments))
        def respond(self, text):
            return super().respond(wrap(text))

    return Listening, lambda: json.dumps(list(heard))


Environment, _certificate_heard = _certificate_listen(Environment)


def hint(seed, knobs, _certificate_hint=hint, _certificate_heard=_certificate_heard):
    return _certificate_heard() if seed == "heard" else _certificate_hint(seed, knobs)
"""


def listen(pool: TimedPool, package: Package, tools: list[dict], scripts: dict[int, Script]) -> list[str]:
    """What texts and arguments are compared with while the oracle plays, and somebody who knows nothing. Empty if it cannot be heard."""
    listening = dataclasses.replace(package, source=package.source + _LISTEN)
    calls = [{"name": tool["function"]["name"], "arguments": fill(tool["function"]["parameters"], _SAID[0])} for tool in tools]
    seeds = list(scripts)[:LISTENED]
    with pool.another() as other:
        for index, seed in enumerate(seeds):
            for script in (scripts[seed], [*calls, {"text": _SAID[index % len(_SAID)]}]):
                play(other, listening, [seed], recite({seed: script}))
        try:
            heard = json.loads(other.function(listening, "hint", _DOOR))
        except (EnvironmentFault, ValueError, RecursionError):
            return []
    return [word for word in heard if isinstance(word, str)] if isinstance(heard, list) else []  # the package may answer in its place


# Scripts that know nothing of the seed


def blind_scripts(package: Package, tools: list[dict], found: Sequence[str], longest: int, ends: bool) -> dict[str, Script]:
    """What is said or passed, and how often something is called.

    Args:
      found: words, the most promising first.
      longest: turns of the longest oracle; counts go up to two more.
      ends: whether a text ends the episode, so that each word needs one of its own.
    """
    best = list(found[:WORDS])
    scripts: dict[str, Script] = {"all words in one text": [{"text": "\n".join(found)[:TEXT]}]}
    step = 1 if ends else TOGETHER
    for start in range(0, len(best), step):
        scripts[f"words {start}"] = [{"text": word} for word in best[start : start + step]]
    for start in range(0, len(best), TOGETHER):
        part = best[start : start + TOGETHER]
        calls = [_filled(tool["function"], word) for word in part for tool in tools]
        scripts[f"arguments {start}"] = [*calls, {"text": "\n".join(part)}]
        scripts[f"names {start}"] = [{"name": word, "arguments": {}} for word in part]
    more = dict.fromkeys((word for word in best if word.isidentifier()), True)
    scripts["arguments that no schema has"] = [
        {"name": tool["function"]["name"], "arguments": more | _filled(tool["function"], "qzx")["arguments"]} for tool in tools
    ]
    scripts["a JSON object"] = [{"text": json.dumps(more)}]
    scripts["all small numbers"] = [{"text": " ".join(map(str, range(4_000)))}]
    lengths = {int(word) for word in found if word.isdecimal() and len(word) <= 4}
    for length in [*sorted(length for length in lengths if 2 <= length <= LONGEST)[:WORDS], 10 * LONGEST]:
        scripts[f"a text of {length}"] = [{"text": "x" * length}]
    idle = [{"name": "no_such_tool", "arguments": {}}, *(_filled(tool["function"], "qzx") for tool in tools)]
    for action in [*idle, {"text": "x"}]:
        scripts[f"{_brief(action)}, each count"] = [action] * package.max_turns
    for count in range(1, min(longest + 2, package.max_turns) + 1):
        scripts[f"{count} calls and a text"] = [idle[count % len(idle)]] * count + [{"text": "x"}]
    return scripts


def _filled(function: dict, word: str) -> Action:
    number = int(word) if re.fullmatch(r"-?\d{1,15}", word) else 1
    return {"name": function["name"], "arguments": fill(function["parameters"], word, number=number)}


def _brief(action: Action) -> str:
    """An action as a sentence says it."""
    return f"says {action['text'][:60]!r}" if "text" in action else f"calls {action['name']}({json.dumps(action['arguments'])[:80]})"


def guesses_earn_nothing(pool: TimedPool, package: Package, scripts: dict[str, Script], seeds: Sequence[int]) -> CheckResult:
    """Plays each script on one of the seeds, by turns, and what was paid up to there on others."""
    casts = {
        name: Cast([seeds[index % len(seeds)]], recite({s: script for s in seeds})) for index, (name, script) in enumerate(scripts.items())
    }
    paid: dict[str, Script] = {}
    for (one,) in play_all(pool, package, casts, peek=True).values():
        place = next((i for i, reward in enumerate(one.peeked) if reward >= MEAN_BAR), None)
        if place is not None:
            paid.setdefault(_brief(one.steps[place][0]), [action for action, _ in one.steps[: place + 1]])
    for what, script in list(paid.items())[:FOLLOWED]:
        for actions in (script[-1:], script):
            found = play(pool, package, seeds[:FOLLOWED], recite(dict.fromkeys(seeds, actions)))
            earned = summary(found)
            if earned["mean"] >= MEAN_BAR or sum(one.reward == 1.0 for one in found) > max(1, 3 * SUCCESS_BAR * len(found)):
                steps = "" if len(actions) == 1 else f", after {len(actions) - 1} others"
                detail = f"mean reward {earned['mean']:.3f}, full reward on {earned['success']:.1%} of {len(found)} seeds"
                return CheckResult("guesses", False, f"{detail}, for an agent that knows nothing and {what}{steps}")
    detail = f"{len(scripts)} scripts that know nothing of the seed earn little: words and numbers of the package, lengths, counts"
    return CheckResult("guesses", True, f"{detail}; what a verifier keeps as a hash alone is beyond them")


# Solutions whose content was exchanged


def exchanged(scripts: dict[int, Script], shown: dict[int, str], places: dict[int, slice]) -> dict[int, Script]:
    """The scripts with other values of the same form: other ids that were shown, numbers of as many digits, texts of the same length.

    Args:
      shown: by seed, what the results of the oracle said.
      places: by seed, which actions are changed; seeds where that changes no argument are left out.
    """
    found = {}
    for seed, script in scripts.items():
        rng = random.Random(f"exchanged {seed}")
        known = sorted(set(re.findall(r"[\w@#-]+", shown[seed])))
        part = [_other_action(action, known, rng) for action in script[places[seed]]]
        before = [action for action in script[places[seed]] if action.get("arguments")]
        after = [action for action in part if action.get("arguments")]
        if before and before != after:
            changed = list(script)
            changed[places[seed]] = part
            found[seed] = changed
    return found


def _other_action(action: Action, known: list[str], rng: random.Random) -> Action:
    if "text" in action:
        return {"text": _other(action["text"], [], rng)}
    return {**action, "arguments": _other(action["arguments"], known, rng)}


def _other(value: Any, known: list[str], rng: random.Random) -> Any:
    """Another value of the same form."""
    if isinstance(value, dict):
        return {key: _other(inner, known, rng) for key, inner in value.items()}
    if isinstance(value, list):
        return [_other(inner, known, rng) for inner in value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        text = _other(str(value), known, rng)
        try:
            return type(value)(text)
        except ValueError:
            return value + 1
    if not isinstance(value, str):
        return value
    alike = [word for word in known if word != value and shape(word) == shape(value) and len(word) == len(value)]
    if alike:
        return rng.choice(alike)
    for _ in range(8):
        other = re.sub(r"[^\W_]", lambda found: _character(found[0], rng), value)
        if other != value:
            break
    return other


def _character(one: str, rng: random.Random) -> str:
    if one.isdigit():
        return rng.choice("123456789")
    return rng.choice("BCDFGHJKLMNPQRSTVWXZ" if one.isupper() else "bcdfghjklmnpqrstvwxz")
