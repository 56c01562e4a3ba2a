"""A small tokenizer, byte-level BPE with merges across what templates and contents put side by side; and episodes against scripts."""

import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl.chat import Chat
from rl.engines.protocol import Completion, Request
from rl.episode import Act
from rl.trajectory import Trajectory
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


def drive(
    game: Generator, chat: Chat, turns: Sequence[str | tuple[str, str]], act: Callable[[Act], Any]
) -> tuple[Trajectory, list[Act | Request]]:
    """Plays an episode (`rl.episode.play`) whose model takes these turns, text or (text, finish), and whose environment is `act`.

    The log-probs of a turn are -1, -2, .. and its policy version is 5. Exceptions are thrown into the episode. Returns what it asked, too.
    """
    turns, asked, answer = list(turns), [], None
    while True:
        try:
            need = game.throw(answer) if isinstance(answer, Exception) else game.send(answer)
        except StopIteration as stop:
            return stop.value, asked
        asked.append(need)
        if isinstance(need, Request):
            turn = turns.pop(0)
            text, finish = (turn, "stop") if isinstance(turn, str) else turn
            tokens = chat.tokenizer(text, add_special_tokens=False).input_ids + ([chat.end] if finish == "stop" else [])
            logprobs = -np.arange(1.0, len(tokens) + 1, dtype=np.float32)
            answer = Completion(need.session, np.array(tokens, np.int32), logprobs, finish, 5)
        else:
            answer = act(need)
