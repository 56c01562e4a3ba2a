import pytest

from tests.docs.blocks import ROOT, Session, blocks

DOCUMENT = """# A guide
```
export PLACE=HOST
cd inside; greet "$PLACE" HOSTS
```
- a list
  ```bash
  greet "$PLACE" from "${PWD##*/}"
  ```
```python
# library/driver.py
place = "HOST"
```
````markdown
<!-- prompts/own.md -->
```
no block of its own
```
````
```text
greet nobody
```
"""


@pytest.fixture
def guide(tmp_path):
    (tmp_path / "guide.md").write_text(DOCUMENT)
    return blocks(tmp_path / "guide.md")


def test_blocks_are_found_with_their_languages_lines_and_files(guide):
    assert [(block.language, block.line, block.file) for block in guide] == [
        ("", 2, None),
        ("bash", 7, None),
        ("python", 10, "library/driver.py"),
        ("markdown", 14, "prompts/own.md"),
        ("text", 20, None),
    ]
    assert guide[1].text == 'greet "$PLACE" from "${PWD##*/}"\n'
    assert guide[3].text == "```\nno block of its own\n```\n"


def test_a_fence_that_is_not_closed_is_an_error(tmp_path):
    (tmp_path / "guide.md").write_text("```\necho\n")
    with pytest.raises(ValueError, match="line 1"):
        blocks(tmp_path / "guide.md")


def test_commands_share_variables_and_folder_and_files_are_written(guide, tmp_path):
    session = Session(tmp_path / "reader", words={"HOST": "host-1"}, stubs=("greet",))
    (session.folder / "inside").mkdir()
    for block in guide:
        session.play(block)
    assert session.calls == [["greet", "host-1", "HOSTS"], ["greet", "host-1", "from", "inside"]]
    assert (session.folder / "library/driver.py").read_text() == 'place = "host-1"\n'
    assert sorted(path.name for path in session.folder.iterdir()) == ["inside", "library", "prompts"]


def test_the_stub_of_a_script_does_what_it_says(tmp_path):
    session = Session(tmp_path / "reader", stubs={"git": 'echo "cloned $*"; mkdir "${2##*/}"'})
    assert session.run("git clone https://example.org/ToolSandbox") == "cloned clone https://example.org/ToolSandbox\n"
    assert (session.folder / "ToolSandbox").is_dir()


def test_a_command_that_fails_fails_the_test_unless_it_should(tmp_path):
    session = Session(tmp_path / "reader")
    with pytest.raises(AssertionError, match="exit code 3\nexit 3"):
        session.run("exit 3")
    session.run("false; true", code=1)  # also in the middle


def test_no_file_is_written_through_a_link_or_outside(tmp_path):
    (tmp_path / "guide.md").write_text("```python\n# configs/own.py\n```\n```python\n# ../own.py\n```\n")
    session = Session(tmp_path / "reader", links=("configs",))
    for block in blocks(tmp_path / "guide.md"):
        with pytest.raises(ValueError, match="no file in the reader's folder"):
            session.write(block)
    assert not (ROOT / "configs/own.py").exists()


def test_the_commands_are_those_of_this_checkout(tmp_path):
    printed = Session(tmp_path / "reader").run("python -c 'import trace_jax; print(trace_jax.__file__)'")
    assert printed == f"{ROOT}/trace_jax/__init__.py\n"


def test_a_server_runs_until_it_is_no_longer_needed(tmp_path):
    session = Session(tmp_path / "reader")
    with session.running("echo $$ >pid; echo ready; sleep 60", until="ready"):
        pid = int((session.folder / "pid").read_text())
    with pytest.raises(AssertionError, match="exit code 1"):
        session.run(f"kill -0 {pid}")
