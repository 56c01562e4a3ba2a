"""Small tokenizer folders for tests: byte-level BPE with merges across what templates and contents put side by side."""

import functools
import json
import pathlib
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl.chat import Chat
from trace_jax.quickstart.random_qwen import CUT, TEMPLATE
from trace_jax.quickstart.tokenizer import CHAT_TEMPLATE

_FILES = {"qwen3": TEMPLATE, "qwen3_6": pathlib.Path(__file__).parent.parent / "data" / "chat_templates" / "qwen3_6.jinja"}
TEMPLATES = {"quickstart": CHAT_TEMPLATE} | {name: path.read_text() for name, path in _FILES.items()}


@functools.cache
def chat(template: str = "quickstart") -> Chat:
    """A chat of some 420 tokens with the named template."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    text = ["system\nuser\nassistant\n", "Be brief.\n\n# Tools\n\n", '{"name": "add", "arguments": {"a": "1"}}\n', "ok!\n\n", "\n\n\n"] * 5
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(text, trainer)
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
        return Chat(folder)
