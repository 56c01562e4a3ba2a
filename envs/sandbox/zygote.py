"""The zygote: has imported all that environments may use, and forks itself into a worker whenever the host asks.

The host starts this file as a script under an isolated interpreter with an empty environment; it was never a fork of the host and holds
nothing of it. It has one thread, reads no message but the host's and never runs an environment's code: a worker that it forks locks itself
down first (`envs.sandbox.worker.live`). Its standard input is a socket of packets: `["fork", arguments]`, with the worker's three standard
streams as descriptors, gives a process id; `["wait", id]` gives the exit code of that process; a text says why not. Until the host has
waited for it an ended worker keeps its id, so the host never signals a stranger. The zygote ends when its channel does, and the workers
end with it.
"""

import _socket
import gc
import importlib
import json
import os
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader

PACKET_BYTES = 10_000


def load_worker():
    """worker.py of this folder as a module; the folder is on no path."""
    module = types.ModuleType("worker")
    module.__file__ = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    SourceFileLoader("worker", module.__file__).exec_module(module)
    return module


def fork(worker, parts, streams, arguments):
    """A worker, which never returns from here; its process id."""
    host = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)  # the host's socket is gone with the first
        worker.live(*parts, host, *arguments)
        code = 0
    except BaseException:  # the process ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(host, modules):
    """The life of a zygote; the arguments as in `envs.sandbox.launch`."""
    worker = load_worker()
    parts = worker.load_parts()
    worker.prepare(modules.split(","))
    sys.argv[:] = sys.argv[:1]
    for name in ("_socket", "traceback"):
        importlib.import_module(name)
    channel = _socket.socket(fileno=0)
    del sys.modules["_socket"]
    gc.collect()
    gc.freeze()  # so that collections in the workers leave shared pages alone
    channel.settimeout(1.0)  # a fork of the host may keep its end of the channel open
    while os.getppid() == int(host):
        try:
            packet, ancillary, _, _ = channel.recvmsg(PACKET_BYTES, _socket.CMSG_SPACE(64))
        except TimeoutError:
            continue
        if not packet:
            return
        streams = memoryview(b"".join(data for _, _, data in ancillary)).cast("i").tolist()
        op, argument = json.loads(packet)
        try:
            if op == "fork":
                answer = fork(worker, parts, streams, argument)
            else:
                answer = os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1])
        except OSError as error:  # no memory, too many processes
            answer = str(error)
        for descriptor in streams:
            os.close(descriptor)
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
