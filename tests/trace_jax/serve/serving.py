"""A server in a thread, and an engine that says what a test wants it to say."""

import contextlib
import functools
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import openai

from rl.engines.protocol import Completion, EngineError
from trace_jax.serve.app import Service
from trace_jax.serve.command import Server
from trace_jax.serve.decoding import Decoder


@contextlib.contextmanager
def serving(chat, engine, models, vocabulary):
    """The base URL of a server over an engine, and its decoder."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    decoder = Decoder(engine)
    server = Server(Service(chat, decoder, models, vocabulary), decoder, url)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    with decoder:
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield url, decoder
        finally:
            decoder.stop()
            server.should_exit = True
            thread.join()


@functools.cache
def client(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def send(url, path, body=None, headers=None):
    """Status and parsed body of a raw request; `body` bytes, or what becomes JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers or {}), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


class ScriptedEngine:
    """Answers every request with the same text, two tokens a call; `cut` leaves the end of the turn out."""

    lanes, context, metrics, gauges, room = 4, 4096, {}, {}, 4096

    def __init__(self, chat):
        self.chat = chat
        self.reset()

    def reset(self):
        self.text, self.cut, self.holding, self.failing = "", False, False, False
        self.requests, self.released, self._running = [], [], {}

    def say(self, text, *, cut=False):
        self.text, self.cut = text, cut

    def submit(self, request):
        if self.failing == "submit":
            raise EngineError("not today")
        self.requests.append(request)
        self._running[request.session] = []

    def poll(self):
        if self.failing == "poll":
            raise FloatingPointError("the device is gone")
        time.sleep(0.002)
        done = []
        for session, said in list(self._running.items()) if not self.holding else ():
            script = self.chat.tokenizer.encode(self.text, add_special_tokens=False) + [self.chat.end] * (not self.cut)
            said += script[len(said) : len(said) + 2]
            if len(said) == len(script):
                del self._running[session]
                tokens = np.array(said, np.int32)
                done.append(Completion(session, tokens, np.full(len(said), -0.5), "length" if self.cut else "stop", 0))
        return done

    def partial(self, session, start=0):
        tokens = self._running[session][start:]
        return tokens, [-0.5] * len(tokens)

    def release(self, session):
        self._running.pop(session, None)
        self.released.append(session)
