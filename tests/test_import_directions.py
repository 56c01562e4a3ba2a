"""Dependencies point one way: trace_jax -> rl -> model, trace_jax -> envs, rl -> envs (types and sandbox client)."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
OURS = {"trace_jax", "rl", "model", "envs"}
MAY_IMPORT = {
    "model": {"model"},
    "envs": {"envs"},
    "rl": {"rl", "model", "envs"},
    "trace_jax": {"trace_jax", "rl", "model", "envs"},
    "configs": {"trace_jax"},
}
RL_MAY_IMPORT_OF_ENVS = ("envs.base", "envs.package", "envs.sandbox", "envs.harness")


def imports(path: pathlib.Path) -> set[str]:
    """The full names of the modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(room: str) -> list[pathlib.Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room):
    for path in sources(room):
        wrong = {name for name in imports(path) if name.split(".")[0] in OURS - MAY_IMPORT[room]}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_rl_uses_types_and_sandbox_client_of_envs_only():
    for path in sources("rl"):
        wrong = {n for n in imports(path) if n.split(".")[0] == "envs" and not n.startswith(RL_MAY_IMPORT_OF_ENVS) and not is_handed_on(n)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def is_handed_on(name: str) -> bool:
    """Whether `envs/__init__.py` hands the name on, and from where rl may import it."""
    last = name.rsplit(".", 1)[-1]
    return any(found.startswith(RL_MAY_IMPORT_OF_ENVS) and found.endswith(f".{last}") for found in imports(ROOT / "envs/__init__.py"))


@pytest.mark.parametrize("folder", ["envs/desk", "envs/library"])
def test_the_code_of_an_environment_package_is_plain_python(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        wrong = {name for name in imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_folder_of_python_is_a_room():
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")}
    assert folders - {"build", "dist", "venv"} <= set(MAY_IMPORT) | {"tests", "tpu_scripts"}
