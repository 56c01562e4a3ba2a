"""Workers come from a zygote that holds nothing, end with it, and leave nothing behind; without one they are the same, only slower."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from envs import Pool, Reply
from envs.sandbox import launch
from envs.sandbox.process import start

pytestmark = pytest.mark.skipif(not launch._has_process_descriptors(), reason="this system has no descriptors for processes")


def state(pid):
    """The letter of a process' state in /proc, Z where there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def wait_for_end(pids):
    end = time.monotonic() + 10
    while any(state(pid) != "Z" for pid in pids):
        assert time.monotonic() < end, "a process outlived the one that started it"
        time.sleep(0.02)


def descriptors():
    return sorted(
        os.readlink(f"/proc/self/fd/{number}").split(":")[0]
        for number in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{number}")
    )


def play(pool, package):
    episode = pool.open(package, 3)
    answers = pool.batch([(episode, "reset", ()), (episode, "call", ("list_codes", {})), (episode, "score", ())])
    return answers, episode


def test_a_worker_comes_from_the_zygote_which_has_no_secret_and_one_thread(make_package, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with Pool() as pool:
        answers, _ = play(pool, make_package())
        zygote = pathlib.Path(f"/proc/{pool._launcher._zygote.process.pid}")
        (process,) = pool._processes[0].values()
        status = pathlib.Path(f"/proc/{process.child.pid}/status").read_text()
        assert isinstance(process.child, launch.Forked) and f"PPid:\t{zygote.name}\n" in status
        names = {line.partition("=")[0] for line in (zygote / "environ").read_text().split("\0")[:-1]}
        assert names <= {"PATH", "LANG", "PYTHONHASHSEED", "LC_CTYPE"}
        assert len(os.listdir(zygote / "fd")) == 3 and len(os.listdir(zygote / "task")) == 1
        assert os.path.samefile(zygote / "fd" / "1", os.devnull)


LACKS = {
    "no descriptors for processes": ("_has_process_descriptors", lambda: False),
    "a zygote that cannot fork": ("_Zygote.ask", lambda *_: "out of memory"),
    "no zygote that works": (
        "Started",
        lambda script, *rest, real=launch.Started, **streams: real(script.replace("zygote", "nothing"), *rest, **streams),
    ),
}


@pytest.mark.parametrize("lack", LACKS)
def test_where_no_zygote_serves_workers_start_on_their_own(lack, make_package, monkeypatch):
    package = make_package()
    with Pool() as pool:
        expected, _ = play(pool, package)
    name, instead = LACKS[lack]
    started = launch.Started
    monkeypatch.setattr(f"envs.sandbox.launch.{name}", instead)
    with Pool(sandbox="require") as pool:
        found, _ = play(pool, package)
        assert isinstance(pool._processes[0][package.digest].child, started) and found == expected


def test_a_zygote_that_died_takes_its_workers_along_and_is_replaced(make_package):
    package = make_package()
    with Pool(2) as pool:
        before, episode = play(pool, package)
        zygote = pool._launcher._zygote.process
        workers = [process.child.pid for processes in pool._processes for process in processes.values()]
        os.kill(zygote.pid, signal.SIGKILL)
        wait_for_end([zygote.pid, *workers])
        assert isinstance(episode.call("list_codes", {}), Reply) and play(pool, package)[0] == before
        assert pool._launcher._zygote.process.pid != zygote.pid


def test_a_pool_outlives_the_thread_that_made_it(make_package):
    made = []
    thread = threading.Thread(target=lambda: made.append(Pool()))
    thread.start()
    thread.join()
    with made[0] as pool:
        zygote = pool._launcher._zygote.process.pid
        play(pool, make_package())
        assert pool.restarts == 0 and pool._launcher._zygote.process.pid == zygote and state(zygote) != "Z"


def test_zygote_and_workers_end_with_their_host():
    code = (
        "import time; from envs import Pool; p = Pool(2)\n"
        "print(p._launcher._zygote.process.pid, *(q[''].child.pid for q in p._processes), flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, host.stdout.readline().split()))
    host.kill()
    host.wait()
    host.stdout.close()
    wait_for_end(pids)


def test_what_a_worker_started_ends_with_it(make_package):
    """In a sandbox that is off, where an environment can start something."""
    body = "import os, time\n        pid = os.fork()\n        if not pid: time.sleep(99)\n        return str(pid)"
    with Pool(sandbox="off") as pool:
        episode = pool.open(make_package(('return "ok"', body), gate=False), 0)
        episode.reset()
        pid = int(episode.call("write_code", {"code": ""}).text)
        assert state(pid) != "Z"
        pool._processes[0][episode.package.digest].kill()
        wait_for_end([pid])


def recycle(pool, times):
    for _ in range(times):
        (process,) = start(pool._launcher, [pool._options])
        process.kill()


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_workers_leave_no_descriptor_and_no_process_behind(times):
    with Pool() as pool:
        recycle(pool, 2)
        zygote = pathlib.Path(f"/proc/{pool._launcher._zygote.process.pid}")
        children = zygote / "task" / zygote.name / "children"
        before = descriptors(), len(os.listdir(zygote / "fd")), children.read_text()
        recycle(pool, times)
        assert (descriptors(), len(os.listdir(zygote / "fd")), children.read_text()) == before


@pytest.mark.slow
def test_workers_start_in_time_while_the_machine_is_busy(make_package):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with Pool(4, deadline_s=5.0, sandbox="require") as pool:
            began = time.monotonic()
            for process in start(pool._launcher, [pool._options] * 64):
                process.kill()
            assert time.monotonic() - began < 20
            for number in range(8):
                assert isinstance(play(pool, make_package(version=str(number)))[0][2].reward, float)
            assert pool.restarts == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
