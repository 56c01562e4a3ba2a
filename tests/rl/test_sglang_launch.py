"""Servers that are started, kept and ended, with a program in SGLang's place that answers `/health` and has a child."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rl.engines.protocol import EngineError
from rl.engines.sglang import ServerSettings, keeper, start_servers
from rl.engines.sglang.launch import server_command
from tests.model import tiny

SETTINGS = ServerSettings(context=100, lanes=4, rank=8, device="cpu", dtype="float32")
PROGRAM = """
import http.server, os, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
print("loading", sys.argv[sys.argv.index("--model-path") + 1], flush=True)
child = subprocess.Popen(["sleep", "300"])
open(f"pids-{port}", "a").write(f"{os.getpid()} {child.pid}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_program_that_is_not_there_is_named_in_a_line(tmp_path):
    with pytest.raises(EngineError, match=r"ended with 127; .* ends with\n.*No such file or directory: '/nowhere/python'\n$") as error:
        start_servers("m", tiny.CONFIG, SETTINGS, logs=tmp_path, python="/nowhere/python")
    assert "Traceback" not in str(error.value)


@pytest.fixture
def program(tmp_path, monkeypatch) -> list[str]:
    """What takes the place of `python`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, "-S", str(tmp_path / "program.py")]


def pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except OSError:
        return False


def test_servers_are_started_started_anew_and_ended_with_their_children(tmp_path, program):
    with start_servers("/models/m", tiny.CONFIG, SETTINGS, logs=tmp_path / "logs", count=2, python=program) as servers:
        assert len(set(servers.urls)) == 2 and all(map(answers, servers.urls))
        first = pids(tmp_path)
        assert len(first) == 4 and "loading /models/m" in (tmp_path / "logs" / "sglang-1.log").read_text()
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(pids(tmp_path)) == 6 and all(map(answers, servers.urls)))
        assert not alive(first[0]) and not alive(first[1])
    assert not any(map(alive, pids(tmp_path)))
    servers.close()


def test_a_server_ends_with_its_owner_that_is_killed(tmp_path, program):
    command = [sys.executable, "-I", keeper.__file__, *program, "--port", "0", "--model-path", "m"]
    script = (
        f"import subprocess, time; server = subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-S", "-c", script])
    until(lambda: len(pids(tmp_path)) == 2)
    assert all(map(alive, pids(tmp_path)))
    owner.kill()
    owner.wait()
    until(lambda: not any(map(alive, pids(tmp_path))))


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    for command, message in [
        ("import sys; print('no such model'); sys.exit(3)", r"ended with 3; .*\n.*no such model"),
        (PROGRAM_MUTE, "no answer within 1 s"),
    ]:
        script = tmp_path / "program.py"
        script.write_text(command)
        with pytest.raises(EngineError, match=message):
            start_servers("m", tiny.CONFIG, SETTINGS, logs=tmp_path, python=[sys.executable, "-S", str(script)], deadline=1)


PROGRAM_MUTE = "import time; print('busy', flush=True); time.sleep(100)"


def test_the_command_line_says_what_the_settings_are(monkeypatch, tmp_path):
    words = server_command(["python3"], "/models/m", tiny.CONFIG, SETTINGS, 99)
    line = " ".join(words)
    assert line.startswith("python3 -m sglang.launch_server --model-path /models/m --host 127.0.0.1 --port 99 --context-length 108 ")
    assert "--max-running-requests 4" in line and "--max-total-tokens 432" in line and "--device cpu" in line
    assert "--enable-lora --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj" in line
    assert "--max-lora-rank 8 --max-loras-per-batch 4 --max-loaded-loras 8 --lora-backend torch_native" in line
    gpu = ServerSettings(context=100, lanes=4, tensor=2, experts=True, memory=0.8, options=("--port", "7"))
    line = " ".join(server_command(["python3"], "/models/m", tiny.CONFIGS["qwen3_moe"], gpu, 99))
    assert line.endswith("--enable-return-routed-experts --port 7") and "--tp-size 2 --mem-fraction-static 0.8" in line
    assert "lora" not in line and "cpu" not in line and "--max-total-tokens" not in line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    with pytest.raises(EngineError, match="4 GPUs are needed, CUDA_VISIBLE_DEVICES=3,5,7 names 3"):
        start_servers("m", tiny.CONFIG, gpu, logs=tmp_path, count=2)
