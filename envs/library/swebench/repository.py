"""One task from a seed: a package with a planted fault, its tests, hidden variants of them, an issue text and the edit that repairs it.

The right text is written first and run by the interpreter: that gives what every test expects. Then the fault is planted and the tests are
run again. The target test is one that fails only then; the visible tests that stay are those that pass both times. Hidden variants call
the same functions with other inputs, so an edit that knows the visible values does not pass them.
"""

import difflib
import functools
import random
import re

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
MAX_KEPT = 40
DRAWS = 36
TRIES = 40

# What turns values into JSON in the worker, and in the interpreter: floats rounded, since a sum may be taken in another order.
ENCODE = """
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
"""


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


def compose(w, capability, knobs):
    """The package with marked places: (modules {path: [pieces]}, the rule that the task is about, the surface of the chain)."""
    depth = int(knobs["depth"]) if capability == "deep_call_graph_traversal" else 2
    groups, sentence = [chain(w, depth)], ""
    surface = groups[0][0][2]
    special = {
        "multi_site_consistency": (rule, "sites"),
        "diff_context_precision": (clones, "clones"),
        "structural_refactor_awareness": (interface, "users"),
    }
    if capability in special:
        make, knob = special[capability]
        pieces, sentence = make(w, int(knobs[knob]))
        groups.append(pieces)
    count, names = int(knobs["blocks"]), list(BLOCKS)
    chosen = w.rng.sample(names, min(count, len(names))) + w.rng.choices(names, k=max(0, count - len(names)))
    groups += [[BLOCKS[name](w)] for name in chosen]
    modules = {f"{w.topic}/{stem}.py": [] for stem in w.rng.sample(w.modules, int(knobs["modules"]))}
    paths = list(modules)
    for pieces in groups:  # a piece calls those after it, so that imports go one way
        for piece, index in zip(pieces, sorted(w.rng.choices(range(len(paths)), k=len(pieces))), strict=True):
            modules[paths[index]].append(piece)
    for pieces in modules.values():
        w.rng.shuffle(pieces)
    return modules, sentence, surface


def module_text(path, pieces, homes, purpose):
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
    """A task, or None where the fault that was drawn does not show as it should."""
    w = Writer(rng, rng.choice(list(THEMES)))
    modules, sentence, top = compose(w, capability, knobs)
    homes, texts, first, sites = {}, {}, {}, []  # where names are defined; texts with places; (kind, piece) of each place
    for path, pieces in modules.items():
        for code, _, _ in pieces:
            homes |= dict.fromkeys(re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE), path)
    for path, pieces in modules.items():
        purpose = f"What the {w.topic} of a {w.place} needs for {path.split('/')[1][:-3]}."
        texts[path], first[path] = module_text(path, pieces, homes, purpose), len(sites)
        sites += [(match[1], name) for code, _, name in pieces for match in PLACE.finditer(code)]
    kind = SPECIAL.get(capability)
    flipped = {number for number, site in enumerate(sites) if site[0] == kind}
    if kind is None:
        flipped = {rng.choice([number for number, site in enumerate(sites) if site[0] in KINDS])}
    affected = {top} if kind == "chain" else {sites[number][1] for number in flipped}
    opening = {f"{w.topic}/__init__.py": f'"""Tools for the {w.topic}."""\n'}
    right, broken = (opening | {path: spelled(text, f, first[path]) for path, text in texts.items()} for f in ((), flipped))

    everyone = sorted((piece for pieces in modules.values() for piece in pieces), key=lambda piece: piece[2])
    draws, few = max(DRAWS // len(affected), 20), -(-MIN_TESTS // int(knobs["blocks"]))
    reached = [test for piece in everyone if piece[2] in affected for test in draw_tests(rng, piece, homes, draws)]
    expected, before = interpret(right, reached), interpret(broken, reached)
    if expected is None or before is None:
        return None
    for test, want, got in zip(reached, expected, before, strict=True):
        test |= {"expected": want, "before": got}
    showing = {}
    for test in reached:
        if test["expected"] != test["before"]:
            showing.setdefault(test["piece"], []).append(test)
    surfaces = [name for name, tests in sorted(showing.items()) if len(tests) >= VARIANTS + 2 and not any(map(_raises, tests[:2]))]
    if not surfaces or (kind != "structure" and len(showing) < len(affected)):
        return None
    surface = rng.choice(surfaces)
    example, target, *variants = showing[surface]
    variants = variants[:VARIANTS] + [test for name, tests in sorted(showing.items()) if name != surface for test in tests[:2]]

    others = [test for piece in everyone if piece[2] not in affected for test in draw_tests(rng, piece, homes, few + 1)]
    expected = interpret(right, others)  # what they call has no part in the fault
    if expected is None:
        return None
    visible, kept, counts = [], [], {}
    for test, value in zip(others, expected, strict=True):
        test |= {"expected": value, "before": value}
    for test in [*others, *(test for test in reached if test["expected"] == test["before"])]:
        counts[test["piece"]] = counts.get(test["piece"], 0) + 1
        (visible if counts[test["piece"]] <= few else kept).append(test)
    kept = kept[-MAX_KEPT:]
    order = sorted([target, *visible], key=lambda test: test["piece"])
    name_tests(order, variants, kept)
    if len(visible) < MIN_TESTS or not lasting(right, broken, target, [*order, *variants, *kept], {sites[n][0] for n in flipped}):
        return None
    return {
        "package": w.topic,
        "files": {**broken, f"tests/test_{w.topic}.py": test_file(order), "README.md": readme(w, modules)},
        "right": right,
        "target": target,
        "visible": visible,
        "order": order,
        "variants": variants,
        "kept": kept,
        "issue": issue_text(rng, example, sentence, kind),
        "edits": edits_between(broken, right),
        "edit_size": sum(changed_lines(broken[path], right[path]) for path in right),
    }


def name_tests(order, variants, kept):
    numbers = {}
    for test in order:
        numbers[test["piece"]] = numbers.get(test["piece"], 0) + 1
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", test["piece"]).lower()
        test["name"] = f"test_{snake}_{numbers[test['piece']]}"
    for label, tests in (("variant", variants), ("kept", kept)):
        for number, test in enumerate(tests):
            test["name"] = f"{label}:{number}"


def lasting(right, broken, target, tests, kinds):
    """Whether the same tests pass and fail where a fault keeps something from one test to the next, all of them in one process."""
    if "default_argument" not in kinds:
        return True
    expected, found = interpret(right, tests), interpret(broken, tests)
    if found is None or expected != [test["expected"] for test in tests]:
        return False
    return all((got == test["expected"]) == (test["before"] == test["expected"]) for test, got in zip(tests, found, strict=True))


def edits_between(old, new):
    """What turns files into others: (path, first line, last line, new lines); nothing is taken away where last < first."""
    edits = []
    for path in sorted(new):
        a, b = old[path].split("\n"), new[path].split("\n")
        codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        edits += [(path, i + 1, j, b[m:n]) for tag, i, j, m, n in codes if tag != "equal"]
    return edits


def _raises(test):
    return isinstance(test["expected"], list) and test["expected"][0] == "raises"


def readme(w, modules):
    lines = [f"# {w.topic}", "", f"Functions for the {w.items} of a {w.place}.", ""]
    for path, pieces in modules.items():
        lines.append(f"- `{path}`: {', '.join(sorted(piece[2] for piece in pieces))}")
    return "\n".join(lines) + "\n"


def changed_lines(old, new):
    """Lines that are taken away or put in; empty lines do not count."""
    a, b = old.split("\n"), new.split("\n")
    codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(bool(line.strip()) for tag, i, j, m, n in codes if tag != "equal" for line in [*a[i:j], *b[m:n]])


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


def issue_text(rng, example, sentence, kind):
    """A report of what was observed: an example, what came out, what should have, and for rules that span functions the rule."""
    got = example["before"]
    seen = f"raises {got[1]}" if isinstance(got, list) and got[0] == "raises" else f"prints `{decode(got)}`"
    snippet = "\n".join([example["import"], *example["setup"], f"print({example['expr']})"])
    if "datetime." in snippet:
        snippet = "import datetime\n" + snippet
    lines = [rng.choice(TITLES).format(f"`{example['piece']}`"), "", rng.choice(["Running", "With the current version,", "I tried"])]
    wanted = f"{rng.choice(['I expected', 'It should be', 'The right answer is'])} `{decode(example['expected'])}`."
    lines += ["```python", snippet, "```", f"{seen}. {wanted}", ""]
    if kind == "rule":
        lines.append(f"The rule is that {sentence}. The same goes wrong in other functions to which it applies; all should follow it.")
    elif kind == "clone":
        lines.append(f"This is about {sentence} The others like it are right as they are.")
    elif kind == "structure":
        lines = ["Follow the new interface", "", f"What we agreed on: {sentence}.", "", *lines[2:-1]]
    else:
        lines.append(rng.choice(["What its description says is right, the values are not.", "I have not found out where this comes from."]))
    return "\n".join(lines)
