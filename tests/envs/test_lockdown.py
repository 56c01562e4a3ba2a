"""Nothing gets out of a locked worker, whoever starts it and whichever of the layers beyond the necessary are there."""

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

import envs
from envs import EnvironmentFault, Pool, SandboxError
from envs.package import ALLOWED_MODULES
from envs.sandbox import lockdown
from tests.envs import hostile

NOBODY = 65534
ROOT = os.geteuid() == 0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the lock-down is Linux's")
needs_root = pytest.mark.skipif(not ROOT, reason="only root can start a pool as somebody else")
EXTRA = [(), ("namespaces",), ("uid",), ("landlock",), ("namespaces", "uid", "landlock")]


def test_no_program_escapes_and_no_neighbour_is_harmed():
    assert len(hostile.PROGRAMS) >= 60
    outcomes = hostile.attack_with("most")
    assert not hostile.surprises(outcomes) and not any(found.startswith("escaped") for found in outcomes.values())


@pytest.mark.parametrize("without", EXTRA[1:], ids="+".join)
def test_the_necessary_layers_hold_by_themselves(without):
    assert not hostile.surprises(hostile.attack_with("quick", without))


@needs_root
@pytest.mark.parametrize("without", EXTRA[:2], ids="+".join)
def test_no_program_of_a_plain_user_escapes(without):
    assert not hostile.surprises(as_nobody("quick", without))


@pytest.mark.slow
@pytest.mark.parametrize("without", EXTRA, ids="+".join)
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_no_program_escapes_from_any_set_of_layers(user, without):
    if user == "nobody" or not ROOT:
        without = tuple(layer for layer in without if layer != "uid")
    assert not hostile.surprises(as_nobody("all", without) if ROOT and user == "nobody" else hostile.attack_with("all", without))


@needs_root
@pytest.mark.parametrize("kept", [(), (0, 6, 7, 21)], ids=["none", "all but kill"])  # dac_override, setgid, setuid, sys_admin
def test_root_of_a_container_with_few_capabilities_is_held_and_can_end_its_workers(kept):
    def drop():
        for capability in range(41):
            if capability not in kept:
                ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)

    code = "import sys, json; from tests.envs import hostile; print(json.dumps([hostile.attack_with('quick'), hostile.Pool().missing]))"
    root = pathlib.Path(envs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=drop, env={}, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outcomes, missing = json.loads(done.stdout)
    assert not hostile.surprises(outcomes) and "CAP_KILL" in missing["uid"] and not set(missing) & set(lockdown.REQUIRED)


def as_nobody(part, without):
    """`hostile.attack_with` in a process of nobody's, which sees a copy of `envs` and an interpreter that everybody may run."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(pathlib.Path(envs.__file__).parent, f"{folder}/envs", ignore=shutil.ignore_patterns("__pycache__"))
        script = shutil.copy(hostile.__file__, folder)
        for path in pathlib.Path(folder).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        command = [_interpreter_for_nobody(), script, part, ",".join(without)]
        done = subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _interpreter_for_nobody():
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            test = "import sys, ctypes; sys.exit(sys.version_info < (3, 11))"
            done = subprocess.run(
                [path, "-c", test], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={}, stderr=subprocess.DEVNULL
            )
            if done.returncode == 0:
                return path
    pytest.skip("no Python 3.11 that nobody may run")


def test_the_kernel_says_the_same_of_a_worker_as_the_worker():
    with Pool(sandbox="require") as pool:
        assert set(pool.layers) >= set(lockdown.REQUIRED) and pool.describe().startswith("sandbox require: ")
        folder = pathlib.Path(f"/proc/{pool._processes[0][''].child.pid}")
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1" and status["CapPrm"] == status["CapEff"] == "0" * 16
        limits = {line[:26].strip(): line[26:].split()[:2] for line in (folder / "limits").read_text().splitlines()}
        assert limits["Max file size"] == limits["Max locked memory"] == limits["Max core file size"] == ["0", "0"]
        if ROOT:
            assert "uid" in pool.layers and set(status["Uid"].split()) == {str(lockdown.SPARE_UID)} and not status["Groups"].strip()
            assert limits["Max processes"] == ["0", "0"]
            if "namespaces" in pool.layers:
                assert all(os.readlink(folder / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "uts"))


def test_a_mode_gives_what_it_says():
    for layer in lockdown.REQUIRED:
        with pytest.raises(SandboxError, match=rf"the layer {layer} is missing on Linux .*left out"):
            Pool(sandbox="require", _without=(layer,))
    with Pool(_without=("seccomp",)) as pool:
        assert "seccomp" not in pool.layers and pool.missing["seccomp"] == "left out" and "without seccomp (left out)" in pool.describe()
    with Pool(sandbox="off") as pool:
        assert pool.layers == () and pool.missing == {} and pool.describe().startswith("sandbox off")
    with pytest.raises(ValueError, match="must be one of require, best_effort, off"):
        Pool(sandbox="on")


def test_a_worker_that_does_not_start_is_no_fault_of_an_environment(make_package, monkeypatch):
    monkeypatch.setattr("envs.sandbox.launch.INTERPRETER", ("/bin/sh", "-c", "echo broken >&2; exit 3"))
    with Pool() as pool, pytest.raises(SandboxError, match="a worker does not start: .* exit code 3; its last words: broken"):
        pool.open(make_package(), 0).reset()


LAZY = """
import datetime, hashlib, statistics, html.parser, json, re, decimal, dataclasses, functools, typing, random, textwrap, difflib, csv, io
import calendar, base64, zlib, unicodedata, enum, string, copy, collections.abc, fractions, ast
@dataclasses.dataclass
class Point:
    x: int = 0
assert typing.get_type_hints(Point) == {"x": int}
@functools.singledispatch
def f(x: object): return 1
@f.register
def _(x: int): return 2
assert f(3) == 2
return repr([
    datetime.datetime.strptime("2026-05-01 10:00", "%Y-%m-%d %H:%M").strftime("%A %d %B"), sorted(hashlib.sha256(b"x").hexdigest())[:3],
    [hashlib.new(name).name for name in ("md5", "sha3_256", "blake2b", "sha512")], statistics.NormalDist(0, 1).cdf(0.0),
    [len("é€".encode(name, "replace")) for name in ("utf-16", "utf-16-le", "utf-8-sig", "cp1252", "ascii")],
    "é".encode("idna"),
    str(decimal.Decimal(2).sqrt())[:6], base64.b16encode(b"x"),
    "".join(difflib.unified_diff("ab", "ac", lineterm=""))[-4:], list(csv.reader(io.StringIO("a,b")))[0],
    calendar.month(2026, 5)[:12].strip(), base64.b85encode(zlib.compress(b"x" * 99))[:4], unicodedata.name("é"), html.unescape("&eacute;"),
    enum.Enum("E", "A B").A.value, string.Template("$a").substitute(a=1), copy.deepcopy([Point(1)])[0].x, ast.unparse(ast.parse("1+1")),
    str(fractions.Fraction("0.25")), textwrap.fill("a b", 1), re.sub("(?i)A", "b", "aA"), random.Random("5").random(), 1 / 3, f"{10**20:,}",
])
"""


def test_what_environments_may_import_works_locked_as_it_does_unlocked(make_package):
    body = "\n".join(" " * 8 + line for line in LAZY.strip().splitlines())
    package = make_package(('        return "ok"', body), gate=False)
    imports = make_package(('return "ok"', f"import {', '.join(sorted(ALLOWED_MODULES))}; return 'ok'"), gate=False)
    broken = make_package(('return "ok"', "return self.lock"))
    texts = []
    for sandbox in ("require", "off"):
        with Pool(sandbox=sandbox) as pool:
            episodes = [pool.open(one, 0) for one in (package, imports)]
            texts.append([answer for e in episodes for answer in pool.batch([(e, "reset", ()), (e, "call", ("write_code", {"code": ""}))])])
            episode = pool.open(broken, 0)
            episode.reset()
            with pytest.raises(EnvironmentFault, match="no attribute 'lock'"):
                episode.call("write_code", {"code": ""})
    assert texts[0] == texts[1] and "Friday 01 May" in texts[0][1].text and texts[0][3].text == "ok"


@needs_root
def test_a_checkout_that_only_root_can_read_is_enough(tmp_path):
    shutil.copytree(pathlib.Path(envs.__file__).parent, tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    tmp_path.chmod(0o700)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport envs; from envs.builtin import load_builtin\n"
        "assert envs.__file__.startswith(sys.argv[1])\n"
        "with envs.Pool(sandbox='require') as pool: print(len(pool.function(load_builtin('desk'), 'tools')), 'uid' in pool.layers)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, tmp_path], capture_output=True, text=True, env={}, cwd="/")
    assert done.stdout.split()[1:] == ["True"] and not done.stderr, done.stderr


def decide(program, machine, number):
    """What a filter returns for a system call: the few instructions of classic BPF that it has."""
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        if code == 0x20:
            accumulator = {0: number, 4: machine}[constant]
        elif code == 0x06:
            return constant
        else:
            holds = accumulator == constant if code == 0x15 else accumulator >= constant
            position += if_true if holds else if_false


X86 = ("x86_64", 0xC000003E, (0, 1, 9, 231), (2, 41, 56, 57, 59, 62))
ARM = ("aarch64", 0xC00000B7, (63, 64, 222, 94), (56, 198, 220, 221, 129, 0))


@pytest.mark.parametrize("machine, audit, allowed, refused", [X86, ARM], ids=["x86_64", "aarch64"])
def test_the_filter_allows_its_list_and_nothing_else(machine, audit, allowed, refused):
    program = lockdown.filter_program(machine)
    fail, kill = 0x00050000, 0x80000000
    assert {decide(program, audit, number) for number in allowed} == {0x7FFF0000}
    assert {decide(program, audit, number) for number in refused} == {fail | errno.EPERM}
    assert decide(program, audit, 435) == fail | errno.ENOSYS
    assert decide(program, 0x40000003, allowed[0]) == kill
    assert decide(program, audit, 0x40000000) == (kill if machine == "x86_64" else fail | errno.EPERM)
    every = [number for number in range(1000) if decide(program, audit, number) == 0x7FFF0000]
    assert len(every) <= 27 and len(program) < 4096
    with pytest.raises(OSError, match="no system call numbers for riscv64"):
        lockdown.filter_program("riscv64")
