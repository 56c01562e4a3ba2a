"""An HTTP server that behaves as SGLang 0.5 does, and misbehaves on demand; its tokens are those of a small model of ours.

What is imitated was seen at a real server: names of adapters are never forgotten (a request for an unloaded one loads its folder again), a
name is loaded once, unloading waits for the requests that run, an aborted request is answered with status 200, `/health` is 503 until the
server is warm, the server ends turns at end tokens of its own, and a prompt must leave some of the context free.
"""

import asyncio
import contextlib
import dataclasses
import json
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from aiohttp import web

from model import CausalLM, load_peft
from tests.model.tiny import logits


@dataclasses.dataclass
class Fake:
    """A server on a port of its own. Fields may be changed at any time.

    Attributes:
      mode: what becomes of requests to `/generate`: "ok", "500", "400", "503", "garbage" (no JSON), "types" (JSON of other types), "drip"
        (a byte now and then), "abort", "hang", "die" (the connection ends), "short" (half of an answer), "nan", "positive".
      times: so many requests are affected, then mode is "ok" again; None: all.
      stopped: nothing is answered, as of a process that got SIGSTOP.
      healthy: whether `/health` is 200.
      cumulative: log-probs have those of earlier chunks before them, as in SGL-JAX.
      ignores_adapters: requests with an adapter run the base.
      versions: the `weight_versions` of a reply.
      info: more or other fields of `/server_info`; None as a value takes one away.
      old: whether only the old names of `/server_info` and `/model_info` are known.
      pace: seconds a token takes.
    """

    model: CausalLM
    context: int = 64
    mode: str = "ok"
    times: int | None = None
    stopped: bool = False
    healthy: bool = True
    cumulative: bool = False
    ignores_adapters: bool = False
    dies_under_adapters: bool = False
    static: bool = False
    old: bool = False
    versions: tuple[str, ...] = ("default",)
    info: dict = dataclasses.field(default_factory=dict)
    end: int | None = None
    pace: float = 0.0

    def __post_init__(self):
        self.random = np.random.default_rng(0)
        self.bodies: list[dict] = []  # of /generate, in order
        self.calls: list[str] = []
        self.aborted: set[str] = set()
        self.reloaded: list[str] = []  # names that a request loaded again
        self.adapters: dict[str, str] = {}
        self.known: dict[str, str] = {}  # all that were ever loaded
        self.running: dict[str, str | None] = {}  # rid: adapter
        self.most = 0
        self._banks: dict[str, object] = {}
        self._contexts: list[tuple[str | None, list[int]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Opens the port, the same as before; a process that starts knows no adapters."""
        self.adapters, self.known, self.running = {}, {}, {}
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def kill(self) -> None:
        """Closes the port and all connections."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)

    def close(self) -> None:
        self.kill()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self) -> None:
        app = web.Application(middlewares=[self._gate])
        add = app.router.add_route
        add("GET", "/health", self._health)
        add("GET", "/get_server_info" if self.old else "/server_info", self._server_info)
        add("GET", "/get_model_info" if self.old else "/model_info", self._model_info)
        add("POST", "/generate", self._generate)
        add("POST", "/abort_request", self._abort)
        if not self.static:
            add("POST", "/load_lora_adapter", self._load)
            add("POST", "/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    @web.middleware
    async def _gate(self, request: web.Request, handler) -> web.StreamResponse:
        self.calls.append(request.path)
        while self.stopped:
            await asyncio.sleep(0.02)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        info = {
            "context_length": self.context,
            "max_total_num_tokens": 4096,
            "enable_lora": True,
            "max_lora_rank": 8,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "tokenizer_worker_num": 1,
            "dp_size": 1,
            "enable_deterministic_inference": True,  # tokens follow from a request's seed, however requests fall together
            "internal_states": [{}],
        }
        return web.json_response({k: v for k, v in (info | self.info).items() if v is not None})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/m", "model_type": self.model.config.model_type, "weight_version": "default"})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        return self._loaded(self._put(body["lora_name"], body["lora_path"]))

    def _put(self, name: str, path: str) -> str:
        """Loads an adapter; what is wrong, if something is."""
        if name in self.adapters:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        if not (Path(path) / "adapter_config.json").exists():
            return f"no adapter at {path}"
        self._banks[path] = load_peft(path, self.model.config)
        self.adapters[name] = self.known[name] = path
        return ""

    def _loaded(self, error: str) -> web.Response:
        body = {"success": not error, "error_message": error, "loaded_adapters": self.adapters}
        return web.json_response(body, status=400 if error else 200)

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return self._loaded(f"{name} is not loaded")
        del self.adapters[name]
        while name in self.running.values():
            await asyncio.sleep(0.005)
        return self._loaded("")

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        scores, mode = body["logprob_start_len"] == 0, self.mode
        if scores and mode not in ("400",):  # the engine's probe
            mode = "ok"
        if mode != "ok" and self.times is not None:
            self.times -= 1
            self.mode = self.mode if self.times > 0 else "ok"
        rid, name = body["rid"], body.get("lora_path")
        if mode in ("500", "400", "503"):
            return web.json_response({"error": {"message": "the reason"}}, status=int(mode))
        if mode == "garbage":
            return web.Response(body=b"\xff\xfe{not json")
        if mode == "types":
            return web.json_response({"meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": "3"}})
        if mode == "hang":
            await asyncio.sleep(60)
        if mode == "die" or (name and self.dies_under_adapters):
            request.transport.abort()
            return web.Response()
        if mode == "drip":
            reply = web.StreamResponse()
            await reply.prepare(request)
            while True:
                await reply.write(b" ")
                await asyncio.sleep(0.05)
        if name and name not in self.adapters:
            if name not in self.known:
                return web.json_response({"error": {"message": f"Got LoRA adapter that has never been loaded: {name}"}}, status=400)
            self.reloaded.append(name)
            self._put(name, self.known[name])
        room = self.context - 6
        if len(body["input_ids"]) >= room:
            return web.json_response({"error": {"message": f"exceeds the maximum allowed length ({room} tokens)"}}, status=400)
        self.running[rid] = name
        self.most = max(self.most, len(self.running))
        try:
            reply = await self._sample(body, rid, name, scores, mode)
        finally:
            del self.running[rid]
        if mode == "short":
            text = json.dumps(reply).encode()
            stream = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await stream.prepare(request)
            await stream.write(text[: len(text) // 2])
            request.transport.abort()
            return stream
        return web.json_response(reply)

    async def _sample(self, body: dict, rid: str, name: str | None, scores: bool, mode: str) -> dict:
        bank = self._banks[self.adapters[name]] if name and not self.ignores_adapters else None
        prompt, sampling, tokens, chosen = body["input_ids"], body["sampling_params"], [], []
        cached = max((_common(prompt, other) for under, other in self._contexts if under == name), default=0)
        limit = min(sampling["max_new_tokens"], self.context - 2 - len(prompt))
        finish = {"type": "length", "length": limit}
        while len(tokens) < limit:
            if rid in self.aborted or mode == "abort":
                finish = {"type": "abort", "message": "Abort by request"}
                break
            n, row = len(tokens), await asyncio.to_thread(self._row, prompt + tokens, bank)
            temperature = sampling["temperature"] or 1.0
            logprobs = _log_softmax(row / temperature)
            random = np.random.default_rng([sampling["sampling_seed"], len(prompt) + n]) if "sampling_seed" in sampling else self.random
            greedy = sampling["temperature"] == 0
            token = int(logprobs.argmax() if greedy else random.choice(len(row), p=np.exp(logprobs) / np.exp(logprobs).sum()))
            tokens.append(token)
            chosen.append([float(logprobs[token]), token, None])
            await asyncio.sleep(self.pace)
            if not sampling.get("ignore_eos") and token in (*sampling.get("stop_token_ids", ()), self.end):
                finish = {"type": "stop", "matched": token}
                break
        self._contexts.append((name, prompt + tokens))
        n = len(tokens)
        if self.cumulative:
            chosen = chosen[: n // 2] + chosen
        if mode in ("nan", "positive"):
            chosen[-1][0] = float("nan") if mode == "nan" else 0.5
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": n,
            "cached_tokens": cached,
            "output_token_logprobs": chosen,
            "weight_version": self.versions[-1],
            "weight_versions": [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(self.versions)],
        }
        if scores:
            table = _log_softmax(await asyncio.to_thread(self._rows, prompt, bank))
            known = [[float(table[i - 1, token]), token, None] for i, token in enumerate(prompt) if i]
            meta["input_token_logprobs"] = [[None, prompt[0], None], *known]
        return {"text": "", "output_ids": [0] * n if self.cumulative else tokens, "meta_info": meta}

    def _rows(self, tokens: list[int], bank) -> np.ndarray:
        padded = np.zeros(self.context, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(logits(self.model, jnp.asarray(padded)[None], adapters=bank))[0, : len(tokens)].astype(np.float64)

    def _row(self, tokens: list[int], bank) -> np.ndarray:
        return self._rows(tokens, bank)[-1]


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _common(one: list[int], other: list[int]) -> int:
    limit = min(len(one) - 1, len(other))
    return next((i for i in range(limit) if one[i] != other[i]), limit)


@contextlib.contextmanager
def fakes(model: CausalLM, count: int = 1, **options):
    """`count` servers for the time of a `with`."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(count):
            servers.append(Fake(model, **options))
            stack.callback(servers[-1].close)
        yield servers
