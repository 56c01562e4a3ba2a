"""SGL-JAX as far as `rl.engines.sgl_jax` sees it, with the faults of the real one, over a model of ours.

It computes with the arrays of its modules, through `model_state_leaves` as the real one does, and remembers what it computed for a prefix
until it is flushed. Its faults: log-probs come once per chunk of 50 tokens, ids of more than 100 tokens in part twice, the stop token and
special tokens are left out of the ids, unknown sampling keys raise, `lora_path` is ignored, static LoRA forgets `o_proj` of sparse models
and their experts, aborts go by prefix, and the scheduler rests only a moment after its last request.
"""

import asyncio
import dataclasses
import functools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import AdapterBank, CausalLM
from model.huggingface_names import MODULES, layers_with

_KEYS = """max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim
stream_interval logit_bias sampling_seed""".split()
_EXPERTS = {"expert_gate": "wi_0", "expert_up": "wi_1", "expert_down": "wo"}


class Node(nnx.Module):
    """A module of whatever it is given."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


@dataclasses.dataclass
class GenerateReqInput:
    rid: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict | None = None
    return_logprob: bool = False
    return_text_in_logprobs: bool = True
    lora_path: str | None = None


@dataclasses.dataclass
class FlushCacheReqOutput:
    success: bool
    error_msg: str = ""


class Engine:
    """`sgl_jax.srt.entrypoints.engine.Engine` over `model`, with `replicas` of its key-value heads; a token takes `delay` seconds."""

    def __init__(self, model: CausalLM, *, replicas: int = 1, eos: tuple[int, ...] = (), **settings):
        defaults = {"enable_static_lora": None, "lora_scaling": None, "disable_radix_cache": False, "enable_deterministic_sampling": False}
        defaults |= {"enable_single_process": False, "enable_engine_loop_run_forever_daemon": None, "max_running_requests": 8}
        self.server_args = types.SimpleNamespace(**defaults | settings)
        self.config, self.replicas, self.eos, self.context_len = model.config, replicas, set(eos), settings["context_length"]
        self.delay, self.flushes, self.asked, self.loop = 0.0, 0, [], asyncio.new_event_loop()
        self._unrest, self._cache, self._aborted = 0, {}, set()
        runner = types.SimpleNamespace(model=Node(model=Node(layers=nnx.data(self._layers(model)))))
        runner.graphdef, state = nnx.split(runner.model)
        runner.model_state_leaves, runner.structure = jax.tree.flatten(state)
        self.runner = runner
        self._logits = self._compile(model)
        worker = types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner))
        scheduler = types.SimpleNamespace(tp_worker=worker, max_running_requests=self.server_args.max_running_requests)
        self.scheduler_info = {"scheduler": scheduler, "max_req_input_len": self.context_len - 6}
        self.tokenizer_manager = types.SimpleNamespace(generate_request=self._generate, rid_to_state={})
        if self.server_args.enable_engine_loop_run_forever_daemon:
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def shutdown(self):
        raise AssertionError("this ends every child of the process")

    def abort_request(self, rid=None, abort_all=False):
        self._aborted |= {name for name in self.tokenizer_manager.rid_to_state if name.startswith(rid)}

    async def async_flush_cache(self):
        self._unrest -= 1
        if self.tokenizer_manager.rid_to_state or self._unrest >= 0:
            return FlushCacheReqOutput(False, "requests are pending")
        self._cache.clear()
        self.flushes += 1
        return FlushCacheReqOutput(True)

    # --- the model

    def _layers(self, model):
        parameters, config, layers = model.parameters(), self.config, []
        for layer in range(config.num_hidden_layers):
            parts = {"self_attn": {}, "mlp": {}}
            for name, p in config.projections().items():
                if layer not in (at := layers_with(config, p.part)):
                    continue
                weight = np.asarray(parameters[f"layers.{name}"][at.index(layer)])
                if name in _EXPERTS:
                    parts["mlp"][_EXPERTS[name]] = nnx.Param(jnp.asarray(weight))
                    continue
                if name in "kv":
                    weight = np.repeat(weight.reshape(len(weight), config.num_key_value_heads, -1), self.replicas, 1)
                    weight = weight.reshape(len(weight), -1)
                room, module = MODULES[name].split(".")
                linear = Node(weight=nnx.Param(jnp.asarray(weight)))
                if name == "o" and config.model_type == "qwen3_moe":
                    module = "c_proj"
                elif self.server_args.enable_static_lora and module in self.server_args.lora_target_modules:
                    rank, (width, out) = self.server_args.max_lora_rank, weight.shape
                    a, b = nnx.Param(jnp.zeros((1, rank, width))), nnx.Param(jnp.zeros((1, out, rank)))
                    linear = Node(base_layer=linear, weight=linear.weight, A_buffer=a, B_buffer=b)
                parts[room][module] = linear
            layers.append(Node(**{room: Node(**modules) for room, modules in parts.items()}))
        return layers

    def _compile(self, model):
        config, rest, replicas = self.config, model.parameters(), self.replicas

        def heads(x):  # one of each that is held several times; the last axis counts them
            return x.reshape(*x.shape[:-1], -1, replicas, config.head_dim)[..., 0, :].reshape(*x.shape[:-1], -1)

        def stack(layers, name, p, get):
            found = []
            for layer in layers_with(config, p.part):
                room, module = MODULES[name].split(".")[:2]
                module = _EXPERTS.get(name) or ("c_proj" if name == "o" and config.model_type == "qwen3_moe" else module)
                found.append(get(getattr(getattr(layers[layer], room), module)))
            return jnp.stack(found)

        @jax.jit
        def logits(leaves, tokens, length):
            layers = nnx.merge(self.runner.graphdef, jax.tree.unflatten(self.runner.structure, leaves)).model.layers
            parameters, a, b = dict(rest), {}, {}
            for name, p in config.projections().items():
                pick = heads if name in "kv" else lambda x: x
                get = (lambda x: x[...]) if name in _EXPERTS else (lambda x: getattr(x, "base_layer", x).weight[...])
                parameters[f"layers.{name}"] = pick(stack(layers, name, p, get))
                if self.server_args.enable_static_lora:
                    a[name] = stack(layers, name, p, lambda x: x.A_buffer[...].swapaxes(1, 2))
                    b[name] = pick(stack(layers, name, p, lambda x: x.B_buffer[...].swapaxes(1, 2)))
            bank = AdapterBank(a, b, jnp.full((1,), self.server_args.lora_scaling)) if a else None
            return CausalLM(config, parameters=parameters)(tokens[None], adapters=bank)[0, length - 1]

        return logits

    def _next(self, tokens):
        """[V]: the logits after these tokens."""
        cache = {} if self.server_args.disable_radix_cache else self._cache
        if (key := tuple(tokens)) not in cache:
            padded = np.zeros(self.context_len, np.int32)
            padded[: len(tokens)] = tokens
            cache[key] = np.asarray(self._logits(self.runner.model_state_leaves, padded, len(tokens)))
        return cache[key]

    # --- a request

    async def _generate(self, obj, request=None):
        settings = {"max_new_tokens": 128, "temperature": 1.0, "top_k": -1, "stop_token_ids": [], "ignore_eos": False} | obj.sampling_params
        if unknown := set(obj.sampling_params) - set(_KEYS):
            raise TypeError(f"SamplingParams.__init__() got an unexpected keyword argument {min(unknown)!r}")
        limit = settings["max_new_tokens"]
        if len(obj.input_ids) + limit >= self.context_len:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        self.asked.append(obj)
        self.tokenizer_manager.rid_to_state[obj.rid] = obj
        temperature, random = settings["temperature"], np.random.default_rng(len(self.asked))
        ids, logprobs, reason = [], [], None
        while reason is None:
            await asyncio.sleep(self.delay)
            logits = self._next(obj.input_ids + ids).astype(np.float64) / (temperature or 1.0)
            law = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            token = int(law.argmax()) if temperature < 1e-6 else int((law + random.gumbel(size=len(law))).argmax())
            ids.append(token)
            logprobs.append((float(law[token]), token, "?" if obj.return_text_in_logprobs else None))
            if obj.rid in self._aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            elif len(ids) >= limit:
                reason = {"type": "length", "length": limit}
            elif not np.isfinite(law[token]):
                ids[-1], reason = 0, {"type": "stop", "matched": "NaN happened"}
            elif not settings["ignore_eos"] and token in {*settings["stop_token_ids"], *self.eos}:
                reason = {"type": "stop", "matched": token}
        del self.tokenizer_manager.rid_to_state[obj.rid]
        self._unrest = 3
        yield {"output_ids": self._broken(ids, settings), "meta_info": self._meta(obj, ids, logprobs, reason)}

    def _broken(self, ids, settings):
        ids = ids[:100] + ids[50:] if len(ids) > 100 else list(ids)
        if ids and ids[-1] in settings["stop_token_ids"]:
            ids.pop()
        return ids if settings.get("skip_special_tokens") is False else [i for i in ids if i not in self.eos]

    def _meta(self, obj, ids, logprobs, reason):
        ends = [*range(50, len(ids), 50), len(ids)]
        meta = {"id": obj.rid, "finish_reason": reason, "prompt_tokens": len(obj.input_ids), "completion_tokens": len(ids)}
        meta["cached_tokens"] = 0
        return meta | ({"output_token_logprobs": [x for end in ends for x in logprobs[:end]]} if obj.return_logprob else {})


def install(monkeypatch, model, **settings):
    """Makes `sgl_jax` importable, its `Engine` one over a model of ours."""
    names = ["sgl_jax", "sgl_jax.srt", "sgl_jax.srt.entrypoints", "sgl_jax.srt.managers"]
    modules = {name: types.ModuleType(name) for name in [*names, f"{names[2]}.engine", f"{names[3]}.io_struct"]}
    modules[f"{names[2]}.engine"].Engine = functools.partial(Engine, model, **settings)
    modules[f"{names[3]}.io_struct"].GenerateReqInput = GenerateReqInput
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
