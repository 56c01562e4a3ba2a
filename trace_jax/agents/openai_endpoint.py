"""An OpenAI-compatible endpoint, and the server of `trace-jax serve`.

Address and key come from the environment alone and go nowhere else: no error, record or log holds them. Endpoints differ in what they take.
Where one refuses `response_format`, the schema goes into the prompt; where one wants `max_completion_tokens`, it gets that; both are found
out once. What comes back with status 200 is not believed to be a chat completion before it is read as one.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import math
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from trace_jax.agents.answers import format_note
from trace_jax.agents.protocol import MOST_TOKENS, Answer, Message, Schema, TooLong, Unavailable, Usage
from trace_jax.agents.redaction import redact, shorten
from trace_jax.config import AgentsSection
from trace_jax.errors import InputError

_CONNECT = 20.0  # seconds: an address where nobody listens is not waited for as an answer is
_AGAIN = {408, 409, 425, 429}
_OURS = ("model", "messages", "n", "stream", "stream_options", "response_format", "max_tokens", "max_completion_tokens")
_LOGGERS = ("openai", "httpx", "httpcore", "httpx2", "httpcore2")
_FIXES = {
    401: "; check OPENAI_API_KEY",
    403: "; check OPENAI_API_KEY and what its account may use",
    404: "; check OPENAI_BASE_URL and config field 'agents.model'",
}


class Endpoint:
    """A backend over `openai`'s client, which is made anew for each event loop.

    Args:
      url: None is OpenAI's own.
      structured: whether to try `response_format`.
    """

    def __init__(self, name: str, model: str, url: str | None, key: str, settings: AgentsSection, structured: bool = True):
        if ours := sorted(set(settings.parameters) & set(_OURS)):
            fix = "use agents.answer_tokens" if "tokens" in ours[0] else "leave it out"
            raise InputError(f"config field 'agents.parameters': {ours[0]!r} is set by trace-jax; {fix}")
        for logger in _LOGGERS:  # with OPENAI_LOG=debug, or a root logger at DEBUG, they would write headers and addresses
            logging.getLogger(logger).setLevel(logging.WARNING)
        self.name, self.model = name, model
        self._url, self._key, self._settings, self._structured = url, key, settings, structured
        self._limit = "max_tokens"
        self._client: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, messages: Sequence[Message], schema: Schema | None, sample: int) -> Answer:
        """One exchange; another one where the endpoint refuses how it was asked, and says so."""
        while True:
            structured, limit = schema is not None and self._structured, self._limit
            try:
                return await self._send(messages, schema, sample, structured, limit)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                said = f"{error.message} {error.body}"
                if structured and any(word in said for word in ("response_format", "json_schema")):
                    self._structured = False
                elif limit == "max_tokens" and "max_completion_tokens" in said:
                    self._limit = "max_completion_tokens"
                elif error.code in ("content_filter", "content_policy_violation"):
                    return Answer("")  # a refusal of this question, as others write it into a message
                else:
                    raise self._refused(error) from None  # the cause holds the request, its headers among it
            except openai.APIStatusError as error:
                wait = error.code != "insufficient_quota" and (error.status_code in _AGAIN or error.status_code >= 500)
                failure = Unavailable(self._say(error), _retry_after(error.response.headers)) if wait else self._refused(error)
                raise failure from None
            except openai.APIConnectionError as error:
                raise Unavailable(f"agents.backend={self.name}: no connection ({type(error.__cause__ or error).__name__})") from None

    async def close(self) -> None:
        """Closes the connections; the next question opens others."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _send(self, messages: Sequence[Message], schema: Schema | None, sample: int, structured: bool, limit: str) -> Answer:
        talk = [dict(message) for message in messages]
        request: dict[str, Any] = {limit: self._settings.answer_tokens}
        if structured:
            request["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        elif schema is not None:
            talk[-1]["content"] += format_note(schema)
        more = dict(self._settings.parameters)
        if isinstance(more.get("seed"), int):
            more["seed"] += sample  # else all samples would be the same one
        create = self._connected().chat.completions.with_raw_response.create
        raw = await create(model=self.model, messages=talk, extra_body=more, **request)
        return self._read(raw.http_response.text, raw.http_response.headers)

    def _read(self, body: str, headers: Mapping[str, str]) -> Answer:
        """The answer in a body.

        Raises:
          Unavailable: the body is no chat completion.
        """
        try:
            found = json.loads(body)
            choice = found["choices"][0]
            message = choice["message"]
            content, refusal = message.get("content"), message.get("refusal")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            what = _clean(body, headers) or "an empty body"
            raise Unavailable(f"agents.backend={self.name}: status 200, but no chat completion: {what}") from None
        text = next((x for x in (content, refusal) if isinstance(x, str) and x), "")
        return Answer(text, choice.get("finish_reason") == "length", _usage(found.get("usage")))

    def _connected(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            timeout = openai.Timeout(self._settings.deadline, connect=min(_CONNECT, self._settings.deadline))
            self._client = openai.AsyncOpenAI(api_key=self._key, base_url=self._url, max_retries=0, timeout=timeout)
            self._loop = loop
        return self._client

    def _say(self, error: openai.APIStatusError) -> str:
        """What the endpoint said, without what is nobody's business."""
        body = error.body
        said = body.get("message") if isinstance(body, Mapping) else body
        text = _clean(str(said or "without a word"), error.response.headers)
        return f"agents.backend={self.name}: status {error.status_code}: {text}{_FIXES.get(error.status_code, '')}"

    def _refused(self, error: openai.APIStatusError) -> InputError:
        said = self._say(error)
        if error.status_code == 413 or (error.status_code in (400, 422) and "context" in f"{error.code} {said}"):
            return TooLong(f"{said}; lower config field 'agents.prompt_tokens' or 'agents.answer_tokens', which have to fit together")
        return InputError(said)


def openai_endpoint(settings: AgentsSection) -> Endpoint:
    """The endpoint that the environment names.

    Raises:
      InputError: no key, no model, or an address that is none.
    """
    url, key = os.environ.get("OPENAI_BASE_URL") or None, os.environ.get("OPENAI_API_KEY", "")
    parts = urllib.parse.urlsplit(url or "https://api.openai.com/v1")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("environment variable OPENAI_BASE_URL: not an address; give one such as http://127.0.0.1:8000/v1")
    if not key and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise InputError("environment variable OPENAI_API_KEY: missing; agents.backend=openai takes its key from there")
    model = settings.model or os.environ.get("OPENAI_MODEL", "")
    if not model:
        raise InputError("config field 'agents.model': missing, and so is the environment variable OPENAI_MODEL; give one of them")
    return Endpoint("openai", model, url, key or "none", settings)


def served_endpoint(settings: AgentsSection) -> Endpoint:
    """A server of `trace-jax serve`, which has no keys and samples text alone."""
    url = (settings.url or "http://127.0.0.1:8000").rstrip("/") + "/v1"
    return Endpoint("served", settings.model or "trace-jax", url, "none", settings, structured=False)


def _clean(text: str, headers: Mapping[str, str]) -> str:
    """What an endpoint wrote, in short, without the names that its headers have."""
    return shorten(redact(text, *(headers.get(name, "") for name in ("openai-organization", "openai-project"))))


def _usage(found: Any) -> Usage | None:
    if not isinstance(found, Mapping):
        return None
    counts = found.get("prompt_tokens"), found.get("completion_tokens")
    return Usage(1, *counts) if all(type(count) is int and 0 <= count < MOST_TOKENS for count in counts) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; the header gives them, or a date."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
