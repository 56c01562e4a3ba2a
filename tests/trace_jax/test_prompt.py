import re

import pytest

from trace_jax import cli
from trace_jax.agents.templates import GENERAL, Templates, domain_of
from trace_jax.config import Config, data_folder
from trace_jax.errors import InputError
from trace_jax.synthesize.brief import terms

DOMAINS = sorted(path.name for path in data_folder("prompts").iterdir() if path.is_dir())
PROMPTS = [(domain, name) for domain in DOMAINS for name in Templates(domain).names()]


@pytest.mark.parametrize("domain, name", PROMPTS)
def test_every_prompt_of_every_domain_is_printed(domain, name, capsys):
    assert cli.main(["prompt", f"{domain}/{name}"]) == 0
    text = capsys.readouterr().out
    assert text.strip() and "{%" not in text and "{{" not in text and "<!--" not in text
    for variable in Templates(domain).variables(name).keys() - terms(Config()).keys():
        assert f"<{variable}" in text, f"{variable} is declared and not shown"


def test_the_contract_is_filled_in_from_the_config(capsys):
    assert cli.main(["prompt", "general/environment_contract", "--config.rollout.context=300", "--config.synthesis.mean_low=0.07"]) == 0
    text = capsys.readouterr().out
    assert "must fit into 300 tokens" in text and "are each between 0.07 and 0.6" in text and ", ".join(terms(Config())["modules"]) in text
    assert set(re.findall(r"<\w[^>]*>", text)) == {"<target>", "<capability>", "<max_turns of the target>"}


def test_a_prompt_that_is_not_there_is_named(capsys):
    assert cli.main(["prompt", "answer_repar"]) == 2
    assert "no prompt 'answer_repar', did you mean 'answer_repair'?" in capsys.readouterr().err
    assert cli.main(["prompt", "nowhere/answer_repair"]) == 2
    assert "no folder 'nowhere'; give one of general" in capsys.readouterr().err


def own(tmp_path, text, name="answer_repair"):
    (tmp_path / f"{name}.md").write_text(text)
    return Templates(str(tmp_path))


def test_a_folder_of_ones_own_extends_ours_and_counts_in_the_hash(tmp_path):
    ours = Templates()
    mine = own(tmp_path, "{% extends 'general/answer_repair.md' %}\n")
    given = {"faults": ["too long"], "schema": ""}
    assert mine.render("answer_repair", **given) == ours.render("answer_repair", **given)
    assert mine.digest("answer_repair") != ours.digest("answer_repair") == Templates().digest("answer_repair")
    assert mine.names() == ours.names()


def test_a_folder_of_ones_own_may_be_named_from_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path, "{% extends 'general/answer_repair.md' %}\n")
    given = {"faults": ["too long"], "schema": ""}
    assert Templates("../" + tmp_path.name).render("answer_repair", **given) == Templates().render("answer_repair", **given)


@pytest.mark.parametrize(
    "text, words",
    [
        ("<!-- x\nfaults: a\n-->\n{{ fault }}\n", "variable 'fault' is not declared"),
        ("<!-- x\nfaults: a\n-->\n{% if %}\n", "answer_repair.md, line"),
        ("{% extends 'general/nothing.md' %}\n", "no such prompt, but another extends it"),
        ("<!-- x\nfaults: a\n-->\n{{ faults.one }}\n", "has no attribute 'one'"),
    ],
)
def test_a_template_that_is_wrong_names_its_file(tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        own(tmp_path, text).render("answer_repair", faults=["x"])


def test_variables_are_given_exactly():
    with pytest.raises(InputError, match="'schema' is not given; those that are: faults"):
        Templates().render("answer_repair", faults=[])
    with pytest.raises(InputError, match="answer_repair.md: variable 'more' is not declared; add a line 'more: ...'"):
        Templates().render("answer_repair", faults=[], schema="", more=1)


def test_the_domain_of_prompts_follows_from_the_environments():
    for names, domain in {
        ("tau2/airline", "tau2_retail"): "tau2",
        ("taubench/airline",): "tau2",
        ("swebench/lite",): "swebench",
        ("desk", "tau2/mock"): GENERAL,
        ("my_own",): GENERAL,
        ("/x", ""): GENERAL,
        (): GENERAL,
    }.items():
        assert domain_of(names) == domain
