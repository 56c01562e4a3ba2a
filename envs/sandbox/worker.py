"""What runs in a worker process: many episodes of many packages, one message in, one message out.

The host starts this file as a script under an isolated interpreter, so it imports the standard library alone. A message is a 4-byte length
and JSON: `{"packages": {digest: source}, "free": [episode], "requests": [[episode, op, arguments]]}` in,
`[[fault or null, value], ...]` out, in the same order. An exception of an environment ends its episode and nobody else's. The process is
limited in memory, CPU time and files, but the kernel is not locked down yet: see `envs.sandbox.host`.
"""

import json
import linecache
import os
import resource
import struct
import sys
import traceback
import types

HEADER = struct.Struct("<I")
SURPLUS = "the reply is larger than {} bytes"


def limit(memory_bytes, cpu_seconds):
    """Limits that stop accidents: a memory bomb raises MemoryError, an endless loop that outlived its host ends."""
    for name, value in (("AS", memory_bytes), ("CPU", cpu_seconds), ("CORE", 0), ("NOFILE", 64)):
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def die_with_parent(parent):
    """Linux ends this process when the thread that started it ends; elsewhere the end of the request pipe does, between messages."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        sys.exit("the host has gone")


class Worker:
    """The packages and episodes of this process."""

    def __init__(self, reply_limit):
        self.reply_limit = reply_limit
        self.sources = {}
        self.modules = {}
        self.episodes = {}
        self.encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode

    def module(self, digest):
        """The package's module; its code runs when it is first needed, inside the request that needs it."""
        if digest not in self.modules:
            name = "environment_" + digest[:16]
            source = self.sources[digest]
            module = types.ModuleType(name)
            linecache.cache[name + ".py"] = (len(source), None, source.splitlines(True), name + ".py")  # lines in tracebacks
            sys.modules[name] = module  # where dataclasses look up annotations
            exec(compile(source, name + ".py", "exec", dont_inherit=True), module.__dict__)
            self.modules[digest] = module
        return self.modules[digest]

    def perform(self, key, op, arguments):
        """One request; what it raises is the environment's."""
        if op == "function":
            digest, name, arguments = arguments
            module = self.module(digest)
            return module.TOOLS if name == "tools" else getattr(module, name)(*arguments)
        if op == "reset":
            digest, seed, knobs = arguments
            self.episodes.pop(key, None)
            environment = self.module(digest).Environment()
            start = environment.reset(seed, knobs)
            self.episodes[key] = environment
            return start
        environment = self.episodes[key]
        if op == "score":
            return environment.score()
        result = environment.call(*arguments) if op == "call" else environment.respond(*arguments)
        return [result, environment.done()]

    def answer(self, key, op, arguments):
        """The encoded reply to one request."""
        try:
            # replace: an agent may write lone surrogates, and a tool may quote them
            reply = self.encode([None, self.perform(key, op, arguments)]).encode("utf-8", "replace")
            if len(reply) <= self.reply_limit:
                return reply
            fault = SURPLUS.format(self.reply_limit)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: guest code must not end the worker of others
            # Guest code may raise what cannot even be printed, hence the second net.
            try:
                fault = "".join(traceback.format_exception(error, limit=-4))[-3000:].encode("utf-8", "replace").decode()
            except BaseException as second:
                fault = type(second).__name__ + " while an exception was printed"
        self.episodes.pop(key, None)
        return self.encode([fault, None]).encode()

    def serve(self, requests, replies):
        """Messages until the host closes the pipe."""
        while header := requests.read(HEADER.size):
            message = json.loads(requests.read(HEADER.unpack(header)[0]))
            self.sources.update(message["packages"])
            for key in message["free"]:
                self.episodes.pop(key, None)
            body = b"[" + b",".join([self.answer(*request) for request in message["requests"]]) + b"]"
            replies.write(HEADER.pack(len(body)) + body)
            replies.flush()


if __name__ == "__main__":
    reading, writing, host, memory, cpu, reply_bytes = map(int, sys.argv[1:])
    die_with_parent(host)
    limit(memory, cpu)
    Worker(reply_bytes).serve(os.fdopen(reading, "rb"), os.fdopen(writing, "wb"))
