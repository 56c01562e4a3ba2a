"""The composed export in SGLang: its folder, and on a real server our log-probs under one gate, then under another."""

import ast
import json
import urllib.error

import jax
import numpy as np
import pytest

from model import CheckpointError, Gate, Routing, load_pretrained, stack_banks
from model.composed import export_composed, save_gate_update
from model.tensor_files import open_tensors, write_tensors
from tests.model import tiny
from tests.sglang_server.server import serve

CASES = {
    "qwen3": ("qwen3", 3, {"tie_word_embeddings": True}),
    "biases": ("qwen3", 2, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "moe": ("qwen3_moe", 2, {"norm_topk_prob": True, "tie_word_embeddings": False}),
}
LENGTHS = (5, 37, 18)


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
    with pytest.raises(CheckpointError, match="no composed model"):
        save_gate_update(tmp_path / "base", gate, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def ours(net, tokens: list[int], bank=None, gate=None) -> tuple[np.ndarray, np.ndarray | None]:
    """The log-prob of each token but the first, and the slots [T, L] of all; without a gate those of the base."""
    padded = np.zeros((1, 64), np.int32)  # one shape to compile; what comes after has no part in what comes before
    padded[0, : len(tokens)] = tokens
    out = tiny.forward(net, padded, adapters=bank, routing=None if gate is None else Routing(gate=gate))
    logprobs = np.asarray(jax.nn.log_softmax(net.unembed(out.hidden)[0]))[np.arange(len(tokens) - 1), tokens[1:]]
    return logprobs, None if gate is None else np.asarray(out.slots)[0, : len(tokens)]


def ask(server, prompts: list[list[int]], count: int):
    """[(the tokens of prompt and answer, the log-probs of all but the first)]; the prompts in one batch, sampled at temperature 1."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    for prompt, reply in zip(prompts, server.post("/generate", body), strict=True):
        info = reply["meta_info"]
        prompted, sampled = info["input_token_logprobs"], info["output_token_logprobs"]
        yield prompt + [x[1] for x in sampled], np.asarray([x[0] for x in (prompted + sampled)[1:]])


def check(server, net, bank, gate) -> None:
    """Whether the server's log-probs are ours under this gate, in the prompt and in the answer."""
    for tokens, got in ask(server, [tiny.tokens(length, seed=length).tolist() for length in LENGTHS], 24):
        want, slots = ours(net, tokens, bank, gate)
        assert set(np.unique(slots)) == set(range(bank.size + 1)), "a test of routing should use all slots"
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        assert np.abs(got - ours(net, tokens)[0]).max() > 0.1, "the bank should matter"


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
        check(server, net, bank, second)

        write_tensors(tmp_path / "second", {"model.layers.0.input_layernorm.gate.bias": np.zeros(bank.size + 1, np.float32)})
        with pytest.raises(urllib.error.HTTPError, match="missing model.layers.0.input_layernorm.gate.kernel"):
            server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "second")})
        check(server, net, bank, second)
