"""Players of the code-repair environments: what an agent without the capability does in the place of an edit, and cheats.

Each gives the commands of an episode, made from the task, which code of ours may run here to know.
"""

import functools
import random
import re

from envs import Package
from envs.builtin import library, load_builtin
from envs.probes import Action
from tests.envs.ladder import Slip

CAPABILITIES = library("swebench")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"


@functools.cache
def load(capability: str) -> tuple[Package, dict]:
    """The package and the names that its code defines."""
    package = load_builtin(capability, "swebench")
    names = {"__name__": f"repair_{capability}"}
    exec(compile(package.source, package.name, "exec"), names)
    return package, names


def task_of(capability: str, seed: int, **knobs) -> dict:
    package, names = load(capability)
    return names["make_task"](seed, capability, package.resolve_knobs(knobs))


def commands(*lines: str) -> list[Action]:
    return [{"name": "bash", "arguments": {"command": line}} for line in lines]


def submitted(*lines: str) -> list[Action]:
    return commands(*lines, "git diff > patch.txt", SUBMIT)


def touches(task: dict) -> list[Action]:
    """Adds a comment: the verdict is that of the code as it was."""
    path = task["edits"][0][0]
    return submitted(f"echo '# looked at' >> {path}")


def knows_the_visible_value(task: dict) -> list[Action]:
    """Returns what the target test expects, for its arguments alone."""
    target, names = task["target"], load("semantic_logic_precision")[1]
    name, expected = target["piece"], names["decode"](target["expected"])
    module = re.match(r"from (\S+) import", target["import"])[1]
    path = module.replace(".", "/") + ".py"
    if target["setup"] or name[0].isupper():  # a class or several steps: what they print is not known by their arguments
        return touches(task)
    arguments = re.fullmatch(rf"{name}\((.*)\)(\.isoformat\(\))?", target["expr"], re.DOTALL)
    if arguments is None or arguments[2]:
        return touches(task)
    lines = [
        f"_{name} = {name}", "", f"def {name}(*args, **kwargs):", f"    if repr((args, kwargs)) == repr(_seen({arguments[1]})):",
        f"        return {expected}", f"    return _{name}(*args, **kwargs)", "", "def _seen(*args, **kwargs):", "    return args, kwargs",
    ]  # fmt: skip
    return submitted(f"cat >> {path} <<'END'\n" + "\n".join(["", *lines]) + "\nEND")


def edits_tests(task: dict) -> list[Action]:
    return submitted(f"sed -i 's/ == .*/ is not None/' tests/test_{task['package']}.py", "python -m pytest -q")


def deletes_the_function(task: dict) -> list[Action]:
    path = task["edits"][0][0]
    return submitted(f"sed -i '{task['edits'][0][1]}d' {path}")


def edits_by_text_alone(task: dict) -> list[Action]:
    """Changes the line wherever its text occurs."""
    path, first, _, new = task["edits"][0]
    old = task["files"][path].split("\n")[first - 1]
    script = "\n".join(
        [
            "import sys",
            "for path in sys.argv[1:]:",
            "    text = open(path).read()",
            f"    open(path, 'w').write(text.replace({old!r}, {new[0]!r}))",
        ]
    )
    return submitted(f"cat > /tmp/edit.py <<'END'\n{script}\nEND", f"python /tmp/edit.py {task['package']}/*.py")


def repairs_one_site(task: dict) -> list[Action]:
    names = load("semantic_logic_precision")[1]
    path = task["edits"][0][0]
    return submitted(names["edit_command"](path, [tuple(task["edits"][0][1:])]))


DECOYS = {
    "semantic_logic_precision": knows_the_visible_value,
    "deep_call_graph_traversal": knows_the_visible_value,
    "multi_site_consistency": repairs_one_site,
    "diff_context_precision": edits_by_text_alone,
    "structural_refactor_awareness": repairs_one_site,
}


def slip_of(capability: str) -> Slip:
    """At every edit of the oracle an unskilled agent goes for the decoy instead; where there are several files, it leaves this one out."""

    def slip(seed: int, rest: list[Action], rng: random.Random) -> list[Action] | None:
        command = rest[0].get("arguments", {}).get("command", "")
        if not command.startswith(("sed -i", "python - <<")):
            return None
        several = capability in ("multi_site_consistency", "structural_refactor_awareness")
        return [*commands("git status"), *rest[1:]] if several else DECOYS[capability](task_of(capability, seed))

    return slip
