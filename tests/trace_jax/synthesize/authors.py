"""What authors of environments hand in: an accepted package, and others that are wrong in one way each."""

import json
import re

from envs.builtin import load_builtin


def write(meta: dict, source: str) -> str:
    """An answer with both files."""
    return f"It trains one thing.\n\n```json\n{json.dumps(meta, indent=2)}\n```\n\n```python\n{source.strip()}\n```\n"


def answer(capability: str, *replacements: tuple[str, str], **meta: object) -> str:
    """The package of the library, with pieces of its source replaced."""
    package = load_builtin(capability)
    source = package.source
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return write(package.meta | {"rationale": "It reads first. It acts then. Both are needed there."} | meta, source)


_FULL = "return 1.0 if share == 1.0 else 0.3 * share"
SYNTAX = ("def grade(checks):", "def grade(checks:")
SOCKET = ("import random\n", "import random\nimport socket\n")
HASHED = ("rng = random.Random(seed)", "rng = random.Random(hash(str(seed)))")  # equal only where the hash seed is
SPAMMED = (_FULL, "return float(all(check['passed'] for name, check in checks.items() if name.startswith('action')))")
EASY = (_FULL, "return 1.0 if share == 1.0 else 0.45")
RAISES = ('        return "Error: no such tool"', "        raise KeyError(name)")
FEW_TOOLS = ("READS = {", "TOOLS = TOOLS[2:4]\nREADS = {")
OTHER_TOOL = ('"Cancels an order."', '"Cancels it."')


def about(prompt: str) -> tuple[str, int]:
    """The capability that a prompt asks for, and the number of the hand-in that it asks for."""
    refused = re.search(r"^Your package, hand-in (\d+) of", prompt, re.MULTILINE)
    return re.search(r'^\| `name` \| "desk_(\w+)" \|$', prompt, re.MULTILINE)[1], int(refused[1]) + 1 if refused else 1
