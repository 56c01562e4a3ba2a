"""What goes to a server and what comes back: the body of `/generate`, and how a reply is read.

Token ids and log-probs are the last `completion_tokens` entries of `output_token_logprobs`, before which a server may repeat earlier ones.
Log-probs are of softmax(logits / temperature) over the whole vocabulary; temperature 0 is a greedy choice at temperature 1 there, so that
its log-probs are of softmax(logits).

A reply is checked as if a stranger had written it: what is not understood is a fault, never a sample.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from model import Config
from rl.engines.protocol import FaultKind, Request
from rl.engines.whole_law import sampling_params

_ROUNDING = 1e-4  # a log-prob this far above 0 is a probability of one


class Failure(Exception):
    """No sample, or no answer. `kind` as in `EngineFault`; `again`: another attempt may do better; `status`: of the HTTP reply, if any."""

    def __init__(self, kind: FaultKind, message: str, again: bool = True, status: int | None = None):
        super().__init__(message)
        self.kind, self.again, self.status = kind, again, status


@dataclasses.dataclass(frozen=True)
class Reply:
    """Sampled tokens [n] with their log-probs; `stopped`: by an end of turn, else by the number of tokens asked for.

    Attributes:
      experts: int16 [len(prompt) + n, L', k], as in `Completion`, or None.
      cached: tokens of the prompt that the server did not compute again.
      weights: the server's name for the weights that sampled, if it tells.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    experts: np.ndarray | None
    cached: int
    weights: str | None


def generate_body(request: Request, tokens: list[int], count: int, lora: str | None, rid: str, *, seeded: bool, experts: bool) -> dict:
    """The body that asks for `count` tokens after `tokens`, as the request wants them, under the adapter `lora`."""
    sampling = sampling_params(request, count) | {"spaces_between_special_tokens": False, "n": 1}
    if seeded:
        sampling["sampling_seed"] = sampling_seed(request.key)
    body = {"rid": rid, "input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1, "stream": False}
    return body | ({"lora_path": lora} if lora else {}) | ({"return_routed_experts": True} if experts else {})


def scoring_body(tokens: list[int], lora: str | None, rid: str) -> dict:
    """The body that asks for the log-probs of `tokens` themselves, and for one token more, which shows that decoding works."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}
    body = {"rid": rid, "input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0, "stream": False}
    return body | ({"lora_path": lora} if lora else {})


def sampling_seed(key: tuple[int, int, int]) -> int:
    """31 bits that stand for a request's key; a server adds the position to them."""
    return int.from_bytes(hashlib.sha256(repr(tuple(map(int, key))).encode()).digest()[:4], "big") >> 1


def read_generated(reply: Any, prompt: int, asked: int, config: Config) -> Reply:
    """What a reply to `generate_body` holds.

    Raises:
      Failure: "aborted", "version" for tokens of several weights, "garbage" for all that does not fit.
    """
    meta = _meta(reply)
    kind = _finish_reason(meta)
    spans = {str(span.get("version")) for span in meta.get("weight_versions") or () if isinstance(span, dict)}
    if len(spans) > 1:
        raise Failure("version", f"sampled under several weights: {sorted(spans)}", again=False)
    n = _field(meta, "completion_tokens", int)
    pairs = _field(meta, "output_token_logprobs", list)
    if not 0 < n <= min(asked, len(pairs)):
        raise Failure("garbage", f"{n} tokens with {len(pairs)} log-probs where up to {asked} were asked for")
    if _field(meta, "prompt_tokens", int) != prompt:
        raise Failure("garbage", f"a prompt of {meta['prompt_tokens']} tokens where {prompt} were sent")
    tokens, logprobs = _pairs(pairs[-n:], config.vocab_size)
    if kind not in ("stop", "length"):
        raise Failure("garbage", f"finish reason {kind!r}")
    if kind == "length" and n < asked:
        raise Failure("server", f"{n} of {asked} tokens and then no room: raise --context-length or --max-total-tokens", again=False)
    version = spans.pop() if spans else meta.get("weight_version")
    cached = meta.get("cached_tokens")
    experts = _read_experts(meta.get("routed_experts"), prompt + n, config)
    cached, version = cached if isinstance(cached, int) else 0, None if version is None else str(version)
    return Reply(tokens, logprobs, kind == "stop", experts, cached, version)


def read_scores(reply: Any, tokens: list[int], vocabulary: int) -> np.ndarray:
    """[T - 1]: the log-probs of all of `tokens` but the first, from a reply to `scoring_body`."""
    meta = _meta(reply)
    _finish_reason(meta)
    found, logprobs = _pairs(_field(meta, "input_token_logprobs", list)[1:], vocabulary)
    if found != tokens[1:]:
        raise Failure("garbage", "log-probs of other tokens than were sent")
    _pairs(_field(meta, "output_token_logprobs", list)[-1:], vocabulary)
    return np.array(logprobs, np.float32)


def _meta(reply: Any) -> dict:
    if not isinstance(reply, dict):
        raise Failure("garbage", f"a JSON {type(reply).__name__} instead of an object")
    return _field(reply, "meta_info", dict)


def _finish_reason(meta: dict) -> str:
    """Its type; raises a `Failure` if the reply was cut short."""
    reason = _field(meta, "finish_reason", dict)
    kind = _field(reason, "type", str)
    if kind == "abort":
        raise Failure("aborted", f"cut short: {str(reason.get('message', 'no reason given'))[:500]}")
    return kind


def _field(values: dict, name: str, kind: type) -> Any:
    value = values.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Failure("garbage", f"field {name!r} is {str(value)[:80]!r}, expected {kind.__name__}")
    return value


def _pairs(entries: list, vocabulary: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of [[log-prob, token, text], ..], checked."""
    tokens, logprobs = [], []
    for entry in entries:
        match entry:
            case [float() | int() as logprob, int() as token, *_] if (
                not isinstance(token, bool) and 0 <= token < vocabulary and math.isfinite(logprob) and logprob <= _ROUNDING
            ):
                tokens.append(token)
                logprobs.append(min(float(logprob), 0.0))
            case _:
                raise Failure("garbage", f"{str(entry)[:80]!r} is no log-prob of a token below {vocabulary}")
    return tokens, logprobs


def _read_experts(encoded: Any, tokens: int, config: Config) -> np.ndarray | None:
    """From base64 of int32 [T - 1, L, k], all layers and all tokens but the last, to int16 [T, L', k] of the sparse layers."""
    if encoded is None:
        return None
    shape = (tokens - 1, config.num_hidden_layers, config.num_experts_per_tok)
    try:
        rows = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32).reshape(shape)
    except (binascii.Error, TypeError, ValueError) as error:
        raise Failure("garbage", f"routed_experts are no int32 {shape}: {error}") from None
    rows = rows[:, [kind.sparse for kind in config.kinds()]]
    if rows.size and not (-1 <= rows.min() and rows.max() < config.num_experts):
        raise Failure("garbage", f"routed_experts has numbers from {rows.min()} to {rows.max()} of {config.num_experts} experts")
    return np.pad(rows.astype(np.int16), ((0, 1), (0, 0), (0, 0)), constant_values=-1)
