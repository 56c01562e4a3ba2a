"""Packages through the doors of other ecosystems: the oracle earns its reward there too. Skipped where a package is not installed."""

import asyncio
import contextlib
import inspect
import json
import socket
import threading
import time
import types

import pytest

from envs import EnvironmentFault, Pool, adapters
from envs.adapters.session import Session, parse_action
from envs.builtin import load_builtin
from envs.probes import nothing, play, recite
from tests.envs import hackable

SEED = 5


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as one:
        yield one


@pytest.fixture(scope="module")
def package():
    return hackable.make()


@pytest.fixture(scope="module")
def script(pool, package):
    return pool.function(package, "oracle", SEED)


def spoken(action):
    """An action as an agent writes it."""
    return action["text"] if "text" in action else json.dumps(action)


def test_the_text_of_an_agent_is_a_call_or_is_said():
    assert parse_action('{"name": "f", "arguments": {"a": 1}}') == {"name": "f", "arguments": {"a": 1}}
    assert parse_action('{"name": "f"}') == {"name": "f", "arguments": {}}
    for text in ("hello", "[1]", '{"name": 1}', '{"name": "f", "arguments": 3}', "{" * 10_000, ""):
        assert parse_action(text) == {"text": text}


def test_a_session_ends_with_the_episode_or_with_its_turns(pool, package, script):
    session = Session(package, pool)
    with pytest.raises(ValueError, match="call reset first"):
        session.step({"text": "hi"})
    session.reset(SEED)
    steps = [session.step(action) for action in script]
    assert [step.reward for step in steps] == [None, None, None, 1.0] and steps[-1].done and not steps[-1].truncated
    with pytest.raises(ValueError, match="is over"):
        session.step({"text": "hi"})
    session.reset(SEED)
    steps = [session.step(script[0]) for _ in range(package.max_turns)]
    assert steps[-1].truncated and not steps[-1].done and steps[-1].reward == 0.0 and "action:0" in steps[-1].checks


def test_an_adapter_names_the_extra_that_it_needs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    monkeypatch.delitem(__import__("sys").modules, "envs.adapters.gymnasium_env", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'trace-jax\[gymnasium\]'"):
        adapters.TextEnv  # noqa: B018
    with pytest.raises(AttributeError, match="there are: OpenEnvPool, TextEnv"):
        adapters.Nothing  # noqa: B018


def test_trl_makes_the_tools_from_the_methods(pool, package, script):
    environment = adapters.environment_factory(package, pool)()
    from envs.adapters.trl_tools import rows

    (row,) = rows(package, pool, [SEED])
    assert [message["role"] for message in row["prompt"]] == ["system", "user"] and "Raise the price" in row["prompt"][1]["content"]
    public = {name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")}
    assert public == {"list_items", "get_item", "set_prices", "reset", "get_reward"}  # as TRL looks for tools
    assert environment.reset(**row) is None
    assert environment.get_reward() == 0.0
    for action in script[:-1]:
        assert isinstance(getattr(environment, action["name"])(**action["arguments"]), str)
    assert environment.get_reward() == 1.0
    environment.reset(seed=SEED)
    assert environment.get_reward() == 0.0
    for _ in range(package.max_turns):
        environment.list_items()
    assert environment.list_items() == "Error: the episode is over"


def test_the_schemas_that_trl_shows_are_those_of_the_package(pool):
    utils = pytest.importorskip("transformers.utils")
    desk = load_builtin("desk")
    environment = adapters.environment_factory(desk, pool)()
    for tool in pool.function(desk, "tools"):
        shown = utils.get_json_schema(getattr(environment, tool["function"]["name"]))["function"]
        parameters = tool["function"]["parameters"]
        assert shown["name"] == tool["function"]["name"] and shown["description"] == tool["function"]["description"]
        assert shown["parameters"]["properties"] == parameters["properties"]
        assert shown["parameters"].get("required", []) == parameters["required"]
    made = adapters.environment_factory(hackable.make(), pool)()
    shown = utils.get_json_schema(made.set_prices)["function"]["parameters"]
    assert shown["required"] == ["prices"] and shown["properties"]["prices"]["items"] == {"type": "object"}
    assert shown["properties"]["note"]["nullable"] is True and shown["properties"]["note"]["type"] == "string"


def test_last_words_are_heard_where_trl_keeps_them(pool):
    """The desk pays for telling the customer why not, which no tool hears."""
    from envs.adapters.trl_tools import closing_reward

    package = load_builtin("precondition_verification")
    seed, script = next((s, a) for s in range(50) if "cannot" in (a := pool.function(package, "oracle", s))[-1].get("text", ""))
    environments = [adapters.environment_factory(package, pool, closing=True)() for _ in range(2)]
    for environment in environments:
        assert not hasattr(environment, "get_reward")
        environment.reset(seed=seed, prompt=[])
        for action in script[:-1]:
            getattr(environment, action["name"])(**action["arguments"])
    completions = [[{"role": "assistant", "content": script[-1]["text"]}], "all done."]
    right, wrong = closing_reward(completions, environments, trainer_state=None)
    assert right == 1.0 > wrong


def test_a_tool_that_cannot_be_a_method_is_refused(pool):
    package = hackable.change({'_tool("list_items", [])': '_tool("list-items", [])'})
    with pytest.raises(ValueError, match="'list-items'; rename it"):
        adapters.environment_factory(package, pool)


def test_gymnasium_plays_a_package(pool, package, script):
    gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    from gymnasium.utils.env_checker import check_env

    env = adapters.TextEnv(package, pool)
    assert isinstance(env, gymnasium.Env)
    check_env(env, skip_render_check=True)
    text, info = env.reset(seed=SEED)
    assert info["seed"] == SEED and "set_prices" in text and info["messages"][0]["content"] in text and text in env.observation_space
    for action in script:
        text, reward, terminated, truncated, info = env.step(spoken(action))
    assert (reward, terminated, truncated) == (1.0, True, False) and info["checks"]["db"]["passed"]
    first = env.reset(seed=SEED, options={"knobs": {"items": 2}})[0]
    assert env.reset(seed=SEED)[0] != first == env.reset(seed=SEED, options={"knobs": {"items": 2}})[0]
    for _ in range(package.max_turns):
        text, reward, terminated, truncated, info = env.step(spoken(script[0]))
    assert (reward, terminated, truncated) == (0.0, False, True)


@pytest.fixture(scope="module")
def server(package):
    """The address of an OpenEnv server of the package."""
    pytest.importorskip("openenv", reason="the extra openenv is not installed")
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Pool(1) as pool:
        app = adapters.make_app(package, pool)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        until = time.monotonic() + 60
        while not server.started and time.monotonic() < until:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(30)


def test_openenv_clients_play_a_package(server, pool, package, script):
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=server).sync() as client, GenericEnvClient(base_url=server).sync() as other:
        first, second = client.reset(seed=SEED), other.reset(seed=SEED + 1)
        assert "Raise the price" in first.observation["messages"][0]["content"] and first.observation != second.observation
        assert first.observation["available_tools"] == pool.function(package, "tools") and not first.done
        for action in script[:2]:
            result = client.step({"message": spoken(action)})
            assert result.observation["text"] and result.reward is None
        client.step(script[2])  # {"name", "arguments"}
        assert client.state()["step_count"] == 3
        result = client.step({"message": spoken(script[3])})
        assert result.done and result.reward == 1.0 and result.metadata["checks"]["db"]["passed"]
        assert other.step({"message": "nothing"}).reward == 0.0
    with GenericEnvClient(base_url=server).sync() as client:
        client.reset(seed=SEED)
        listed = client.step({"type": "list_tools"}).observation["tools"]
        assert [tool["name"] for tool in listed] == ["list_items", "get_item", "set_prices"]
        called = client.step({"type": "call_tool", "tool_name": "list_items", "arguments": {}}).observation
        assert called["result"] == pool.batch([(opened(pool, package), "call", ("list_items", {}))])[0].text
        with pytest.raises(RuntimeError):
            client.step({"unknown": 1})


def opened(pool, package):
    episode = pool.open(package, SEED)
    episode.reset()
    return episode


def test_openenv_environments_are_episodes_of_ours(server, pool, package, script):
    with adapters.OpenEnvPool(server) as remote:
        served = remote.package("shelf", package.max_turns)
        tools = remote.function(served, "tools")
        assert [tool["function"]["parameters"] for tool in tools] == [t["function"]["parameters"] for t in pool.function(package, "tools")]
        scripts = {SEED: script, SEED + 1: script}
        there, here = play(remote, served, [SEED, SEED + 1], recite(scripts)), play(pool, package, [SEED, SEED + 1], recite(scripts))
        assert [one.reward for one in there] == [1.0, 0.0] == [one.reward for one in here]
        assert [one.start for one in there] == [one.start for one in here]
        assert [one.steps[:3] for one in there] == [one.steps[:3] for one in here]
        assert play(remote, served, [SEED], nothing)[0].scores[0].checks["assertion:0"].passed is False
        with pytest.raises(EnvironmentFault, match="has no function oracle"):
            remote.function(served, "oracle", SEED)
    with adapters.OpenEnvPool(server, scale=lambda total: total * 3) as wrong:
        (one,) = play(wrong, served, [SEED], recite(scripts))
        assert one.fault.kind == "reply" and "give OpenEnvPool a scale" in str(one.fault)
    with adapters.OpenEnvPool("http://127.0.0.1:9") as gone:
        (one,) = play(gone, served, [SEED], nothing)
        assert one.fault.kind == "exception" and "http://127.0.0.1:9" in str(one.fault)


def test_a_taskset_of_verifiers_has_a_task_for_each_seed():
    config = adapters.taskset("http://localhost:8000", range(2), {"items": 3})
    assert config["id"] == "openenv" and config["base_url"] == "http://localhost:8000"
    assert config["resets"] == [{"seed": 0, "knobs": {"items": 3}}, {"seed": 1, "knobs": {"items": 3}}]


class Scripted:
    """Stands for the agents of verifiers, their interaction and its trace: says what it was told to, one line a turn."""

    def __init__(self, lines):
        self.player, self.trace, self.lines, self.seen, self.rewards = self, self, list(lines), [], {}

    @contextlib.asynccontextmanager
    async def interaction(self, task):
        yield self

    async def turn(self, observation):
        self.seen.append(json.loads(observation))
        return types.SimpleNamespace(terminated=False, last_reply=self.lines.pop(0))

    def record_reward(self, name, value):
        self.rewards[name] = value


def test_verifiers_plays_what_openenv_serves(request, script):
    verifiers = pytest.importorskip("verifiers.v1.tasksets.openenv.taskset", reason="verifiers is not installed")
    config = adapters.taskset(request.getfixturevalue("server"), [SEED, SEED + 1])
    fields = {key: value for key, value in config.items() if key != "id"}
    tasks = list(verifiers.OpenEnvTaskset(verifiers.OpenEnvConfig(**fields)).load())
    for task, reward in zip(tasks, (1.0, 0.0), strict=True):
        agents = Scripted(map(spoken, script))
        asyncio.run(verifiers.OpenEnvEnv.run(None, task, agents))
        assert agents.rewards == {"openenv_reward": reward} and not agents.lines
        assert agents.seen[0]["observation"]["available_tools"] and agents.seen[1]["observation"]["text"]
