import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import Gate, Routing, load_peft, load_pretrained, save_gate
from tests.trace_jax import tiny
from trace_jax import export
from trace_jax.errors import InputError
from trace_jax.policies import find_policy, load_mixture
from trace_jax.train import load_adapter

ONE, TWO = "tool_calling_precision", "precondition_verification"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint):
    """A runtime with two adapters."""
    with tiny.open_tiny(tmp_path_factory.mktemp("trained"), checkpoint) as runtime:
        tiny.store_adapters(runtime, ONE, TWO)
        yield runtime


def run(runtime, what, out):
    export.main(tiny.arguments(runtime, "export", what=what, out=str(out)))


def test_an_adapter_is_a_peft_folder(trained, tmp_path, capsys):
    run(trained, f"adapter:{ONE}", tmp_path / "out")
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    exported, stored = load_peft(tmp_path / "out", trained.model.config), load_adapter(trained, ONE)
    for name in stored.b:
        np.testing.assert_array_equal(exported.b[name], stored.b[name])


def test_a_merged_model_is_a_checkpoint_with_its_tokenizer(trained, tmp_path):
    run(trained, f"merged:{ONE}", tmp_path / "out")
    tokens = jnp.arange(20)[None]
    adapted = trained.model(tokens, adapters=load_adapter(trained, ONE), routing=Routing(weights=jnp.array([[0.0, 1.0]])))
    np.testing.assert_allclose(load_pretrained(tmp_path / "out")(tokens), adapted, atol=1e-4)
    assert not np.allclose(trained.model(tokens), adapted, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == trained.chat.tokenizer.chat_template


@pytest.mark.parametrize("kept", [True, False])
def test_the_composed_agent_is_a_folder_that_transformers_routes_as_we_do(trained, tmp_path, kept):
    mixture = load_mixture(trained, [ONE, TWO])
    kernel = jax.random.normal(jax.random.key(5), (trained.model.config.num_hidden_layers, trained.model.config.hidden_size, 3))
    save_gate(Gate(kernel, jnp.zeros(kernel.shape[::2])), trained.workdir.local("gate/gate.safetensors"))
    routing = {"slots": ["base", ONE, TWO], "kept": kept, "composed": "gate" if kept else f"adapter:{TWO}"}
    trained.workdir.write_json("gate/routing.json", routing)
    run(trained, "composed", tmp_path / "out")

    policy, tokens = find_policy(trained, "composed", mixture), jnp.arange(20)[None]
    weights = None if kept else jnp.asarray(policy.weights)[None]
    ours = trained.model.forward(tokens, adapters=policy.adapters, routing=Routing(weights, policy.gate))
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    with torch.no_grad():
        theirs = net(torch.arange(20)[None], output_slots=True)
    np.testing.assert_allclose(theirs.logits.numpy(), trained.model.unembed(ours.hidden), atol=1e-4)
    expected = ours.slots if kept else np.full(theirs.slots.shape, 2)
    np.testing.assert_array_equal(theirs.slots.numpy(), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == trained.chat.tokenizer.chat_template

    run(trained, "gate", tmp_path / "gate")
    exported = load_file(tmp_path / "gate" / "model.safetensors")
    assert exported.keys() == {name for name in load_file(tmp_path / "out" / "adapters.safetensors") if "layernorm.gate" in name}
    for layer in range(trained.model.config.num_hidden_layers):
        assert np.argmax(exported[f"model.layers.{layer}.input_layernorm.gate.bias"]) == (0 if kept else 2)
        assert not kept or np.array_equal(exported[f"model.layers.{layer}.input_layernorm.gate.kernel"], kernel[layer])


def test_bad_input_leaves_nothing_behind(trained, tmp_path):
    for what in ("composed:", "adapter:", "router"):
        with pytest.raises(InputError, match=f"--what={what}: give adapter:CAPABILITY, merged:CAPABILITY, composed, gate or results"):
            run(trained, what, tmp_path / "out")
    with pytest.raises(InputError, match="adapter 'typo' is not trained"):
        run(trained, "adapter:typo", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("full", "file"):
        with pytest.raises(InputError, match=f"--out=.*{name}: exists already"):
            run(trained, f"adapter:{ONE}", tmp_path / name)
    with pytest.raises(InputError, match="--out=.*Not a directory; give a folder that can be written"):
        run(trained, f"adapter:{ONE}", tmp_path / "file" / "below")


def test_a_damaged_adapter_is_named_with_what_to_do(trained, tmp_path):
    file = trained.workdir.local(f"adapters/{ONE}/hf/adapter_model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(b"short")
    with pytest.raises(
        InputError, match=rf"adapter_model\.safetensors.*; remove .*summary\.json and run trace-jax train --capability={ONE}"
    ):
        run(trained, f"adapter:{ONE}", tmp_path / "out")
    file.write_bytes(whole)
