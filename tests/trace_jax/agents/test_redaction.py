import pytest

from trace_jax.agents.redaction import redact, shorten, without_keys

ENVIRONMENT = {
    "OPENAI_API_KEY": "very secret value",
    "OPENAI_BASE_URL": "https://llm.corp.internal:8443/v1/",
    "OPENAI_ORG_ID": "acme-corp",
    "OPENAI_PROJECT_ID": "apollo-11",
    "ANTHROPIC_API_KEY": "another-secret",
    "SOMEONES_API_KEY": "third-secret",
    "LOCAL_API_KEY": "none",
    "OTHER_API_KEY": "password",
    "DB_SECRET": "a longer word",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "text, gone",
    [
        ("with very secret value here", "very secret"),
        ("another-secret, third-secret", "-secret"),
        ("POST https://llm.corp.internal:8443/v1/chat/completions", "corp.internal"),
        ("cannot connect to llm.corp.internal:8443", "corp.internal"),
        ("in organization acme-corp and apollo-11", "acme"),
        ("Incorrect API key provided: sk-proj-ab12****wxYZ.", "ab12"),
        ("sk-ant-api03-x_y-z", "api03"),
        ("Authorization: Bearer eyJhbGci.x-y_z", "eyJ"),
        ("{'authorization': 'Basic dXNlcjpwdw==', 'x': 1}", "dXN"),
        ('{"openai-organization": "other-corp"}', "other-corp"),
        ("x-api-key: 0123abcd", "0123"),
        ("Rate limit for org-AbC123 in proj_9zY8, user-Q1w2E3", "AbC"),
        ("Rate limit for org-AbC123 in proj_9zY8, user-Q1w2E3", "9zY"),
        ("Rate limit for org-AbC123 in proj_9zY8, user-Q1w2E3", "Q1w"),
        ("client_secret=ab12 passwd: 'cd34'", "cd34"),
        ("http://me:pw@proxy.example/x", "pw"),
        ("ask jane.doe+x@corp.example.org", "jane"),
    ],
)
def test_secrets_are_taken_out(text, gone):
    assert gone in text and gone not in redact(text) and "[redacted]" in redact(text)


def test_the_rest_stays():
    text = """
        File "x.py", line 3, in f
          @functools.cache
          q_proj_weight = none @ proj_weight  # user-agent, user-supplied, task-oriented, hf_config; organization: any
        see https://github.com/acme/x for the risk-free organization of projects
    """
    assert redact(text) == text
    assert redact("the tenant initech", "initech") == "the tenant [redacted]"


def test_an_answer_loses_keys_alone():
    text = "very secret value of me@corp.example, sk-not-ours, acme-corp, none, password, a longer word"
    assert without_keys(text) == text.replace("very secret value", "[redacted]")


def test_a_long_text_keeps_both_ends():
    assert shorten("a  b\nc") == "a b c"
    short = shorten("x" * 500 + "end", 50)
    assert short.endswith("end") and len(short) < 60
