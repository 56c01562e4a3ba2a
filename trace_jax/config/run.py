"""The configuration of a run: typed, documented field by field, and checked in full before any weight loads.

A config is a Python file with `get_config() -> Config`, named (`--config=quickstart`, a file in `configs/`) or given as a path. One field
is overridden with `--config.train.rank=16`; the value is read by the field's annotation. An unknown key is an error that names the
nearest known one. Configs are immutable: write `dataclasses.replace(base, seed=1)`.
"""

import dataclasses
import json
import operator
import pathlib
import re
import runpy
import shlex
import traceback
import urllib.parse
from collections.abc import Iterator
from typing import Any, Self

from trace_jax.config.fields import check, field, fields, nearest, parse, read, section
from trace_jax.config.sections import (
    ANALYSTS,
    PACKAGE,
    ROOT,
    AgentsSection,
    BaselineSection,
    BenchmarkSection,
    DiagnosisSection,
    EvaluationSection,
    GateSection,
    MeshSection,
    ModelSection,
    ReportSection,
    RolloutSection,
    ServersSection,
    SynthesisSection,
    TargetSection,
    TrainSection,
)
from trace_jax.errors import InputError


@section()
class Config:
    """A whole run."""

    name: str = field("", "shown in the report", changes=True)
    seed: int = field(0, "seed of everything that is random", "[0, 4294967296)")
    analyst: str = field(
        "evidence",
        "who labels the trajectories: rules over the grader's evidence, an LLM, or the LLM set beside the rules",
        ANALYSTS,
        changes=True,
    )
    generator: str = field(
        "library", "where environments come from: those that come with trace-jax, or an LLM", ("library", "llm"), changes=True
    )
    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    target: TargetSection = dataclasses.field(default_factory=TargetSection)  # its knobs are a dictionary
    benchmark: BenchmarkSection = BenchmarkSection()
    rollout: RolloutSection = RolloutSection()
    servers: ServersSection = ServersSection()
    agents: AgentsSection = dataclasses.field(default_factory=AgentsSection)  # its parameters are a dictionary
    diagnosis: DiagnosisSection = DiagnosisSection()
    synthesis: SynthesisSection = SynthesisSection()
    train: TrainSection = TrainSection()
    gate: GateSection = GateSection()
    evaluation: EvaluationSection = EvaluationSection()
    baselines: BaselineSection = BaselineSection()
    report: ReportSection = ReportSection()

    def to_json(self) -> dict[str, Any]:
        """Nested dictionaries of JSON values; `from_json` is the inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any], source: str) -> Self:
        """The validated config; fields left out keep their defaults. Raises InputError, with `source`, on a wrong key or value."""
        try:
            return read(cls, data).validate()
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def validate(self) -> Self:
        """Checks types, ranges, choices, and what fields demand of each other. Returns the config.

        Raises:
          InputError: the first field that is wrong, and how to mend it.
        """
        for name, spec, value in fields(self):
            check(name, spec, value)
        _check_addresses("servers.urls", self.servers.urls, "the servers' key goes into SGLANG_API_KEY")
        _check_addresses("agents.url", (self.agents.url,) if self.agents.url else (), "it takes no key")
        _check_secrets("agents.command", self.agents.command, "put it into a script that reads it from the environment")
        _check_secrets("agents.parameters", json.dumps(self.agents.parameters, default=str), "leave it out")
        for ok, name, why in self._rules():
            if not ok:
                raise InputError(f"config field {name!r}: {operator.attrgetter(name)(self)} {why}")
        return self

    def _rules(self) -> Iterator[tuple[bool, str, str]]:
        """What fields demand of each other, as (holds, field, what is wrong with its value)."""
        d, s, t, r, e = self.diagnosis, self.synthesis, self.train, self.rollout, self.evaluation
        yield d.min_runs <= d.runs, "diagnosis.min_runs", f"is more than diagnosis.runs = {d.runs}"
        yield s.mean_low < s.mean_high, "synthesis.mean_low", f"is not below synthesis.mean_high = {s.mean_high}"
        yield r.max_tokens < r.context, "rollout.max_tokens", f"leaves no room for a prompt in rollout.context = {r.context}"
        yield t.pack_length >= r.context, "train.pack_length", f"cannot hold an episode of rollout.context = {r.context} tokens"
        replayed = not (t.router_replay and r.engine == "sgl_jax")
        yield replayed, "train.router_replay", "needs an engine that tells the experts: rollout.engine = 'jax' or 'sglang'"
        yield t.min_group <= t.group_size, "train.min_group", f"is more than train.group_size = {t.group_size}"
        yield t.pack_length % 2 ** (t.buckets - 1) == 0, "train.buckets", f"halves train.pack_length = {t.pack_length} to no whole number"
        yield len(t.icepop) in (0, 2) and sorted(t.icepop) == list(t.icepop), "train.icepop", "is neither empty nor LOW,HIGH"
        yield t.warmup_steps < t.iterations, "train.warmup_steps", f"is not below train.iterations = {t.iterations}"
        yield t.outlier_high >= t.importance_cap, "train.outlier_high", f"is below train.importance_cap = {t.importance_cap}"
        a = self.agents
        yield a.backend != "command" or bool(a.command), "agents.command", "is empty; agents.backend=command needs one"
        yield a.backend != "replay" or bool(a.recorded), "agents.recorded", "is empty; agents.backend=replay needs the file of another run"
        priced = a.backend == "claude" or None not in (a.price_input, a.price_output)
        yield a.max_cost is None or priced, "agents.max_cost", "needs agents.price_input and agents.price_output, of a million tokens each"
        yield _splits(a.command), "agents.command", "has a quotation mark or backslash without its other half"
        yield e.tasks <= self.target.heldout_tasks, "evaluation.tasks", f"is more than target.heldout_tasks = {self.target.heldout_tasks}"
        yield bool(e.policies), "evaluation.policies", "names no policy"
        names = self.baselines.policies
        yield len(set(names)) == len(names), "baselines.policies", "names a policy twice"
        b = self.benchmark
        yield b.name != "tau2" or 0 < len(set(b.domains)) == len(b.domains), "benchmark.domains", "names no domain, or one twice"
        asked = bool(b.name) and b.name != "swebench"
        yield not asked or b.user == "base" or bool(b.user_model), "benchmark.user_model", "is empty; benchmark.user=endpoint needs one"
        one = asked and b.user == "base" and r.engine == "sgl_jax"
        yield (
            not one,
            "benchmark.user",
            "needs base and adapter side by side: rollout.engine = 'jax' or 'sglang', or benchmark.user = 'endpoint'",
        )
        yield _splits(b.python), "benchmark.python", "has a quotation mark or backslash without its other half"
        for name in ("python", "options"):
            yield _splits(getattr(self.servers, name)), f"servers.{name}", "has a quotation mark or backslash without its other half"


def _splits(words: str) -> bool:
    try:
        shlex.split(words)
    except ValueError:
        return False
    return True


def _check_addresses(name: str, urls: tuple[str, ...], key: str) -> None:
    """Raises InputError when one is no address or stands there twice. One that may hold a password is not shown, and never stored."""
    for place, url in enumerate(urls):
        try:
            parts = urllib.parse.urlsplit(url)
            ok = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not set("@?# ") & set(url)
        except ValueError:  # of a port or an IPv6 address
            ok = False
        if not ok:
            shown = f"number {place + 1}" if "@" in url else repr(url)
            raise InputError(f"config field {name!r}: {shown} is no http://HOST:PORT; {key}")
        if url.rstrip("/") in [other.rstrip("/") for other in urls[:place]]:
            raise InputError(f"config field {name!r}: {url} is there twice; adapters are loaded into a server once")


def _check_secrets(name: str, text: str, fix: str) -> None:
    """Raises InputError, which does not show it, when a text holds what config.json must not."""
    from trace_jax.agents.redaction import redact  # the package itself needs this module

    if redact(text) != text:
        raise InputError(f"config field {name!r}: holds a key, a password or the name of an account, and is stored in config.json; {fix}")


def data_folder(name: str) -> pathlib.Path:
    """`configs/` or `prompts/`: inside the package in a wheel, beside it in a checkout."""
    return next(folder for folder in (PACKAGE / name, ROOT / name) if folder.is_dir())


def load_config(name: str, overrides: list[tuple[str, str]] | None = None) -> Config:
    """The validated config of a name in `configs/` or of a path that ends in `.py`, with `(field, text)` overrides.

    Raises:
      InputError: no such file, an error in it, an unknown key, a wrong value.
    """
    if name.endswith(".py"):
        path = pathlib.Path(name).expanduser()
        if not path.is_file():
            raise InputError(f"--config={name}: no such file")
    else:
        path = data_folder("configs") / f"{name}.py"
        known = config_names()
        if name not in known:
            raise InputError(f"--config={name}: no such config{nearest(name, known)}; there are: {', '.join(known)}, or give a PATH.py")
    config = _run(path)
    return override(config, overrides or []).validate()


def config_names() -> list[str]:
    """The names that `--config` accepts."""
    return sorted(path.stem for path in data_folder("configs").glob("*.py") if not path.stem.startswith("_"))


def override(config: Config, overrides: list[tuple[str, str]]) -> Config:
    """Sets fields from text, each read by its annotation: `("train.rank", "16")`. Later ones win.

    Raises:
      InputError: an unknown field, or text that is not of its type.
    """
    for name, text in overrides:
        config = _replace(config, name, lambda name, spec, text=text: parse(name, text, spec.type))
    return config


def changed_fields(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """The fields that differ and may not change while a run goes on, as (name, old value, new value)."""
    pairs = zip(fields(old), fields(new), strict=True)
    return [(name, a, b) for (name, spec, a), (_, _, b) in pairs if a != b and not spec.metadata["changes"]]


def _run(path: pathlib.Path) -> Config:
    try:
        module = runpy.run_path(str(path))
        if not callable(module.get("get_config")):
            raise InputError(f"{path}: has no function get_config()")
        config = module["get_config"]()
    except InputError:
        raise
    except Exception as error:  # a config is the user's own program: whatever it raises is an input error of that file
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else 0
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        hint = nearest(unknown[1], [name.rsplit(".", 1)[-1] for name, _, _ in fields(Config())]) if unknown else ""
        raise InputError(f"{path}, line {line}: {type(error).__name__}: {' '.join(str(error).split())}{hint}") from error
    if not isinstance(config, Config):
        raise InputError(f"{path}: get_config() returned {type(config).__name__}, expected trace_jax.config.Config")
    return config


def _replace(config: Any, name: str, value: Any, prefix: str = "") -> Any:
    """The config with the field of a dotted name replaced by `value(full name, field)`."""
    key, _, rest = name.partition(".")
    spec = next((spec for spec in dataclasses.fields(config) if spec.name == key), None)
    if spec is None:
        leaves = [leaf for leaf, _, _ in fields(config, prefix)]
        # a leaf of another section ("analyst") is found by its last name
        elsewhere = [leaf for leaf, _, _ in fields(Config()) if leaf.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
        hint = f", did you mean {elsewhere[0]!r}?" if elsewhere else nearest(prefix + name, leaves)
        raise InputError(f"unknown config key {prefix + name!r}{hint}")
    is_section = dataclasses.is_dataclass(spec.type)
    if is_section and not rest:
        names = ", ".join(spec.name for spec in dataclasses.fields(getattr(config, key)))
        raise InputError(f"config key {prefix + key!r} is a section: set --config.{prefix}{key}.FIELD=VALUE, where FIELD is one of {names}")
    if rest and not is_section:
        raise InputError(f"unknown config key {prefix + name!r}: {prefix + key!r} is a field, not a section")
    new = _replace(getattr(config, key), rest, value, f"{prefix}{key}.") if is_section else value(prefix + key, spec)
    return dataclasses.replace(config, **{key: new})
