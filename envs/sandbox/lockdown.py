"""The kernel's side of the sandbox: a worker locks itself down before it runs a line of an environment's code.

Code that a language model wrote shares an interpreter with the worker's loop, so nothing in Python holds it. What holds it is what the
kernel grants the process, and none of these layers can be taken off again:

  namespaces     a network, System V memory and a host name of its own, with nothing in them
  uid            a user that owns nothing, where the worker starts as root
  limits         no processes, no growing file, 64 descriptors; memory and CPU time as given
  no_new_privs   no set-user-id programs, no capabilities, no looking into it from outside; it dies with its zygote
  landlock       no file system, no TCP port, no signal and no abstract socket beyond itself
  seccomp        the few system calls that compute, allocate and talk over open pipes; all others fail with EPERM

`limits`, `no_new_privs` and `seccomp` close the process by themselves, since no file can be opened and no socket made; the others are there
for the day on which one of these has a hole. The order matters: namespaces need root's capabilities, a change of user forgets the
parent-death signal, Landlock and seccomp need no_new_privs, and after seccomp none of the calls above exists.

No file can be opened afterwards, so all modules must have been imported. The standard library alone is used: the worker loads this file by
its path, under an interpreter that sees no other package.
"""

import errno
import os
import resource
import sys

LAYERS = ("namespaces", "uid", "limits", "no_new_privs", "landlock", "seccomp")
REQUIRED = ("limits", "no_new_privs", "seccomp")
SPARE_UID = 65_533  # inside the 65,536 ids that a container usually has; nobody's 65,534 is shared with others

# include/uapi/linux: sched.h, prctl.h, capability.h, landlock.h, seccomp.h, filter.h, audit.h
_NEW_UTS_IPC_NET, _NEW_USER = 0x04000000 | 0x08000000 | 0x40000000, 0x10000000
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CAPABILITY_VERSION_3, _KILL_OTHERS = 0x20080522, 5
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # Landlock ABI: so many rights over files from then on
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# what a worker may call, by the numbers of these two
_ALLOWED = """
read              0   63    write              1   64    close              3   57    getpid           39  172
brk              12  214    mmap               9  222    munmap            11  215    mremap           25  216
mprotect         10  226    madvise           28  233    futex            202   98    sched_yield      24  124
clock_gettime   228  113    clock_getres     229  114    clock_nanosleep  230  115    nanosleep        35  101
gettimeofday     96  169    time             201    -    times            100  153    getrusage        98  165
rt_sigprocmask   14  135    rt_sigreturn      15  139    sigaltstack      131  132    restart_syscall 219  128
getrandom       318  278    exit              60   93    exit_group       231   94
"""
_TRIED = "socket 41 198 openat 257 56"  # what must fail
_CLONE3 = 435


def restrain(memory_bytes, cpu_seconds, parent):
    """What every worker has, locked down or not: limits that stop accidents, and an end together with the process that started it.

    Linux ends the process when the thread that started it ends; elsewhere the end of the request pipe does, between messages.
    """
    _limit(AS=memory_bytes, CPU=cpu_seconds + 1, CORE=0, NOFILE=64)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_seconds, hard), hard))  # SIGXCPU, which says what it was; a second later SIGKILL
    if sys.platform == "linux":
        _die_with_parent()
    if os.getppid() != parent:
        sys.exit("the host has gone")


def lock_down(without=()):
    """Puts on every layer that this system has, whatever becomes of the others.

    Args:
      without: layers to leave out.

    Returns:
      {layer: None where it is on, else why it is not}; a layer that there is no use for, `uid` without root, is not named.
    """
    if sys.platform != "linux":
        return {layer: f"there is none on {sys.platform}" for layer in LAYERS if layer != "uid" or os.geteuid() == 0}
    found = {}

    def put_on(layer, function, *arguments):
        if layer in without:
            found[layer] = "left out"
            return
        try:
            function(*arguments)
            found[layer] = None
        except (OSError, ImportError, AttributeError) as error:  # refused; an interpreter without ctypes; a libc without the function
            found[layer] = str(error)

    put_on("namespaces", _leave, _NEW_UTS_IPC_NET)
    if os.geteuid() == 0:
        put_on("uid", _change_user)
    if found["namespaces"]:  # without the capability it takes a user namespace, in which root could not become anybody else any more
        put_on("namespaces", _leave, _NEW_USER | _NEW_UTS_IPC_NET)
    put_on("limits", _limit_to_computing)
    put_on("no_new_privs", _renounce)
    put_on("landlock", _close_files)
    put_on("seccomp", _filter_calls)
    return found


def _limit(**limits):
    for name, value in limits.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _limit_to_computing():
    _limit(FSIZE=0, MEMLOCK=0, MSGQUEUE=0, **({} if os.geteuid() == 0 else {"NPROC": 0}))  # root may have any number of processes


def _leave(kinds):
    _check(_libc().unshare(kinds))


def _change_user():
    with open("/proc/self/status") as file:
        capabilities = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    if not capabilities >> _KILL_OTHERS & 1:  # a container may leave it out
        raise OSError(errno.EPERM, "the host could not end a worker of another user without CAP_KILL")
    os.setgroups([])
    os.setresgid(SPARE_UID, SPARE_UID, SPARE_UID)
    os.setresuid(SPARE_UID, SPARE_UID, SPARE_UID)


def _die_with_parent():
    _prctl(_SET_PDEATHSIG, 9)


def _renounce():
    import ctypes

    _die_with_parent()  # again: a change of user forgot it
    _prctl(_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)()))  # all that a user namespace gave
    _prctl(_SET_DUMPABLE, 0)


def _close_files():
    """A Landlock ruleset that governs every right the kernel knows of and grants none."""
    import ctypes

    abi = _syscall(_LANDLOCK_CREATE, None, 0, 1)
    rights = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= abi)]
    # struct landlock_ruleset_attr: file rights; bind and connect of TCP from ABI 4; abstract sockets and signals from ABI 6
    fields = [(1 << rights) - 1, *([0b11] if abi >= 4 else []), *([0b11] if abi >= 6 else [])]
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = _syscall(_LANDLOCK_CREATE, ctypes.addressof(attributes), ctypes.sizeof(attributes), 0)
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def system_calls(table, machine):
    """The numbers of a table's calls on a machine, by name.

    Raises:
      OSError: no numbers are known for it.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}")
    words = table.split()
    numbers = words[1 + list(_ARCHITECTURES).index(machine) :: 3]
    return {name: int(number) for name, number in zip(words[::3], numbers, strict=True) if number != "-"}


def filter_program(machine):
    """The seccomp filter of a machine as (code, jump if true, jump if false, constant) of classic BPF.

    Raises:
      OSError: no numbers are known for it.
    """
    allowed = system_calls(_ALLOWED, machine)
    audit = _ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]  # no 32-bit calls on the side
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in allowed.values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    # where clone3 is unknown the C library tries clone
    return [*program, (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS), (_RETURN, 0, 0, _FAIL | errno.EPERM)]


def _filter_calls():
    import ctypes

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]

    machine = os.uname().machine
    if sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, f"no system call numbers for a 32-bit interpreter on {machine}")
    instructions = filter_program(machine)
    program = Program(len(instructions), (Instruction * len(instructions))(*instructions))
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(program))
    for name, number in system_calls(_TRIED, machine).items():  # a system that only says yes is found out here
        try:
            _syscall(number, -1, None, 0)
        except PermissionError:
            continue
        except OSError as error:
            raise OSError(error.errno, f"the filter lets {name} through") from None
        raise OSError(errno.EINVAL, f"the filter lets {name} through")


def _libc():
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _prctl(option, argument, pointer=0):
    import ctypes

    _check(_libc().prctl(option, *map(ctypes.c_ulong, (argument, pointer, 0, 0))))


def _syscall(number, *arguments):
    import ctypes

    function = _libc().syscall
    function.restype = ctypes.c_long
    return _check(function(*map(ctypes.c_long, (number, *(argument or 0 for argument in arguments)))))


def _check(result):
    import ctypes

    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
