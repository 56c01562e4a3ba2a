"""Which ToolSandbox scenarios are trained on and which are held out, and what is known of each before anything runs.

A scenario has eight variants that differ in the tools on offer, and most have relatives: the same request in other words, over several
turns, with a service switched off, or with something missing. Relatives share calls and answers, so a whole family is on one side, by a
hash of its name. `scenarios.json` lists the base scenarios of ToolSandbox 0.0.1; a scenario that is not on it is split by the same hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re

VARIANTS = (
    "",
    "_3_distraction_tools",
    "_10_distraction_tools",
    "_all_tools",
    "_3_distraction_tools_tool_description_scrambled",
    "_3_distraction_tools_arg_type_scrambled",
    "_3_distraction_tools_arg_description_scrambled",
    "_3_distraction_tools_tool_name_scrambled",
)
RENAMED = VARIANTS[-1]  # the variant in which tools have other names
_RELATIVE = re.compile(
    r"(_alt|_implicit|_ambiguous|_canonicalize|_twice|_multiple_user_turn|_insufficient_information|_low_battery_mode|_wifi_off"
    r"|_no_remove_contact|_no_search_contacts)$"
)
_SEED = 0
_HELD_OUT = 4  # of ten families; 50 of the 129 base scenarios


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A base scenario.

    Attributes:
      categories: the benchmark's own, of the scenario itself; a variant has one or two more.
      offline: none of its tools asks RapidAPI.
      floor: the similarity of an agent that says nothing and calls nothing. 1 where there is no milestone, only something not to do.
    """

    name: str
    split: str
    categories: tuple[str, ...]
    offline: bool
    floor: float


@functools.cache
def scenarios() -> dict[str, Scenario]:
    """The known base scenarios by name."""
    listed = _list()["scenarios"]
    return {s["name"]: Scenario(**{**s, "categories": tuple(s["categories"])}) for s in listed}


def tool_names() -> dict[str, str]:
    """What a tool is called in the variant that renames tools, by its real name."""
    return _list()["renamed_tools"]


def parts(name: str) -> tuple[str, str]:
    """The base scenario and the variant of a scenario's name; "" is the variant without distraction."""
    variant = max((v for v in VARIANTS if name.endswith(v)), key=len)
    return name.removesuffix(variant), variant


def family(base: str) -> str:
    """The name that relatives of a base scenario share."""
    while (shorter := _RELATIVE.sub("", base)) != base:
        base = shorter
    return base


def split_of(name: str) -> str:
    """ "train" or "heldout", of any scenario and variant."""
    digest = hashlib.sha256(f"toolsandbox/{_SEED}/{family(parts(name)[0])}".encode()).hexdigest()
    return "heldout" if int(digest, 16) % 10 < _HELD_OUT else "train"


def offline(name: str) -> bool:
    """Whether a scenario is known to ask nothing of the network."""
    known = scenarios().get(parts(name)[0])
    return known is not None and known.offline


def floor(name: str) -> float:
    """The similarity of doing nothing; 0 for a scenario that is not listed."""
    known = scenarios().get(parts(name)[0])
    return known.floor if known else 0.0


@functools.cache
def _list() -> dict:
    return json.loads((pathlib.Path(__file__).parent / "scenarios.json").read_text())
