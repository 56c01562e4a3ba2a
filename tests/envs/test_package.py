"""Packages on disk: what is read, what is refused, and with which words."""

import json

import pytest

from envs import PackageError, load_package, parse_package, write_package
from tests.envs.conftest import META, SOURCE


def test_a_written_package_reads_back_equal_and_keeps_other_files(tmp_path):
    written = write_package(tmp_path / "toy", META, SOURCE)
    (tmp_path / "toy" / "certificate.json").write_text("{}")
    write_package(tmp_path / "toy", META, SOURCE)
    read = load_package(tmp_path / "toy")
    assert read == written and read.digest == written.digest and read.meta == META
    assert sorted(file.name for file in (tmp_path / "toy").iterdir()) == ["certificate.json", "environment.py", "package.json"]


def test_digest_follows_content_not_formatting(tmp_path):
    package = parse_package(META, SOURCE)
    assert parse_package(json.dumps(META, indent=7), SOURCE).digest == package.digest
    assert parse_package(META, SOURCE + "\n# changed\n").digest != package.digest
    assert parse_package(META | {"version": "2"}, SOURCE).digest != package.digest


def test_reading_does_not_run_the_code(tmp_path):
    write_package(tmp_path / "toy", META, "1 / 0\n" + SOURCE)
    assert load_package(tmp_path / "toy").name == "toy"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"surprise": 1}, "unknown field 'surprise'; remove it"),
        ({"max_turns": True}, "max_turns = True must be a whole number"),
        ({"max_turns": 0}, "must be at least 1"),
        ({"version": 1}, "version = 1 must be a string"),
        ({"name": "../toy"}, "must be snake_case"),
        ({"knobs": {"k": {"default": 1, "min": 2, "max": 3}}}, "knobs.k: min 2 <= default 1"),
        ({"knobs": {"k": {"default": 1, "min": 0}}}, "knobs.k: must be"),
        ({"knobs": {"k": {"default": float("nan"), "min": 0, "max": 1}}}, "knobs.k.default = nan must be a finite number"),
    ],
)
def test_bad_fields_are_named(change, words):
    with pytest.raises(PackageError, match="toy/package.json: ") as error:
        parse_package(META | change, SOURCE, "toy")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_missing_fields_files_and_truncated_json_are_named(tmp_path):
    with pytest.raises(PackageError, match="'rationale' is missing"):
        parse_package({key: value for key, value in META.items() if key != "rationale"}, SOURCE)
    with pytest.raises(PackageError, match="package.json: No such file"):
        load_package(tmp_path)
    (tmp_path / "package.json").write_text(json.dumps(META)[:-5])
    (tmp_path / "environment.py").write_text(SOURCE)
    with pytest.raises(PackageError, match="package.json: not JSON"):
        load_package(tmp_path)
    (tmp_path / "package.json").write_text(json.dumps(META | {"rationale": "\ud83d"}))
    with pytest.raises(PackageError, match="package.json: holds half of a surrogate pair"):
        load_package(tmp_path)
    (tmp_path / "environment.py").write_bytes(b"\xff\xfe")
    with pytest.raises(PackageError, match="environment.py: not UTF-8"):
        load_package(tmp_path)


@pytest.mark.parametrize(
    "source, words",
    [
        ("import os\n" + SOURCE, "environment.py:1: import of 'os'"),
        ("from envs.base import Score\n" + SOURCE, "import of 'envs.base'"),
        ("from . import x\n" + SOURCE, "import of '.'"),
        ("x = eval('1')\n" + SOURCE, "'eval' may not be used"),
        (SOURCE.replace("def oracle", "def solve"), "oracle is missing"),
        (SOURCE + "def (:", "not Python"),
        (SOURCE + "x = " + "-" * 100_000 + "1", "not Python: nested too deeply"),
        ("#" * 500_000 + SOURCE, "larger than"),
    ],
)
def test_static_gate_names_line_and_fix(source, words):
    with pytest.raises(PackageError) as error:
        parse_package(META, source)
    assert words in str(error.value)


def test_knobs_are_completed_and_checked():
    package = parse_package(META, SOURCE)
    assert package.resolve_knobs() == {"digits": 4, "noise": 0.5}
    assert package.resolve_knobs({"digits": 8}) == {"digits": 8, "noise": 0.5}
    for knobs, words in (
        ({"speed": 1}, "no knob 'speed'"),
        ({"digits": 9}, "from 1 to 8"),
        ({"digits": 2.0}, "whole number"),
        ({"noise": "x"}, "a number"),
    ):
        with pytest.raises(PackageError, match=words):
            package.resolve_knobs(knobs)
