"""Agents of others against the server: tau2's command line and mini-swe-agent's, as a user would run them."""

import json
import os
import shutil
import subprocess

import pytest

from rl.engines.protocol import Policy
from tests.rl import chats
from tests.trace_jax.serve.qwen import command_serving
from tests.trace_jax.serve.serving import ScriptedEngine, serving

pytestmark = pytest.mark.slow
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true"}


def command(name: str, extra: str) -> str:
    """The path of an agent's command, which may be installed in an environment of its own."""
    found = os.environ.get(f"{name.upper()}_COMMAND") or shutil.which(name)
    if found is None:
        pytest.skip(f"pip install 'trace-jax[{extra}]', or set {name.upper()}_COMMAND to the path of `{name}` in another environment")
    return found


def run(words, folder, **environment):
    done = subprocess.run(
        words, cwd=folder, env=os.environ | QUIET | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with command_serving(tmp_path_factory.mktemp("agents")) as url:
        yield url


def test_tau2_runs_agent_and_user_against_the_server(url, tmp_path):
    """Two tasks of its mock domain, twice each. A random model solves nothing; every simulation runs to its end."""
    tau2 = command("tau2", "tau2")
    model = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 1.0, "max_tokens": 32}
    words = [tau2, "run", "--domain=mock", "--num-tasks=2", "--num-trials=2", "--max-steps=8", "--max-concurrency=4", "--save-to=mock"]
    words += [f"--{side}-{name}" for side in ("agent", "user") for name in ("llm=openai/base", f"llm-args={json.dumps(model)}")]
    run([*words, f"--results-dir={tmp_path}"], tmp_path)
    simulations = json.loads((tmp_path / "mock.json").read_text())["simulations"]
    assert len({(s["task_id"], s["trial"]) for s in simulations}) == 4
    assert {s["termination_reason"] for s in simulations} <= {"max_steps", "agent_stop", "user_stop", "too_many_errors"}
    for s in simulations:
        assert s["reward_info"] is not None and {"assistant", "user"} <= {m["role"] for m in s["messages"]}


def run_mini(url, folder, task, steps):
    """The trajectory of mini-swe-agent in a toy repository."""
    mini = command("mini", "swebench")
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    words = [mini, f"--task={task}", "--model=openai/base", "--yolo", "--exit-immediately", f"--output={folder / 'out.traj.json'}"]
    settings = {"agent.step_limit": steps, "model.cost_tracking": "ignore_errors", "model.model_kwargs.api_key": "none"}
    settings |= {"model.model_kwargs.api_base": f"{url}/v1", "model.model_kwargs.max_tokens": 256}
    words += ["-c", "mini.yaml", *(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))]
    run([*words, "--environment-class=local", "--agent-class=default"], folder, MSWEA_GLOBAL_CONFIG_DIR=str(folder / "mini"))
    return json.loads((folder / "out.traj.json").read_text())


def test_mini_swe_agent_runs_to_its_limit_against_a_random_model(url, tmp_path):
    found = run_mini(url, tmp_path, "add() subtracts. Repair it.", 3)
    assert found["info"]["exit_status"] in ("LimitsExceeded", "RepeatedFormatError", "Submitted")
    assert found["info"]["model_stats"]["api_calls"] == 3


class Script(ScriptedEngine):
    """Answers the n-th request with the n-th text."""

    def submit(self, request):
        self.say(self.script.pop(0))
        super().submit(request)


def test_mini_swe_agent_repairs_a_repository_with_what_a_model_says(tmp_path):
    chat = chats.chat("qwen3")
    engine = Script(chat)
    engine.context = 32_768

    def bash(text):
        return f"I go on.\n<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': text}})}\n</tool_call>"

    check = 'python3 -c "import calc; assert calc.add(2, 3) == 5" && echo good'
    tags = f"<tool_call>\n<function=bash>\n<parameter=command>\n{check}\n</parameter>\n</function>\n</tool_call>"
    engine.script = [bash("grep -n return *.py"), bash("sed -i 's/a - b/a + b/' calc.py"), tags, bash(DONE)]
    with serving(chat, engine, {"base": Policy("base")}, len(chat.tokenizer)) as (url, _):
        found = run_mini(url, tmp_path, "add() subtracts. Repair it.", 10)
    assert found["info"]["exit_status"] == "Submitted" and found["info"]["model_stats"]["api_calls"] == 4
    assert (tmp_path / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    said = [m["content"] for m in found["messages"] if m["role"] == "tool"]
    assert "2:    return a - b" in said[0] and "good" in said[2]
