"""One task from a seed: a package with a planted fault, its tests, hidden variants of them, an issue text and the edit that repairs it.

The right text is written first and run by the interpreter: that gives what every test expects. Then the fault is planted and the tests are
run again. The target test is one that fails only then; the visible tests that stay are those that pass both times. Hidden variants call
the same functions with other inputs, so an edit that knows the visible values does not pass them.
"""

import difflib
import functools
import random
import re

from envs.library.swebench.blocks import BLOCKS, THEMES, Writer
from envs.library.swebench.interpreter import ROOT, Exit, Python, Unsupported
from envs.library.swebench.structures import chain, clones, interface, rule

KINDS = {"boundary", "operator", "order", "off_by_one", "aliasing", "default_argument", "rounding"}
SPECIAL = {
    "deep_call_graph_traversal": "chain",
    "multi_site_consistency": "rule",
    "diff_context_precision": "clone",
    "structural_refactor_awareness": "structure",
}
PLACE = re.compile(r"«(\w+)\|([^|»]*)\|([^»]*)»")
TITLES = ["Wrong result from {}", "{} gives an unexpected result", "Unexpected value returned by {}", "{} is off in some cases"]
MIN_TESTS = 10
VARIANTS = 3  # hidden tests that the fault fails, for each function that shows it
DRAWS = 30
TRIES = 40

# What turns values into JSON in the worker, and in the interpreter: floats rounded, since a sum may be taken in another order.
ENCODE = '''
import datetime

def encode(value, depth=0):
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if depth > 6:
        return ["deep"]
    if kind is float:
        return int(value) if value == round(value) else ["float", round(value, 9)]
    if kind is list or kind is tuple:
        return [kind.__name__, [encode(item, depth + 1) for item in value]]
    if kind is set or kind is frozenset:
        return ["set", sorted([repr(item) for item in value])]
    if kind is dict:
        return ["dict", sorted([[repr(key), encode(item, depth + 1)] for key, item in value.items()], key=lambda pair: pair[0])]
    return ["other", kind.__name__]

def attempt(test):
    try:
        return encode(test())
    except BaseException as error:
        return ["raises", type(error).__name__]

result = []
'''


def spelled(text, flipped, first=0):
    """The text with the wrong version at the flipped places, which are counted from `first`."""
    count = iter(range(first, first + text.count("«") + 1))
    return PLACE.sub(lambda match: match[3] if next(count) in flipped else match[2], text)


def test_program(tests):
    """The code of a program that runs tests over a package and leaves what they found in `result`, one value a test."""
    parts = [ENCODE]
    for number, test in enumerate(tests):
        body = [test["import"], *test["setup"], f"return {test['expr']}"]
        parts.append(f"def test_{number}():\n" + "".join(f"    {line}\n" for line in body) + f"result.append(attempt(test_{number}))\n")
    return "\n".join(parts)


def interpret(files, tests):
    """What the tests find in the interpreter, encoded; None where a test or the package cannot be run there at all."""
    python = Python({f"{ROOT}/{path}": text for path, text in files.items()})
    try:
        module = python.run_module("grading", f"{ROOT}/grading.py", test_program(tests))
    except (Unsupported, Exit, Exception):  # a planted fault may raise while the package is imported, or never end
        return None
    return module.env.vars["result"]


def decode(value):
    """The Python source of an encoded value."""
    if isinstance(value, list):
        kind, *rest = value
        if kind == "float":
            return repr(rest[0])
        if kind == "dict":
            return "{" + ", ".join(f"{key}: {decode(item)}" for key, item in rest[0]) + "}"
        if kind == "set":
            return "{" + ", ".join(rest[0]) + "}" if rest[0] else "set()"
        if kind in ("list", "tuple"):
            inner = ", ".join(map(decode, rest[0]))
            return f"[{inner}]" if kind == "list" else f"({inner},)" if len(rest[0]) == 1 else f"({inner})"
        return f"<{rest[0]}>"
    return repr(value)


def compose(rng, capability, knobs):
    """The package as text with marked places: (package name, modules {path: [pieces]}, sentence of the rule that the task is about)."""
    w = Writer(rng, rng.choice(list(THEMES)))
    groups, sentence = [], ""
    depth = int(knobs.get("depth", 2)) if capability == "deep_call_graph_traversal" else 2
    groups.append(chain(w, depth))
    if capability == "multi_site_consistency":
        pieces, sentence = rule(w, int(knobs["sites"]))
        groups.append(pieces)
    elif capability == "diff_context_precision":
        pieces, sentence = clones(w, int(knobs["clones"]))
        groups.append(pieces)
    elif capability == "structural_refactor_awareness":
        pieces, sentence = interface(w, int(knobs["users"]))
        groups.append(pieces)
    count = int(knobs["blocks"])
    names = list(BLOCKS)
    chosen = rng.sample(names, min(count, len(names))) + rng.choices(names, k=max(0, count - len(names)))
    groups += [[BLOCKS[name](w)] for name in chosen]
    modules = [[] for _ in range(int(knobs["modules"]))]
    for pieces in groups:
        for piece, index in zip(pieces, sorted(rng.choices(range(len(modules)), k=len(pieces))), strict=True):
            modules[index].append(piece)
    stems = rng.sample(w.modules, len(modules))
    package = w.topic
    for pieces in modules:
        rng.shuffle(pieces)
    return package, {f"{package}/{stem}.py": pieces for stem, pieces in zip(stems, modules, strict=True)}, sentence, w


def module_text(package, path, pieces, homes, purpose):
    """A module with its imports; `homes` says in which file each name is defined."""
    body = "\n".join(code for code, _, _ in pieces)
    lines = [f'"""{purpose}"""', ""]
    if "datetime." in body:
        lines += ["import datetime", ""]
    wanted = {}
    for name, home in sorted(homes.items()):
        if home != path and re.search(rf"\b{name}\(", body):
            wanted.setdefault(home, []).append(name)
    lines += [f"from {home[:-3].replace('/', '.')} import {', '.join(names)}" for home, names in sorted(wanted.items())]
    return "\n".join(lines).rstrip() + "\n\n" + body.rstrip() + "\n"


def draw_tests(rng, piece, home, count):
    """Up to `count` different tests of a piece, without what they expect."""
    _, cases, name = piece
    drawn, seen = [], set()
    if cases is None:
        return drawn
    for _ in range(count):
        setup, expr = cases(rng)
        names = sorted(set(re.findall(r"\w+", " ".join([*setup, expr]))) & {other for other in home if home[other] == home[name]})
        line = f"from {home[name][:-3].replace('/', '.')} import {', '.join(names)}"
        if (repr(setup), expr) not in seen:
            seen.add((repr(setup), expr))
            drawn.append({"import": line, "setup": setup, "expr": expr, "piece": name})
    return drawn


def make_task(seed, capability, knobs):
    """The task of a seed; the same object for the same arguments, so nobody may change it.

    Returns:
      A dict: `package`; `files` with the fault and `right` without, {path: text}; `target`, `visible`, `variants`, `kept`: tests with what
      they expect; `issue`; `edits` [(path, first line, last line, new lines)]; `edit_size` in changed lines.
    """
    return _make_task(seed, capability, tuple(sorted(knobs.items())))


@functools.lru_cache(maxsize=128)
def _make_task(seed, capability, items):
    knobs = dict(items)
    for attempt in range(TRIES):
        rng = random.Random(f"repair {capability} {seed} {attempt}")
        task = _attempt(rng, capability, knobs)
        if task is not None:
            return task
    raise RuntimeError(f"no fault can be planted for seed {seed} with {knobs}")


def _attempt(rng, capability, knobs):
    package, modules, sentence, w = compose(rng, capability, knobs)
    homes, sites, texts = {}, [], {}
    for path, pieces in modules.items():
        for code, _, _ in pieces:
            homes |= dict.fromkeys(re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE), path)
    stem = {path: path.split("/")[1][:-3] for path in modules}
    for path, pieces in modules.items():
        texts[path] = module_text(package, path, pieces, homes, f"What the {w.topic} of a {w.place} needs for {stem[path]}.")
    first = {}
    for path, text in texts.items():
        first[path] = len(sites)
        sites += [(match[1], path, match.start()) for match in PLACE.finditer(text)]
    owner = {}
    for path, pieces in modules.items():
        position, number = 0, first[path]
        for piece in pieces:
            for _ in PLACE.finditer(piece[0]):
                owner[number] = piece
                number += 1
    kind = SPECIAL.get(capability)
    if kind is None:
        flipped = {rng.choice([number for number, site in enumerate(sites) if site[0] in KINDS])}
    else:
        flipped = {number for number, site in enumerate(sites) if site[0] == kind}

    def tree(chosen):
        files = {path: spelled(text, chosen, first[path]) for path, text in texts.items()}
        return {f"{package}/__init__.py": f'"""Tools for the {w.topic}."""\n', **files}

    right, broken = tree(set()), tree(flipped)
    everyone = [piece for pieces in modules.values() for piece in pieces]
    affected = {owner[number][2] for number in flipped}
    if kind == "chain":
        affected = {piece[2] for piece in everyone if piece[1] is not None and re.search(r"statement|overview|report|bill_of", piece[2])}
    per_piece = max(2, -(-MIN_TESTS // max(1, int(knobs["blocks"]))))
    drawn = []
    for piece in sorted(everyone, key=lambda piece: piece[2]):
        drawn += draw_tests(rng, piece, homes, DRAWS if piece[2] in affected else per_piece + 1)
    expected, before = interpret(right, drawn), interpret(broken, drawn)
    if expected is None:
        return None
    before = before or [["raises", "ImportError"]] * len(drawn)
    for test, want, got in zip(drawn, expected, before, strict=True):
        test |= {"expected": want, "before": got}
    showing = {name: [t for t in drawn if t["piece"] == name and t["expected"] != t["before"]] for name in sorted(affected)}
    showing = {name: tests for name, tests in showing.items() if tests}
    enough = VARIANTS + 2
    surfaces = [name for name, tests in showing.items() if len(tests) >= enough]
    if not surfaces or (kind in ("rule", "clone", "chain") and len(showing) < len(affected)):
        return None
    surface = rng.choice(surfaces)
    example, target, *variants = showing[surface]
    if _raises(example) or _raises(target):
        return None
    variants = variants[:VARIANTS] + [test for name, tests in showing.items() if name != surface for test in tests[:2]]
    kept, visible, counts = [], [], {}
    for test in drawn:
        if test["expected"] == test["before"]:
            counts[test["piece"]] = counts.get(test["piece"], 0) + 1
            (visible if counts[test["piece"]] <= per_piece else kept).append(test)
    kept = [test for test in kept if counts[test["piece"]] and counts.__setitem__(test["piece"], counts[test["piece"]] - 1) is None][:40]
    if len(visible) < MIN_TESTS:
        return None
    order = sorted([target, *visible], key=lambda test: test["piece"])
    numbers = {}
    for test in order:
        numbers[test["piece"]] = numbers.get(test["piece"], 0) + 1
        test["name"] = f"test_{_snake(test['piece'])}_{numbers[test['piece']]}"
    for label, tests in (("variant", variants), ("kept", kept)):
        for number, test in enumerate(tests):
            test["name"] = f"{label}:{number}"
    # In one process after another, as pytest and the grader run them, a fault may leave traces that others trip over.
    rerun = interpret(broken, [*order, *variants, *kept])
    if rerun is not None:
        failing = {t["name"] for t, got in zip([*order, *variants, *kept], rerun, strict=True) if got != t["expected"]}
        if target["name"] not in failing or any(test["name"] in failing for test in [*visible, *kept]):
            return None
    edits = []
    for path in sorted(right):
        old, new = broken[path].split("\n"), right[path].split("\n")
        for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag != "equal":
                edits.append((path, a + 1, b, new[c:d]))
    return {
        "package": package,
        "files": {**broken, f"tests/test_{package}.py": test_file(order), "README.md": _readme(w, package, modules)},
        "right": right,
        "target": target,
        "visible": visible,
        "order": order,
        "variants": variants,
        "kept": kept,
        "issue": issue_text(rng, capability, example, sentence, kind),
        "edits": edits,
        "edit_size": sum(changed_lines(broken[path], right[path]) for path in right),
    }


def _raises(test):
    return isinstance(test["expected"], list) and test["expected"][0] == "raises"


def _snake(name):
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _readme(w, package, modules):
    lines = [f"# {package}", "", f"Functions for the {w.items} of a {w.place}.", ""]
    for path, pieces in modules.items():
        lines.append(f"- `{path}`: {', '.join(sorted(piece[2] for piece in pieces))}")
    return "\n".join(lines) + "\n"


def changed_lines(old, new):
    """Lines that are taken away or put in; empty lines do not count."""
    diff = difflib.ndiff(old.split("\n"), new.split("\n")) if len(old) + len(new) < 400 else None
    if diff is not None:
        return sum(line[0] in "+-" and bool(line[2:].strip()) for line in diff)
    matcher, count = difflib.SequenceMatcher(None, old.split("\n"), new.split("\n"), autojunk=False), 0
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            count += sum(bool(line.strip()) for line in [*matcher.a[a:b], *matcher.b[c:d]])
    return count


def test_file(tests):
    """The visible tests as a file for pytest."""
    wanted = {}
    for test in tests:
        module, _, names = test["import"].removeprefix("from ").partition(" import ")
        wanted.setdefault(module, set()).update(names.split(", "))
    lines = ["import datetime", ""] if any("datetime." in test["expr"] for test in tests) else []
    lines += ["import pytest", ""] if any(map(_raises, tests)) else []
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(wanted.items())]
    for test in tests:
        lines += ["", "", f"def {test['name']}():", *(f"    {line}" for line in test["setup"])]
        if _raises(test):
            lines += [f"    with pytest.raises({test['expected'][1]}):", f"        {test['expr']}"]
        else:
            lines += [f"    assert {test['expr']} == {decode(test['expected'])}"]
    return "\n".join(lines) + "\n"


def issue_text(rng, capability, example, sentence, kind):
    """A report of what was observed: an example, what came out, what should have, and for rules that span functions the rule."""
    got = example["before"]
    seen = f"raises {got[1]}" if isinstance(got, list) and got[0] == "raises" else f"prints `{decode(got)}`"
    snippet = "\n".join([example["import"], *example["setup"], f"print({example['expr']})"])
    if "datetime." in snippet:
        snippet = "import datetime\n" + snippet
    lines = [rng.choice(TITLES).format(f"`{example['piece']}`"), "", rng.choice(["Running", "With the current version,", "I tried"])]
    lines += ["```python", snippet, "```", f"{seen}. {rng.choice(['I expected', 'It should be', 'The right answer is'])} `{decode(example['expected'])}`."]
    if kind == "rule":
        lines += ["", f"The rule is that {sentence}. The same goes wrong in other functions wherever this rule applies; all of them should follow it."]
    elif kind == "clone":
        lines += ["", f"This is about {sentence} The others like it are right as they are."]
    elif kind == "structure":
        lines = ["Follow the new interface", "", f"What we agreed on: {sentence}.", "", *lines[2:]]
    else:
        lines += ["", rng.choice(["The description of what it should do is right, the values are not.", "I have not found out where this comes from."])]
    return "\n".join(lines)
