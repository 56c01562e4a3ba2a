"""The blocks of the documents, typed and run: what takes a second in the default suite, the rest with `-m slow`."""

import contextlib
import pathlib
import re
import shutil
import urllib.request

import pytest

from envs.builtin import load_builtin
from tests import gcs
from tests.docs.blocks import ROOT, Block, Session, blocks
from tests.docs.claims import DOCUMENTS
from tests.docs.plans import PLANS, RUN, SERVE, SLOW, Plan
from tests.scripted_llm import scripted_llm
from tests.sglang_server import server as sglang_server
from tests.sglang_server.install import sglang_python
from tests.trace_jax import tiny
from tests.trace_jax.diagnose import scripted_analyst
from tests.trace_jax.synthesize import authors

# what a reader who cloned the repository has in the folder
CHECKOUT = ("tests", "trace_jax", "configs")


def commands(document: str) -> list[Block]:
    return [block for block in blocks(document) if block.is_commands]


def decisions(document: str) -> list[str]:
    return [decision for _, decision in PLANS[document].blocks] if document in PLANS else []


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document != "docs/own_benchmark.md"])
def test_it_is_decided_what_is_done_with_every_block(document):
    found = [block.text.splitlines()[0] for block in commands(document)]
    planned = [beginning for beginning, _ in PLANS[document].blocks] if document in PLANS else []
    assert len(found) == len(planned) and all(map(str.startswith, found, planned)), f"mend tests/docs/plans.py: {found}"


class Reader:
    """One who types the blocks of a document into a shell, one after the other.

    Attributes:
      plan, session: the document's.
      printed: what the last block printed.
    """

    def __init__(self, document: str, folder: pathlib.Path, names: dict[str, object], environment: dict[str, str] | None = None):
        self.document, self.plan = document, PLANS.get(document, Plan(()))
        words = {word: text.format(folder=folder, **names) for word, text in self.plan.words.items()}
        stubs = {name: f'. "{ROOT}/tests/tpu_scripts/stub.sh"' for name in self.plan.stubs} | dict(self.plan.scripts)
        self.session = Session(folder, words, stubs, CHECKOUT, environment)
        for name, file in self.plan.files.items():
            shutil.copy(ROOT / file, folder / name)
        self._servers = contextlib.ExitStack()

    def play(self, decided: set[str], first: int = 0, last: int | None = None) -> None:
        """Plays the blocks of these decisions, and all files; servers go on until the next one."""
        waiting = iter(zip(commands(self.document), decisions(self.document), strict=True))
        with self._servers:
            for number, block in enumerate(blocks(self.document)):
                decision = next(waiting)[1] if block.is_commands else RUN
                if decision in decided and first <= number and (last is None or number < last):
                    self._play(block, decision)

    def _play(self, block: Block, decision: str) -> None:
        if decision == SERVE:
            self._servers.close()
            printed = self._servers.enter_context(self.session.running(block, self.plan.until))
            (address, *_) = re.findall(r"http://[\w.:]+", printed)
            with urllib.request.urlopen(address if "view" in block.text else f"{address}/health", timeout=60) as reply:
                assert reply.status == 200 and (b"<html" in reply.read()) == ("view" in block.text)
        elif block.language == "python" and not block.file:
            self.session.run(f"python - <<'END'\n{block.text}END")
        else:
            printed = self.session.play(block, timeout=1800.0)
            assert not re.search(r'"error"|"object":"error"', printed), printed


def answer(request: dict) -> str:
    """A scripted LLM, as analyst and as author: it hands in the library's packages for the capabilities that it found."""
    prompt = "\n".join(message["content"] for message in request["messages"])
    asked = re.search(r'^\| `name` \| "desk_(\w+)" \|$', prompt, re.MULTILINE)
    if asked is None:
        return scripted_analyst.answer(request)
    have = "multi_step_task_completion" if "error" in asked[1] else "precondition_verification"
    package = load_builtin(have)
    return authors.write(package.meta | {"name": f"desk_{asked[1]}", "capability": asked[1]}, package.source)


@pytest.fixture
def endpoint():
    with scripted_llm(answer) as server:
        yield server.url


@pytest.mark.parametrize("document", [document for document in PLANS if RUN in decisions(document)])
def test_commands_of_seconds(document, tmp_path, endpoint):
    reader = Reader(document, tmp_path / "reader", {"port": gcs.free_port(), "endpoint": endpoint})
    reader.play({RUN})


# ---------------------------------------------------------------------------------------------------------------------------- slow


@pytest.fixture(scope="session")
def readme(tmp_path_factory) -> Reader:
    """One who has run the quickstart, as the README says."""
    reader = Reader("README.md", tmp_path_factory.mktemp("readme") / "reader", {"port": gcs.free_port()}, {"XLA_FLAGS": ""})
    reader.play({SLOW}, last=1)
    return reader


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, checkpoint) -> pathlib.Path:
    """A finished run of the tiny agent, which the documents' commands go on with where the quickstart would take hours."""
    session = Session(tmp_path_factory.mktemp("tiny") / "reader")
    tiny.write_config(session.folder / "tiny.py", checkpoint)
    session.run("trace-jax run --config=tiny.py --workdir=trace-run")
    return session.folder / "trace-run"


@pytest.fixture(scope="session")
def bucket(tiny_run):
    """The name of a bucket with a run in it, and the variables that lead there."""
    with gcs.server() as url, pytest.MonkeyPatch.context() as patch:
        settings = {name: value.format(url) for name, value in gcs.SETTINGS.items()}
        for name, value in settings.items():
            patch.setenv(name, value)
        bucket = gcs.Bucket()
        for path in tiny_run.rglob("*"):
            if path.is_file():
                bucket.put(f"tau2/{path.relative_to(tiny_run)}", path.read_bytes())
        yield bucket.url.removeprefix("gs://"), settings


def slow_documents():
    for document in PLANS:
        if {SLOW, SERVE} & set(decisions(document)):
            yield pytest.param(document, marks=[pytest.mark.slow, *[pytest.mark.sglang] * PLANS[document].sglang])


@pytest.mark.parametrize("document", list(slow_documents()))
def test_commands_of_minutes(document, tmp_path, request, checkpoint, endpoint):
    if document == "README.md":
        return request.getfixturevalue("readme").play({RUN, SLOW, SERVE}, first=1)
    plan, names, environment = PLANS[document], {"port": gcs.free_port(), "endpoint": endpoint}, {}
    for module in plan.requires:
        pytest.importorskip(module)
    if "\ncurl " in (ROOT / document).read_text() and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    if "{bucket}" in str(plan.words):
        names["bucket"], environment = request.getfixturevalue("bucket")
    if plan.sglang:
        options = [word for pair in sglang_server.OPTIONS.items() for word in pair]
        words = [str(sglang_python()), "-m sglang.launch_server --port", str(names["port"]), *options, *sglang_server.FLAGS]
        names |= {"sglang": " ".join(words), "shim": sglang_server.SHIM}
        environment = {name: value for name, value in sglang_server.environment().items() if name != "PYTHONPATH"}
    reader = Reader(document, tmp_path / "reader", names, environment)
    tiny.write_config(reader.session.folder / "tiny.py", checkpoint)
    if plan.run:
        made = request.getfixturevalue("tiny_run") if plan.run == "tiny" else request.getfixturevalue("readme").session.folder / "trace-run"
        shutil.copytree(made, reader.session.folder / "trace-run")
    reader.play({RUN, SLOW, SERVE})
