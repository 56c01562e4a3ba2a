"""`trace-jax export --what=adapter:C|merged:C|composed --out=DIR`: what was trained, in Hugging Face format.

An adapter becomes a PEFT folder, a merged model a checkpoint that loads anywhere the base does. The routed model is no linear sum of
weights: its folder holds base, adapters and gate, and a modelling file with which transformers routes as this project's engine does.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

from model import constant_gate, export_composed, load_gate, merge, save_peft, save_pretrained
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.policies import Mixture, read_routing, trained_mixture
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.train import load_adapter

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")


def main(arguments: Arguments) -> None:
    """Writes the folder.

    Raises:
      InputError: `--what` is none of the three, what it names was not trained, or the folder exists or cannot be made.
    """
    kind, _, capability = arguments.what.partition(":")
    if arguments.what != "composed" and (kind not in ("adapter", "merged") or not capability):
        raise InputError(f"--what={arguments.what}: give adapter:CAPABILITY, merged:CAPABILITY or composed")
    out = pathlib.Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out={out}: exists already; give another folder")
    with open_runtime(arguments) as runtime:
        write = _writer(runtime, kind, capability)
        try:
            out.mkdir(parents=True, exist_ok=True)
            out.rmdir()  # it can be made; that of a composed model appears as a whole
            write(out)
        except OSError as error:
            raise InputError(f"--out={out}: {error.strerror}; give a folder that can be written") from error
    print(out)


def _writer(runtime: Runtime, kind: str, capability: str) -> Callable[[pathlib.Path], None]:
    """What writes the folder, everything that it needs being there."""
    if kind == "composed":
        if (mixture := trained_mixture(runtime)) is None:
            raise InputError(f"nothing is trained in {runtime.workdir.root}; run trace-jax run first")
        read_routing(runtime, mixture.slots)
        return lambda out: write_composed(runtime, mixture, out)
    bank = load_adapter(runtime, capability)
    if kind == "adapter":
        return lambda out: save_peft(bank, runtime.model.config, out)

    def write_merged(out: pathlib.Path) -> None:
        save_pretrained(merge(runtime.model, bank, 1), out)
        for name in _TOKENIZER:
            if (source := runtime.config.model.folder / name).is_file():
                shutil.copy(source, out / name)

    return write_merged


def write_composed(runtime: Runtime, mixture: Mixture, out: pathlib.Path) -> None:
    """The policy `composed` as a Hugging Face folder; where the gate was not kept, its gate always takes the best adapter's slot."""
    routing = read_routing(runtime, mixture.slots)
    if routing["kept"]:
        gate = load_gate(runtime.workdir.path("gate/gate.safetensors"))
    else:
        slot = mixture.slots.index(routing["composed"].removeprefix("adapter:"))
        gate = constant_gate(runtime.model.config, len(mixture.slots), slot)
    export_composed(runtime.config.model.folder, mixture.bank, gate, out, mixture.slots)
