"""What an LLM hands in, taken apart: two fenced blocks become a package, or a list of all that is wrong with them.

Nothing is executed here. What can be told from the text is told at once and together, since every round costs an answer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from envs import Package, PackageError, Target, parse_package
from envs.package import REQUIRED_NAMES, check_source

KNOBS = 8  # most difficulty settings: the oracle is tried at both ends of each
TOOLS = (3, 5)  # tools of the target that an environment has
_LONGEST_VERSION = 20
SENTENCES = (3, 5)  # of the rationale
_BLOCK = re.compile(r"^(`{3,})[ \t]*(\w*)[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {"package.json": ("json",), "environment.py": ("python", "py", "python3")}
_EMPTY = "\n".join(f"{name} = None" for name in REQUIRED_NAMES)  # stands in for the code while package.json is checked


@dataclasses.dataclass(frozen=True)
class HandIn:
    """An answer taken apart.

    Attributes:
      texts: the files that the answer has, by name; one that is missing or there several times is left out.
      package: None where there are faults.
      faults: what is wrong, in sentences that the author can act on.
    """

    texts: dict[str, str]
    package: Package | None
    faults: list[str]


def read_hand_in(answer: str, capability: str, target: Package | Target) -> HandIn:
    """The package in an answer, for a capability of a target."""
    said = answer.replace("\r\n", "\n").rpartition("</think>")[2]
    blocks = [(match[2].lower(), match[3]) for match in _BLOCK.finditer(said)]
    texts, faults = {}, []
    for name, languages in _LANGUAGES.items():
        found = [text for language, text in blocks if language in languages]
        if len(found) == 1:
            texts[name] = found[0]
        else:
            wanted = f"give {name} in exactly one block between ```{languages[0]} and ``` on lines of their own"
            faults.append(f"{'no' if not found else len(found)} ```{languages[0]} block{'s' * (len(found) > 1)} in the answer: {wanted}")
    if "package.json" in texts:
        faults += _meta_faults(texts["package.json"], capability, target)
    if "environment.py" in texts:
        try:
            check_source(texts["environment.py"])
        except PackageError as error:
            faults.append(str(error))
    return HandIn(texts, None if faults else parse_package(texts["package.json"], texts["environment.py"]), faults)


def tool_faults(tools: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the tools of a package: their number, or any difference from the target's."""
    by_name = {tool["function"]["name"]: tool for tool in target}
    low, high = min(TOOLS[0], len(target)), TOOLS[1]
    faults = []
    if not low <= len(tools) <= high:
        faults.append(f"TOOLS: {len(tools)} tools, there must be {low} to {high} of the target's")
    for tool in tools:
        name = tool["function"]["name"]
        if name not in by_name:
            faults.append(f"TOOLS: the target has no tool {name!r}; it has {', '.join(by_name)}")
        elif tool != by_name[name]:
            faults.append(f"TOOLS: {name!r} is not equal to the target's, which is {json.dumps(by_name[name], ensure_ascii=False)}")
    return faults


def _meta_faults(text: str, capability: str, target: Package | Target) -> list[str]:
    try:
        package = parse_package(text, _EMPTY)
    except PackageError as error:
        return [str(error)]
    called = target.target if isinstance(target, Target) else target.name
    wanted = {"name": f"{called}_{capability}", "capability": capability, "target": called}
    faults = [f"package.json: {field} = {getattr(package, field)!r} must be {value!r}" for field, value in wanted.items()
              if getattr(package, field) != value]  # fmt: skip
    if package.max_turns > target.max_turns:
        faults.append(f"package.json: max_turns = {package.max_turns} is more than the target's {target.max_turns}")
    if not any(knob.min < knob.max for knob in package.knobs.values()):
        faults.append("package.json: knobs is empty, or all have one value; give at least one difficulty setting with default, min and max")
    elif len(package.knobs) > KNOBS:
        faults.append(f"package.json: {len(package.knobs)} knobs, there may be {KNOBS}")
    if odd := next((name for name in package.knobs if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name)), None):
        faults.append(f"package.json: knobs: {odd[:60]!r} must be snake_case, of at most 40 characters")
    if len(package.version) > _LONGEST_VERSION:
        faults.append(f"package.json: version has {len(package.version):,} characters; write 1")
    count = len(_sentences(package.rationale))
    if not SENTENCES[0] <= count <= SENTENCES[1]:
        faults.append(f"package.json: rationale has {count} sentence{'s' * (count != 1)}, it must have {SENTENCES[0]} to {SENTENCES[1]}")
    return faults


def _sentences(text: str) -> list[str]:
    """Split where a full stop, exclamation or question mark is followed by white space and no small letter, as after "e.g."."""
    return [part for part in re.split(r"(?<=[.!?])\s+(?![a-z])", text.strip()) if part]
