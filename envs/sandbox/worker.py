"""What runs in a worker process: many episodes of many packages, one message in, one message out.

A zygote forks it (`envs.sandbox.zygote`), or the host starts this file as a script; both run under an isolated interpreter, so the standard
library alone is used. What environments may use has been imported when the worker locks itself down (`envs.sandbox.lockdown`); then it says
which layers are on, `{layer: null or why not}`. Then a message is a 4-byte length and JSON:
`{"packages": {digest: source}, "free": [episode], "requests": [[episode, op, arguments]]}` in, `[[fault or null, value], ...]` out, in the
same order. An exception of an environment ends its episode and nobody else's. A process that runs a program of a code task
(`envs.sandbox.programs`) gets that one request in its life.
"""

import contextlib
import hashlib
import importlib
import json
import linecache
import os
import struct
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader

HEADER = struct.Struct("<I")
REQUESTS, REPLIES = 3, 4  # descriptors
SURPLUS = "the reply is larger than {} bytes"


# What the modules that environments may import import only in the middle of their work.
LAZY = """
_strptime collections.abc contextlib html.entities html.parser inspect json.scanner locale reprlib signal struct tokenize types warnings
weakref
""".split()
DIGESTS = "_blake2 _md5 _sha1 _sha2 _sha256 _sha3 _sha512".split()  # of random and hashlib; each Python has some of them
ENCODINGS = """
aliases ascii base64_codec cp1252 hex_codec idna iso8859_15 latin_1 punycode raw_unicode_escape rot_13 unicode_escape utf_7 utf_8_sig utf_16
utf_16_be utf_16_le utf_32 utf_32_be utf_32_le
""".split()


def load_sibling(name):
    """A file of this folder as a module; the folder is on no path."""
    module = types.ModuleType(name)
    SourceFileLoader(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")).exec_module(module)
    return module


def prepare(modules):
    """Loads all that is read from files, since none can be opened later."""
    for name in (*modules, *LAZY, *("encodings." + name for name in ENCODINGS)):
        importlib.import_module(name)
    for name in hashlib.algorithms_guaranteed:
        with contextlib.suppress(ValueError):  # some systems refuse the old ones
            hashlib.new(name)
    for name in (*DIGESTS, "ctypes"):  # the last is the lock-down's, and half of its time
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for source in ("nothing", "''.nothing", "1 +"):  # a traceback, with what it suggests
        try:
            exec(source, {})
        except Exception as error:
            traceback.format_exception(error)


class Worker:
    """The packages and episodes of this process."""

    def __init__(self, reply_limit, run_program):
        self.reply_limit, self.run_program = reply_limit, run_program
        self.sources = {}
        self.modules = {}
        self.episodes = {}
        self.decode = json.JSONDecoder().raw_decode  # what the host sends begins and ends without spaces
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
        if op == "program":
            return self.run_program(*arguments)
        if op == "reset":
            digest, seed, knobs = arguments
            self.episodes.pop(key, None)
            environment = self.module(digest).Environment()
            start = environment.reset(seed, knobs)
            self.episodes[key] = environment
            return start
        environment = self.episodes[key]
        if op == "score":
            if not arguments and hasattr(environment, "programs"):
                return {"programs": environment.programs()}  # the host asks again, with their results
            return environment.score(*arguments)
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
            message, _ = self.decode(requests.read(HEADER.unpack(header)[0]).decode())
            self.sources.update(message["packages"])
            for key in message["free"]:
                self.episodes.pop(key, None)
            send(replies, b"[" + b",".join([self.answer(*request) for request in message["requests"]]) + b"]")


def send(replies, body):
    """One message to the host."""
    replies.write(HEADER.pack(len(body)) + body)
    replies.flush()


def load_parts():
    """The other files that a worker needs: the module `lockdown`, and the function that runs a program."""
    return load_sibling("lockdown"), load_sibling("memory_modules").run


def live(lockdown, run_program, parent, memory_bytes, cpu_seconds, reply_bytes, locked, without):
    """The life of a worker; the host's pipes are its standard input and output at first, the rest is as in `envs.sandbox.launch`."""
    os.dup2(0, REQUESTS)
    os.dup2(1, REPLIES)
    os.closerange(REPLIES + 1, 256)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    lockdown.restrain(int(memory_bytes), int(cpu_seconds), parent)
    with os.fdopen(REQUESTS, "rb") as requests, os.fdopen(REPLIES, "wb") as replies:
        send(replies, json.dumps(lockdown.lock_down(without.split(",")) if locked == "locked" else {}).encode())
        Worker(int(reply_bytes), run_program).serve(requests, replies)


def main(host, modules, *options):
    """A worker that was started on its own."""
    parts = load_parts()
    prepare(modules.split(","))
    live(*parts, int(host), *options)


if __name__ == "__main__":
    main(*sys.argv[1:])
