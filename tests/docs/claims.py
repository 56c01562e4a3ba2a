"""What the documents say that can be looked up: commands, flags, config fields, files, names, links.

A claim is checked, without running anything, by a function that raises ValueError, InputError or AssertionError, with what is wrong.
"""

import functools
import importlib.util
import pathlib
import re
import shlex
from collections.abc import Iterator

from tests.docs.blocks import ROOT, Block, blocks
from trace_jax import cli
from trace_jax.config import Config, load_config, override
from trace_jax.config.fields import check, fields

DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "tpu_scripts/README.md", "envs/library/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))

# programs that are not ours, and what of theirs is named by its flags
PROGRAMS = {
    "pip",
    "git",
    "curl",
    "gcloud",
    "ssh-keygen",
    "ssh-add",
    "cat",
    "export",
    "source",
    "ruff",
    "tau2",
    "mini",
    "kill",
    "cd",
    "mkdir",
}
FLAGS_OF_OTHERS = {"--enable-lora", "--max-lora-rank", "--lora-target-modules", "--ntasks-per-node", "--xla_gpu_deterministic_ops"}
# what stands in for a value of the reader's
PLACEHOLDERS = {"CONFIG": "quickstart", "NAME": "quickstart", "...": "quickstart"}

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(document: str) -> str:
    """A document without its fenced blocks, the lines kept."""
    lines, text = (ROOT / document).read_text().splitlines(), []
    inside = {number for block in blocks(document) for number in _lines(block, lines)}
    for number, line in enumerate(lines, 1):
        text.append("" if number in inside else line)
    return "\n".join(text)


def _lines(block: Block, lines: list[str]) -> range:
    fence = re.match(r" *([`~]+)", lines[block.line - 1])[1]
    last = next(number for number in range(block.line + 1, len(lines) + 1) if lines[number - 1].strip() == fence)
    return range(block.line, last + 1)


def spans(document: str) -> list[str]:
    """The inline code of a document, each on one line."""
    return sorted({" ".join(span.split()) for span in SPAN.findall(prose(document))})


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a script, without assignments before it and redirections behind it."""
    text = re.sub(r"<<(\w+)\n.*?\n\1\n", "\n", text, flags=re.DOTALL)  # what a command reads
    # a comment ends with its line, whose end is kept by doubling it
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", "\n\n"), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, "#"
    words: list[str] = []
    skipped = False  # a file follows, or the mark of a text
    for word in [*lexer, "\n"]:
        if word and set(word) <= set("();<>|&\n"):
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            skipped = set(word) <= set("<>")
            if words and not skipped:
                yield words
            words = words if skipped else []
        elif not skipped:
            words.append(word)
        else:
            skipped = False


def check_command(words: list[str]) -> None:
    """Raises if a command does not exist, or does not take these words."""
    program, *rest = words
    if program == "trace-jax":
        check_trace_jax(rest)
    elif program == "srun":
        check_command([word for word in rest if not word.startswith("--ntasks")])
    elif program == "tpu_scripts/pod":
        if "--" in rest:
            check_trace_jax(rest[rest.index("--") + 1 :])
    elif re.fullmatch(r"python[\d.]*", program):
        check_python(rest)
    elif program == "pytest":
        check_pytest(rest)
    elif program in PROGRAMS or program.endswith("/bin/pip"):
        pass
    else:
        raise ValueError(f"no program {program!r} is known; if it is another's, name it in tests/docs/claims.py")


def check_trace_jax(words: list[str]) -> None:
    """Raises InputError if the command line is wrong, as far as it can be told without a workdir."""
    if not words or words[-1] == "...":
        words = words[:-1]
    if not words or words[0] == "COMMAND":
        return
    name, command = cli.find_command(words[0])
    complete = len(words) > 1  # the name alone is the command's name
    words = [re.sub(r"(?<==)[A-Z.]+$", lambda word: PLACEHOLDERS.get(word[0], word[0]), word) for word in words[1:]]
    if not complete:
        return
    values, overrides, _ = cli.parse(name, command, words)
    if values.get("config"):
        load_config(values["config"], overrides)
    else:
        override(Config(), overrides).validate()


def check_python(words: list[str]) -> None:
    if words[0] == "-m" and words[1] != "venv":
        module, flags = words[1], words[2:]
        if module.partition(".")[0] in ("trace_jax", "tests", "envs", "rl", "model"):
            path = ROOT / f"{module.replace('.', '/')}.py"
            _check_flags(path if path.exists() else pathlib.Path(importlib.util.find_spec(module).origin), flags)
    elif words[0].endswith(".py"):
        path = pathlib.Path(words[0])
        _check_flags(path if path.exists() else ROOT / path, words[1:])


def _check_flags(path: pathlib.Path, words: list[str]) -> None:
    source = path.read_text()
    for word in words:
        if word.startswith("--") and (flag := word.partition("=")[0]) not in source:
            raise ValueError(f"{path} has no flag {flag}")


def check_pytest(words: list[str]) -> None:
    paths = [word for word in words if "/" in word]
    for path in paths:
        if not (ROOT / path).exists():
            raise ValueError(f"pytest: no {path}")
    markers = re.findall(r"\w+", words[words.index("-m") + 1]) if "-m" in words else []
    for marker in set(markers) - {"and", "or", "not"}:
        if f'"{marker}: ' not in (ROOT / "pyproject.toml").read_text():
            raise ValueError(f"pytest: no marker {marker}")


@functools.cache
def sources() -> str:
    """All that is written in the checkout apart from the documents: names are looked up here."""
    rooms = ["model", "rl", "envs", "trace_jax", "tpu_scripts", "configs", "prompts", "tests"]
    kinds = {".py", ".sh", ".env", ".yaml", ".html", ".jinja", ".json", ""}
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*")) if path.suffix in kinds and path.is_file()]
    paths = [path for path in paths if "tests/docs" not in str(path) and path.stat().st_size < 200_000]
    paths += [*(ROOT / "prompts").rglob("*.md"), ROOT / "pyproject.toml", ROOT / "Dockerfile"]
    return "\n".join([*(path.read_text() for path in paths), *(str(path.relative_to(ROOT)) for path in paths)])


ROOMS = ("trace_jax", "rl", "model", "envs", "tests", "configs", "prompts", "docs", "tpu_scripts")
SECTIONS = {name.partition(".")[0] for name, _, _ in fields(Config()) if "." in name}


def check_span(span: str, document: str) -> None:
    """Raises if inline code names a command, flag, field, file or name that is not there."""
    first = span.split()[0]
    if first in ("trace-jax", "tpu_scripts/pod", "pytest", "srun", "pip") or re.fullmatch(r"python[\d.]*", first):
        for words in simple_commands(span):
            if len(words) > 1 and "COMMAND" not in words:
                check_command(words)
    elif first.startswith("--"):
        for word in span.split():
            _check_flag(word)
    elif re.fullmatch(r"(?:analyst|generator)=\w+|[a-z]\w*\.[a-z]\w*(?:=.*)?", span) and re.split(r"[.=]", span)[0] in SECTIONS | {
        "analyst",
        "generator",
    }:
        name, equals, value = span.partition("=")
        if not any(name == field for field, _, _ in fields(Config())):
            _check_names(span, document)  # agents.client is a module
        elif equals and not value.isupper():
            _check_value(name, value)
    elif re.fullmatch(rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+", span):
        _check_module(span)
    elif _path(span, document):
        return
    elif span.partition("/")[0] in ROOMS:
        raise ValueError(f"no file {span}")
    else:
        _check_names(span, document)


def _check_module(name: str) -> None:
    """Raises if there is no such module, or nothing of the last name in it."""
    *folders, last = name.split(".")
    folder = ROOT.joinpath(*folders)
    holders = [folder / "__init__.py", folder.with_suffix(".py"), folder / last / "__init__.py", folder / f"{last}.py"]
    found = [path for path in holders if path.exists()]
    if not any(path.stem == last or path.parent.name == last or re.search(rf"\b{last}\b", path.read_text()) for path in found):
        raise ValueError(f"no module {name}")


def _check_flag(word: str) -> None:
    flag, equals, value = word.partition("=")
    if flag.startswith("--config."):
        name = flag.removeprefix("--config.")
        if name == "FIELD":
            return
        known = {field for field, _, _ in fields(Config())}
        if name not in known:
            raise ValueError(f"no config field {name}")
        if equals and not value.isupper() and "..." not in value:
            _check_value(name, value)
    elif flag.lstrip("-") not in cli.FLAGS and flag not in FLAGS_OF_OTHERS and flag not in sources() and f"{flag[2:]}=" not in sources():
        raise ValueError(f"no flag {flag}")


def _check_value(name: str, text: str) -> None:
    spec, value = next((spec, value) for field, spec, value in fields(override(Config(), [(name, text)])) if field == name)
    check(name, spec, value)


def _path(span: str, document: str) -> bool:
    """Whether it is a file or folder of the checkout, from its root or from the document."""
    pattern = re.sub(r"<\w+>", "*", span).strip("/")
    if not re.fullmatch(r"[\w./*-]+", pattern):
        return False
    return any(
        any(folder.glob(pattern))
        for folder in (ROOT, (ROOT / document).parent)
        if not pattern.startswith(("/", ".")) or (folder / pattern).exists()
    )


def _check_names(span: str, document: str) -> None:
    """Raises if a word of the span, or the words between its dots and slashes, is found nowhere."""
    for word in re.findall(r"[A-Za-z_][\w.*-]*\w", re.sub(r"<\w+>|\"[^\"]*\"", " ", span)):
        if word in sources():
            continue
        for piece in re.split(r"[.*]", word):
            if piece not in sources():
                raise ValueError(f"nothing is called {piece!r}")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def check_link(target: str, document: str) -> None:
    """Raises if a relative link leads nowhere."""
    if re.match(r"https?:", target):
        return
    path, _, anchor = target.partition("#")
    file = ((ROOT / document).parent / path).resolve() if path else ROOT / document
    if not file.exists():
        raise ValueError(f"no file {path}")
    if anchor and anchor not in map(slug, HEADING.findall(prose(str(file.relative_to(ROOT))))):
        raise ValueError(f"no heading {anchor} in {path}")
