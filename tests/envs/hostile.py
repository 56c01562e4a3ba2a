"""Environments that try to get out of their worker, and what each must come to.

A program is a body of Python that ends without an exception only when its deed succeeded, so every other outcome is named: an errno or an
exception of the deed, which the environment reports, or `fault:KIND` where the worker or the reply does not survive it. The static gate of
`envs.package` is left out, for it is no wall. Deeds are chosen to be harmless should they ever succeed: signal 0, a seizure instead of an
attachment, reboot without its magic numbers; even so `attack` begins only when the layers are seen to work.

The same programs are tried as the candidate edits of a code task, each in a process of its own.

Run as a script, by a user who sees nothing of ours but this file and `envs`, it prints the outcomes as JSON:
`hostile.py quick|most|all LAYER,LAYER` with the layers to leave out.
"""

import ast
import contextlib
import json
import os
import pathlib
import platform
import sys
import tempfile
import textwrap

from envs.base import EnvironmentFault
from envs.package import Package
from envs.sandbox import Pool
from envs.sandbox.lockdown import REQUIRED
from envs.sandbox.programs import MAX_PROGRAMS

PRELUDE = (
    f"MACHINE = {platform.machine()!r}"
    + """
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def c(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
    return result

def raw(x86_64, aarch64, *arguments):
    number = {"x86_64": x86_64, "aarch64": aarch64}[MACHINE]
    libc.syscall.restype = ctypes.c_long
    return c(libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in (*arguments, 0, 0, 0)]))

def machine_code(code):
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0))
    ctypes.memmove(page, code, len(code))
    return ctypes.CFUNCTYPE(ctypes.c_long)(page)

class Whole(Exception):
    "Its argument is the reply as it is."

def outcome(deed, arguments):
    try:
        return "escaped: " + repr(deed(*map(arguments.get, ("host", "zygote", "secret", "folder"))))[:200]
    except Whole as whole:
        return whole.args[0]
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except Exception as error:
        return type(error).__name__
"""
)
ENVIRONMENT = """
TOOLS = []

class Environment:
    def reset(self, seed, knobs):
        self.seed, self.calls = seed, 0
        return {"system": "", "messages": [{"role": "user", "content": str(seed)}]}
    def respond(self, text):
        return None
    def done(self):
        return False
    def score(self):
        return {"reward": 0.0, "checks": {}}
    def call(self, name, arguments):
        self.calls += 1
        return f"{self.seed}:{self.calls}" if name == "count" else outcome(globals()[name], arguments)
"""
# an environment whose programs are what it is told
CODE_TASK = """
    def call(self, name, arguments):
        self.given = arguments["programs"]
        return ""
    def programs(self):
        return self.given
    def score(self, results):
        return {"reward": 0.0, "checks": {"": {"passed": True, "expected": None, "actual": results, "call": None}}}
"""

# name: (body, outcome). An expression is returned; outcomes that depend on version or machine are given with | between.
NETWORK = {
    "tcp": ("c(libc.socket(2, 1, 0))", "EPERM"),
    "udp": ("c(libc.socket(2, 2, 0))", "EPERM"),
    "tcp over IPv6": ("c(libc.socket(10, 1, 0))", "EPERM"),
    "raw packets": ("c(libc.socket(2, 3, 1))", "EPERM"),
    "link layer": ("c(libc.socket(17, 3, 768))", "EPERM"),
    "unix socket": ("c(libc.socket(1, 1, 0))", "EPERM"),
    "socket pair": ("c(libc.socketpair(1, 1, 0, (ctypes.c_int * 2)()))", "EPERM"),
    "netlink": ("c(libc.socket(16, 3, 0))", "EPERM"),
    "host of a virtual machine": ("c(libc.socket(40, 1, 0))", "EPERM"),
    "kernel cryptography": ("c(libc.socket(38, 5, 0))", "EPERM"),
    "connect an open descriptor": ("c(libc.connect(0, bytes(16), 16))", "EPERM"),
    "bind an open descriptor": ("c(libc.bind(0, bytes(16), 16))", "EPERM"),
    "listen": ("c(libc.listen(0, 1))", "EPERM"),
    "accept": ("c(libc.accept(0, None, None))", "EPERM"),
    "send a message": ("c(libc.sendmsg(0, bytes(56), 0))", "EPERM"),
    "receive a message": ("c(libc.recvmsg(0, bytes(56), 0))", "EPERM"),
    "look a name up": (
        "assert libc.getaddrinfo(b'metadata.google.internal', b'80', None, ctypes.byref(ctypes.c_void_p())) == 0",
        "AssertionError",
    ),
    "import socket": ("import socket", "ModuleNotFoundError"),
    "urllib": ("import urllib.request; urllib.request.urlopen('http://127.0.0.1')", "ModuleNotFoundError"),
}
FILES = {
    "read a secret": ("open(SECRET).read()", "EPERM"),
    "read a secret by os.open": ("os.read(os.open(SECRET, 0), 99)", "EPERM"),
    "read a secret by libc": ("c(libc.open(SECRET.encode(), 0))", "EPERM"),
    "open as of 1970": ("raw(2, 56, SECRET.encode(), 0) if MACHINE == 'x86_64' else open(SECRET)", "EPERM"),
    "openat2": ("raw(437, 437, -100, SECRET.encode(), 0, 24)", "EPERM"),
    "open by handle": ("raw(304, 265, -100, 0, 0)", "EPERM"),
    "accounts": ("open('/etc/passwd').read()", "EPERM"),
    "list root's home": ("os.listdir('/root')", "EPERM"),
    "walk the file system": ("assert list(os.walk('/'))", "AssertionError"),
    "stat": ("os.stat(SECRET)", "EPERM"),
    "statx": ("raw(332, 291, -100, SECRET.encode(), 0, 4095, 0)", "EPERM"),
    "access": ("assert os.access(SECRET, 0)", "AssertionError"),
    "readlink": ("os.readlink('/proc/self/exe')", "EPERM"),
    "current folder": ("os.getcwd()", "EPERM"),
    "change folder": ("os.chdir('/tmp')", "EPERM"),
    "write a file": ("open(FOLDER + '/written', 'w').write('x')", "EPERM"),
    "creat": ("c(libc.creat(FOLDER.encode() + b'/created', 0o777))", "EPERM"),
    "make a folder": ("os.mkdir(FOLDER + '/made')", "EPERM"),
    "make a device": ("os.mknod(FOLDER + '/node')", "EPERM"),
    "make a fifo": ("os.mkfifo(FOLDER + '/fifo')", "EPERM"),
    "remove": ("os.unlink(SECRET)", "EPERM"),
    "rename": ("os.rename(SECRET, FOLDER + '/renamed')", "EPERM"),
    "link": ("os.link(SECRET, FOLDER + '/linked')", "EPERM"),
    "symbolic link": ("os.symlink(SECRET, FOLDER + '/symbolic')", "EPERM"),
    "truncate": ("os.truncate(SECRET, 0)", "EPERM"),
    "chmod": ("os.chmod(SECRET, 0o777)", "EPERM"),
    "chown": ("os.chown(SECRET, os.getpid(), -1)", "EPERM"),
    "change times": ("os.utime(SECRET, (0, 0))", "EPERM"),
    "extended attribute": ("os.setxattr(SECRET, 'user.x', b'x')", "EPERM"),
    "shared folder in memory": ("open('/dev/shm/hostile', 'w')", "EPERM"),
    "file in memory": ("os.memfd_create('x')", "EPERM"),
    "watch files": ("c(libc.inotify_init())", "EPERM"),
    "copy between descriptors": ("os.sendfile(1, 0, 0, 9)", "EPERM"),
    "control a terminal": ("c(libc.ioctl(0, 0x5412, b'x'))", "EPERM"),
    "duplicate a descriptor": ("os.dup(1)", "EPERM"),
    "set a descriptor's flags": ("c(libc.fcntl(0, 4, 2048))", "EPERM"),
    "a pipe of its own": ("os.pipe()", "EPERM"),
    "load a library": ("ctypes.CDLL('libpthread.so.0' * 2)", "OSError"),
    "load a C extension": ("import _ssl, termios", "ModuleNotFoundError|ImportError"),
    "environment of the host": ("open(f'/proc/{HOST}/environ', 'rb').read()", "EPERM"),
    "command line of the host": ("open(f'/proc/{HOST}/cmdline', 'rb').read()", "EPERM"),
    "memory of the host": ("open(f'/proc/{HOST}/mem', 'rb')", "EPERM"),
    "files of the host": ("os.listdir(f'/proc/{HOST}/fd')", "EPERM"),
    "own memory as a file": ("open('/proc/self/mem', 'r+b')", "EPERM"),
    "secrets in the environment": (
        "assert set(os.environ) - {'PATH', 'LANG', 'LC_CTYPE', 'PYTHONHASHSEED'} or 'HOME' in os.environ",
        "AssertionError",
    ),
}
PROCESSES = {
    "fork": ("os.fork() or os._exit(0)", "EPERM"),
    "vfork": ("raw(58, 220, 0x4111) or os._exit(0)", "EPERM"),
    "clone": ("raw(56, 220, 17, 0, 0, 0, 0) or os._exit(0)", "EPERM"),
    "clone3": ("raw(435, 435, 0, 0)", "ENOSYS"),
    "thread": ("import _thread; _thread.start_new_thread(print, ())", "RuntimeError"),
    "exec": ("os.execv('/bin/true', ['true'])", "EPERM"),
    "exec a descriptor": ("raw(322, 281, 0, b'', 0, 0, 0x1000)", "EPERM"),
    "spawn": ("os.posix_spawn('/bin/true', ['true'], {})", "EPERM"),
    "shell": ("assert os.system('exit 0') == 0", "AssertionError"),
    "import subprocess": ("import subprocess; subprocess.run(['true'])", "ModuleNotFoundError"),
    "import multiprocessing": ("import multiprocessing; multiprocessing.Process(target=print).start()", "ModuleNotFoundError"),
    "new session": ("os.setsid()", "EPERM"),
    "new group": ("os.setpgid(0, 0)", "EPERM"),
    "wait for others": ("os.waitpid(-1, 0)", "EPERM"),
    "signal the host": ("os.kill(HOST, 0)", "EPERM"),
    "signal the zygote": ("os.kill(ZYGOTE, 0)", "EPERM"),
    "signal everybody": ("os.kill(-1, 0)", "EPERM"),
    "signal its group": ("os.kill(0, 0)", "EPERM"),
    "signal a thread of the host": ("raw(234, 131, HOST, HOST, 0)", "EPERM"),
    "signal by queue": ("raw(129, 138, HOST, 0, 0)", "EPERM"),
    "handle of the host": ("os.pidfd_open(HOST)", "EPERM"),
    "descriptor of the host": ("raw(438, 438, 0, 0, 0)", "EPERM"),
    "seize the host": ("raw(101, 117, 0x4206, HOST, 0, 0)", "EPERM"),
    "seize the zygote": ("raw(101, 117, 0x4206, ZYGOTE, 0, 0)", "EPERM"),
    "memory of the zygote": ("open(f'/proc/{ZYGOTE}/mem', 'rb')", "EPERM"),
    "channel of the zygote": (
        "f = sys._getframe()\nwhile 'channel' not in f.f_locals: f = f.f_back\nf.f_locals['channel'].send(b'[\"wait\", 1]')",
        "EPERM|AttributeError",
    ),
    "who is the zygote": ("assert os.getppid() > 0", "EPERM|AssertionError"),
    "be traced": ("raw(101, 117, 0, 0, 0, 0)", "EPERM"),
    "read the host's memory": ("raw(310, 270, HOST, 0, 0, 0, 0)", "EPERM"),
    "write the host's memory": ("raw(311, 271, HOST, 0, 0, 0, 0)", "EPERM"),
    "compare with the host": ("raw(312, 272, HOST, os.getpid(), 0, 0, 0)", "EPERM"),
    "limits of the host": ("raw(302, 261, HOST, 7, 0, 0)", "EPERM"),
    "priority of the host": ("os.setpriority(0, HOST, 19)", "EPERM"),
    "cores of the host": ("os.sched_setaffinity(HOST, {0})", "EPERM"),
    "scheduling of the host": ("os.sched_setscheduler(HOST, 0, os.sched_param(0))", "EPERM"),
}
PRIVILEGE = {
    "become root": ("os.setuid(0)", "EPERM"),
    "become root in all ways": ("os.setresuid(0, 0, 0)", "EPERM"),
    "group root": ("os.setgid(0)", "EPERM"),
    "more groups": ("os.setgroups([0])", "EPERM"),
    "user for files": ("raw(122, 151, 0); assert raw(122, 151, 0) == 0", "EPERM"),
    "capabilities": ("c(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(1, 1, 1)))", "EPERM"),
    "keep capabilities": ("c(libc.prctl(8, 1, 0, 0, 0))", "EPERM"),
    "become visible": ("c(libc.prctl(4, 1, 0, 0, 0))", "EPERM"),
    "outlive the host": ("c(libc.prctl(1, 0, 0, 0, 0))", "EPERM"),
    "another filter": ("raw(317, 277, 1, 0, 0)", "EPERM"),
    "another ruleset": ("raw(444, 444, 0, 0, 1)", "EPERM"),
    "user namespace": ("c(libc.unshare(0x10000000))", "EPERM"),
    "mount namespace": ("c(libc.unshare(0x20000))", "EPERM"),
    "enter a namespace": ("c(libc.setns(0, 0))", "EPERM"),
    "mount": ("c(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None))", "EPERM"),
    "mount the new way": ("raw(430, 430, b'tmpfs', 0)", "EPERM"),
    "clone a mount": ("raw(428, 428, -100, b'/', 1)", "EPERM"),
    "unmount": ("c(libc.umount2(b'/mnt', 2))", "EPERM"),
    "pivot the root": ("raw(155, 41, b'/', b'/')", "EPERM"),
    "chroot": ("os.chroot('/')", "EPERM"),
    "raise a limit": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))", "ValueError|EPERM"),
    "host name": ("c(libc.sethostname(b'x', 1))", "EPERM"),
    "clock": ("time.clock_settime(time.CLOCK_REALTIME, 0.0)", "EPERM"),
    "reboot": ("raw(169, 142, 0, 0, 0)", "EPERM"),
    "kernel module": ("raw(175, 105, 0, 0, b'')", "EPERM"),
    "kernel log": ("raw(103, 116, 3, 0, 0)", "EPERM"),
    "bpf": ("raw(321, 280, 0, 0, 0)", "EPERM"),
    "performance counters": ("raw(298, 241, 0, 0, -1, -1, 0)", "EPERM"),
    "page faults": ("raw(323, 282, 1)", "EPERM"),
    "io_uring": ("raw(425, 425, 1, bytes(120))", "EPERM"),
    "old asynchronous i/o": ("raw(206, 0, 1, bytes(8))", "EPERM"),
    "keys": ("raw(250, 219, 0, -3, 1)", "EPERM"),
    "add a key": ("raw(248, 217, b'user', b'x', b'x', 1, -3)", "EPERM"),
    "personality": ("raw(135, 92, 0x0040000)", "EPERM"),
    "segments": ("raw(154, 0, 0, 0, 0) if MACHINE == 'x86_64' else os.fork()", "EPERM"),
    "input and output ports": ("raw(172, 0, 3) if MACHINE == 'x86_64' else os.fork()", "EPERM"),
    "shared memory": ("c(libc.shmget(0, 4096, 0o1777))", "EPERM"),
    "attach shared memory": ("raw(30, 196, 0, 0, 0)", "EPERM"),
    "semaphores": ("c(libc.semget(0, 1, 0o1777))", "EPERM"),
    "message queue": ("c(libc.msgget(0, 0o1777))", "EPERM"),
    "posix message queue": ("raw(240, 180, b'x', 0o102, 0o777, 0)", "EPERM"),
    "lock memory": ("raw(151, 230, 3)", "EPERM"),
    "signal handler": ("import signal; signal.signal(signal.SIGUSR1, lambda *_: 0)", "EPERM"),
    "signal itself": ("import signal; signal.raise_signal(9)", "EPERM"),
    "stop itself": ("os.kill(os.getpid(), 19)", "EPERM"),
    "timer": ("import signal; signal.setitimer(0, 0.01)", "EPERM"),
    "alarm": ("raw(37, 103, 1, 0, 0)", "EPERM"),
}
INTERPRETER = {
    "memory bomb": ("x = bytearray(1)\nwhile True: x = x + x", "MemoryError"),
    "memory bomb of lists": ("x = [0]\nwhile True: x = [x] + x * 2", "MemoryError"),
    "memory at once": ("bytearray(1 << 40)", "MemoryError"),
    "endless recursion": ("(f := lambda: f())()", "RecursionError"),
    "exit": ("raise SystemExit(0)", "fault:exception"),
    "interrupt": ("raise KeyboardInterrupt", "fault:exception"),
    "reply too large": ("raise Whole('y' * 2_000_000)", "fault:exception"),
    "reply that is no JSON": ("raise Whole(object())", "fault:exception"),
    "reply that is no number": ("raise Whole(float('nan'))", "fault:exception"),
    "reply of another type": ("raise Whole(1)", "fault:reply"),
    "reply without an end": ("x = []\nfor _ in range(500): x = [x]\nraise Whole(x)", "fault:reply"),
    "flood of output": ("sys.stdout.write('x' * 10_000_000)\nraise EOFError", "EOFError"),
    "flood of complaints": ("sys.stderr.write('x' * 3_000_000)\nraise EOFError", "EOFError"),
}
KILLERS = {
    "x32 call": ("raw(0x40000000 + 39, 0)" if platform.machine() == "x86_64" else "os._exit(1)", "fault:crash"),
    "32-bit call": (
        "machine_code(bytes.fromhex('53b814000000cd805bc3'))()" if platform.machine() == "x86_64" else "os._exit(1)",
        "fault:crash",
    ),
    "null pointer": ("ctypes.string_at(0)", "fault:crash"),
    "jump anywhere": ("ctypes.CFUNCTYPE(None)(1)()", "fault:crash"),
    "end the process": ("os._exit(0)", "fault:crash"),
    "abort": ("os.abort()", "fault:crash"),
    "overflow the C stack": (
        "x = ()\nfor _ in range(10**6): x = (x,)\nsys.setrecursionlimit(10**9); repr(x)",
        "fault:crash|fault:deadline|RecursionError|MemoryError",
    ),
    "close all descriptors": ("os.closerange(0, 64)", "fault:crash"),
    "scribble on all descriptors": (
        "for fd in range(64):\n    try: os.write(fd, b'\\xff' * 99)\n    except OSError: pass",
        "fault:reply",
    ),
    "announce a huge reply": ("os.write(4, (200_000_000).to_bytes(4, 'little') + b'x' * 9)", "fault:reply"),
    "answer twice": ("os.write(4, b'\\x02\\0\\0\\0[]' * 2)", "fault:reply"),
    "answer in another's place": (
        "b = b'[[null,[\"escaped\",false]]]' * 9\nos.write(4, len(b).to_bytes(4, 'little') + b)",
        "fault:reply",
    ),
    "say hello again": ("b = b'{\"seccomp\":null}'\nos.write(4, len(b).to_bytes(4, 'little') + b)", "fault:reply"),
}
HANGERS = {
    "sleep": ("time.sleep(10**6)", "fault:deadline"),
}
LONG_HANGERS = {
    "endless loop": ("while True: pass", "fault:deadline"),
    "hard expression": ("import re; re.match('(a+)+b', 'a' * 60)", "fault:deadline"),
    "large number": ("10 ** (10**8 - 1)", "fault:deadline"),
}
CAREFUL = {"tcp": NETWORK["tcp"], "read": FILES["read a secret"], "fork": PROCESSES["fork"]}
QUICK = {**NETWORK, **FILES, **PROCESSES, **PRIVILEGE, **INTERPRETER}
PROGRAMS = {**QUICK, **KILLERS, **HANGERS, **LONG_HANGERS}
EDIT = "as an edit: "


def as_function(name: str, body: str) -> str:
    """A program as a function of Python."""
    with contextlib.suppress(SyntaxError):
        ast.parse(body, mode="eval")
        body = f"return {body}"
    return f"def {name}(HOST, ZYGOTE, SECRET, FOLDER):\n" + textwrap.indent(body, "    ") + "\n"


def package(programs: dict[str, tuple[str, str]], environment: str = ENVIRONMENT) -> Package:
    """One package with a tool `deed_0`, `deed_1`, ... for every program, so that all have one worker; not checked by the static gate."""
    functions = [as_function(f"deed_{number}", body) for number, (body, _) in enumerate(programs.values())]
    source = PRELUDE + "".join(functions) + environment
    return Package(name="hostile", capability="", target="", version="1", knobs={}, max_turns=1, rationale="", source=source)


def attack(
    programs: dict[str, tuple[str, str]], without: tuple[str, ...] = (), workers: int = 1, deadline_s: float = 20.0
) -> dict[str, str]:
    """The outcome of every program, each with an innocent neighbour in its worker; `neighbours` is what became of these."""
    with contextlib.ExitStack() as stack:
        arguments = stack.enter_context(prey())
        folder, secret = arguments["folder"], pathlib.Path(arguments["secret"])
        pool = stack.enter_context(
            Pool(workers, deadline_s=deadline_s, memory_bytes=1 << 28, sandbox="require", quarantine=1000, _without=without)
        )
        assert set(REQUIRED) <= set(pool.layers) and not set(without) & set(pool.layers)
        arguments["zygote"] = zygote_of(pool)
        careful = package(CAREFUL)
        for number in range(len(CAREFUL)):  # before anything that could do harm
            episode = pool.open(careful, 0)
            assert pool.batch([(episode, "reset", ()), (episode, "call", (f"deed_{number}", arguments))])[1].text == "EPERM"
        hostile = package(programs)
        deeds = [pool.open(hostile, 0) for _ in programs]
        others = [pool.open(hostile, seed) for seed in range(len(deeds))]
        pairs = [pair for both in zip(deeds, others, strict=True) for pair in both]
        count = [(other, "call", ("count", {})) for other in others]
        pool.batch([(episode, "reset", ()) for episode in pairs])
        before = pool.batch(count)
        attempts = [(deed, "call", (f"deed_{number}", arguments)) for number, deed in enumerate(deeds)]
        answers = pool.batch([request for both in zip(attempts, count, strict=True) for request in both])
        after = pool.batch(count)
        outcomes = {name: _outcome(answer) for name, answer in zip(programs, answers[::2], strict=True)}
        found = [[_outcome(one) for one in step] for step in (before, answers[1::2], after)]
        harmed = [step for n, step in enumerate(found, 1) if step != [f"{seed}:{n}" for seed in range(len(deeds))]]
        assert sorted(os.listdir(folder)) == ["secret"] and secret.read_text() == "hunter2"
        return outcomes | {"neighbours": f"harmed: {harmed}" if harmed else "unharmed"}


@contextlib.contextmanager
def prey():
    """What programs are after: this process, and a secret in a folder that everybody may write to."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        secret = pathlib.Path(folder, "secret")
        secret.write_text("hunter2")
        yield {"host": os.getpid(), "secret": str(secret), "folder": folder}


def zygote_of(pool: Pool) -> int:
    """Process id of a pool's zygote, or of the host where there is none."""
    zygote = pool._launcher._zygote
    return os.getpid() if zygote is None else zygote.process.pid


def attack_as_programs(pool: Pool, programs: dict[str, tuple[str, str]], arguments: dict, deadline_s: int = 2) -> dict[str, str]:
    """The outcome of every program when it is what a code task runs, side by side with innocent programs: `neighbours`."""
    task = package({}, ENVIRONMENT + CODE_TASK)
    codes = [PRELUDE + as_function("deed", body) + f"result = outcome(deed, {arguments!r})" for body, _ in programs.values()]
    outcomes, harmed = [], []
    for first in range(0, len(codes), MAX_PROGRAMS // 2):
        chosen = codes[first : first + MAX_PROGRAMS // 2]
        both = [code for pair in zip(chosen, (f"result = {first + n}" for n in range(len(chosen))), strict=True) for code in pair]
        given = [{"files": {}, "code": code, "deadline_s": 1 if n % 2 else deadline_s} for n, code in enumerate(both)]
        episode = pool.open(task, first)
        score = pool.batch([(episode, "reset", ()), (episode, "call", ("", {"programs": given})), (episode, "score", ())])[2]
        if isinstance(score, EnvironmentFault):
            raise score
        results = score.checks[""].actual
        outcomes += [f"fault:{result['error']['kind']}" if result["error"] else str(result["value"]) for result in results[::2]]
        harmed += [n for n, result in enumerate(results[1::2], first) if result != {"value": n, "error": None}]
    return dict(zip(programs, outcomes, strict=True)) | {"neighbours": f"harmed: {harmed}" if harmed else "unharmed"}


def attack_with(part: str, without: tuple[str, ...] = ()) -> dict[str, str]:
    """The outcomes of the `quick` programs, of `most`, or of `all`; but for the first, as programs of a code task too."""
    outcomes = attack(QUICK, without)
    if part != "quick":
        outcomes |= attack(KILLERS, without) | {"neighbours of the quick": outcomes["neighbours"]}
        hangers = HANGERS | (LONG_HANGERS if part == "all" else {})
        outcomes |= attack(hangers, without, workers=2, deadline_s=3.0) | {"neighbours of killers": outcomes["neighbours"]}
        with prey() as arguments, Pool(memory_bytes=1 << 28, sandbox="require", _without=without) as pool:
            programs = QUICK | KILLERS | (hangers if part == "all" else {})
            found = attack_as_programs(pool, programs, arguments | {"zygote": zygote_of(pool)})
            assert sorted(os.listdir(arguments["folder"])) == ["secret"]
        outcomes |= {EDIT + name: outcome for name, outcome in found.items()}
    return outcomes


def surprises(outcomes: dict[str, str]) -> dict[str, str]:
    """The outcomes that are not as they must be, and what they must be."""
    expected = {name: outcome for name, (_, outcome) in PROGRAMS.items()}
    expected |= {EDIT + name: outcome for name, outcome in expected.items()} | {EDIT + "reply of another type": "1"}  # any JSON will do
    return {
        name: f"{found}, not {expected.get(name, 'unharmed')}"
        for name, found in outcomes.items()
        if found not in expected.get(name, "unharmed").split("|")
    }


def _outcome(answer: object) -> str:
    return f"fault:{answer.kind}" if isinstance(answer, EnvironmentFault) else answer.text


if __name__ == "__main__":
    print(json.dumps(attack_with(sys.argv[1], tuple(filter(None, sys.argv[2].split(","))))))
