"""The process in which a benchmark's own program runs: `python -s worker.py DRIVER`, on the standard library of Python 3.9 and later.

A driver is a Python file, which may import what lies beside it, with two functions:

    describe(settings) -> {"version", "tasks": [{"id", "split", "hash", ...}], ...}
    run_episode(settings, task_id, seed, speak) -> {"reward", "stop_reason", "graded", "error", "record"}

`speak(speaker, system, messages, tools)` waits for the host's turn of "agent" or "user" and returns it as an assistant's message. Where the
host ends the episode it raises `speak.Stopped`, no `Exception`, so that a program that catches everything lets it pass.

Host and worker send each other JSON, a line a message, `id` naming the episode. To the worker: `{"op": "describe" | "start" | "turn" |
"stop", ...}`. To the host: `ask`, what the driver wants said; `end`, what it returned; `fault`, what it raised; `stopped`. Whatever the
program prints goes to the error output, which the host reads; it can neither write into the messages nor read them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import sys
import threading
import time
import traceback

_FAREWELL = 4.0  # seconds in which episodes may tidy up after the host has gone


class Stopped(BaseException):
    """The host has ended the episode."""


class Speak:
    """What a driver is given to speak with."""

    Stopped = Stopped

    def __init__(self, key, send):
        self._key, self._send, self._over = key, send, False
        self.answers = queue.SimpleQueue()  # messages, or None: stop

    def __call__(self, speaker, system, messages, tools):
        if not self._over and self.answers.empty():  # what is there before it was asked for is a stop
            self._ask(speaker, system, messages, tools)
        message = None if self._over else self.answers.get()
        if message is None:
            self._over = True
            raise Stopped("the host has ended the episode")
        return message

    def _ask(self, speaker, system, messages, tools):
        self._send({"id": self._key, "ask": {"speaker": speaker, "system": system, "messages": messages, "tools": tools}})


def main(path):
    """Serves the driver in the file `path` until the host closes the connection."""
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # the modules beside this one are the host's
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message):
        line = json.dumps(message, allow_nan=False)
        with lock:
            replies.write(line + "\n")
            replies.flush()

    driver = None
    episodes = {}

    def work(key, kind, function):
        """In a thread of its own: a call of the driver."""
        nonlocal driver
        try:
            with loading:
                driver = driver or _load(path)
            send({"id": key, kind: function(driver)})
        except Stopped:
            send({"id": key, "stopped": True})
        except BaseException as error:  # a driver may end in any way; the host says whose failure that is
            traceback.print_exc()
            send({"id": key, "fault": " ".join(f"{type(error).__name__}: {error}".split())[:4000] + _place(error, path)})
        finally:
            episodes.pop(key, None)

    loading = threading.Lock()
    for line in requests:
        request = json.loads(line)
        op, key = request["op"], request["id"]
        if op == "describe":
            call = (key, "described", lambda driver, r=request: driver.describe(r["settings"]))
        elif op == "start":
            speak = episodes[key] = Speak(key, send)
            call = (key, "end", lambda driver, r=request, s=speak: driver.run_episode(r["settings"], r["task"], r["seed"], s))
        else:
            if key in episodes:
                episodes[key].answers.put(request["message"] if op == "turn" else None)
            continue
        threading.Thread(target=work, args=call, daemon=True).start()

    for speak in list(episodes.values()):
        speak.answers.put(None)
    ends = time.monotonic() + _FAREWELL
    while episodes and time.monotonic() < ends:
        time.sleep(0.01)
    os._exit(0)


def _load(path):
    spec = importlib.util.spec_from_file_location("driver", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["driver"] = module
    sys.path.append(os.path.dirname(os.path.abspath(path)))  # the last: nothing beside a driver hides what is installed
    spec.loader.exec_module(module)
    for name in ("describe", "run_episode"):
        if not callable(getattr(module, name, None)):
            raise AttributeError(f"the driver has no function {name}; define it at the top level")
    return module


def _place(error, path):
    """Where the driver's own code was when it failed, if it was."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({os.path.basename(path)}, line {lines[-1]})" if lines else ""


if __name__ == "__main__":
    main(sys.argv[1])
