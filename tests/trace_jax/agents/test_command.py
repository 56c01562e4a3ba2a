"""Coding agents' commands, played by small scripts that behave as `claude -p --output-format json` and `codex exec --json` do."""

import asyncio
import json
import os
import pathlib
import sys
import textwrap
import time

import pytest

from tests.trace_jax.agents.asking import GOOD, SCHEMA, ask, make, question
from trace_jax.agents.command import one_text
from trace_jax.agents.protocol import Unavailable, Usage
from trace_jax.agents.record import EXCHANGES
from trace_jax.config import Config
from trace_jax.errors import InputError, Unfinished
from trace_jax.workdir import Workdir


@pytest.fixture
def workdir(tmp_path):
    with Workdir.open(tmp_path / "run", Config()) as workdir:
        yield workdir


@pytest.fixture
def plays(tmp_path, monkeypatch):
    """Puts a Python script on the path under a name; it has `prompt`, `words`, and `log(value)` to tell the test."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    log = tmp_path / "log.jsonl"

    def play(name, code):
        head = f"""\
            #!{sys.executable}
            import json, os, pathlib, sys, time
            words, prompt = sys.argv[1:], sys.stdin.read()
            def log(value):
                with open({str(log)!r}, "a") as file: file.write(json.dumps(value) + "\\n")
        """
        path = tmp_path / "bin" / name
        path.write_text(textwrap.dedent(head) + textwrap.dedent(code))
        path.chmod(0o755)

    play.log = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return play


CLAUDE = """
    log({"words": words, "prompt": prompt, "limit": os.environ["CLAUDE_CODE_MAX_OUTPUT_TOKENS"],
         "files": os.listdir(), "folder": os.getcwd()})
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 1000, "cache_read_input_tokens": 20, "output_tokens": 7}
    result = {"type": "result", "subtype": "success", "is_error": False, "result": "done", "usage": usage, "total_cost_usd": 0.125}
    if "--json-schema" in words:
        result["structured_output"] = {"label": "NA", "step": 3}
    print(json.dumps(result))
"""


def test_claude_answers_with_its_own_count_of_tokens_and_money(plays, workdir):
    plays("claude", CLAUDE)
    agent = make(workdir, backend="claude", model="opus", price_input=1.0, price_output=1.0)
    (found,) = ask(agent)
    assert found.parsed == {"label": "NA", "step": 3}
    assert found.usage == agent.usage == Usage(1, 1023, 7, 0.125)
    (call,) = plays.log()
    assert call["words"][:3] == ["-p", "--output-format", "json"] and call["limit"] == "256"
    assert call["words"][call["words"].index("--tools") + 1] == "" and call["words"][call["words"].index("--model") + 1] == "opus"
    assert json.loads(call["words"][call["words"].index("--json-schema") + 1]) == SCHEMA
    assert call["files"] == [] and not pathlib.Path(call["folder"]).exists(), "a fresh folder, removed afterwards"
    assert "Be brief." in call["prompt"] and "How is it?" in call["prompt"]
    assert ask(agent, schema=None)[0].text == "done"
    assert "--json-schema" not in plays.log()[1]["words"]


def test_the_price_of_claude_is_learned_and_its_limit_kept(plays, workdir):
    plays("claude", CLAUDE)
    agent = make(workdir, backend="claude", max_cost=1.0, concurrency=3)
    with pytest.raises(Unfinished, match=r"'agents.max_cost': \$0.8750 of \$1.0000 are spent, and the next question may cost \$0.2500"):
        ask(agent, *"abcdefghijkl")
    assert agent.usage.cost == 0.875


@pytest.mark.parametrize(
    "code, said",
    [
        ('print(json.dumps({"is_error": True, "result": "API Error: overloaded sk-ant-abc123"}))', "overloaded"),
        ('print(json.dumps({"is_error": True, "subtype": "error_during_execution"})); sys.exit(1)', "error_during_execution"),
        ('print("x" * 9 + "no JSON"); sys.exit(3)', "exit code 3"),
        ('sys.stderr.write("a" * 9999 + "Invalid key sk-ant-abc123 of me@corp.example\\n"); sys.exit(1)', "Invalid key"),
        ("", "no output"),
    ],
)
def test_claude_that_fails_is_asked_again_and_its_last_words_are_told(plays, workdir, code, said):
    plays("claude", f"log(1)\n{code}")
    (found,) = ask(make(workdir, backend="claude", attempts=2))
    assert isinstance(found, Unavailable) and said in str(found) and len(plays.log()) == 2
    assert "abc123" not in str(found) and "corp.example" not in str(found) and len(str(found)) < 500


def test_claude_that_cannot_fit_the_schema_leaves_a_gap_that_was_paid(plays, workdir):
    usage = {"input_tokens": 3, "output_tokens": 7}
    result = {"subtype": "error_max_structured_output_retries", "is_error": True, "usage": usage, "total_cost_usd": 0.5}
    plays("claude", f"print(json.dumps({result}))\nsys.exit(1)")
    (found,) = ask(make(workdir, backend="claude"))
    assert found.faults == ("it is empty",) and found.usage == Usage(3, 9, 21, 1.5)


def test_a_version_without_our_flags_is_not_asked_again(plays, workdir):
    plays("claude", """log(1); sys.stderr.write("error: unknown option '--tools'"); sys.exit(1)""")
    with pytest.raises(InputError, match="unknown option '--tools'; another version"):
        ask(make(workdir, backend="claude"))
    assert len(plays.log()) == 1


def test_codex_answers_in_a_file(plays, workdir):
    plays(
        "codex",
        """
        log({"words": words, "prompt": prompt, "schema": json.load(open(words[words.index("--output-schema") + 1])), "files": os.listdir()})
        print(json.dumps({"type": "thread.started", "thread_id": "t"}))
        print("not JSON")
        print(json.dumps({"type": "turn.completed", "usage": {"input_tokens": 50, "cached_input_tokens": 10, "output_tokens": 5}}))
        pathlib.Path(words[words.index("-o") + 1]).write_text('{"label": "LACKING", "step": 1}')
        """,
    )
    (found,) = ask(make(workdir, backend="codex"))
    assert found.parsed == {"label": "LACKING", "step": 1} and found.usage == Usage(1, 50, 5)
    (call,) = plays.log()
    assert call["words"][:2] == ["exec", "--json"] and call["words"][-1] == "-" and call["schema"] == SCHEMA and call["files"] == []
    assert {"read-only", "--skip-git-repo-check", "--ephemeral"} <= set(call["words"])


def test_codex_that_fails_says_why(plays, workdir):
    plays("codex", 'print(json.dumps({"type": "turn.failed", "error": {"message": "usage limit of org-abc123"}})); sys.exit(1)')
    (found,) = ask(make(workdir, backend="codex", attempts=1))
    assert isinstance(found, Unavailable) and "usage limit" in str(found) and "abc123" not in str(found)


def test_any_command_reads_the_prompt_and_is_known_by_its_digest(plays, workdir):
    plays("llm", f"log(prompt)\nprint({GOOD!r})")
    agent = make(workdir, backend="command", model="", command="llm --key=s3cret")
    (found,) = ask(agent)
    assert found.parsed == {"label": "NA", "step": 3}
    assert '"LACKING"' in plays.log()[0], "the schema is in the prompt"
    (line,) = workdir.read_jsonl(EXCHANGES)
    assert line["model"].startswith("llm#") and line["estimated"] and "s3cret" not in json.dumps(line)
    ask(make(workdir, backend="command", model="", command="llm --other"))
    assert len(workdir.read_jsonl(EXCHANGES)) == 2, "another command is another author"


def test_a_command_and_its_children_are_killed_at_the_deadline_and_on_cancellation(plays, workdir):
    plays("llm", "import subprocess\nlog(subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)")
    agent = make(workdir, backend="command", command="llm", deadline=0.6, attempts=1)
    start = time.monotonic()
    (found,) = ask(agent)
    assert "no answer within 0.6 s" in str(found) and time.monotonic() - start < 10

    async def cancelled():
        task = asyncio.create_task(agent.complete(question("other"), None))
        while len(plays.log()) < 2:
            await asyncio.sleep(0.02)
        await agent.close()
        await asyncio.gather(task, return_exceptions=True)

    agent = make(workdir, backend="command", command="llm", deadline=60.0)
    asyncio.run(cancelled())
    for pid in plays.log():
        for _ in range(200):
            if not alive(pid):
                break
            time.sleep(0.02)
        assert not alive(pid)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"backend": "command", "command": "no-such-program x"}, "'agents.command': no command 'no-such-program'"),
        ({"backend": "claude"}, "'agents.backend': no command 'claude'"),
        ({"backend": "codex"}, "'agents.backend': no command 'codex'"),
        ({"backend": "command", "command": "cat", "parameters": {"temperature": 1}}, "'agents.parameters'"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(workdir, monkeypatch, fields, said):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(InputError, match=said):
        make(workdir, **fields)


def test_one_message_is_the_prompt_and_several_have_headings():
    assert one_text([{"role": "user", "content": "hi"}]) == "hi"
    text = one_text([*question("q"), {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}])
    assert [line for line in text.splitlines() if line] == [
        "===== Instructions =====", "Be brief.", "===== User =====", "q", "===== Your earlier answer =====", "a", "===== User =====", "r",
    ]  # fmt: skip
