"""Every command of the documents is one that there is, and every name, file and link leads somewhere."""

import re

import pytest

from tests.docs import claims
from tests.docs.blocks import ROOT, Session, blocks
from tests.docs.claims import DOCUMENTS

# what benchmarks, Google, NVIDIA and Hugging Face call it
OF_OTHERS = set()


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
