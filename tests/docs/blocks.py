"""The fenced blocks of the documents, and a shell in which they happen.

What a document tells its reader to type is typed by a test. A block without a language, or of `bash`, is commands. A block of `python`,
`json` or `markdown` whose first line is a comment with a path, such as `# library/driver.py` or `<!-- prompts/own.md -->`, is that file,
without the line. All other blocks are only read: `text`, or `python` without a path.

    session = Session(folder, words={"WEIGHTS": checkpoint}, stubs=("pip", "git"))
    for block in blocks("docs/serve.md"):
        session.play(block)
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[2]
RECORDER = ROOT / "tests/tpu_scripts/stub.sh"
FENCE = re.compile(r"( *)(`{3,}|~{3,})([\w-]*) *")
COMMENT = re.compile(r"(?:#|//|<!--) ([\w./-]+\.\w+)(?: -->)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """Attributes:
    text: what is between the fences; of a file what follows the line with its name.
    line: of the opening fence, from 1.
    file: where the text belongs, relative to the reader's folder.
    document: path, relative to the checkout.
    """

    language: str
    text: str
    line: int
    file: str | None = None
    document: str = ""

    @property
    def is_commands(self) -> bool:
        return self.language in ("", "bash")

    def __str__(self) -> str:
        return f"{self.document}, line {self.line}"


def blocks(path: str | pathlib.Path) -> list[Block]:
    """The fenced blocks of a document, in its order. Raises ValueError where a fence is not closed."""
    path = ROOT / path
    document = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    lines, found = iter(enumerate(path.read_text().splitlines(), 1)), []
    for number, line in lines:
        if not (opening := FENCE.fullmatch(line)):
            continue
        indent, fence, language = opening.groups()
        inside = []
        for _, line in lines:
            if line.strip() == fence:
                break
            inside.append(line.removeprefix(indent))
        else:
            raise ValueError(f"{document}, line {number}: the fence is not closed")
        file = COMMENT.fullmatch(inside[0]) if inside and language in ("python", "json", "markdown") else None
        text = "\n".join(inside[1:] if file else inside) + "\n"
        found.append(Block(language, text, number, file[1] if file else None, document))
    return found


class Session:
    """A reader's shell, in a folder of its own. Variables and the current folder stay from one run to the next.

    `trace-jax`, `python`, `pytest` and `ruff` are those of this Python and this checkout; the stubs come before everything else.

    Args:
      folder: where commands run and files are written; made if it is not there.
      words: text of a document and what stands for it here, such as a folder for WEIGHTS; the longest first, a name only as a whole.
      stubs: names of programs that only record their words in `calls` (tests/tpu_scripts/stub.sh), or a mapping to bash scripts.
      links: files and folders of the checkout that a reader who cloned it has in the folder, such as `tests/data`.
      environment: variables beyond those of this process.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        words: Mapping[str, object] | None = None,
        stubs: tuple[str, ...] | Mapping[str, str] = (),
        links: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.folder, self.words = folder, {word: str(text) for word, text in (words or {}).items()}
        self._private = folder.parent / f".{folder.name}"  # beside the folder, so that the reader's holds nothing of ours
        self._state, self._record = self._private / "state.sh", self._private / "record"
        programs = self._private / "bin"
        for new in (folder, programs):
            new.mkdir(parents=True, exist_ok=True)
        for name in links:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(ROOT / name)
        scripts = {name: f'exec "{sys.executable}" -m {module} "$@"' for name, module in _MODULES.items()}
        scripts |= {"python": f'exec "{sys.executable}" "$@"', "python3": f'exec "{sys.executable}" "$@"'}
        scripts |= stubs if isinstance(stubs, Mapping) else {name: f'. "{RECORDER}"' for name in stubs}
        for name, script in scripts.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
            (programs / name).chmod(0o755)
        self._record.touch()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "STUB_RECORD": str(self._record),
            **(environment or {}),
            "PATH": f"{programs}{os.pathsep}{(environment or os.environ).get('PATH', os.environ['PATH'])}",
        }

    @property
    def calls(self) -> list[list[str]]:
        """The words of every stub that was called, its name first."""
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    def text(self, block: Block | str) -> str:
        """The text of a block with the words replaced, the longer before the shorter."""
        text = block.text if isinstance(block, Block) else block
        if not self.words:
            return text
        longest = sorted(self.words, key=len, reverse=True)
        pattern = "|".join(rf"\b{re.escape(word)}\b" if word.isidentifier() else re.escape(word) for word in longest)
        return re.sub(pattern, lambda found: self.words[found[0]], text)

    def play(self, block: Block, timeout: float = 600.0) -> str:
        """Runs a block of commands, writes a block that is a file, leaves every other alone. Returns what commands printed."""
        if block.file:
            self.write(block)
        return self.run(block, timeout) if block.is_commands else ""

    def write(self, block: Block) -> pathlib.Path:
        """Writes the file that a block is. Raises ValueError if it does not belong into the folder, or the block is no file."""
        path = self.folder / (block.file or "")
        if not block.file or not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{block}: no file in the reader's folder: {block.file}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(block))
        return path

    def run(self, block: Block | str, timeout: float = 600.0, code: int = 0) -> str:
        """What the commands printed, both streams together. Raises AssertionError, with the end of it, if they end with another code."""
        process = self._begin(block)
        try:
            printed, _ = process.communicate(timeout=timeout)
        finally:
            _end(process)
        assert process.returncode == code, f"{block}: exit code {process.returncode}\n{self.text(block)}\n{printed[-4000:]}"
        return printed

    @contextlib.contextmanager
    def running(self, block: Block | str, until: str, timeout: float = 300.0) -> Iterator[str]:
        """Commands that go on, such as a server, ended with the context; what they printed up to the first line that has `until`."""
        with tempfile.NamedTemporaryFile("w", dir=self._private, delete=False) as output:
            process, log = self._begin(block, output), pathlib.Path(output.name)
        try:
            end = time.monotonic() + timeout
            while until not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, f"{block}: no {until!r}\n{log.read_text()[-4000:]}"
                time.sleep(0.1)
            yield log.read_text()
        finally:
            _end(process)

    def _begin(self, block: Block | str, output: object = subprocess.PIPE) -> subprocess.Popen:
        before = f'[ ! -e "{self._state}" ] || . "{self._state}"\nexport PATH="{self.environment["PATH"]}"\n'
        after = f'export -p >"{self._state}"\n'  # OLDPWD and PWD too, but a shell has its own
        script = f'set -euo pipefail -a\n{before}cd "${{FOLDER:-.}}"\n{self.text(block)}\nFOLDER=$PWD\n{after}'
        words = ["bash", "-c", script]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


_MODULES = {"trace-jax": "trace_jax", "pytest": "pytest", "ruff": "ruff"}


def _end(process: subprocess.Popen) -> None:
    """Ends a shell and all that it started: SIGTERM, and SIGKILL after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return
