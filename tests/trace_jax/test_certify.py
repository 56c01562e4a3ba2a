import json

import pytest

from envs.builtin import LIBRARY, load_builtin
from envs.certify import CheckResult
from envs.package import write_package
from trace_jax import certify
from trace_jax.cli import Arguments
from trace_jax.config import Config, override
from trace_jax.errors import InputError

ONE = "tool_calling_precision"
CONFIG = override(Config(), [("synthesis.certify_seeds", "20")])


def run(argument) -> None:
    certify.main(Arguments(command="certify", config=CONFIG, argument=str(argument)))


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_is_certified(name, capsys):
    run(name)
    text = capsys.readouterr().out
    assert text.endswith("\ncertified\n") and "FAIL" not in text and "20 seeds from 1000000" in text


def test_a_folder_with_the_same_code_is_certified_too(tmp_path, capsys):
    package = load_builtin(ONE)
    write_package(tmp_path, package.meta, package.source)
    run(tmp_path)
    assert capsys.readouterr().out.endswith("\ncertified\n")


def test_the_code_of_others_is_not_run(tmp_path):
    package = load_builtin(ONE)
    write_package(tmp_path, package.meta, package.source + "\nopened = 1\n")
    with pytest.raises(InputError, match="not one of the packages that come with trace-jax"):
        run(tmp_path)
    (tmp_path / "package.json").write_text(json.dumps({"name": "x"}))
    with pytest.raises(InputError, match=r"package\.json: field 'capability' is missing"):
        run(tmp_path)
    with pytest.raises(InputError, match=r"typo/package\.json: No such file"):
        run("typo")


def test_a_check_that_fails_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr("envs.certify._seeds_differ", lambda *_: CheckResult("seeds_differ", False, "all alike"))
    with pytest.raises(InputError, match=f"{ONE}: not certified"):
        run(ONE)
    assert "FAIL seeds_differ" in capsys.readouterr().out
