"""A tiny Qwen3 agent for the tests of the drivers: it plays the desk at random, but in well-formed calls.

A random model would hardly ever end a turn. This one is a bigram model in the clothes of a Qwen3: every token's embedding says what may
follow it, the head knows these classes, and two random layers add a little noise, for the adapters to work on.
"""

import pathlib
import textwrap

import jax
import numpy as np

from envs.builtin import load_builtin
from model import AdapterBank, CausalLM, Config, init_bank, save_peft, save_pretrained
from model.parameters import parameter_specs
from rl.chat import Chat
from trace_jax.cli import Arguments
from trace_jax.config import load_config
from trace_jax.progress import Progress
from trace_jax.quickstart.tokenizer import save_tokenizer
from trace_jax.runtime import Runtime, plan
from trace_jax.workdir import Workdir

CALL = '<tool_call>{{"name": "{}", "arguments": {{"order_id": "{}"}}}}</tool_call>'
SURE = 14.0  # logit of what may follow, against 0 of all the rest


def write_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """Tokenizer and weights."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    chat = Chat(folder)

    def encode(text: str) -> list[int]:
        return chat.tokenizer.encode(text, add_special_tokens=False)

    ids = [f"{letter}{digit}" for letter in "ABC" for digit in range(10)]
    said = [CALL.format(name, order) for name in ("check_order", "return_order", "cancel_order") for order in ids]
    said += ["all done."] * (len(said) // 2)  # a third of the episodes runs out of turns, so that the rewards of a group differ
    follows: dict[int, dict[int, int]] = {}
    for text in said:
        turn = [*encode("<|im_start|>assistant\n"), *encode(text), chat.end]
        for before, after in zip(turn[1:], turn[2:], strict=False):
            follows.setdefault(before, {}).setdefault(after, 0)
            follows[before][after] += 1

    config = Config(len(chat.tokenizer), 32, 48, 2, 2, 1, head_dim=16, max_position_embeddings=1024)
    keys = iter(jax.random.split(jax.random.key(0), 32))
    parameters = {
        name: np.ones(spec.shape) if "norm" in name else 0.1 * np.array(jax.random.normal(next(keys), spec.shape))
        for name, spec in parameter_specs(config).items()
    }
    for name in ("layers.o", "layers.down"):
        parameters[name] *= 0.3
    parameters["embed"][:, 0] = 1.0
    parameters["head"] *= 0.1
    parameters["head"][0, chat.end] = SURE / np.sqrt(32)  # after a slip the turn ends
    classes = list({tuple(sorted(after)) for after in follows.values()})
    classes.sort()
    for before, after in follows.items():
        place = 1 + classes.index(tuple(sorted(after)))
        parameters["embed"][before] = np.eye(32)[place]
        total = sum(after.values())
        for token, count in after.items():
            parameters["head"][place, token] = (SURE + np.log(count / total)) / np.sqrt(32)
    save_pretrained(CausalLM(config, parameters={name: jax.numpy.asarray(x, jax.numpy.float32) for name, x in parameters.items()}), folder)
    return folder


def write_config(path: pathlib.Path, checkpoint: pathlib.Path, most: int | None = None) -> pathlib.Path:
    """The smallest run: what the diagnosis finds is retained, `most` of it, whatever an environment is like is accepted, and 0.05 is
    success."""
    path.write_text(
        textwrap.dedent(f"""
        from trace_jax.config import *

        def get_config():
            return Config(
                name="tiny",
                model=ModelSection(path={str(checkpoint)!r}),
                target=TargetSection(train_tasks=12, heldout_tasks=6),
                rollout=RolloutSection(lanes=16, context=256, max_tokens=24, max_turns=3),
                diagnosis=DiagnosisSection(trials=2, coverage=0.0, gap=0.0, min_runs=1, success=0.05, most={most}),
                synthesis=SynthesisSection(
                    calibration_seeds=4, calibration_rollouts=2, certify_seeds=20, mean_low=0.0, mean_high=1.0, min_std=0.0,
                    max_all_success=1.0, max_all_zero=1.0, max_constant=1.0,
                ),
                train=TrainSection(
                    rank=2, alpha=2.0, learning_rate=1e-2, iterations=2, groups=2, group_size=4, selection_seeds=2, pack_length=256,
                    micro_rows=2, validation_seeds=2,
                ),
                gate=GateSection(successes=12, table_seeds=2, grpo_iterations=1, warm_steps=6),
                evaluation=EvaluationSection(tasks=6, policies=("base", "adapters", "router", "composed")),
                report=ReportSection(trajectories=2),
            )
        """)
    )
    return path


def open_tiny(folder: pathlib.Path, checkpoint: pathlib.Path, **overrides: str) -> Runtime:
    """A runtime of the smallest run, in a workdir of its own; field `train.rank` is given as `train__rank`."""
    config = load_config(
        str(write_config(folder / "config.py", checkpoint)), [(name.replace("__", "."), value) for name, value in overrides.items()]
    )
    stages = plan(config) | {"baseline": 1}
    runtime = Runtime(config, Workdir.open(folder / "run", config), Progress(stages))
    runtime.plan(stages)
    return runtime


def arguments(runtime: Runtime, command: str, **fields) -> Arguments:
    """What a command is asked to do in a runtime's workdir."""
    return Arguments(command=command, config=runtime.config, workdir=runtime.workdir, **fields)


def store_environment(runtime: Runtime, capability: str, **calibration) -> None:
    """A library environment in the workdir, as step 2 leaves it."""
    package = load_builtin(capability)
    folder = f"environments/{capability}"
    runtime.workdir.write_json(f"{folder}/package.json", package.meta)
    runtime.workdir.write_bytes(f"{folder}/environment.py", package.source.encode())
    runtime.workdir.write_json(f"{folder}/certificate.json", {"digest": package.digest, "passed": True})
    runtime.workdir.write_json(f"{folder}/calibration.json", {"usable": True, "hint_ratio": 0.0, "verdict": "ok"} | calibration)


def retain(runtime: Runtime, *capabilities: str) -> None:
    """A selection of step 1."""
    entries = [{"skill": capability, "passes_consistency": True, "status": "PENDING"} for capability in capabilities]
    runtime.workdir.write_json("diagnosis/selected_capabilities.json", entries)


def store_adapters(runtime: Runtime, *capabilities: str) -> None:
    """Random adapters that do something, in certified environments, as steps 1 to 3 leave them."""
    retain(runtime, *capabilities)
    for number, capability in enumerate(capabilities):
        store_environment(runtime, capability)
        train = runtime.config.train
        bank = init_bank(runtime.model.config, 1, train.rank, train.alpha, jax.random.key(number))
        keys = jax.random.split(jax.random.key(100 + number), len(bank.b))
        b = {name: 0.1 * jax.random.normal(key, x.shape) for key, (name, x) in zip(keys, bank.b.items(), strict=True)}
        save_peft(AdapterBank(bank.a, b, bank.scale), runtime.model.config, runtime.workdir.local(f"adapters/{capability}/hf"))
        runtime.workdir.write_json(f"adapters/{capability}/summary.json", {"capability": capability})
