"""`trace-jax prompt NAME`: a prompt as it is sent, with its variables shown by name where a run would fill them in.

NAME is `capability_labelling`, or `tau2/capability_labelling` for the prompt of a domain. What the config tells of an environment's
contract (limits, bounds, seeds) is filled in, since people write environments too.
"""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.agents.templates import GENERAL, Templates
from trace_jax.cli import Arguments
from trace_jax.synthesize.brief import terms


class Placeholder:
    """Stands for a variable of any kind: text, a list of one item, an object with whatever fields a template reads."""

    def __init__(self, name: str):
        self._name = name

    def __str__(self) -> str:
        return f"<{self._name}>"

    def __getattr__(self, field: str) -> Placeholder:
        if field.startswith("_"):  # what jinja2 and copy ask of any object
            raise AttributeError(field)
        return Placeholder(f"{self._name}.{field}")

    def __getitem__(self, key: str | int) -> Placeholder:
        return Placeholder(f"{self._name}.{key}")

    def __iter__(self) -> Iterator[Placeholder]:
        yield Placeholder(f"{self._name}[0]")

    def __len__(self) -> int:
        return 1

    def __float__(self) -> float:
        return float("nan")


def main(arguments: Arguments) -> None:
    """Prints the prompt.

    Raises:
      InputError: no such prompt, or one whose template is wrong.
    """
    domain, _, name = arguments.argument.rpartition("/")
    templates = Templates(domain or arguments.config.agents.prompts or GENERAL)
    told = terms(arguments.config) | {"max_turns": Placeholder("max_turns of the target")}
    print(templates.render(name, **{variable: told.get(variable, Placeholder(variable)) for variable in templates.variables(name)}), end="")
