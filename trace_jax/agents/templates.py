"""The prompts: Markdown files of `prompts/` with variables that each declares, rendered by jinja2, strictly.

`prompts/general/` has every prompt; the folder of a domain holds those in which it differs, each of which usually extends the general one
and fills its blocks. A prompt begins with a comment that says what it is for and, one a line, what its variables are:

    <!-- Labels one conversation.
    candidates: the capabilities, each with name and description
    -->

A variable that is used and not declared, or declared and not given, is an error, not an empty place.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.meta

from trace_jax.config import data_folder
from trace_jax.config.fields import nearest
from trace_jax.errors import InputError

GENERAL = "general"
_ALIASES = {"taubench": "tau2"}
_HEADER = re.compile(r"\A<!--(.*?)-->\n", re.DOTALL)
_VARIABLE = re.compile(r"^([a-z_]+): (.+)$", re.MULTILINE)


def domain_of(names: Iterable[str]) -> str:
    """The folder of prompts for trajectories, or a target, of these environments: `tau2` for `tau2/airline` and `tau2_retail`."""
    found = {_ALIASES.get(word, word) for word in (re.match(r"[^/_]*", name)[0] for name in names)}
    (domain,) = found if len(found) == 1 else {GENERAL}
    return domain if (data_folder("prompts") / domain).is_dir() and domain else GENERAL


class Templates:
    """The prompts of one domain.

    Args:
      domain: a folder of `prompts/`, or the path of one of the user's own, which may extend ours.

    Raises:
      InputError: there is no such folder.
    """

    def __init__(self, domain: str = GENERAL):
        self.domain = domain
        root = data_folder("prompts")
        own = root / domain if (root / domain).is_dir() else pathlib.Path(domain).expanduser()
        if not own.is_dir():
            domains = sorted(path.name for path in root.iterdir() if path.is_dir())
            raise InputError(f"config field 'agents.prompts': no folder {domain!r}; give one of {', '.join(domains)}, or a path")
        self._folders = [own, root / GENERAL]
        self._environment = jinja2.Environment(
            loader=jinja2.FunctionLoader(self._load), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )

    def names(self) -> list[str]:
        """The prompts that there are."""
        return sorted({path.stem for folder in self._folders for path in folder.glob("*.md")})

    def variables(self, name: str) -> dict[str, str]:
        """What a prompt needs: variable to what it is.

        Raises:
          InputError: no such prompt, one that is no template, or one that uses a variable that it does not declare.
        """
        used: set[str] = set()
        declared: dict[str, str] = {}
        for path, text in self._parts(name):
            header = _HEADER.match(text)
            declared |= dict(_VARIABLE.findall(header[1])) if header else {}
            used |= jinja2.meta.find_undeclared_variables(self._parse(path, text))
        if missing := sorted(used - declared.keys()):
            raise InputError(
                f"{self._path(name)}: variable {missing[0]!r} is not declared; add a line '{missing[0]}: ...' to its first comment"
            )
        return declared

    def render(self, name: str, **variables: Any) -> str:
        """The text of a prompt.

        Raises:
          InputError: as `variables`; it declares others than those given; or the template fails with these values.
        """
        declared = self.variables(name)
        if odd := sorted(declared.keys() ^ variables.keys()):
            given = f"is not given; those that are: {', '.join(variables)}"
            told = given if odd[0] in declared else f"is not declared; add a line '{odd[0]}: ...' to its first comment, and use it"
            raise InputError(f"{self._path(name)}: variable {odd[0]!r} {told}")
        try:
            return self._environment.get_template(str(self._path(name))).render(**variables).strip() + "\n"
        except jinja2.TemplateError as error:
            raise InputError(f"{self._path(name)}: {error}") from error

    def digest(self, name: str) -> str:
        """The sha256 of a prompt's files, those included that it extends."""
        return hashlib.sha256("\0".join(text for _, text in self._parts(name)).encode()).hexdigest()

    def _path(self, name: str) -> pathlib.Path:
        for folder in self._folders:
            if re.fullmatch(r"\w+", name) and (folder / f"{name}.md").is_file():
                return folder / f"{name}.md"
        raise InputError(f"no prompt {name!r}{nearest(name, self.names())}; there are: {', '.join(self.names())}")

    @functools.cache  # noqa: B019 - as long-lived as the run
    def _parts(self, name: str) -> list[tuple[pathlib.Path, str]]:
        """The file of a prompt and those that it extends or includes, in the order in which they are met."""
        parts: dict[pathlib.Path, str] = {}
        waiting = [self._path(name)]
        while waiting:
            path = waiting.pop(0)
            if path not in parts:
                text = self._read(path)
                parts[path] = text
                waiting += [self._resolve(other) for other in jinja2.meta.find_referenced_templates(self._parse(path, text)) if other]
        return list(parts.items())

    def _resolve(self, reference: str) -> pathlib.Path:
        """`general/x.md` is ours, the absolute path of a prompt itself."""
        path = pathlib.Path(reference)
        path = path if path.is_absolute() else data_folder("prompts") / path
        if not path.is_file():
            raise InputError(f"{path}: no such prompt, but another extends it")
        return path

    def _read(self, path: pathlib.Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error

    def _parse(self, path: pathlib.Path, text: str) -> jinja2.nodes.Template:
        try:
            return self._environment.parse(_HEADER.sub("", text))
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{path}, line {error.lineno}: {error.message}") from error

    def _load(self, reference: str) -> tuple[str, str, None]:
        path = self._resolve(reference)
        return _HEADER.sub("", self._read(path)), str(path), None
