"""One server: how it is asked, what it says it is, and whether that is what the engine needs.

Whatever goes wrong is a `Failure` of a kind; nothing else leaves `ask`. No header, and no part of a URL that could be a password, gets into
a message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import aiohttp
import numpy as np

from model import Config
from rl.engines.sglang.adapters import Adapter
from rl.engines.sglang.wire import Failure

MARGIN = 8  # tokens that a server's context must have beyond ours: it keeps one for itself and refuses prompts that leave less than six
_LARGEST = 256 * 2**20  # bytes of a reply
_DEPRECATED = {"/server_info": "/get_server_info", "/model_info": "/get_model_info"}


@dataclasses.dataclass(frozen=True)
class Info:
    """What a server says about itself; None where it says nothing."""

    context: int | None
    lora: bool | None
    rank: int | None
    modules: frozenset[str] | None
    model_type: str | None
    weights: str | None  # its name for the base's weights
    seeded: bool
    experts: bool | None
    tokenizers: int
    data_parallel: int

    def problems(self, config: Config, context: int, experts: bool) -> list[str]:
        """Why the engine cannot use the server, each with the flag that changes it."""
        out = []
        if self.context is not None and self.context < context + MARGIN:
            out.append(f"its room is {self.context} tokens, {context} need --context-length and --max-total-tokens of {context + MARGIN}")
        if self.model_type is not None and self.model_type.removesuffix("_text") != config.model_type:
            out.append(f"it serves a {self.model_type}, the model here is a {config.model_type}; set --model-path")
        if experts and self.experts is False:
            out.append("it does not tell the experts of tokens; start it with --enable-return-routed-experts")
        return out

    def adapter_problems(self, adapter: Adapter) -> list[str]:
        """Why an adapter cannot be loaded, each with the flag that changes it."""
        out = []
        if self.lora is False:
            out.append(f"it serves no adapters; start it with --enable-lora --max-lora-rank {adapter.rank} --lora-target-modules all")
        if self.lora and self.rank is not None and adapter.rank > self.rank:
            out.append(f"it takes adapters up to rank {self.rank}, this one has {adapter.rank}; set --max-lora-rank {adapter.rank}")
        if self.lora and self.modules is not None and "all" not in self.modules and (odd := sorted({*adapter.modules} - self.modules)):
            out.append(f"it takes no adapters of {', '.join(odd)}; add them to --lora-target-modules")
        if self.tokenizers > 1:
            out.append(f"{self.tokenizers} tokenizer processes do not agree on adapters; set --tokenizer-worker-num 1")
        if self.data_parallel > 1:
            out.append(f"it has {self.data_parallel} data-parallel ranks, which take no adapters while they serve; start single servers")
        return out


def read_info(server: Any, model: Any) -> Info:
    """`Info` from the replies to `/server_info` and `/model_info`."""
    if not isinstance(server, dict) or not isinstance(model, dict):
        raise Failure("garbage", "its description is no JSON object")

    def get(name: str, kind: type, default: Any = None) -> Any:
        value = server.get(name)
        return value if isinstance(value, kind) else default

    states = [state for state in get("internal_states", list, []) if isinstance(state, dict)]
    rooms = [get("context_length", int), get("max_total_num_tokens", int), get("max_total_tokens", int)]
    rooms += [state.get("max_total_num_tokens") for state in states]
    modules, weights = get("lora_target_modules", list), model.get("weight_version")
    return Info(
        context=min((room for room in rooms if isinstance(room, int) and room > 0), default=None),
        lora=bool(server["enable_lora"]) if "enable_lora" in server else None,
        rank=get("max_lora_rank", int),
        modules=None if modules is None else frozenset(map(str, modules)),
        model_type=model["model_type"] if isinstance(model.get("model_type"), str) else None,
        weights=None if weights is None else str(weights),
        seeded=bool(server.get("enable_deterministic_inference") or server.get("enable_deterministic_sampling")),
        experts=bool(server["enable_return_routed_experts"]) if "enable_return_routed_experts" in server else None,
        tokenizers=get("tokenizer_worker_num", int, 1),
        data_parallel=get("dp_size", int, 1),
    )


class Replica:
    """A server as the engine sees it.

    Attributes:
      name: its address without user and password, for messages.
      ready: whether requests may go there. `down` is a future that is done when requests that run there are to be given up.
      failure: why it was last not ready.
      loaded: names of the adapters it has.
      base: [T - 1], the log-probs of the engine's probe under the base.
      running: requests it has now.
      weights: its name for the base's weights when first seen.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession):
        self._url, self._http = url.rstrip("/"), http
        scheme, _, rest = self._url.rpartition("://")
        self.name = f"{scheme or 'http'}://{rest.rpartition('@')[2]}"
        self.ready, self.running = False, 0
        self.down: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wake = asyncio.Event()
        self.lock = asyncio.Lock()
        self.failure = Failure("lost", "not asked yet")
        self.loaded: set[str] = set()
        self.info: Info | None = None
        self.base: np.ndarray | None = None
        self.weights: str | None = None

    async def ask(self, method: str, path: str, body: dict | None = None, *, timeout: float) -> Any:
        """The JSON of a reply, None if it is empty.

        Raises:
          Failure: "timeout" no answer, "lost" no connection, "server" a status of 400 or more (below 500 not worth another attempt),
            "garbage" a reply that is not whole in time, too large, or no JSON.
        """
        answered = False
        try:
            async with asyncio.timeout(max(timeout, 0.001)), self._http.request(method, self._url + path, json=body) as reply:
                answered = True
                data = bytearray()
                async for piece in reply.content.iter_chunked(2**16):
                    data += piece
                    if len(data) > _LARGEST:
                        raise Failure("garbage", f"{path}: a reply of more than {_LARGEST} bytes")
        except TimeoutError:
            if answered:
                raise Failure("garbage", f"{path}: an answer began and was not whole within {timeout:.3g} s") from None
            raise Failure("timeout", f"{path}: no answer within {timeout:.3g} s") from None
        except aiohttp.ClientResponseError as error:  # not HTTP
            raise Failure("garbage", f"{path}: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Failure("lost", f"{path}: {type(error).__name__}: {error}".replace(self._url, self.name)) from None
        if reply.status >= 400:
            again = reply.status >= 500 or reply.status in (408, 429)
            text = data.decode("utf-8", "replace").strip()[:1000]
            raise Failure("server", f"{path}: status {reply.status}: {text}", again, reply.status)
        try:
            return json.loads(data) if data else None
        except (ValueError, RecursionError) as error:
            raise Failure("garbage", f"{path}: no JSON: {error}") from None

    def give_up(self) -> None:
        """Ends the requests that run here, on our side."""
        if not self.down.done():
            self.down.set_result(None)

    async def inspect(self, timeout: float) -> Info:
        found = []
        for path, deprecated in _DEPRECATED.items():
            try:
                found.append(await self.ask("GET", path, timeout=timeout))
            except Failure as failure:
                if failure.status != 404:
                    raise
                found.append(await self.ask("GET", deprecated, timeout=timeout))
        return read_info(*found)
