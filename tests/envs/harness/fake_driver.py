"""A driver that misbehaves as its task says; the agent and the user talk in turns."""

import contextlib
import json
import os
import pathlib
import sys
import time

SYSTEM = "You are an agent."
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
NAMES = ["talk", "print", "raise", "crash", "hang", "stubborn", "graded", "environment", "outage", "nonsense", "slow", "pid"]
NAMES += ["verdict", "tools", "flood", "secret", "nested", "abyss"]


def describe(settings):
    print("to be hidden")
    tasks = [{"id": name, "split": "test" if name == "talk" else "train", "hash": "0" * 64} for name in NAMES]
    return {"version": "fake 1", "tasks": tasks, "tools": TOOLS, "settings": settings}


def run_episode(settings, task_id, seed, speak):
    print("to be hidden")
    if task_id == "raise":
        raise ValueError("a driver's\nown mistake " + os.environ.get("FAKE_KEY", ""))
    if task_id == "crash":
        sys.stderr.write("the last words " + os.environ.get("FAKE_KEY", ""))
        sys.stderr.flush()
        os._exit(3)
    if task_id == "hang":
        time.sleep(3600)
    if task_id == "slow":
        time.sleep(0.5)
    if task_id == "nonsense":
        return {"reward": 2.0}
    if task_id == "verdict":
        return {"reward": None, "error": "away"}
    if task_id == "tools":
        speak("agent", SYSTEM, [], [{"name": "add"}])
    if task_id == "secret":
        speak("agent", SYSTEM, [{"role": "user", "content": [os.environ.get("FAKE_KEY", "")]}], [])
    if task_id == "flood":
        speak("agent", SYSTEM, [{"role": "user", "content": "x" * (1 << 21)}], [])
    if task_id == "nested":
        inner = []
        for _ in range(700):
            inner = [inner]
        return {"reward": 1.0, "stop_reason": "done", "graded": inner}
    if task_id == "abyss":  # what the protocol's own pipe is made to say
        for pipe in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(pipe, b'{"id": 1, "end": ' + b"[" * 50_000 + b"\n")
    if task_id == "outage":
        return {"reward": None, "error": {"kind": "user", "message": "the simulator is away"}}
    user = [{"role": "user", "content": "hello " + str(seed)}]
    said = []
    try:
        if task_id == "environment":
            user[0]["content"] = json.dumps([sorted(os.environ), os.getcwd(), sys.stdin.read()])
        if task_id == "pid":
            user[0]["content"] = str(os.getpid())
        while True:
            said.append(speak("agent", SYSTEM, user, TOOLS))
            if said[-1]["tool_calls"]:
                user = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in said[-1]["tool_calls"]]
                continue
            answer = speak("user", "You are a user.", [{"role": "user", "content": said[-1]["content"]}], [])
            if "bye" in answer["content"]:
                return {"reward": 1.0, "stop_reason": "done", "graded": {"turns": len(said)}, "error": None, "record": said}
            user = [{"role": "user", "content": answer["content"]}]
    except speak.Stopped:
        if task_id == "stubborn":
            time.sleep(3600)
        if task_id == "graded":
            return {"reward": 0.0, "stop_reason": "invalid_action", "graded": {"turns": len(said)}, "error": None}
        if "file" in settings:
            pathlib.Path(settings["file"]).write_text("stopped")
        raise
