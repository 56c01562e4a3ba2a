"""Every command of the documents is one that there is, and every name, file and link leads somewhere."""

import re
from xml.etree import ElementTree

import pytest

from tests.docs import claims
from tests.docs.blocks import ROOT, Session, blocks
from tests.docs.claims import DOCUMENTS

# what others call it, and what is made from numbers
OF_OTHERS = {
    "JAX_DEFAULT_MATMUL_PRECISION=highest",
    "XLA_FLAGS=--xla_gpu_deterministic_ops=true",
    "00007-3of64.jsonl.zst",
    "1e-05",
    "markdown",
}


def complaints(checks) -> list[str]:
    found = []
    for check, *arguments in checks:
        try:
            check(*arguments)
        except Exception as error:  # each is one line of the report
            found.append(f"{arguments[0]}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_line_is_one_that_its_program_takes(document, tmp_path, monkeypatch):
    session = Session(tmp_path / "reader")
    for block in blocks(document):
        if block.file:
            session.write(block)
    monkeypatch.chdir(session.folder)
    commands = [words for block in blocks(document) if block.is_commands for words in claims.simple_commands(block.text)]
    assert not complaints((claims.check_command, words) for words in commands)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_stands_in_code_is_there(document):
    assert not complaints((claims.check_span, span, document) for span in claims.spans(document) if span not in OF_OTHERS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    assert not complaints((claims.check_link, target, document) for target in claims.LINK.findall(claims.prose(document)))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_of_prose_are_read_without_scrolling(document):
    lines = enumerate(claims.prose(document).splitlines(), 1)
    assert not [(number, len(line)) for number, line in lines if len(line) > 140 and not line.startswith("|")]


def test_every_document_is_in_the_table_of_contents():
    contents = (ROOT / "docs/README.md").read_text()
    for path in ROOT.glob("docs/*.md"):
        assert f"[{path.name}]({path.name})" in contents or path.name == "README.md", path


def test_the_readme_is_read_in_five_minutes():
    assert len(re.findall(r"\w+", (ROOT / "README.md").read_text())) < 1600


WRONG = [
    (claims.check_span, "trace-jax rollouts --workdir=DIR", "README.md"),
    (claims.check_span, "trace-jax run --config=quickstart --config.seeds=1 --workdir=DIR", "README.md"),
    (claims.check_span, "--config.train.ranks", "README.md"),
    (claims.check_span, "rollout.engine=vllm", "README.md"),
    (claims.check_span, "--no-such-flag", "README.md"),
    (claims.check_span, "trace_jax/no_such_file.py", "README.md"),
    (claims.check_span, "trace_jax.no_such_module", "README.md"),
    (claims.check_span, "evaluation/no_such_file.json", "README.md"),
    (claims.check_command, ["python", "tests/benchmarks/backbone_speed.py", "--fast"]),
    (claims.check_command, ["pytest", "tests/no_such_folder/"]),
    (claims.check_command, ["pytest", "-m", "fast"]),
    (claims.check_command, ["no-such-program"]),
    (claims.check_command, "tpu_scripts/pod launch --slice=my.env -- run --config=quickstart --workdirs=gs://b/r".split()),
    (claims.check_link, "steps.md#no-such-heading", "docs/README.md"),
    (claims.check_link, "docs/steps.md", "docs/README.md"),
]


@pytest.mark.parametrize("check", WRONG, ids=lambda check: str(check[1]))
def test_what_is_not_there_is_found_out(check):
    assert complaints([check])


def test_commands_are_found_behind_whatever_stands_before_them():
    text = 'A=1 one --x="a # b" \\\n  two && three # it\'s\nfour >file <<END\nnone\nEND\nfive &\n'
    assert list(claims.simple_commands(text)) == [["one", "--x=a # b", "two"], ["three"], ["four"], ["five"]]


def test_the_readme_has_the_commands_that_others_rely_on():
    readme = (ROOT / "README.md").read_text()
    assert "pip install -e . && trace-jax run --config=quickstart --workdir=trace-run\n" in readme
    assert "pip install -e '.[test]' && pytest\n" in readme


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/*.svg")), ids=lambda path: path.name)
def test_a_picture_says_in_words_what_it_shows_and_is_legible_in_the_dark(picture):
    names = [element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()]
    assert {"title", "desc"} <= set(names) and "prefers-color-scheme: dark" in picture.read_text()
