"""The composed export in SGLang: its folder, and on a real server our log-probs under one gate, then under another."""

import ast
import importlib.util
import json
import sys
import types
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import model
from model import Gate, Routing, export_composed, load_pretrained, save_gate_update, stack_banks
from model.tensor_files import open_tensors, write_tensors
from tests.model import tiny
from tests.sglang_server.server import serve

CASES = {
    "qwen3": ("qwen3", 3, {"tie_word_embeddings": True}),
    "biases": ("qwen3", 2, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "moe": ("qwen3_moe", 2, {"norm_topk_prob": True, "tie_word_embeddings": False}),
}
PROMPTS = [tiny.tokens(length, seed=length).tolist() for length in (5, 37, 18)]


def export(folder, case: str):
    """Our model, bank and gate, and the folder of the export."""
    kind, adapters, changes = CASES[case]
    tiny.checkpoint(folder / "base", kind, **changes)
    net = load_pretrained(folder / "base")
    bank = stack_banks([tiny.bank(net.config, 1, rank=rank, seed=rank) for rank in (4, 2, 3)[:adapters]])
    gate = tiny.gate(adapters + 1, net.config)
    export_composed(folder / "base", bank, gate, folder / "out", ["base", "search", "plan", "ask"][: adapters + 1])
    return net, bank, gate, folder / "out"


def test_the_package_for_sglang_is_in_the_export(tmp_path):
    _, _, gate, out = export(tmp_path, "biases")
    assert sorted(path.name for path in (out / "sglang_trace").iterdir()) == ["__init__.py", "models.py"]
    tree = ast.parse((out / "sglang_trace" / "models.py").read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert json.loads((out / "config.json").read_text())["architectures"][0] in named
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] in ("model", "rl", "trace_jax")], "the folder stands alone"

    save_gate_update(out, gate, tmp_path / "update")
    with open_tensors(tmp_path / "update") as tensors:
        names = sorted(tensors.names())
        np.testing.assert_array_equal(tensors.read("model.layers.1.input_layernorm.gate.kernel"), gate.kernel[1])
    assert names == [f"model.layers.{i}.input_layernorm.gate.{name}" for i in range(2) for name in ("bias", "kernel")]
    with pytest.raises(ValueError, match="gate's kernel"):
        save_gate_update(out, Gate(gate.kernel[:, :, :2], gate.bias[:, :2]), tmp_path / "other")
    with pytest.raises(ValueError, match="gate's kernel"):
        save_gate_update(tmp_path / "base", Gate(gate.kernel[:1], gate.bias[:1]), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture
def models(monkeypatch):
    """The file that SGLang imports, with what it takes from SGLang replaced: one GPU, no adapters of SGLang's own."""
    context = SimpleNamespace(tp_size=1, pp_size=1, moe_ep_size=1, attn_dp_size=1, enable_lora=False)
    replaced = {
        "layers.moe.topk": {"TopKOutputChecker": SimpleNamespace(format_is_standard=lambda topk: True)},
        "models.qwen3": {"Qwen3ForCausalLM": torch.nn.Module},
        "models.qwen3_moe": {"Qwen3MoeForCausalLM": torch.nn.Module},
        "runtime_context": {"get_lora": lambda: context, "get_parallel": lambda: context},
    }
    for name, members in replaced.items():
        words = f"sglang.srt.{name}".split(".")
        for i in range(1, len(words)):
            monkeypatch.setitem(sys.modules, ".".join(words[:i]), types.ModuleType(".".join(words[:i])))
        module = types.ModuleType(".".join(words))
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("models", Path(model.__file__).parent / "sglang_trace" / "models.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.context = context
    return loaded


@pytest.fixture
def routed_experts(models):
    """A gate over two adapters of rank 3 and six experts with their part of the bank, all random; the router's choice for 30 tokens."""
    random = torch.Generator().manual_seed(2)
    experts = torch.nn.Module()
    experts.w13_weight, experts.w2_weight = torch.randn(6, 32, 8, generator=random), torch.randn(6, 8, 16, generator=random)
    experts.quant_method = SimpleNamespace()
    gate = models.Gate(8, [1.0, 2.0], 3)
    lora = models.ExpertsLoRA(gate, experts)
    with torch.no_grad():
        for parameter in (*gate.parameters(), *lora.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    hidden = torch.randn(30, 8, generator=random)
    weights, ids = torch.topk(torch.rand(30, 6, generator=random), 2)
    return gate, lora, experts, hidden, SimpleNamespace(topk_ids=ids.int(), topk_weights=weights)


def test_experts_are_those_of_a_loop_over_tokens(routed_experts):
    gate, lora, experts, hidden, topk = routed_experts
    slots = torch.argmax(hidden @ gate.kernel + gate.bias, -1)
    assert set(slots.tolist()) == {0, 1, 2}

    def bank(name: str, x: torch.Tensor, expert: int, slot: int) -> torch.Tensor:
        ranks = slice(3 * (slot - 1), 3 * slot) if slot else slice(0, 0)
        a, b = getattr(lora, f"{name}_A")[expert, ranks], getattr(lora, f"{name}_B")[expert, :, ranks]
        return slot * (b @ (a @ x))  # the scales are 1 and 2

    want = torch.zeros(30, 8)
    for token, slot in enumerate(slots.tolist()):
        x = hidden[token]
        for weight, expert in zip(topk.topk_weights[token], topk.topk_ids[token].tolist(), strict=True):
            inner = experts.w13_weight[expert] @ x
            inner = F.silu(inner[:16] + bank("gate", x, expert, slot)) * (inner[16:] + bank("up", x, expert, slot))
            want[token] += weight * (experts.w2_weight[expert] @ inner + bank("down", inner, expert, slot))
    gate(hidden)
    torch.testing.assert_close(lora(hidden, topk), want, rtol=1e-4, atol=1e-4)
    experts.w13_weight = experts.w13_weight.view(6, 2, 16, 8).transpose(1, 2).reshape(6, 32, 8).clone()
    experts.quant_method.w13_swiglu_interleaved = True
    torch.testing.assert_close(lora(hidden, topk), want, rtol=1e-4, atol=1e-4)


def test_a_step_has_the_same_operations_whatever_its_tokens_choose(models, routed_experts):
    gate, lora, experts, hidden, topk = routed_experts
    for name in ("w13_weight", "w2_weight"):
        setattr(experts, name, getattr(experts, name).bfloat16())
    lora, hidden = lora.bfloat16(), hidden.bfloat16()  # as on a GPU, whose grouped products want rows of whole 16 bytes
    fused = models.LoRA(gate, 8, [4, 2, 2], decides=True).bfloat16()

    def step(hidden, ids, weights):
        y = fused(None, (hidden,), (torch.zeros(30, 8), None))[0]
        return y, lora(hidden, SimpleNamespace(topk_ids=ids, topk_weights=weights))

    # of tensors without values: what asked for one, as a branch or a loop over tokens does, would raise
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(hidden, topk.topk_ids, topk.topk_weights)
    for x in (hidden, hidden.flip(0), -hidden):
        for got, want in zip(graph(x, topk.topk_ids, topk.topk_weights), step(x, topk.topk_ids, topk.topk_weights), strict=True):
            torch.testing.assert_close(got, want)


def test_what_it_does_not_serve_is_refused_with_what_to_do(models):
    config = SimpleNamespace(trace_jax={"format": 1, "scale": [1.0], "rank": 2})
    models._check(config, None)
    for changes, message in (
        ({"tp_size": 2}, "--tp-size 1"),
        ({"enable_lora": True}, "--enable-lora would pass them by"),
    ):
        before = dict(vars(models.context))
        vars(models.context).update(changes)
        with pytest.raises(ValueError, match=message):
            models._check(config, None)
        vars(models.context).update(before)
    with pytest.raises(ValueError, match="leave --quantization out"):
        models._check(config, object())
    for changes, message in (
        ({"mlp_only_layers": [1]}, "use trace-jax serve"),
        ({"trace_jax": {"format": 2}}, "format 2"),
        ({"trace_jax": None}, "no trace_jax"),
    ):
        with pytest.raises(ValueError, match=message):
            models._check(SimpleNamespace(**vars(config) | changes), None)
    with pytest.raises(NotImplementedError, match="use trace-jax serve"):
        models.TraceQwen3_5MoeForCausalLM(config)


def ours(net, tokens: list[int], bank=None, gate=None) -> tuple[np.ndarray, np.ndarray | None]:
    """The log-prob of each token but the first, and the slots [T, L] of all; without a gate those of the base."""
    padded = np.zeros((1, 64), np.int32)  # one shape to compile; what comes after has no part in what comes before
    padded[0, : len(tokens)] = tokens
    out = tiny.forward(net, padded, adapters=bank, routing=None if gate is None else Routing(gate=gate))
    logprobs = np.asarray(jax.nn.log_softmax(net.unembed(out.hidden)[0]))[np.arange(len(tokens) - 1), tokens[1:]]
    return logprobs, None if gate is None else np.asarray(out.slots)[0, : len(tokens)]


def ask(server, prompts: list[list[int]], count: int, start: int = -1) -> list[SimpleNamespace]:
    """One batch sampled at temperature 1: tokens of prompt and answer, log-probs of the answer, with start=0 also of the prompt."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    replies = []
    for prompt, reply in zip(prompts, server.post("/generate", body), strict=True):
        info = reply["meta_info"]
        sampled = info["output_token_logprobs"]
        known = [*info["input_token_logprobs"][1:], *sampled] if start == 0 else sampled
        tokens, logprobs = prompt + [x[1] for x in sampled], np.asarray([x[0] for x in known])
        replies.append(SimpleNamespace(tokens=tokens, logprobs=logprobs, cached=info["cached_tokens"]))
    return replies


def check(server, net, bank, gate) -> None:
    """Whether the server's log-probs are ours under this gate: in prompts, in answers, and in answers to what is in its cache."""
    for reply in (first := ask(server, PROMPTS, 12, start=0)):
        want, slots = ours(net, reply.tokens, bank, gate)
        assert set(np.unique(slots)) == set(range(bank.size + 1)), "a test of routing should use all slots"
        np.testing.assert_allclose(reply.logprobs, want, rtol=0, atol=1e-4)
        assert np.abs(reply.logprobs - ours(net, reply.tokens)[0]).max() > 0.1, "the bank should matter"
    for reply in ask(server, [reply.tokens + [1, 2, 3] for reply in first], 8):
        assert reply.cached >= len(reply.tokens) - 8 - 3 - 1
        np.testing.assert_allclose(reply.logprobs, ours(net, reply.tokens, bank, gate)[0][-8:], rtol=0, atol=1e-4)


@pytest.mark.sglang
@pytest.mark.parametrize("case", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_a_server_routes_as_we_do_and_takes_a_new_gate(tmp_path, case):
    net, bank, gate, out = export(tmp_path, case)
    env = {"PYTHONPATH": str(out), "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_trace"}
    with serve(out, "--skip-tokenizer-init", env=env) as server:
        check(server, net, bank, gate)

        second = tiny.gate(bank.size + 1, net.config, seed=9)
        save_gate_update(out, second, tmp_path / "second")
        reply = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "second"), "weight_version": "second"})
        assert reply["success"], reply
        assert not any(reply.cached for reply in ask(server, PROMPTS, 1)), "keys and values of the first gate"
        check(server, net, bank, second)

        write_tensors(tmp_path / "second", {"model.layers.0.input_layernorm.gate.bias": np.zeros(bank.size + 1, np.float32)})
        with pytest.raises(urllib.error.HTTPError, match="missing model.layers.0.input_layernorm.gate.kernel"):
            server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "second")})
        check(server, net, bank, second)
