"""The composed export in transformers: our logits, our slots, our tokens; and folders that are not whole."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import setuptools
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file

from model import CheckpointError, Gate, Routing, init_cache, load_pretrained, stack_banks
from model.composed import export_composed
from tests.model import tiny

# one of each type, and what else changes where adapters sit: the type, the number of adapters, what differs from `tiny.BASES`
CASES = {
    "qwen3": ("qwen3", 3, {"tie_word_embeddings": True}),
    "biases": ("qwen3", 2, {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 2}),
    "moe, some layers dense": ("qwen3_moe", 2, {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 4}),
    "hybrid": ("qwen3_5", 3, {"tie_word_embeddings": True}),
    "hybrid moe": ("qwen3_5_moe", 2, {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
}


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory):
    """Where transformers keeps copies of modelling files; not the home folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


def load(folder: Path, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype, **options)


def parts(config, adapters: int):
    """A bank of mixed ranks, a gate that uses all slots, and names."""
    banks = [tiny.bank(config, 1, rank=rank, seed=rank) for rank in (4, 2, 3)[:adapters]]
    return stack_banks(banks), tiny.gate(adapters + 1, config), ["base", "search", "plan", "ask"][: adapters + 1]


def add_vision_tower(folder: Path) -> None:
    """Turns a text checkpoint into the layout of those with a vision tower and multi-token prediction."""
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    tensors |= {"model.visual.pos_embed.weight": torch.ones(2, 3), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text, "vision_config": {"model_type": kind}} | tied))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Our model, bank and gate, the folder of the base and that of the composed model."""
    kind, adapters, changes = CASES[request.param]
    base = tmp_path_factory.mktemp("base")
    tiny.checkpoint(base, kind, **changes)
    net = load_pretrained(base)
    bank, gate, names = parts(net.config, adapters)
    out = base.parent / f"{base.name}-composed"
    export_composed(base, bank, gate, out, names)
    return net, bank, gate, base, out


def greedy(net, bank, gate, prompt: np.ndarray, count: int) -> np.ndarray:
    """The `count` most probable next tokens of ours, with a cache."""
    graphdef, state = nnx.split(net)
    length = prompt.shape[1] + count

    @jax.jit
    def step(state, tokens, positions, cache):
        net = nnx.merge(graphdef, state)
        out = net.forward(tokens, positions, None, bank, Routing(gate=gate), cache)
        return jnp.argmax(net.unembed(out.hidden), -1), out.cache

    positions = jnp.broadcast_to(jnp.arange(length), (len(prompt), length))
    tokens, cache = jnp.asarray(prompt), init_cache(net.config, len(prompt), length)
    for i in range(length - 1):  # one by one from the beginning: only one shape to compile
        token, cache = step(state, tokens[:, i : i + 1], positions[:, i : i + 1], cache)
        tokens = tokens if i + 1 < prompt.shape[1] else jnp.concatenate([tokens, token], axis=1)
    return np.asarray(tokens[:, prompt.shape[1] :])


def test_logits_slots_and_greedy_tokens_are_ours(case):
    net, bank, gate, _, out = case
    tokens = tiny.tokens(2, 21)
    theirs = load(out)
    with torch.no_grad():
        got = theirs(torch.tensor(tokens), output_slots=True)
    want = tiny.logits(net, tokens, adapters=bank, routing=Routing(gate=gate))
    scale = np.abs(want).max()
    np.testing.assert_allclose(got.logits.numpy(), want, rtol=0, atol=2e-4 * scale)
    slots = np.asarray(tiny.forward(net, tokens, adapters=bank, routing=Routing(gate=gate)).slots)
    assert set(np.unique(slots)) == set(range(bank.size + 1)), "a test of routing should use all slots"
    np.testing.assert_array_equal(got.slots.numpy(), slots)
    assert got.slots.dtype == torch.int8 and theirs.slot_names[0] == "base" and len(theirs.slot_names) == bank.size + 1

    prompt = tokens[:, :9]
    whole = torch.ones(prompt.shape, dtype=torch.long)  # otherwise `generate` takes token 0 for padding
    text = theirs.generate(torch.tensor(prompt), attention_mask=whole, max_new_tokens=24, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(text.numpy()[:, 9:], greedy(net, bank, gate, prompt, 24))


def test_a_base_with_a_vision_tower(case, tmp_path):
    net, bank, gate, base, out = case
    if not net.config.gated:
        pytest.skip("none of this type has one")
    folder, tokens = tmp_path / "base", torch.tensor(tiny.tokens(2, 12))
    shutil.copytree(base, folder)
    add_vision_tower(folder)
    export_composed(folder, bank, gate, tmp_path / "out", list("abcd")[: bank.size + 1])
    with torch.no_grad():
        got, want = (load(path)(tokens, output_slots=True) for path in (tmp_path / "out", out))
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-5)
    assert torch.equal(got.slots, want.slots)


def test_left_padding_changes_nothing(case):
    *_, out = case
    theirs, tokens = load(out), torch.tensor(tiny.tokens(1, 12))
    mask = torch.ones(1, 15, dtype=torch.long)
    mask[:, :3] = 0
    with torch.no_grad():
        want = theirs(tokens, output_slots=True)
        got = theirs(
            torch.nn.functional.pad(tokens, (3, 0)), attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0), output_slots=True
        )
    torch.testing.assert_close(got.logits[:, 3:], want.logits, rtol=0, atol=2e-4 * want.logits.abs().max().item())
    assert torch.equal(got.slots[:, 3:], want.slots)


def test_a_gate_that_prefers_the_base_gives_the_base(case, tmp_path):
    _, bank, gate, base, _ = case
    shut = Gate(gate.kernel, gate.bias.at[:, 0].set(1e4))
    export_composed(base, bank, shut, tmp_path / "out", list("abcd")[: bank.size + 1])
    tokens = torch.tensor(tiny.tokens(2, 10))
    with torch.no_grad():
        got = load(tmp_path / "out")(tokens, output_slots=True)
        want = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(tokens)
    assert not got.slots.any()
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-4)


def test_bfloat16_keeps_the_gate_in_float32(case):
    *_, out = case
    theirs, tokens = load(out, torch.bfloat16), torch.tensor(tiny.tokens(2, 16))
    for name, x in theirs.named_parameters():
        assert x.dtype == (torch.float32 if "norm.gate." in name else torch.bfloat16), name
    with torch.no_grad():
        got, want = theirs(tokens, output_slots=True), load(out)(tokens, output_slots=True)
    assert got.logits.isfinite().all()
    assert (got.slots == want.slots)[..., 0].float().mean() > 0.9


@pytest.fixture
def small(tmp_path):
    """A base and the arguments of its export."""
    base = tmp_path / "base"
    tiny.checkpoint(base, num_hidden_layers=2)
    return base, parts(load_pretrained(base).config, 2)


def test_the_base_s_files_are_shared_and_its_settings_copied(small, tmp_path):
    base, (bank, gate, names) = small
    for name in ("tokenizer.json", "generation_config.json"):
        (base / name).write_text('{"π": 1}', encoding="utf-8")
    (base / "adapter_config.json").write_text("{}")
    export_composed(base, bank, gate, tmp_path / "out", names)
    out = tmp_path / "out"
    assert (out / "base.safetensors").samefile(base / "model.safetensors") and not (out / "model.safetensors").exists()
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (out / "adapter_config.json").exists()
    assert not (tmp_path / "out.part").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["trace_jax"] == {"format": 1, "slots": names, "rank": bank.rank, "scale": [1.0, 1.0]}
    assert json.loads((base / "config.json").read_text()).items() <= (config | {"architectures": ["Qwen3ForCausalLM"]}).items()


def test_a_sharded_base_on_another_disk_is_copied(tmp_path, monkeypatch):
    base = tmp_path / "base"
    tiny.checkpoint(base).save_pretrained(base, max_shard_size="100KB")
    (base / "model.safetensors").unlink(missing_ok=True)
    net = load_pretrained(base)
    bank, gate, names = parts(net.config, 2)

    def another_disk(source, target):
        raise OSError(18, "Invalid cross-device link")

    export_composed(base, bank, gate, tmp_path / "linked", names)
    monkeypatch.setattr("os.link", another_disk)
    export_composed(base, bank, gate, tmp_path / "copied", names)
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(shards) > 1
    for name in shards:
        assert (tmp_path / "linked" / name).samefile(base / name)
        assert not (tmp_path / "copied" / name).samefile(base / name)
    tokens = tiny.tokens(1, 8)
    want = np.asarray(tiny.logits(net, tokens, adapters=bank, routing=Routing(gate=gate)))
    for name in ("linked", "copied"):
        np.testing.assert_allclose(tiny.torch_logits(load(tmp_path / name), tokens), want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_a_base_in_a_bucket(small, tmp_path, bucket):
    base, (bank, gate, names) = small
    export_composed(bucket.upload(base), bank, gate, tmp_path / "out", names)
    export_composed(base, bank, gate, tmp_path / "local", names)
    tokens = tiny.tokens(1, 8)
    np.testing.assert_array_equal(*(tiny.torch_logits(load(tmp_path / name), tokens) for name in ("out", "local")))


def test_what_the_folder_lacks_or_has_too_much_is_named(small, tmp_path):
    base, (bank, gate, names) = small
    out = tmp_path / "out"
    export_composed(base, bank, gate, out, names)
    path, index = out / "adapters.safetensors", out / "model.safetensors.index.json"
    whole, tensors, listed = path.read_bytes(), load_file(path), index.read_text()
    lacking = "model.layers.1.mlp.up_proj.lora.B"

    def rewrite(tensors):
        save_file(tensors, path, metadata={"format": "pt"})
        files = {n: f for n, f in json.loads(listed)["weight_map"].items() if f != path.name}
        index.write_text(json.dumps({"metadata": {}, "weight_map": files | dict.fromkeys(tensors, path.name)}))

    rewrite({name: x for name, x in tensors.items() if name != lacking})
    with pytest.raises(ValueError, match=f"missing {lacking}"):
        load(out)
    rewrite(tensors | {"model.layers.7.input_layernorm.gate.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="surplus model.layers.7.input_layernorm.gate.bias"):
        load(out)
    index.write_text(listed)
    path.write_bytes(whole[:-100])
    with pytest.raises(OSError, match="adapters.safetensors is not a whole safetensors file"):
        load(out)
    path.unlink()
    with pytest.raises(OSError, match="adapters.safetensors does not exist"):
        load(out)


def test_a_folder_of_another_format_is_refused(small, tmp_path):
    base, arguments = small
    export_composed(base, *arguments[:2], tmp_path / "out", arguments[2])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["trace_jax"]["format"] = 2
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="format 2"):
        load(tmp_path / "out")


def test_what_does_not_fit_is_refused_before_anything_is_written(small, tmp_path):
    base, (bank, gate, names) = small
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="3 different names"):
        export_composed(base, bank, gate, out, names[:2])
    with pytest.raises(ValueError, match="gate's kernel"):
        export_composed(base, bank, Gate(gate.kernel[:1], gate.bias[:1]), out, names)
    with pytest.raises(ValueError, match="the bank's q has shapes"):
        export_composed(base, parts(tiny.CONFIG, 2)[0], gate, out, names)
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        export_composed(base, bank, gate, out, names)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    out.mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        export_composed(base, bank, gate, out, names)


def test_a_saved_composed_model_loads_again(case, tmp_path):
    *_, out = case
    first = load(out)
    first.save_pretrained(tmp_path)
    second, tokens = load(tmp_path), tiny.tokens(1, 8)
    np.testing.assert_allclose(tiny.torch_logits(first, tokens), tiny.torch_logits(second, tokens), rtol=0, atol=1e-5)
    assert second.slot_names == first.slot_names


def test_two_threads_run_one_model(small, tmp_path):
    base, (bank, gate, names) = small
    export_composed(base, bank, gate, tmp_path / "out", names)
    theirs = load(tmp_path / "out")
    inputs = [torch.tensor(tiny.tokens(1, 40, seed=i)) for i in range(2)]
    got = [[], []]

    def run(i):
        with torch.no_grad():
            for _ in range(20):
                got[i].append(theirs(inputs[i], output_slots=True))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for step in ("start", "join"):
        for thread in threads:
            getattr(thread, step)()
    for x, outputs in zip(inputs, got, strict=True):
        want = theirs(x, output_slots=True)
        assert len(outputs) == 20
        assert all(torch.equal(y.slots, want.slots) and torch.allclose(y.logits, want.logits, atol=1e-5) for y in outputs)


def test_the_modelling_file_ships_and_torch_stays_out():
    root = Path(__file__).parents[2]
    assert "model.composed_hf" in setuptools.find_namespace_packages(str(root), include=["model", "model.*"])
    program = "import model, model.composed, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
