from tests.docs.blocks import ROOT
from trace_jax.config import Config
from trace_jax.config.fields import fields
from trace_jax.reference import reference


def test_the_reference_of_config_fields_is_that_of_the_program():
    text = reference()
    assert (ROOT / "docs/config.md").read_text() == text, "python -m trace_jax.reference >docs/config.md"
    for name, spec, _ in fields(Config()):
        assert f"| `{name}` |" in text and spec.metadata["help"].split("|")[0].split("<")[0].split("*")[0] in text
