import json

import pytest

from envs import Pool
from envs.builtin import library, load_builtin
from envs.certify import CheckResult
from envs.package import write_package
from trace_jax import certify
from trace_jax.cli import Arguments
from trace_jax.config import Config, override
from trace_jax.errors import InputError

LIBRARY = library("desk")
ONE = "tool_calling_precision"
CONFIG = override(Config(), [("synthesis.certify_seeds", "20")])


def run(argument, **flags) -> None:
    certify.main(Arguments(command="certify", config=CONFIG, argument=str(argument), **flags))


@pytest.mark.parametrize("name", [*LIBRARY[1:], f"desk/{LIBRARY[0]}", "toolsandbox/state_dependency"])
def test_the_library_is_certified(name, capsys):
    run(name)
    text = capsys.readouterr().out
    assert text.endswith("\ncertified\n") and "FAIL" not in text and "20 seeds from 1000000" in text


def test_a_folder_with_the_same_code_is_certified_too(tmp_path, capsys):
    package = load_builtin(ONE)
    write_package(tmp_path, package.meta, package.source)
    run(tmp_path)
    assert capsys.readouterr().out.endswith("\ncertified\n")


def test_the_code_of_others_runs_where_the_kernel_holds_it_or_not_at_all(tmp_path, capsys, monkeypatch):
    package = load_builtin(ONE)
    write_package(tmp_path, package.meta, package.source + "\nopened = 1\n")
    run(tmp_path)
    text = capsys.readouterr().out
    assert text.startswith("sandbox require: ") and "seccomp" in text.splitlines()[0] and text.endswith("\ncertified\n")
    monkeypatch.setattr(certify, "Pool", lambda **options: Pool(**options, _without=("seccomp",)))
    with pytest.raises(InputError, match=r"the layer seccomp is missing on Linux .* \(left out\); use Linux on"):
        run(tmp_path)
    run(ONE)
    assert "without seccomp (left out)" in capsys.readouterr().out


def test_a_folder_that_is_no_package_is_refused(tmp_path):
    (tmp_path / "package.json").write_text(json.dumps({"name": "x"}))
    (tmp_path / "environment.py").write_text("")
    with pytest.raises(InputError, match=r"package\.json: field 'capability' is missing"):
        run(tmp_path)
    with pytest.raises(InputError, match=r"typo/package\.json: No such file.* one that is built in: desk, .*tau2_retail/precondition"):
        run("typo")


def test_a_check_that_fails_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr("envs.checks.seeds_differ", lambda *_: CheckResult("seeds_differ", False, "all alike"))
    with pytest.raises(InputError, match=f"{ONE}: not certified: seeds_differ: all alike"):
        run(ONE)
    assert "FAIL seeds_differ" in capsys.readouterr().out


def test_the_certificate_is_written_as_json(tmp_path, capsys):
    run(ONE, output=str(tmp_path / "certificate.json"))
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["passed"] and not written["reasons"] and len(written["fresh"]) == 10 and written["timing"]["median_ms"] > 0
    assert "and 10 others" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--output=.*: .*; give a file that can be written"):
        run(ONE, output=str(tmp_path))
