"""`trace-jax export --what=adapter:C|merged:C|composed|gate --out=DIR`: what was trained, in Hugging Face format. With `--what=results`
it is what a policy did in a benchmark, in the benchmark's format (`trace_jax.benchmarks.writers`).

An adapter becomes a PEFT folder, a merged model a checkpoint that loads anywhere the base does. The routed model is no linear sum of
weights: its folder holds base, adapters and gate, and a modelling file with which transformers routes as this project's engine does, and
a package with which SGLang does. A gate alone is for an SGLang server that runs an earlier export of the same adapters:

    PYTHONPATH=DIR SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_trace python -m sglang.launch_server --model-path DIR
    curl SERVER/update_weights_from_disk -H 'Content-Type: application/json' -d '{"model_path": "GATE_DIR", "weight_version": "2"}'
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

from model import Gate, constant_gate, export_composed, merge, save_gate_update, save_peft, save_pretrained
from model.composed import COMPANIONS
from trace_jax.base_model import tokenizer_folder
from trace_jax.benchmarks.writers import export_results
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.policies import Mixture, composed_gate, read_routing, trained_mixture
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.stores import is_remote
from trace_jax.train import load_adapter


def main(arguments: Arguments) -> None:
    """Writes the folder.

    Raises:
      InputError: `--what` is none of the five, what it names was not trained, or the folder exists or cannot be made.
    """
    kind, _, capability = arguments.what.partition(":")
    if arguments.what not in ("composed", "gate", "results") and (kind not in ("adapter", "merged") or not capability):
        raise InputError(f"--what={arguments.what}: give adapter:CAPABILITY, merged:CAPABILITY, composed, gate or results")
    if is_remote(arguments.out):
        raise InputError(f"--out={arguments.out}: give a folder of this machine, and copy it with `gcloud storage cp -r`")
    out = pathlib.Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out={out}: exists already; give another folder")
    if kind == "results":
        try:
            print("\n".join(export_results(arguments.workdir, arguments.policy, arguments.split, out)))
        except OSError as error:
            raise InputError(f"--out={out}: {error.strerror}; give a folder that can be written") from error
        return
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
    if kind in ("composed", "gate"):
        if (mixture := trained_mixture(runtime)) is None:
            raise InputError(f"nothing is trained in {runtime.workdir.place()}; run trace-jax run first")
        gate = gate_of(runtime, mixture)
        if kind == "gate":
            return lambda out: save_gate_update(runtime.config.model.folder, gate, out)
        return lambda out: write_composed(runtime, mixture, out)
    bank = load_adapter(runtime, capability)
    if kind == "adapter":
        return lambda out: save_peft(bank, runtime.model.config, out)

    def write_merged(out: pathlib.Path) -> None:
        save_pretrained(merge(runtime.model, bank, 1), out)
        folder = tokenizer_folder(runtime.config.model)
        for name in COMPANIONS:
            if (source := folder / name).is_file():
                shutil.copy(source, out / name)

    return write_merged


def write_composed(runtime: Runtime, mixture: Mixture, out: pathlib.Path) -> None:
    """The policy `composed` as a folder."""
    export_composed(runtime.config.model.folder, mixture.bank, gate_of(runtime, mixture), out, mixture.slots)


def gate_of(runtime: Runtime, mixture: Mixture) -> Gate:
    """The policy `composed` as a gate; where that is a single adapter, one that always takes its slot."""
    routing = read_routing(runtime, mixture.slots)
    if (gate := composed_gate(runtime, routing)) is not None:
        return gate
    slot = mixture.slots.index(routing["composed"].removeprefix("adapter:"))
    return constant_gate(runtime.model.config, len(mixture.slots), slot)
