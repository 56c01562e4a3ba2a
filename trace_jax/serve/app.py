"""The routes: what a client asks is checked, encoded, sampled with everybody else's, and answered in OpenAI's form.

`/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/metrics`. Nothing is allowed across origins. Whatever goes wrong, the
client reads OpenAI's error object and no traceback.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.chat import Chat
from rl.engines import protocol
from rl.engines.protocol import EngineError
from rl.tool_calls import OPEN
from trace_jax.serve.answers import Answer
from trace_jax.serve.decoding import Decoder, Unavailable
from trace_jax.serve.prometheus import Counts
from trace_jax.serve.reply import Delta, Splitter, Text, Turn
from trace_jax.serve.schema import ApiError, Asked, ChatAsked, CompletionAsked, read_chat, read_completion, read_json

LARGEST_BODY = 32 * 2**20
_DRAINED = 8 * LARGEST_BODY  # read and dropped, so that the client gets to read why
BEGUN = f"{OPEN}\n"  # what a call begins with in both forms
_COLDEST = 1e-4  # below it the likeliest token is taken; float32 logits over less would overflow


class Service:
    """What the routes share.

    Args:
      models: the name that clients say to the engine's policy.
      vocabulary: ids are below it.
    """

    def __init__(self, chat: Chat, decoder: Decoder, models: Mapping[str, protocol.Policy], vocabulary: int):
        self.chat, self.decoder, self.models, self.vocabulary = chat, decoder, models, vocabulary
        self.context, self.counts, self.created = decoder.engine.context, Counts(), int(time.time())
        self._hidden = frozenset(chat.control.values())
        # the end of a turn, and that of a text, with which base models end theirs
        self._ends = (*chat.stop, *(chat.control[name] for name in ("<|endoftext|>",) if chat.control.get(name) not in (None, chat.end)))
        self._thinking = "<think>" in chat.tokenizer.chat_template
        self._encoder = concurrent.futures.ThreadPoolExecutor(1, "encoder")  # a long prompt must not hold up the streams of others

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(_Counting, counts=self.counts)],
            exception_handlers={
                ApiError: lambda _, error: JSONResponse(error.body, error.status),
                EngineError: lambda _, error: _failed(400, str(error)),
                Unavailable: lambda _, error: _failed(503, str(error)),
                HTTPException: lambda _, error: _failed(error.status_code, error.detail, error.headers),
                ClientDisconnect: lambda _, error: Response(status_code=499),
                Exception: lambda _, error: _failed(500, "internal error; the server's own output says more"),
            },
        )

    # --- routes

    async def _chat_completions(self, request: Request) -> Response:
        return await self._answer(request, read_chat(read_json(await _read_body(request))))

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion(read_json(await _read_body(request))))

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.models]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._policy(name)
        return JSONResponse(self._model_card(name))

    async def _health(self, request: Request) -> Response:
        self.decoder.check()
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        engine = self.decoder.engine
        gauges = {"requests_running": self.decoder.running, "lanes": engine.lanes}
        gauges |= {f"engine_{name}": value for name, value in engine.gauges.items() if name != "lanes"}
        return PlainTextResponse(self.counts.render(gauges, engine.metrics), media_type="text/plain; version=0.0.4")

    # --- an answer

    async def _answer(self, request: Request, asked: ChatAsked | CompletionAsked) -> Response:
        policy = self._policy(asked.model)
        prompts, inside = await asyncio.get_running_loop().run_in_executor(self._encoder, self._encode, asked)
        self.decoder.check()
        answer = Answer(asked, self.chat, prompts, f"{policy.name}@{policy.version}")
        turns = [self._turn(asked, inside) for _ in range(len(prompts) * asked.n)]
        deltas = self._deltas(asked, policy, prompts, turns)
        if asked.stream:
            return StreamingResponse(_events(answer, turns, deltas), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return JSONResponse(await _while_connected(request, _collect(answer, turns, deltas)))

    def _encode(self, asked: ChatAsked | CompletionAsked) -> tuple[list[list[int]], bool]:
        """The prompts' ids, and whether the generation prompt has opened a thought."""
        inside = False
        if isinstance(asked, ChatAsked):
            first, *rest = asked.messages
            system, rest = (first["content"], rest) if first["role"] == "system" else ("", [first, *rest])
            try:
                prompts = [self.chat.start(system, rest, asked.tools).tolist()]
            except (ValueError, TypeError, jinja2.TemplateError) as error:
                raise ApiError(f"messages: the model's chat template cannot print them: {error}"[:500], "messages") from error
            inside = self.chat.decode(prompts[0][-8:]).rstrip().endswith("<think>")
            if asked.forced:  # the call is begun in the model's place
                begun = f"\n</think>\n\n{BEGUN}" if inside else BEGUN
                prompts[0] += self.chat.tokenizer.encode(begun, add_special_tokens=False)
        else:
            prompts = [
                list(prompt) if isinstance(prompt, tuple) else self.chat.tokenizer.encode(prompt, add_special_tokens=False)
                for prompt in asked.prompts
            ]
        field = "messages" if isinstance(asked, ChatAsked) else "prompt"
        for prompt in prompts:
            if len(prompt) >= self.context:
                raise ApiError(
                    f"{field}: {len(prompt)} tokens, but the context is {self.context}, the answer included; shorten it",
                    field,
                    code="context_length_exceeded",
                )
            if not prompt or min(prompt) < 0 or max(prompt) >= self.vocabulary:
                raise ApiError(f"{field}: needs at least one token, and every id within [0, {self.vocabulary})", field)
        return prompts, inside

    def _turn(self, asked: ChatAsked | CompletionAsked, inside: bool) -> Turn:
        text = Text(self.chat.decode, self._hidden, asked.stop)
        if not isinstance(asked, ChatAsked):
            return Turn(text, None)
        inside = inside and self._thinking and not asked.forced
        splitter = Splitter(asked.tools, thinking=self._thinking, inside=inside, parallel=asked.parallel)
        if asked.forced:
            splitter.feed(BEGUN)
        return Turn(text, splitter)

    async def _deltas(
        self, asked: Asked, policy: protocol.Policy, prompts: Sequence[Sequence[int]], turns: Sequence[Turn]
    ) -> AsyncIterator[tuple[int, Delta]]:
        """What is new in each choice, as it comes."""
        run, seed = secrets.token_hex(12), secrets.randbits(62) if asked.seed is None else asked.seed
        requests = [
            protocol.Request(
                session=f"{run}-{i}",
                policy=policy.name,
                tokens=np.array(prompts[i // asked.n], np.int32),
                max_tokens=min(asked.max_tokens or self.context, self.context),
                temperature=asked.temperature if asked.temperature >= _COLDEST else 0.0,
                key=(seed, 0, i % asked.n),
                stop=self._ends,
                top_k=asked.top_k,
                top_p=asked.top_p,
            )
            for i in range(len(turns))
        ]
        self.counts.add("prompt_tokens_total", sum(map(len, prompts)), model=asked.model)
        try:
            async with contextlib.aclosing(self.decoder.sample(requests)) as pieces:
                async for piece in pieces:
                    turn = turns[piece.index]
                    if turn.finished:
                        continue
                    delta = turn.feed(piece.tokens, piece.logprobs, piece.finish)
                    if turn.finished and not piece.finish:
                        self.decoder.release(requests[piece.index].session)
                    yield piece.index, delta
        finally:
            self.counts.add("completion_tokens_total", sum(turn.count for turn in turns), model=asked.model)

    def _policy(self, name: str) -> protocol.Policy:
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(f"model: there is no {name!r}; there are: {known}", "model", status=404, code="model_not_found")
        return self.models[name]

    def _model_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "trace-jax", "max_model_len": self.context}


async def _collect(answer: Answer, turns: Sequence[Turn], deltas: AsyncIterator[tuple[int, Delta]]) -> dict[str, Any]:
    """The answer in one piece."""
    whole = [Delta() for _ in turns]
    async with contextlib.aclosing(deltas):
        async for index, delta in deltas:
            whole[index].add(delta)
    return answer.whole(whole, sum(turn.count for turn in turns))


async def _events(answer: Answer, turns: Sequence[Turn], deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    asked = answer.asked
    try:
        if answer.is_chat:
            for index in range(len(turns)):
                yield _event(answer.opening(index))
        async with contextlib.aclosing(deltas):
            async for index, delta in deltas:
                if delta.content or delta.reasoning or delta.finish or (delta.tokens and (asked.logprobs or asked.return_token_ids)):
                    yield _event(answer.chunk(index, delta))
        if asked.include_usage:
            yield _event(answer.closing(sum(turn.count for turn in turns)))
        yield "data: [DONE]\n\n"
    except (Unavailable, EngineError) as error:
        yield _event(ApiError(str(error), status=503 if isinstance(error, Unavailable) else 400).body)


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def _failed(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(ApiError(message, status=status).body, status, headers)


async def _read_body(request: Request) -> bytes:
    """The body.

    Raises:
      ApiError: it is too large.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= LARGEST_BODY:
            chunks.append(chunk)
        elif size > _DRAINED:
            break
        else:
            chunks.clear()
    if size > LARGEST_BODY:
        raise ApiError(f"the body is larger than {LARGEST_BODY:,} bytes", status=413)
    return b"".join(chunks)


async def _while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The result of the work, which is cancelled when the client goes away.

    Raises:
      ClientDisconnect: it went.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Counting:
    """Counts answers by path and status, and the seconds of those that sample."""

    _PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")

    def __init__(self, app: ASGIApp, counts: Counts):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in self._PATHS else "other"  # any path a client thinks of would be a label
        began = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.add("requests_total", path=path, status=str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            if path in self._PATHS[:2]:
                self._counts.add("request_seconds_sum", time.monotonic() - began)
                self._counts.add("request_seconds_count")
