"""An OpenAI-compatible endpoint on a port of its own that says, or does wrong, what a script tells it.

    with scripted_llm(lambda request: '{"x": 1}') as server:
        ... server.url, server.requests, server.answered

A script gets a request's parsed body and returns the text of the answer, or a `Reply` for everything else: `status`, `slow`, `cut`, ...
It runs in the server's only thread, one request after the other; it may keep a state.
"""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable

from aiohttp import web

ORGANISATION = "acme-corp"  # in a header of every reply, as the real one has


@dataclasses.dataclass(frozen=True)
class Reply:
    """Attributes:
    body: the whole body; None: a chat completion of `content`, `refusal`, `finish`.
    usage: whether the completion says how many tokens it took.
    delay: seconds before anything is sent.
    share: of the body that is sent; then the connection ends.
    """

    content: str | None = None
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: str | None = None
    type: str = "application/json"
    refusal: str | None = None
    finish: str = "stop"
    usage: bool = True
    delay: float = 0.0
    share: float = 1.0


def status(code: int, message: str = "no", **headers: str) -> Reply:
    """An error in OpenAI's form."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=code, headers=names, body=json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}}))


def slow(seconds: float, text: str = "late") -> Reply:
    return Reply(text, delay=seconds)


def cut(text: str) -> Reply:
    return Reply(text, finish="length")


def refusal(text: str = "I cannot help with that.") -> Reply:
    return Reply(refusal=text)


def html(text: str = "<html><body>Sign in</body></html>") -> Reply:
    return Reply(body=text, type="text/html")


def truncated() -> Reply:
    """JSON that ends in the middle, of the length that the header says."""
    return Reply(body='{"id": "c1", "object": "chat.completion", "choices": [{"index": 0, "mess')


def dropped() -> Reply:
    """The connection ends in the middle of the body."""
    return Reply("never seen whole", share=0.5)


EMPTY_BODY = Reply(body="")


def in_turn(*replies: str | Reply) -> Callable[[dict], str | Reply]:
    """A script that does one after the other, and the last of them for ever."""
    waiting = list(replies)
    return lambda request: waiting.pop(0) if len(waiting) > 1 else waiting[0]


@dataclasses.dataclass
class Server:
    """Attributes:
    requests: parsed bodies, in the order in which they came.
    headers: those of the same requests, names in lower case.
    answered: completions that were sent whole.
    most: requests that were open at once.
    """

    script: Callable[[dict], str | Reply]
    url: str = ""
    requests: list[dict] = dataclasses.field(default_factory=list)
    headers: list[dict] = dataclasses.field(default_factory=list)
    answered: int = 0
    most: int = 0
    _open: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        self.requests.append(asked)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            said = self.script(asked)
            return await self._send(request, asked, Reply(said) if isinstance(said, str) else said)
        except ConnectionResetError:  # the client has gone
            return web.Response()
        finally:
            self._open -= 1

    async def _send(self, request: web.Request, asked: dict, said: Reply) -> web.StreamResponse:
        await asyncio.sleep(said.delay)
        body = (json.dumps(completion(asked, said)) if said.body is None else said.body).encode()
        headers = {"openai-organization": ORGANISATION, "x-request-id": "req_1", "content-type": said.type, **said.headers}
        response = web.StreamResponse(status=said.status, headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        await response.write(body[: int(len(body) * said.share)])
        if said.share < 1.0:
            request.transport.close()
            return response
        await response.write_eof()
        self.answered += said.status == 200 and said.body is None
        return response


def completion(asked: dict, said: Reply) -> dict:
    prompt = sum(len(message["content"]) for message in asked["messages"]) // 4
    counts = {"prompt_tokens": prompt, "completion_tokens": len(said.content or "") // 4 + 1}
    message = {"role": "assistant", "content": said.content, "refusal": said.refusal}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": asked["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": said.finish}],
        **({"usage": counts | {"total_tokens": sum(counts.values())}} if said.usage else {}),
    }


@contextlib.contextmanager
def scripted_llm(script: Callable[[dict], str | Reply]):
    """The running `Server`; `url` is what OPENAI_BASE_URL is set to."""
    server, loop, started = Server(script), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
