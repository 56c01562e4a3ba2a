"""The checkpoint that ships with the quickstart: a real Hugging Face folder, as its recipe wrote it."""

import json

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from model import count_parameters, load_pretrained
from rl.chat import Chat
from trace_jax.config import load_config
from trace_jax.quickstart.base import STAGES
from trace_jax.quickstart.tokenizer import save_tokenizer
from trace_jax.quickstart.world import WORLD

FOLDER = load_config("quickstart").model.folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chat, environment = Chat(FOLDER), WORLD["Environment"]()
    starts = [environment.reset(seed, {"records": 4, "returnable": 0.2}) for seed in range(8)]
    return [chat.start(start["system"], start["messages"], WORLD["TOOLS"]).tolist() for start in starts]


def test_transformers_gives_the_same_logits(prompts):
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval(), load_pretrained(FOLDER)
    for prompt in prompts:
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits.numpy()
        np.testing.assert_allclose(ours(np.array([prompt])), expected, atol=2e-4 * np.abs(expected).max())


def test_transformers_writes_the_same_greedy_turn(prompts):
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval(), load_pretrained(FOLDER)
    end = ours.config.eos_token_id
    with torch.no_grad():
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        expected = theirs.generate(torch.tensor([prompts[0]]), **options)[0].tolist()
    graphdef, state = nnx.split(ours)
    forward = nnx.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    tokens = list(prompts[0])
    while len(tokens) < len(expected):
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(forward(state, padded)[0, len(tokens) - 1].argmax()))
    assert tokens == expected


def test_its_tokenizer_is_the_one_of_the_recipe(tmp_path):
    save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (FOLDER / name).read_text() == (tmp_path / name).read_text(), f"{name}: train the checkpoint again"


def test_its_log_shows_the_bars_of_the_recipe():
    log = json.loads((FOLDER / "training_log.json").read_text())["stages"]
    for stage in STAGES:
        success = [entry["success"] for entry in log if entry["stage"] == stage.name][-1]
        assert all(low <= success[name] <= high for name, (low, high) in stage.bars.items())


def test_it_is_small():
    assert 300_000 < count_parameters(load_pretrained(FOLDER).config) < 2_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4_000_000
