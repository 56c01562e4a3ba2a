"""The command line: one table of commands, their flags, and what each exit code means.

A command is a function `main(arguments: Arguments) -> None` in a module of its own, imported only when flags and config are known to be
right: `trace-jax --help` starts no JAX. Exit code 0: all that was asked was done. 2: bad flags, config or input, in one line. 1: anything
else, in one line, the traceback of an unexpected error in a file. 130 and 143: Ctrl-C and SIGTERM; both are raised in the main thread, so
a command's `with` blocks save its state on the way out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags, logging

from envs.base import SandboxError
from trace_jax import config as configs
from trace_jax.config import ROOT, Config
from trace_jax.config.fields import fields, nearest, type_name
from trace_jax.endings import GO_ON, Terminated, complain, crash, reader_left, signals_raise
from trace_jax.errors import InputError, Unfinished
from trace_jax.preflight.libtpu import expect_no_tpu_without_chips
from trace_jax.processes import ALONE
from trace_jax.processes.job import cause, find_job, join
from trace_jax.processes.roll_call import facts
from trace_jax.reference import allowed, shown
from trace_jax.workdir import Workdir, stored_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command was asked to do.

    Attributes:
      config: validated; the one of the workdir when `--config` is left out.
      workdir: open, and locked by this process; None where the command needs none and none was given.
      argument: the command's positional argument, `DIR` of `certify`, `NAME` of `prompt` and `WORKDIR` of `view`.
    """

    command: str
    config: Config
    workdir: Workdir | None = None
    argument: str | None = None
    results: tuple[str, ...] = ()
    against: str | None = None
    intersect: bool = False
    policy: tuple[str, ...] = ()
    split: str | None = None
    capability: str | None = None
    package: str | None = None
    what: str | None = None
    out: str | None = None
    model: str | None = None
    adapter: str | None = None
    input: str | None = None
    topology: str | None = None
    output: str | None = None
    profile_steps: tuple[str, ...] = ()
    rounds: int = 1
    host: str | None = None
    port: int | None = None
    context: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One row of the table.

    Attributes:
      module: has the function `main(arguments)`.
      flags: beyond `--config`; with `!` when it must be given.
      argument: its positional argument; where a flag has its name, it may be given either way, or be left out.
      defaults: of flags that have another one here than in FLAGS.
      config: whether a config must be named, or be in the workdir; else the defaults do.
      lock: False for a command that may be used beside a run that holds the workdir.
      fields: how the config fields begin that its help lists.
    """

    module: str
    help: str
    flags: tuple[str, ...] = ("workdir!",)
    argument: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: bool = True
    lock: bool = True
    fields: tuple[str, ...] = ("",)

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


_TOGETHER = ("coordinator", "num_processes", "process_id")  # of the commands that several processes may run together

COMMANDS = {
    "run": Command(
        module="trace_jax.run",
        help="the four steps and the evaluation, resuming wherever an earlier run stopped",
        flags=("workdir!", "rounds", "profile_steps", *_TOGETHER),
    ),
    "rollout": Command(
        module="trace_jax.rollout",
        help="rolls a policy out in the target environment",
        flags=("workdir!", "policy!", "split!", *_TOGETHER),
    ),
    "diagnose": Command(
        module="trace_jax.diagnose.command",
        help="step 1, on the workdir's rollouts or on result files that another tool wrote",
        flags=("workdir", "results", "against"),
        config=False,
    ),
    "synthesize": Command(
        module="trace_jax.synthesize", help="step 2: generate, certify, calibrate", flags=("workdir!", "capability", *_TOGETHER)
    ),
    "certify": Command(
        module="trace_jax.certify",
        help="the certificate of one environment package",
        flags=("output",),
        argument="DIR",
        config=False,
        fields=("target.package", "benchmark.", "rollout.sandbox", "synthesis.certify_"),
    ),
    "train": Command(
        module="trace_jax.train",
        help="step 3: the adapter of one or all retained capabilities",
        flags=("workdir!", "capability", "profile_steps", *_TOGETHER),
    ),
    "compose": Command(
        module="trace_jax.compose", help="step 4: the gate over the base and the adapters", flags=("workdir!", "profile_steps", *_TOGETHER)
    ),
    "evaluate": Command(
        module="trace_jax.evaluate.command",
        help="success with intervals of policies on the held-out split, side by side and paired; or of other tools' result files",
        flags=("workdir", "policy", "results", "intersect", *_TOGETHER),
        config=False,
    ),
    "compare": Command(
        module="trace_jax.compare",
        help="baselines side by side: table, score against rollouts, score against number of capabilities",
        flags=("workdir!", *_TOGETHER),
    ),
    "preflight": Command(
        module="trace_jax.preflight.command",
        help="compiles the run's steps for accelerators that are not there: memory per device, operations, what limits a step",
        flags=("topology",),
        lock=False,
    ),
    "score": Command(
        module="trace_jax.score",
        help="log-probs of given tokens under a model, with or without an adapter",
        flags=("model!", "adapter", "input!", "output!"),
        config=False,
    ),
    "serve": Command(
        module="trace_jax.serve.command",
        help="an OpenAI-compatible server over the policies of a workdir, or the base of a config",
        flags=("workdir", "policy!", "host", "port", "context"),
        lock=False,
    ),
    "export": Command(
        module="trace_jax.export",
        help="what was trained in Hugging Face format, or rollouts in the format of their benchmark",
        flags=("workdir!", "what!", "out!", "policy", "split"),
        lock=False,
    ),
    "report": Command(module="trace_jax.report", help="writes report.html again from what the workdir holds", lock=False),
    "view": Command(
        module="trace_jax.view.command",
        help="a browsable list of all rollouts of a workdir, or of result files, in a browser; only reads",
        flags=("workdir", "results", "host", "port"),
        argument="WORKDIR",
        defaults={"port": 8001},  # beside a server of the same workdir
        config=False,
        lock=False,
    ),
    "verify-again": Command(
        module="trace_jax.verify_again",
        help="stored rollouts scored by the verifier as it is now, or by a changed one, and what differs",
        flags=("workdir!", "capability", "package"),
        lock=False,
    ),
    "prompt": Command(
        module="trace_jax.prompt",
        help="one rendered prompt of the LLM agents",
        flags=(),
        argument="NAME",
        config=False,
        lock=False,
        fields=("agents.prompts", "rollout.context", "rollout.max_t", "synthesis."),
    ),
    "params": Command(
        module="trace_jax.params", help="parameter counts of the model, the adapters and the gate", flags=("workdir",), lock=False
    ),
}


# every flag of a command: how absl defines it, its default, for a choice what there is, and its help
FLAGS = {
    "config": (flags.DEFINE_string, None, "a name in configs/, or PATH.py; left out, the workdir's"),
    "workdir": (flags.DEFINE_string, None, "where the run lives: a folder, or gs://BUCKET/PREFIX"),
    "results": (flags.DEFINE_list, [], "result files of one domain each, with commas between"),
    "against": (flags.DEFINE_string, None, "workdir of another diagnosis of the same trajectories, to compare the labels with"),
    "intersect": (flags.DEFINE_bool, False, "compare result files on the tasks that they share, instead of refusing others"),
    "policy": (flags.DEFINE_list, [], "base, adapter:CAPABILITY, uniform, router or composed; with commas between"),
    "split": (flags.DEFINE_enum, None, ["train", "heldout"], "which tasks of the target"),
    "capability": (flags.DEFINE_string, None, "this one only; left out, all that were retained"),
    "package": (flags.DEFINE_string, None, "folder of a changed package; left out, the workdir's own"),
    "topology": (flags.DEFINE_string, None, "accelerators, such as v5p:2x2x4; left out, the config's mesh.topology"),
    "model": (flags.DEFINE_string, None, "a Hugging Face model folder, local or gs://"),
    "adapter": (flags.DEFINE_string, None, "a PEFT adapter folder; left out, the model alone"),
    "input": (flags.DEFINE_string, None, 'file of lines {"tokens": [...]}'),
    "output": (flags.DEFINE_string, None, 'file to write: of score lines {"logprobs": [null, ...]}, of certify the certificate as JSON'),
    "what": (
        flags.DEFINE_string,
        None,
        "adapter:CAPABILITY, merged:CAPABILITY, composed, gate (a new one for an SGLang server of the composed), "
        "or results: the rollouts of --policy on --split for tau2 or the SWE-bench harness",
    ),
    "out": (flags.DEFINE_string, None, "folder to write to"),
    "rounds": (
        flags.DEFINE_integer,
        1,
        "how often the steps are done: from the second time on what the composed agent still lacks gets adapters and slots",
        1,
    ),
    "profile_steps": (
        flags.DEFINE_list,
        [],
        "numbers of iterations, such as 2,3, whose trace for TensorBoard or Perfetto goes to profile/",
    ),
    "host": (flags.DEFINE_string, "127.0.0.1", "address to listen on"),
    "port": (flags.DEFINE_integer, 8000, "port to listen on; 0: any that is free", 0, 65535),
    "context": (flags.DEFINE_integer, None, "longest context in tokens, the answer included; left out, the config's rollout.context", 16),
    "coordinator": (flags.DEFINE_string, None, "HOST:PORT of process 0, or auto on a TPU pod; for a run of several processes"),
    "num_processes": (flags.DEFINE_integer, None, "how many processes run this command together, one a host"),
    "process_id": (flags.DEFINE_integer, None, "the number of this one, from 0"),
}


def main(argv: list[str]) -> int:
    """Runs one command and returns the exit code.

    Args:
      argv: the words after `trace-jax`.
    """
    with contextlib.ExitStack() as stack:
        workdir: Workdir | None = None
        try:
            stack.enter_context(signals_raise())
            check_packages()
            words = [word for word in argv if word not in ("--help", "-h")]
            if not words:
                print(overview())
                return 0
            name, command = find_command(words[0])
            if len(words) < len(argv):
                print(usage(name, command))
                return 0
            values, overrides, argument = parse(name, command, words[1:])
            config = _config(values, overrides, command)
            expect_no_tpu_without_chips()
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch, which we do not use
            logging.set_verbosity(logging.ERROR)  # orbax warns of every save that a bucket takes seconds for
            job = find_job(*(values.pop(flag) for flag in _TOGETHER)) if "coordinator" in values else None
            processes = join(job, facts(name, values, config)) if job else ALONE
            if values.get("workdir"):
                workdir = stack.enter_context(Workdir.open(values.pop("workdir"), config, lock=command.lock, processes=processes))
            options = {key: value for key, value in values.items() if key not in ("config", "workdir")}
            importlib.import_module(command.module).main(
                Arguments(command=name, config=config, workdir=workdir, argument=argument, **options)
            )
            return 0
        except InputError as error:
            return complain(str(error), 2)
        except Unfinished as error:
            return complain(str(error), 1)
        except SandboxError as error:
            return complain(f"config field 'rollout.sandbox': {error}; {GO_ON}", 1)
        except KeyboardInterrupt:
            return complain(f"interrupted; {GO_ON}", 130)
        except Terminated:
            lost = cause()  # of another process, which is why this one was told to end
            return complain(f"{lost or 'terminated'}; {GO_ON}", 1 if lost else 143)
        except BrokenPipeError as error:
            return 1 if reader_left() else crash(error, workdir, argv)
        except Exception as error:  # the last frame of the program: nothing is swallowed, the traceback goes to a file
            return crash(error, workdir, argv)


def overview() -> str:
    """What `trace-jax` alone prints."""
    commands = {name: command for name, command in COMMANDS.items() if command.exists}
    lines = ["trace-jax COMMAND [flags]: diagnose what an agent lacks, synthesise environments, train adapters, compose them", ""]
    lines += [f"  {f'{name} {command.argument or str()}':<12} {command.help}" for name, command in commands.items()]
    lines += [
        "",
        f"Configs: {', '.join(configs.config_names())}. `trace-jax COMMAND --help` lists a command's flags and the config fields.",
    ]
    return "\n".join(lines)


def usage(name: str, command: Command) -> str:
    """What `trace-jax COMMAND --help` prints: its flags and every config field, or those that it reads where they are few."""
    values = define_flags(command)
    required = [flag[:-1] for flag in command.flags if flag.endswith("!")]
    lines = [f"trace-jax {name} {command.argument or ''}".rstrip() + f": {command.help}", ""]
    for flag in ("config", *(flag.rstrip("!") for flag in command.flags)):
        default = f" (default {values[flag].default})" if values[flag].default else ""
        lines.append(f"  --{flag}  {values[flag].help}{' (required)' if flag in required else default}")
    lines += ["", "Config fields and their defaults, set with --config.FIELD=VALUE:", ""]
    for field, spec, value in (row for row in fields(Config()) if row[0].startswith(command.fields)):
        limits = f", {allowed(spec)}" if allowed(spec) else ""
        lines.append(f"  {f'{field}={shown(value)}':<40} {spec.metadata['help']} ({type_name(spec.type)}{limits})")
    if not all(field.startswith(command.fields) for field, _, _ in fields(Config())):
        lines += ["", "docs/config.md has the others."]
    return "\n".join(lines)


def find_command(name: str) -> tuple[str, Command]:
    """Raises InputError when there is no such command."""
    known = [known for known, command in COMMANDS.items() if command.exists]
    if name not in known:
        raise InputError(f"no command {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
    return name, COMMANDS[name]


def define_flags(command: Command) -> flags.FlagValues:
    """The absl flags of a command, apart from other commands'."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    names = {flag.rstrip("!") for flag in command.flags}
    for name, (define, *settings) in FLAGS.items():
        if name == "config" or name in names:
            define(name, *settings, flag_values=values)
    for name, value in command.defaults.items():
        values.set_default(name, value)
    return values


def parse(name: str, command: Command, words: list[str]) -> tuple[dict, list[tuple[str, str]], str | None]:
    """The values of a command's flags, the `--config.a.b=value` overrides, and the positional argument.

    Raises:
      InputError: an unknown flag, a wrong value, a flag or argument that is missing or too many.
    """
    overrides, rest = [], []
    for word in words:
        if word.startswith("--config."):
            key, equals, text = word.removeprefix("--config.").partition("=")
            if not equals:
                raise InputError(f"{word}: write {word}=VALUE")
            overrides.append((key, text))
        else:
            rest.append(word)
    values = define_flags(command)
    try:
        positional = values([name, *rest])[1:]
    except flags.Error as error:
        raise InputError(f"{' '.join(str(error).split())}; see trace-jax {name} --help") from error
    by_flag = (command.argument or "").lower()
    if by_flag in command.flags:
        positional += filter(None, [values[by_flag].value])
        positional, values[by_flag].value = positional or [None], None
    if len(positional) != (1 if command.argument else 0):
        expected = f"expected one argument, {command.argument}" if command.argument else "takes flags only"
        raise InputError(f"trace-jax {name}: {expected}, found {' '.join(positional) or 'none'}")
    for flag in command.flags:
        if flag.endswith("!") and not values[flag[:-1]].value:
            raise InputError(f"trace-jax {name}: --{flag[:-1]} is missing: {values[flag[:-1]].help}")
    parsed = {flag: values[flag].value for flag in values}
    parsed = {flag: tuple(value) if isinstance(value, list) else value for flag, value in parsed.items()}
    return parsed, overrides, positional[0] if positional else None


def check_packages() -> None:
    """Our four packages must come from one place.

    Raises:
      InputError: the path that hides one of them.
    """
    for name in ("rl", "model", "envs"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise InputError(f"the package {name!r} of trace-jax is not in {ROOT}; install trace-jax again")
        found = pathlib.Path(spec.origin or next(iter(spec.submodule_search_locations)))
        if found.resolve() != ROOT / name / "__init__.py":
            raise InputError(f"{found} hides the package {name!r} of trace-jax in {ROOT}; rename it or take its folder out of PYTHONPATH")


def _config(values: dict, overrides: list[tuple[str, str]], command: Command) -> Config:
    if values["config"]:
        return configs.load_config(values["config"], overrides)
    workdir = values.get("workdir")
    stored = stored_config(workdir) if workdir else None
    # a workdir holds the config of its run: no command may fill a new one with defaults
    if stored is None and (command.config or workdir):
        where = f"{workdir} holds none yet: " if workdir else ""
        raise InputError(f"--config is missing: {where}give one of {', '.join(configs.config_names())}, or a PATH.py")
    return configs.override(stored or Config(), overrides).validate()
