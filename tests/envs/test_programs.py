"""Programs of code tasks: modules from memory, one process each, failures that are results, and a verifier that none of them reaches."""

import json

import pytest

from envs import EnvironmentFault, Pool

PROGRAMS = """
    def programs(self):
        return {programs}

    def score(self, results):
        return {{"reward": float(all(r["error"] is None for r in results)), "checks": {{
            "assertion:0": {{"passed": True, "expected": None, "actual": results, "call": None}}}}}}

    def score_without(self):"""


def program(code, deadline_s=5, **files):
    return {
        "files": {name.replace("__", "/").replace("_py", ".py"): text for name, text in files.items()},
        "code": code,
        "deadline_s": deadline_s,
    }


@pytest.fixture
def make_task(make_package):
    """A package whose programs are the value of a Python expression."""

    def make(programs, **meta):
        text = programs if isinstance(programs, str) else f"__import__('json').loads({json.dumps(programs)!r})"
        return make_package(("\n    def score(self):", PROGRAMS.format(programs=text)), gate=False, **meta)

    return make


@pytest.fixture(scope="module")
def pool():
    with Pool(1, sandbox="require") as pool:
        yield pool


def results_of(pool, package, seed=0):
    episode = pool.open(package, seed)
    answer = pool.batch([(episode, "reset", ()), (episode, "score", ())])[1]
    if isinstance(answer, EnvironmentFault):
        raise answer
    return answer.checks["assertion:0"].actual


TREE = {
    "shop/__init__.py": "from .prices import total\nNAME = __name__\n",
    "shop/prices.py": "import shop.tax as tax\nfrom dataclasses import dataclass\n\n@dataclass\nclass Item:\n    price: 'int'\n\n"
    "def total(items):\n    return tax.add(sum(item.price for item in items))\n",
    "shop/tax.py": "def add(price):\n    return price * 2\n",
    "spaces/deep/inner.py": "from shop.prices import Item\nWHERE = __file__\n",
    "calendar.py": "month = lambda *_: 'mine'\n",
    "data.txt": "words",
}


def test_files_are_modules_and_result_is_the_value(pool, make_task):
    code = (
        "import calendar, shop, spaces.deep.inner as inner, json\nfrom shop.prices import Item\n"
        "result = [shop.total([Item(1), inner.Item(2)]), shop.NAME, inner.WHERE, calendar.month(), FILES['data.txt'], __name__]"
    )
    broken = TREE | {"shop/tax.py": "def add(price):\n    return price + None\n"}
    programs = [
        {"files": TREE, "code": code, "deadline_s": 5},
        {"files": broken, "code": code, "deadline_s": 5},
        {"files": TREE | {"shop/tax.py": "def add(:"}, "code": code, "deadline_s": 5},
        program("x = 1"),
        program("import nowhere"),
        program("raise SystemExit(3)"),
    ]
    values = results_of(pool, make_task(programs))
    assert values[0] == {"value": [6, "shop", "spaces/deep/inner.py", "mine", "words", "__main__"], "error": None}
    assert values[3] == {"value": None, "error": None}
    kinds, messages = zip(*[(value["error"]["kind"], value["error"]["message"]) for value in (*values[1:3], *values[4:])], strict=True)
    assert set(kinds) == {"exception"}
    assert 'File "shop/tax.py", line 2, in add\n    return price + None' in messages[0] and "frozen" not in messages[0] + messages[3]
    assert "SyntaxError" in messages[1] and "def add(:" in messages[1]
    assert "No module named 'nowhere'" in messages[2] and messages[3].endswith("SystemExit: 3\n")


FAILURES = {
    "import os; os._exit(3)": ("crash", "exit code 3"),
    "import ctypes; ctypes.string_at(0)": ("crash", "SIGSEGV"),
    "while True: pass": ("deadline", "SIGXCPU"),
    "result = float('nan')": ("exception", "not JSON compliant"),
    "result = {1, 2}": ("exception", "not JSON serializable"),
    "result = 'x' * 200_000": ("exception", "larger than 20000 bytes"),
    "import os; os.write(4, b'x' * 99)": ("reply", "bytes where at most"),
    "import os; os.write(4, b'\\x04\\0\\0\\0null'); os._exit(0)": ("reply", "does not hold the 1 replies"),
    "x = []\nfor _ in range(60): x = [x]\nresult = x": ("reply", "nest deeper"),
    "import os\nb = b'[[\"' + b'\\\\ud800' * 9 + b'\",null]]'\nos.write(4, len(b).to_bytes(4, 'little') + b)\nos._exit(0)": (
        "exception",
        "?????",
    ),
    "result = bytearray(1 << 40)": ("exception", "MemoryError"),
    "raise ValueError(object())": ("exception", "<object object at 0x...>"),
}


def test_a_failure_is_a_result_and_costs_the_episode_nothing(pool, make_task):
    before = pool.restarts
    values = results_of(pool, make_task([program(code, 1) for code in FAILURES]))  # the verifier can repeat each
    for value, (kind, words) in zip(values, FAILURES.values(), strict=True):
        assert value["value"] is None and value["error"]["kind"] == kind and words in value["error"]["message"], value
    assert pool.restarts == before


def test_a_program_that_only_waits_is_ended_too(pool, make_task, monkeypatch):
    monkeypatch.setattr("envs.sandbox.programs.WAIT", 1)
    package = make_task([program("import time; time.sleep(99)", 1)])
    (value,) = results_of(pool, package)
    assert not any(future.result().result == value for future in pool._programs._futures.values())  # it may have been the machine
    assert value["error"]["kind"] == "deadline" and "no reply within 1 s" in value["error"]["message"]


MALFORMED = {
    "3": "list of at most",
    "[{'files': {}, 'code': '1'}]": '"deadline_s"',
    "[{'files': {'a': 1}, 'code': '', 'deadline_s': 1}]": "files as",
    "[{'files': {}, 'code': None, 'deadline_s': 1}]": "code as a string",
    "[{'files': {}, 'code': '', 'deadline_s': 99}]": "deadline_s above 0",
    "[{'files': {}, 'code': '', 'deadline_s': True}]": "deadline_s above 0",
    "[{'files': {}, 'code': '', 'deadline_s': 30}] * 3": "at most 60 s together",
    "[{'files': {}, 'code': '', 'deadline_s': 1}] * 33": "list of at most 32",
    "[{'files': {}, 'code': 'x' * 10 ** 6, 'deadline_s': 1}]": "larger than",
    "1 / 0": "ZeroDivisionError",
}


def test_malformed_programs_are_faults_of_the_environment(pool, make_task):
    for text, words in MALFORMED.items():
        with pytest.raises(EnvironmentFault) as caught:
            results_of(pool, make_task(text))
        assert words in str(caught.value) and "environment toy, seed 0, score" in str(caught.value), (words, caught.value)


def test_a_program_runs_once_however_often_the_score_is_asked(pool, make_task, monkeypatch):
    from envs.sandbox import programs

    ran = []
    run = programs.run_program
    monkeypatch.setattr(programs, "run_program", lambda program, *rest: ran.append(program.code) or run(program, *rest))
    package = make_task("[{'files': {}, 'code': f'result = {n}', 'deadline_s': 1} for n in (1, 2, len(self.log))]")
    episodes = [pool.open(package, seed) for seed in range(5)]
    write = ("call", ("write_code", {"code": "1"}))
    requests = [(e, *step) for e in episodes for step in (("reset", ()), write, ("score", ()), ("score", ()), write, ("score", ()), write)]
    answers = pool.batch(requests)
    values = [[r["value"] for r in answer.checks["assertion:0"].actual] for answer in answers if hasattr(answer, "checks")]
    assert values == [[1, 2, 1], [1, 2, 1], [1, 2, 2]] * 5  # the second score is of the state at its place in the batch
    assert sorted(ran) == ["result = 1", "result = 2"]
    assert episodes[0].score().checks["assertion:0"].actual[2]["value"] == 3


def test_a_verifier_that_dies_over_the_results_is_played_again(pool, make_package):
    dies = "import os; os._exit(1)"
    text = PROGRAMS.format(programs="[{'files': {}, 'code': 'result = 1', 'deadline_s': 1}]").replace(
        '        return {"reward', f'        {dies}\n        return {{"reward'
    )
    package = make_package(("\n    def score(self):", text), gate=False)
    honest = make_package()
    episodes = [pool.open(one, 0) for one in (package, honest)]
    answers = pool.batch([(e, op, ()) for e in episodes for op in ("reset", "score")])
    assert isinstance(answers[1], EnvironmentFault) and answers[1].kind == "crash" and answers[3].reward == 0.0


def test_a_program_can_forge_its_own_result_and_nothing_else(pool, make_task):
    forge = "import os\nb = b'[[null,[\"forged\",null]]]'\nos.write(4, len(b).to_bytes(4, 'little') + b)\nos._exit(0)"
    values = results_of(pool, make_task([program("result = 1"), program(forge), program("result = 2")]))
    assert [value["value"] for value in values] == [1, "forged", 2]


def test_a_program_shares_nothing_with_its_verifier_or_other_programs(pool, make_task):
    look = (
        "import gc, sys, os\nworker = next(o for o in gc.get_objects() if type(o).__name__ == 'Worker')\n"
        "result = [len(worker.sources), len(worker.episodes), sorted(FILES), hasattr(sys, 'left')]\nsys.left = 1"
    )
    values = results_of(pool, make_task([program(look, a_py="1"), program(look, b_py="2")]))
    assert [value["value"] for value in values] == [[0, 0, ["a.py"], False], [0, 0, ["b.py"], False]]
