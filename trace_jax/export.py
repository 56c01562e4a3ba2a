"""`trace-jax export --what=adapter:C|merged:C --out=DIR`: what was trained, in Hugging Face format.

An adapter becomes a PEFT folder, a merged model a checkpoint that loads anywhere the base does. The routed model is no linear sum of
weights; it is served by this project's engine.
"""

from __future__ import annotations

import pathlib
import shutil

from model import merge, save_peft, save_pretrained
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import open_runtime
from trace_jax.train import load_adapter

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")


def main(arguments: Arguments) -> None:
    """Writes the folder.

    Raises:
      InputError: `--what` is none of the two, the capability has no adapter, or the folder is not empty or cannot be made.
    """
    kind, _, capability = arguments.what.partition(":")
    if kind not in ("adapter", "merged") or not capability:
        raise InputError(f"--what={arguments.what}: give adapter:CAPABILITY or merged:CAPABILITY")
    out = pathlib.Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out={out}: exists already; give another folder")
    with open_runtime(arguments) as runtime:
        bank = load_adapter(runtime, capability)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out={out}: {error.strerror}; give a folder that can be written") from error
        if kind == "adapter":
            save_peft(bank, runtime.model.config, out)
        else:
            save_pretrained(merge(runtime.model, bank, 1), out)
            for name in _TOKENIZER:
                if (source := runtime.config.model.folder / name).is_file():
                    shutil.copy(source, out / name)
    print(out)
