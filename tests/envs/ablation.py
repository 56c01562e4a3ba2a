"""What each layer of the lock-down lets through when it stands alone: the hostile programs beside sets of layers.

    python -m tests.envs.ablation [--json] [SET ...]

Everything runs in a cage (`tests.envs.cage`), and what the programs take for their host is a process that is there to be harmed: some of
them stop or kill what they reach. Outside a cage nothing runs. Programs that multiply without an end are left out, since root's processes
have no limit in a user namespace; `children` makes fifty. Each program has a fresh worker, a victim and a folder of its own. A cell says

  .         held: refused (EPERM, EACCES), or ended as it ends under all layers
  THROUGH   it did its deed, or the victim was stopped or ended
  else      nothing held it, and what came of it was something else: an errno of its own (ENOTSOCK), `crash` (exec has replaced the worker),
            `deadline` (it walks the file system to this day)

All sets take two minutes. Exits with 97 where the system allows no cage.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from envs import Pool
from envs.sandbox.lockdown import LAYERS, REQUIRED
from envs.sandbox.programs import Program
from tests.envs import cage, hostile

DANGEROUS = {
    "end the host": ("os.kill(HOST, 9)", "EPERM"),
    "end everybody": ("os.kill(-1, 9)", "EPERM"),
    "stop the host": ("os.kill(HOST, 19)", "EPERM"),
    "attach to the host": ("raw(101, 117, 16, HOST, 0, 0); time.sleep(0.2)", "EPERM"),
    "end the zygote": ("os.kill(ZYGOTE, 9)", "EPERM"),
    "children": ("for _ in range(50):\n    if not os.fork(): time.sleep(1), os._exit(0)", "EPERM"),
}
PROGRAMS = {**hostile.NETWORK, **hostile.FILES, **hostile.PROCESSES, **hostile.PRIVILEGE, **DANGEROUS}
SETS = {
    "none": (),
    "uid": ("uid",),
    "namespaces": ("namespaces",),
    "limits": ("limits",),
    "no_new_privs": ("no_new_privs",),
    "landlock": ("no_new_privs", "landlock"),  # as whoever is not root must have it
    "seccomp": ("no_new_privs", "seccomp"),
    "required": REQUIRED,
    "all": LAYERS,
}
TIMEOUT_S = 300
HELD = ("EPERM", "EACCES")


def measure(sets):
    """{set of layers: {program: outcome}}.

    Raises:
      RuntimeError: this is no cage.
    """
    if (hole := cage.find_hole()) is not None:
        raise RuntimeError(f"the programs run in a cage only: {hole}; run python -m tests.envs.ablation")
    found = {}
    for name in sets:
        with Pool(memory_bytes=1 << 28, _without=tuple(layer for layer in LAYERS if layer not in SETS[name])) as pool:
            if name != "all" and set(pool.layers) != set(SETS[name]):
                print(f"{name} is left out: {pool.describe()}", file=sys.stderr)
                continue
            found[name] = {program: attempt(pool, body) for program, (body, _) in PROGRAMS.items()}
    return found


def attempt(pool, body):
    """What becomes of one program in a fresh worker."""
    with tempfile.TemporaryDirectory(dir=cage.SCRATCH, ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        secret = pathlib.Path(folder, "secret")
        secret.write_text("hunter2")
        secret.chmod(0o666)
        with subprocess.Popen(["sleep", "1000"], env={"TOKEN": "hunter2"}) as victim:
            where = {"host": victim.pid, "zygote": hostile.zygote_of(pool), "secret": str(secret), "folder": folder}
            code = hostile.PRELUDE + hostile.as_function("deed", body) + f"result = outcome(deed, {where!r})"
            (result,) = pool._programs.run([Program({}, code, 1)])
            time.sleep(0.01)
            harmed = pathlib.Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZTt"
            harmed |= pool._launcher._zygote.process.poll() is not None
            victim.kill()
        with contextlib.suppress(OSError):
            os.unlink("/dev/shm/hostile")
    while orphan_ended():
        pass
    if harmed:
        return "THROUGH"
    if result["error"]:
        return result["error"]["kind"]
    return "THROUGH" if result["value"].startswith("escaped") else result["value"]


def orphan_ended():
    """Waits for a process that was left to the first one of the cage, if any has ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0]
    return 0


def cell(program, outcome):
    return "." if outcome in (*HELD, *PROGRAMS[program][1].split("|")) else outcome


def print_table(found):
    print(f"{'':30}" + "".join(f"{name:>14}" for name in found))
    for program in PROGRAMS:
        print(f"{program:30}" + "".join(f"{cell(program, outcomes[program])[:13]:>14}" for outcomes in found.values()))
    for word, matches in (("through", "THROUGH".__eq__), ("held", ".".__eq__)):
        counts = [sum(matches(cell(program, outcome)) for program, outcome in outcomes.items()) for outcomes in found.values()]
        print(f"{f'{word}, of {len(PROGRAMS)}':30}" + "".join(f"{count:>14}" for count in counts))


def caged():
    words = sys.argv[1:]
    found = measure([word for word in words if word != "--json"] or SETS)
    print(json.dumps(found)) if "--json" in words else print_table(found)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(cage.run(caged, TIMEOUT_S))
