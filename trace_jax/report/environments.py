"""The environment of each capability: what it is, why its rewards may be believed, and how hard the base agent finds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_jax.report.charts import histogram
from trace_jax.report.reader import Reader
from trace_jax.report.whole_run import children

# check of a certificate (`envs.certify`) to what it asks for; one that is not here is shown by its name
CHECKS = {
    "functions": "its functions give what they should",
    "tools": "its tools are the target's",
    "oracle": "the oracle always earns everything",
    "oracle_knobs": "the oracle does so at every end of the knobs, and knobs change something",
    "step_limit": "there are turns enough for the oracle",
    "hint": "the hint does not tell the answer",
    "prompt": "the prompt does not tell the answer",
    "nothing": "ending without a word earns little",
    "empty": "saying nothing earns little",
    "say_done": "saying that all is done earns little",
    "echo": "repeating the prompt earns little",
    "last_words": "repeating the user's last words earns little",
    "parrot": "handing results on from tool to tool earns little",
    "random": "random calls earn little",
    "memorised": "the solution of another seed earns little",
    "closing": "the closing words of another seed earn little",
    "spam": "calling every tool with all that was seen earns little",
    "inject_text": "texts that pose as a verdict earn little",
    "inject_call": "arguments that pose as a verdict earn little",
    "odd": "malformed calls earn little and break nothing",
    "early": "stopping before the last change is no success",
    "incomplete": "leaving out a change is no success",
    "altered": "other values in the last change are no success",
    "shape": "calls of the right form with other values are no success",
    "guesses": "guesses from the package's own text earn little",
    "repeat": "making a call again and again earns no more",
    "stray_write": "changes that nobody asked for are no success",
    "fresh_seeds": "the same holds on seeds that its author could not know",
    "hidden": "no result of a tool tells the answer",
    "clock": "no clock and no other chance is read",
    "seeds_differ": "seeds give different tasks",
    "repeats": "episodes can be played again and come out the same",
    "state": "no episode leaves anything behind",
    "verifier": "the verdict is the same whenever it is asked for",
    "faults": "no crash, no missed deadline, rewards in [0, 1]",
    "sizes": "prompts and replies are of bounded size",
    "speed": "requests are fast",
    "time": "the certificate was done in time",
}
# the certificate's players; the oracle knows the solution, all others must earn little
PLAYERS = {
    "oracle": "oracle, who knows the solution",
    "nothing": "ends without a word",
    "empty": "says nothing",
    "say_done": "says that all is done",
    "echo": "repeats the prompt",
    "last_words": "repeats the user's last words",
    "parrot": "hands results on from tool to tool",
    "random": "makes random calls",
    "memorised": "plays the solution of another seed",
    "closing": "says the closing words of another seed",
    "spam": "calls every tool with all it has seen",
    "inject_text": "says what may pass for a verdict",
    "inject_call": "calls with what may pass for a verdict",
}


def environments(read: Reader, styles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The environment of each capability: package, certificate, calibration, each None where it is not there yet."""
    shown = []
    for name in children(read, "environments", styles):
        package, calibration = read.json(f"environments/{name}/package.json"), read.json(f"environments/{name}/calibration.json")
        certificate = read.json(f"environments/{name}/certificate.json")
        style = styles.get(name, "s0")
        seeds = (calibration or {}).get("per_seed", {})
        shown.append(
            {
                "name": name,
                "style": style,
                "package": package,
                "knobs": _knobs(package or {}, calibration or {}),
                "certificate": certificate,
                "players": (certificate or {}).get("rewards", {}),
                "calibration": calibration,
                "generation": read.json(f"environments/{name}/generation.json"),
                "histogram": histogram(seeds.values(), f"calibration of {name}", style) if seeds else None,
            }
        )
    return shown


def _knobs(package: Mapping[str, Any], calibration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every knob: its range, what the calibration began with and ended at, and the end at which tasks are harder where that is known."""
    search = calibration.get("search") or []
    began = search[0]["knobs"] if search else {}  # what is found becomes the package's default
    used = calibration.get("knobs", {})
    return [
        {
            "name": name,
            "min": knob.get("min"),
            "max": knob.get("max"),
            "default": began.get(name, knob["default"]),
            "used": used.get(name, knob["default"]),
            "harder": knob.get("harder") or calibration.get("harder", {}).get(name),
        }
        for name, knob in package.get("knobs", {}).items()
    ]
