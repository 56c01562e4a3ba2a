import dataclasses
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax import cli
from trace_jax import config as configs
from trace_jax.config import Config, ModelSection, RolloutSection, TrainSection, changed_fields, load_config, override, sections
from trace_jax.config.fields import fields
from trace_jax.errors import InputError


def test_the_quickstart_has_the_values_of_its_experiment():
    config = load_config("quickstart")
    assert (config.train.rank, config.train.alpha, config.train.learning_rate, config.train.adam_b2) == (8, 16.0, 4e-3, 0.95)
    assert config.synthesis.calibration_seeds * config.synthesis.calibration_rollouts == 320
    assert config.train.groups * config.train.group_size == 64
    assert config.evaluation.tasks >= 400


def test_every_shipped_config_is_valid_and_tells_how_to_run_it():
    for name in configs.config_names():
        load_config(name)
        docstring = (configs.data_folder("configs") / f"{name}.py").read_text().split('"""')[1]
        assert f"--config={name}" in docstring
        assert "Hardware:" in docstring


@pytest.mark.parametrize("name", ["tau2_qwen3_30b_a3b", "swebench_qwen3_6_27b"])
def test_a_shipped_architecture_is_counted_but_has_no_weights_to_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # found from anywhere
    assert cli.main(["params", f"--config={name}"]) == 0
    assert cli.main(["run", f"--config={name}", f"--workdir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no weights in" in error and "download the model and set --config.model.path=FOLDER" in error


def test_a_shipped_architecture_is_found_inside_the_package_of_a_wheel(tmp_path, monkeypatch):
    folder = tmp_path / "trace_jax" / "configs" / "architectures" / "M"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(sections, "ROOT", tmp_path)
    monkeypatch.setattr(sections, "PACKAGE", tmp_path / "trace_jax")
    assert ModelSection(path="configs/architectures/M").folder == folder


def test_every_field_is_documented_and_its_default_is_allowed():
    assert Config().validate() == Config()
    for name, spec, _ in fields(Config()):
        assert spec.metadata["help"], name


def test_overrides_are_read_by_the_type_of_the_field():
    texts = {
        "train.rank": ("16", 16),
        "train.learning_rate": ("3e-4", 3e-4),
        "train.alpha": ("4", 4.0),
        "diagnosis.blind": ("true", True),
        "name": ("3", "3"),
        "train.stop_reward": ("none", None),
        "rollout.max_turns": ("7", 7),
        "evaluation.policies": ("base,composed", ("base", "composed")),
        "target.knobs": ('{"orders": 4}', {"orders": 4}),
    }
    config = load_config("quickstart", [(name, text) for name, (text, _) in texts.items()])
    values = {name: value for name, _, value in fields(config)}
    for name, (_, expected) in texts.items():
        assert values[name] == expected and type(values[name]) is type(expected), name


def test_the_last_override_wins_and_the_config_itself_is_immutable():
    config = Config()
    assert override(config, [("seed", "1"), ("seed", "2")]).seed == 2
    assert config.seed == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("train.rnk", "8", ["train.rnk", "train.rank"]),
        ("temperature", "1", ["temperature", "rollout.temperature"]),
        ("trian.rank", "8", ["trian.rank", "train.rank"]),
        ("train.rank.x", "8", ["train.rank.x", "not a section"]),
        ("baselines", "grpo_target", ["baselines", "--config.baselines.FIELD=VALUE", "grpo_target"]),
        ("train.rank", "3.5", ["--config.train.rank=3.5", "expected int"]),
        ("train.rank", "0", ["train.rank", "[1, inf)"]),
        ("train.learning_rate", "nan", ["train.learning_rate", "(0, inf)"]),
        ("diagnosis.blind", "maybe", ["diagnosis.blind", "expected bool"]),
        ("analyst", "evidnce", ["analyst", "did you mean 'evidence'"]),
        ("evaluation.policies", "base,compsed", ["evaluation.policies", "did you mean 'composed'"]),
        ("target.knobs", "[1]", ["target.knobs", "JSON object"]),
        ("train.stop_reward", "1.5", ["train.stop_reward", "(0, 1]"]),
        ("seed", "-1", ["seed"]),
        ("servers.options", "--log 'x", ["servers.options", "without its other half"]),
        ("servers.python", '"python', ["servers.python", "without its other half"]),
        ("servers.urls", "http://a:1,localhost:30000", ["servers.urls", "'localhost:30000' is no http://HOST:PORT"]),
        ("servers.urls", "ftp://a:1", ["servers.urls", "'ftp://a:1' is no http://HOST:PORT"]),
        ("servers.urls", "http://a:port", ["servers.urls", "'http://a:port' is no http://HOST:PORT"]),
        ("servers.urls", "http://[::1", ["servers.urls", "is no http://HOST:PORT"]),
        ("servers.urls", "http://:30000", ["servers.urls", "is no http://HOST:PORT"]),
        ("servers.urls", "http://a:1, http://a:1/", ["servers.urls", "http://a:1/ is there twice"]),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_field_and_the_fix(name, text, words):
    with pytest.raises(InputError) as error:
        load_config("quickstart", [(name, text)])
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(InputError, match="'servers.urls': number 2 is no .* SGLANG_API_KEY") as error:
        load_config("quickstart", [("servers.urls", "http://a:1,http://me:secret@a:2")])
    assert "secret" not in str(error.value)
    assert load_config("quickstart", [("servers.urls", "http://a:1,https://[::1]:2/x")]).servers.urls[1] == "https://[::1]:2/x"


@pytest.mark.parametrize(
    "name, text, secret",
    [
        ("agents.command", "ask --key sk-0123456789abcdef", "0123456789"),
        ("agents.command", "curl -H 'Authorization: Bearer abc.def'", "abc.def"),
        ("agents.parameters", '{"user": "me@acme.example"}', "acme"),
    ],
)
def test_a_secret_in_what_is_stored_is_refused_and_not_repeated(name, text, secret):
    with pytest.raises(InputError, match=f"'{name}': holds a key, .* stored in config.json") as error:
        load_config("quickstart", [(name, text)])
    assert secret not in str(error.value)
    load_config("quickstart", [("agents.command", "sh -c 'ask $MY_API_KEY'"), ("agents.parameters", '{"user": "anna", "seed": 1}')])


@pytest.mark.parametrize(
    "config, name",
    [
        (Config(diagnosis=configs.DiagnosisSection(runs=5)), "diagnosis.min_runs"),
        (Config(synthesis=configs.SynthesisSection(mean_low=0.7)), "synthesis.mean_low"),
        (Config(rollout=RolloutSection(max_tokens=400)), "rollout.max_tokens"),
        (Config(rollout=RolloutSection(context=1024)), "train.pack_length"),
        (Config(train=TrainSection(min_group=20)), "train.min_group"),
        (Config(train=TrainSection(warmup_steps=99)), "train.warmup_steps"),
        (Config(evaluation=configs.EvaluationSection(tasks=401)), "evaluation.tasks"),
        (Config(evaluation=configs.EvaluationSection(policies=())), "evaluation.policies"),
        (Config(train=TrainSection(rank=True)), "train.rank"),
        (Config(train=TrainSection(rank="8")), "train.rank"),
        (Config(evaluation=configs.EvaluationSection(policies=["base"])), "evaluation.policies"),
    ],
)
def test_what_fields_demand_of_each_other_is_checked(config, name):
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        config.validate()


@pytest.mark.parametrize(
    "source, words",
    [
        ("x = (", ["line 1", "SyntaxError"]),
        ("x = 1", ["get_config"]),
        ("def get_config():\n    return 3", ["returned int"]),
        ("def get_config():\n    return 1 / 0", ["line 2", "ZeroDivisionError"]),
        (
            "from trace_jax.config import *\ndef get_config():\n    return Config(train=TrainSection(learning_rat=1))",
            ["line 3", "learning_rat", "did you mean 'learning_rate'"],
        ),
        ("from trace_jax.config import *\ndef get_config():\n    return Config(seed='a')", ["seed", "expected int"]),
    ],
)
def test_an_error_in_a_config_file_names_file_and_line(tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(source))
    with pytest.raises(InputError) as error:
        load_config(str(path))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_config_may_be_a_path_and_build_on_a_shipped_one(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from trace_jax.config import *\ndef get_config():\n    return override(load_config('quickstart'), [('seed', '5')])\n")
    assert load_config(str(path)).seed == 5
    assert load_config(str(path)).train.rank == 8


@pytest.mark.parametrize("name, word", [("quickstrat", "quickstart"), ("missing.py", "no such file")])
def test_a_config_that_is_not_there_is_named(name, word):
    with pytest.raises(InputError, match=word):
        load_config(name)


@given(
    rank=st.integers(1, 512),
    rate=st.floats(1e-8, 1.0),
    stop=st.none() | st.floats(0.1, 1.0),
    knobs=st.dictionaries(st.text(), st.integers()),
)
def test_json_and_back_is_the_same_config(rank, rate, stop, knobs):
    config = Config(train=TrainSection(rank=rank, learning_rate=rate, stop_reward=stop), target=configs.TargetSection(knobs=knobs))
    assert Config.from_json(config.to_json(), "config.json") == config


def test_stored_json_with_an_unknown_key_names_file_and_key():
    with pytest.raises(InputError, match=r"config\.json: unknown config key 'train\.rnk', did you mean 'rank'"):
        Config.from_json({"train": {"rnk": 8}}, "config.json")


def test_only_fields_that_leave_the_figures_alone_may_change():
    old = load_config("quickstart")
    new = override(old, [("rollout.workers", "3"), ("baselines.grpo_target", "true"), ("train.rank", "4"), ("seed", "1")])
    assert [name for name, _, _ in changed_fields(old, new)] == ["seed", "train.rank"]


def test_a_model_path_of_the_package_is_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "envs" / "desk" / "checkpoint").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert configs.ModelSection(path="mine").folder == tmp_path / "mine"
    with pytest.raises(InputError, match=r"model\.path"):
        _ = configs.ModelSection(path="nowhere").folder
