"""The tokenizer of the quickstart's base agent: whole words of the desk's world as pieces, and single bytes for everything else.

A byte-level BPE without merges: the pre-tokenizer cuts the text at the listed pieces, `ignore_merges` takes each of them whole, and any
other text falls apart into its bytes, so that every string is encodable and decoding gives it back. A model of 0.4 M parameters learns to
look an order up when its id is the same one token everywhere and stands right behind the item, which is why words carry their space behind
them.
"""

from __future__ import annotations

import json
import pathlib
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from trace_jax.quickstart.world import NOUNS, WORLD

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # not special, as in Qwen3

CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n# Tools' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {{- '\\n' + function.name + '(' + (function.parameters.properties | join(', ')) + ')' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or content %}
                {{- '\\n' }}
            {%- endif %}
            {%- set call = tool_call.function if tool_call.function is defined else tool_call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def pieces() -> list[str]:
    """Every piece that is one token, longest first: phrases of the template, of JSON calls, and the words of the desk."""
    found = {"\n", "system\n", "user\n", "user", "assistant\n", "# Tools", "(order_id)", "(order_id, zip)", "()"}
    found |= {'{"name": "', '", "arguments": {"order_id": "', '", "zip": "', '"}}', '", "arguments": {}}'}
    found |= {"cannot return ", " it is ", "all done.", "please.", "Error: ", "ok", "no such order", "bad zip", "already "}
    found |= {tool["function"]["name"] for tool in WORLD["TOOLS"]}
    found |= {
        word + " " for word in [*WORLD["COLOURS"], *NOUNS, *WORLD["ORDINALS"], "order", "cancel", "return", "send", "the", "to", "then"]
    }
    found |= {*WORLD["STATUSES"], WORLD["RETURNABLE"], "cancelled", "returned"}
    found |= set(re.findall(r"\S+ ?", WORLD["SYSTEM"]))
    found |= {*WORLD["ORDER_IDS"], *(ordinal + ": " for ordinal in WORLD["ORDINALS"])}
    return sorted(found, key=lambda piece: (-len(piece), piece))


def build_tokenizer() -> Tokenizer:
    """The tokenizer; bytes first, then pieces, tags and special tokens."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = list(dict.fromkeys([*alphabet, *(byte_level.pre_tokenize_str(piece)[0][0] for piece in pieces())]))
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[], ignore_merges=True))
    cut = "|".join(map(re.escape, pieces()))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def save_tokenizer(folder: pathlib.Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, as `transformers.AutoTokenizer` reads them."""
    build_tokenizer().save(str(folder / "tokenizer.json"), pretty=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
