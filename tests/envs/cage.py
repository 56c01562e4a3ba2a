"""A cage for programs that freeze or kill what they reach: user, process, network, mount, IPC and host name namespaces of their own.

The caged process is the first of its process namespace: nothing that it starts can see or signal a process outside, it ends with the one
that made the cage, and everything inside ends with it. All mounted file systems are read-only, but for a fresh `/dev/shm`.
"""

import ctypes
import os
import resource
import signal
import socket
import time

NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, UTS, IPC, user, pid, net
PRIVATE_AND_BELOW, AT_FDCWD, AT_RECURSIVE, MOUNT_SETATTR = (1 << 18) | (1 << 14), -100, 0x8000, 442
UNMADE = 97  # exit code of a process that could not make its cage
SCRATCH = "/dev/shm"

libc = ctypes.CDLL(None, use_errno=True)


def run(function, timeout_s):
    """Runs `function()` in a cage; its exit code, UNMADE where the system allows none. The calling process must have one thread.

    Raises:
      TimeoutError: it took longer than `timeout_s`; it was ended.
    """
    unshared, make, mapped, go = (*os.pipe(), *os.pipe())
    child = os.fork()
    if not child:
        try:
            libc.prctl(1, signal.SIGKILL)
            os.close(unshared)
            os.close(go)
            _check(libc.unshare(NEW))
            os.write(make, b".")
            if not os.read(mapped, 1):
                os._exit(UNMADE)
            first = os.fork()
            if not first:
                os._exit(_first(function))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        except OSError as error:
            print(f"no cage: {error}", flush=True)
            os._exit(UNMADE)
    os.close(make)
    os.close(mapped)
    if os.read(unshared, 1):
        try:
            _map_users(child)
            os.write(go, b".")
        except OSError as error:  # without the word to go the child ends
            print(f"no cage: {error}", flush=True)
    os.close(unshared)
    os.close(go)
    end = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"the cage was ended after {timeout_s} s")
        time.sleep(0.05)


def find_hole():
    """What is not as it must be in a cage, None where all is."""
    with open("/proc/self/uid_map") as file:
        everybody = file.read().split()[2] == "4294967295"
    if os.getpid() != 1 or os.readlink("/proc/self") != "1":
        return "this is not the first process of a process namespace"
    if everybody:
        return "this is not a user namespace"
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "there is a network"
    if not os.statvfs("/").f_flag & os.ST_RDONLY or os.statvfs(SCRATCH).f_flag & os.ST_RDONLY:
        return "the file system can be written to"
    return None


def _first(function):
    """The life of the first process in the namespaces."""
    libc.prctl(1, signal.SIGKILL)
    _check(libc.mount(None, b"/", None, PRIVATE_AND_BELOW, None))
    read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    _check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(read_only), ctypes.c_size_t(32)))
    _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    _check(libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", 0, b"size=64m"))
    for limit, value in ((resource.RLIMIT_NPROC, 256), (resource.RLIMIT_CPU, 300), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if (hole := find_hole()) is not None:
        print(f"no cage: {hole}", flush=True)
        return UNMADE
    return function()


def _map_users(child):
    """Root gives the cage the ids of a container, anybody else only their own, as root."""
    maps = {"uid_map": "0 0 65536", "gid_map": "0 0 65536"}
    if os.geteuid():
        maps = {"setgroups": "deny", "uid_map": f"0 {os.geteuid()} 1", "gid_map": f"0 {os.getegid()} 1"}
    for name, text in maps.items():
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(text)


def _check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
