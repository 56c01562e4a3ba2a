"""A small honest environment, and variants of it that are wrong in one way each."""

import pytest

from envs import Package, parse_package
from envs.package import check_source

META = {
    "name": "toy",
    "capability": "copying",
    "target": "toy",
    "version": "1",
    "max_turns": 6,
    "knobs": {"digits": {"default": 4, "min": 1, "max": 8}, "noise": {"default": 0.5, "min": 0.0, "max": 1.0}},
    "rationale": "Reading a value and writing it elsewhere.",
}

SOURCE = '''
"""Find the code of the asked item, write it once, say so."""
import random

def _tool(name, **properties):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {key: {"type": "string"} for key in properties}, "required": list(properties)}}}

TOOLS = [_tool("list_codes"), _tool("write_code", code=str)]

def task(seed, knobs):
    rng = random.Random(seed)
    items = rng.sample(["lamp", "vase", "chair", "table", "clock", "sofa"], 4)
    codes = rng.sample(range(10 ** (knobs["digits"] - 1), 10 ** knobs["digits"]), 4)
    return {item: str(code) for item, code in zip(items, codes)}, rng.choice(items)

class Environment:
    def reset(self, seed, knobs):
        self.codes, self.wanted = task(seed, knobs)
        self.log, self.over = [], False
        return {"system": "Write the code of the item, then say done.", "messages": [{"role": "user", "content": f"the {self.wanted}"}]}

    def call(self, name, arguments):
        self.log.append([name, arguments])
        if name == "list_codes":
            return "\\n".join(f"{item} {code}" for item, code in self.codes.items())
        if name != "write_code" or not isinstance(arguments.get("code"), str):
            return "Error: bad call"
        return "ok"

    def respond(self, text):
        self.log.append([None, text])
        self.over = True

    def done(self):
        return self.over

    def score(self):
        writes = [arguments for name, arguments in self.log if name == "write_code"]
        wanted = {"code": self.codes[self.wanted]}
        passed = self.over and writes == [wanted]
        call = next((i for i, entry in enumerate(self.log) if entry[0] == "write_code"), None)
        expected = {"name": "write_code", "arguments": wanted, "kind": "write"}
        check = {"passed": passed, "expected": expected, "actual": writes, "call": call}
        return {"reward": float(passed), "checks": {"action:0": check}}

def oracle(seed, knobs):
    codes, wanted = task(seed, knobs)
    return [{"name": "list_codes", "arguments": {}}, {"name": "write_code", "arguments": {"code": codes[wanted]}}, {"text": "done"}]

def hint(seed, knobs):
    return "Look the code up before you write it."
'''


@pytest.fixture
def make_package():
    """A toy package with pieces of its source replaced; `gate=False` leaves the static gate out, to see what the sandbox does."""

    def make(*replacements: tuple[str, str], gate: bool = True, **meta) -> Package:
        source = SOURCE
        for old, new in replacements:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        if gate:
            return parse_package(META | meta, source, "toy")
        check_source(SOURCE)
        package = parse_package(META | meta, SOURCE, "toy")
        return Package(**{**package.__dict__, "source": source})

    return make
