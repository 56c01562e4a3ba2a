"""The agent against an endpoint that misbehaves: each question ends with a good answer, a gap that says why, or an error that does."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.scripted_llm import EMPTY_BODY, Reply, cut, dropped, html, in_turn, refusal, scripted_llm, slow, status, truncated
from tests.trace_jax.agents.asking import GOOD, KEY, SCHEMA, ask, asking, environment, make, question
from trace_jax.agents import ask_all, client, usage_of
from trace_jax.agents.protocol import Unavailable, Usage
from trace_jax.agents.record import EXCHANGES
from trace_jax.config import Config
from trace_jax.errors import InputError, Unfinished
from trace_jax.workdir import Workdir


@pytest.mark.parametrize(
    "reply",
    [
        status(429, "slow down", retry_after="0.01"),
        status(429, "slow down", retry_after="Mon, 30 Nov 2015 00:00:00 GMT"),
        status(503),
        status(500),
        slow(30.0),
        truncated(),
        dropped(),
        html(),
        EMPTY_BODY,
        Reply(body='{"choices": []}'),
        Reply(body='{"error": {"message": "upstream"}}'),
        Reply(body="[]"),
    ],
    ids=str.split("seconds date 503 500 slow truncated dropped html empty no-choices error list"),
)
def test_what_passes_is_asked_again(tmp_path, reply):
    with asking(tmp_path, in_turn(reply, GOOD), deadline=1.0 if reply.delay else 20.0) as (agent, server):
        (found,) = ask(agent)
        assert found.parsed == {"label": "NA", "step": 3} and found.faults == ()
        assert len(server.requests) == 2 and server.answered == 1 and found.usage.requests == 1


@pytest.mark.parametrize(
    "bad, fault",
    [
        (refusal(), "there is no JSON in it"),
        ("As a language model I would rather not.", "there is no JSON in it"),
        ("", "it is empty"),
        (Reply(None), "it is empty"),
        (cut('{"label": "NA", "st'), "it was cut off at 5 tokens: be shorter"),
        (cut(GOOD), "it was cut off at 7 tokens: be shorter"),
        ('{"label": "ABSENT", "step": 3}', "label: 'ABSENT' is not one of"),
        ('{"label": "NA", "step": NaN}', "NaN is no number of JSON"),
        ('{"label": "NA"}', "'step' is a required property"),
        (f"{GOOD}\n{GOOD}", "it holds 2 JSON values"),
    ],
)
def test_an_answer_that_cannot_be_used_is_mended_or_a_gap(tmp_path, bad, fault):
    with asking(tmp_path / "mended", in_turn(bad, GOOD)) as (agent, server):
        (found,) = ask(agent)
        assert found.parsed == {"label": "NA", "step": 3} and found.faults == () and found.usage.requests == 2
        first, second = (request["messages"] for request in server.requests)
        assert second[:2] == first and [m["role"] for m in second[2:]] == ["assistant", "user"]
        assert fault in second[3]["content"] and '"enum"' in second[3]["content"] and second[2]["content"]
    with asking(tmp_path / "gap", lambda request: bad) as (agent, server):
        (found,) = ask(agent)
        assert found.parsed is None and any(fault in one for one in found.faults)
        assert len(server.requests) == 3 == found.usage.requests, "two repairs, no more"
        (again,) = ask(agent)
        assert again.faults == found.faults and again.usage.earlier == 3 and len(server.requests) == 3, "a gap is replayed for free"


def test_a_check_beyond_the_schema_is_shown_and_the_last_fitting_value_stays(tmp_path):
    def check(value):
        return [] if value["step"] < 3 else [f"step {value['step']}: there are 3 messages"]

    with asking(tmp_path, in_turn(GOOD, "no", '{"label": "NA", "step": 9}')) as (agent, server):
        (found,) = ask(agent, check=check)
        assert found.faults == ("step 9: there are 3 messages",) and found.parsed["step"] == 9
        assert "step 3: there are 3 messages" in server.requests[1]["messages"][-1]["content"]


def test_without_a_schema_the_text_is_the_answer(tmp_path):
    with asking(tmp_path, lambda request: "free text") as (agent, server):
        (found,) = ask(agent, schema=None, check=lambda text: ["too free"] if "free" in text else [])
        assert found.text == "free text" and found.parsed is None and found.faults == ("too free",)
        assert "response_format" not in server.requests[0]


@pytest.mark.parametrize("code, fix", [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "agents.model"), (400, "status 400")])
def test_what_does_not_pass_ends_the_run_without_telling_secrets(tmp_path, code, fix):
    said = f"Incorrect API key provided: {KEY} of org-acme1, see me@corp.example"
    with asking(tmp_path, lambda request: status(code, said)) as (agent, server):
        with pytest.raises(InputError, match=fix) as caught:
            ask(agent, *"abcdefgh")
        assert "Incorrect API key" in str(caught.value)
        assert not any(secret in str(caught.value) for secret in (KEY, "org-acme1", "corp.example", "127.0.0.1"))
        assert len(server.requests) <= 2 * 4, "those that waited for their turn"


def test_an_endpoint_without_schemas_is_told_in_the_prompt_and_remembered(tmp_path):
    def script(request):
        if "response_format" in request:
            return status(400, "Unsupported parameter: 'response_format' of type json_schema")
        return status(400, "Use 'max_completion_tokens' instead.") if "max_tokens" in request else GOOD

    with asking(tmp_path, script, concurrency=1, parameters={"top_k": 5, "seed": 10}) as (agent, server):
        replies = ask(agent, "a", "b", sample=2)
        assert [reply.parsed["step"] for reply in replies] == [3, 3]
        assert len(server.requests) == 4, "three for the first, one for the second"
        last = server.requests[-1]
        assert last["max_completion_tokens"] == 256 and last["top_k"] == 5 and last["seed"] == 12 and last["model"] == "gpt-x"
        assert '"LACKING"' in last["messages"][-1]["content"]
        assert server.requests[0]["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_content_filter_is_a_refusal(tmp_path):
    filtered = Reply(status=400, body='{"error": {"message": "filtered", "code": "content_filter"}}')
    with asking(tmp_path, lambda request: filtered) as (agent, server):
        assert ask(agent)[0].faults == ("it is empty",) and len(server.requests) == 3


def test_attempts_and_concurrency_are_bounded(tmp_path):
    with asking(tmp_path, lambda request: slow(0.05, GOOD), concurrency=3) as (agent, server):
        ask(agent, *map(str, range(12)))
        assert 1 < server.most <= 3 and len(server.requests) == 12
    with asking(tmp_path / "down", lambda request: status(503), attempts=4) as (agent, server):
        (found,) = ask(agent)
        assert isinstance(found, Unavailable) and "status 503" in str(found) and len(server.requests) == 4


def test_waits_grow_and_obey_the_endpoint(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF", 1.0)
    for attempt, longest in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 1):
        assert longest / 2 <= client._wait(attempt, None) <= longest
    assert 7 <= client._wait(1, 7.0) <= 8 and client._wait(1, 1e9) <= 601 and client._wait(5, 0.0) <= 1


def test_a_dead_endpoint_is_given_up_and_tried_again_next_time(tmp_path):
    with asking(tmp_path, lambda request: status(503), attempts=2, concurrency=2) as (agent, server):
        found = ask(agent, *map(str, range(40)))
        assert all(isinstance(reply, Unavailable) for reply in found)
        assert sum("not asked" in str(reply) for reply in found) >= 30 and len(server.requests) <= 2 * 10
        server.script = lambda request: GOOD
        assert ask(agent)[0].faults == ()


def test_an_endpoint_that_never_answers_is_not_waited_for_by_every_question(tmp_path):
    with asking(tmp_path, lambda request: slow(30.0), attempts=50, concurrency=4, deadline=0.1) as (agent, server):
        found = ask(agent, *map(str, range(40)))
        assert all(isinstance(reply, Unavailable) for reply in found) and "within 0.1 s" in str(found[0]) and "not asked" in str(found[-1])
        assert len(server.requests) <= 12 + 4


def test_a_question_is_asked_once_and_its_sample_is_part_of_it(tmp_path):
    numbers = iter(range(100))
    with asking(tmp_path, lambda request: slow(0.05, f'{{"label": "NA", "step": {next(numbers)}}}')) as (agent, server):
        found = ask(agent, *["same"] * 5)
        assert len(server.requests) == 1 and len({reply.text for reply in found}) == 1
        assert sorted(reply.usage.earlier for reply in found) == [0, 1, 1, 1, 1] and agent.usage.requests == 1
        other = ask(agent, "same", sample=1)[0]
        assert len(server.requests) == 2 and other.text != found[0].text and other.digest != found[0].digest
        workdir = agent._workdir
        again = make(workdir, stage="later")
        assert [ask(again, "same", sample=k)[0].text for k in (0, 1)] == [found[0].text, other.text]
        assert len(server.requests) == 2 and again.usage.earlier == again.usage.requests == 2
        ask(make(workdir, model="gpt-y"), "same")
        ask(make(workdir, parameters={"temperature": 0.5}), "same")
        assert len(server.requests) == 4
        assert list(usage_of(workdir)) == ["diagnose", "total"] and usage_of(workdir)["total"].requests == 4


def test_a_cut_answer_is_asked_for_again_with_a_larger_limit(tmp_path):
    with asking(tmp_path, in_turn(*[cut("{")] * 3, GOOD)) as (agent, server):
        assert "cut off" in ask(agent)[0].faults[0]
        assert ask(make(agent._workdir, answer_tokens=128))[0].faults and len(server.requests) == 3
        assert ask(make(agent._workdir, answer_tokens=512))[0].faults == () and len(server.requests) == 4
        assert ask(agent)[0].faults == (), "the later line counts"


def test_the_budget_is_never_exceeded(tmp_path):
    with asking(tmp_path, lambda request: slow(0.02, "x" * 800), concurrency=8, max_tokens=6000) as (agent, server):
        with pytest.raises(
            Unfinished, match=r"'agents.max_tokens': [\d,]+ of 6,000 tokens .* raise it and run again: nothing is asked twice"
        ):
            ask(agent, *map(str, range(200)), schema=None)
        spent = usage_of(agent._workdir)["total"]
        assert 5500 < spent.input_tokens + spent.output_tokens <= 6000, "reserved too little, or gave up while answers were outstanding"
        assert 1 < server.most <= 8 and server.answered == spent.requests == len(server.requests)
        before = len(server.requests)
        with pytest.raises(Unfinished):
            ask(make(agent._workdir, max_tokens=6000), *map(str, range(200)), schema=None)
        assert len(server.requests) == before, "earlier runs count"
        more = make(agent._workdir, max_tokens=10**6)
        assert len(ask(more, *map(str, range(30)), schema=None)) == 30 and len(server.requests) == 30, "nothing is asked twice"


def test_money_is_counted_by_the_prices(tmp_path):
    prices = {"price_input": 10.0, "price_output": 100.0}
    with asking(tmp_path, lambda request: "x" * 400, max_cost=0.12, **prices) as (agent, server):
        with pytest.raises(Unfinished, match=r"'agents.max_cost': \$0.\d+ of \$0.1200 are spent"):
            ask(agent, *map(str, range(100)), schema=None)
        spent = usage_of(agent._workdir)["total"]
        assert spent.cost == pytest.approx((10 * spent.input_tokens + 100 * spent.output_tokens) / 1e6)
        assert 0.08 < spent.cost <= 0.12 and agent.usage.cost == pytest.approx(spent.cost)
        with pytest.raises(InputError, match="'agents.price_output': missing"):
            make(agent._workdir, price_input=1.0)


@pytest.mark.parametrize(
    "usage", ["null", '{"prompt_tokens": -1, "completion_tokens": 1}', f'{{"prompt_tokens": 1{"0" * 400}, "completion_tokens": 1}}']
)
def test_tokens_are_estimated_where_nobody_tells(tmp_path, usage):
    body = f'{{"choices": [{{"message": {{"content": {json.dumps(GOOD)}}}}}], "usage": {usage}}}'
    with asking(tmp_path, lambda request: Reply(body=body)) as (agent, server):
        ask(agent)
        (line,) = agent._workdir.read_jsonl(EXCHANGES)
        assert line["estimated"] and line["output_tokens"] >= len(GOOD) // 3 and line["cost"] is None
        assert agent.usage == Usage(1, line["input_tokens"], line["output_tokens"], None, 0)


def test_half_a_surrogate_pair_harms_nobody(tmp_path):
    with asking(tmp_path, lambda request: "a\ud83d") as (agent, server):
        assert ask(agent, "b\udc00", schema=None)[0].text == "a?"
        assert server.requests[0]["messages"][-1]["content"] == "b?"


def test_an_error_cancels_the_others_and_keeps_what_has_arrived(tmp_path):
    def script(request):
        text = request["messages"][-1]["content"]
        return status(401) if text == "bad" else slow(30.0) if text == "hangs" else GOOD

    with asking(tmp_path, script, deadline=60.0) as (agent, server):
        start = time.monotonic()
        with pytest.raises(InputError):
            ask(agent, "a", "hangs", "b", "bad", "c")
        assert time.monotonic() - start < 5
        assert agent.usage.requests >= 2 and len(agent._workdir.read_jsonl(EXCHANGES)) == agent.usage.requests
        assert ask(agent, "a", "b", "c")[2].faults == (), "the client works again, in another loop"


def test_progress_is_told_and_results_keep_their_order(tmp_path):
    told = []
    with asking(
        tmp_path, lambda request: slow(0.03 if "1" in request["messages"][-1]["content"] else 0.0, request["messages"][-1]["content"])
    ) as (
        agent,
        _,
    ):
        asked = [lambda i=i: agent.complete(question(str(i))) for i in range(6)]
        assert [reply.text for reply in ask_all(agent, asked, told.append)] == list("012345") and told == [1, 2, 3, 4, 5, 6]
        assert ask_all(agent, []) == []


def test_a_waiter_that_goes_takes_no_answer_from_the_others(tmp_path):
    with asking(tmp_path, lambda request: slow(0.1, GOOD)) as (agent, server):

        async def both():
            first, second = (asyncio.create_task(agent.complete(question(), SCHEMA)) for _ in range(2))
            await asyncio.sleep(0.03)
            first.cancel()
            reply = await second
            await agent.close()
            return reply

        assert asyncio.run(both()).faults == () and len(server.requests) == 1


class Stop(BaseException):
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize(
    "number, handler, raised",
    [(signal.SIGTERM, stop, Stop), (signal.SIGINT, stop, Stop), (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt)],
)
def test_a_signal_raises_what_its_handler_raises_and_what_has_arrived_is_recorded(tmp_path, number, handler, raised):
    before = signal.signal(number, handler)
    try:
        script = lambda request: GOOD if request["messages"][-1]["content"] < "3" else slow(30.0)  # noqa: E731
        with asking(tmp_path, script, deadline=60.0) as (agent, server):
            threading.Thread(target=lambda: (wait_for(lambda: server.answered == 3), time.sleep(0.1), os.kill(os.getpid(), number))).start()
            with pytest.raises(raised):
                ask(agent, *"012345")
            assert signal.getsignal(number) is handler
            assert len(agent._workdir.read_jsonl(EXCHANGES)) == 3
    finally:
        signal.signal(number, before)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


ASKS = """
    import sys
    from tests.trace_jax.agents.asking import SCHEMA, make, ask
    from trace_jax.config import Config
    from trace_jax.workdir import Workdir

    with Workdir.open(sys.argv[1], Config()) as workdir:
        replies = ask(make(workdir, concurrency=4), *map(str, range(40)))
        print(all(reply.faults == () for reply in replies))
"""


def test_killed_at_any_moment_it_repeats_no_answered_question(tmp_path):
    concurrency, questions, kills = 4, 40, 3
    with scripted_llm(lambda request: slow(0.05, GOOD)) as server:
        words = [sys.executable, "-c", textwrap.dedent(ASKS), str(tmp_path)]
        for kill in range(kills):
            process = subprocess.Popen(words, env=environment(server.url))
            aim = len(server.requests) + 5 + 4 * kill
            wait_for(lambda aim=aim: len(server.requests) >= aim)
            process.kill()
            process.wait()
            with Workdir.open(tmp_path, lock=False) as workdir:
                had = {line["key"] for line in workdir.read_jsonl(EXCHANGES)}
            assert len(server.requests) <= len(had) + concurrency * (kill + 1)
        with (tmp_path / EXCHANGES).open("ab") as file:
            file.write(b'{"key": "torn')
        done = subprocess.run(words, env=environment(server.url), capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "True", done.stderr
        assert questions <= len(server.requests) <= questions + concurrency * kills
        with Workdir.open(tmp_path, Config()) as workdir:
            lines = workdir.read_jsonl(EXCHANGES)
        assert len({line["key"] for line in lines}) == len(lines) == questions


def _tight(limit):
    """An endpoint with room for so many tokens, that answers at length and uselessly."""

    def script(request):
        tokens = sum(len(message["content"]) for message in request["messages"]) // 4 + request["max_tokens"]
        return status(400, f"This model's maximum context length is {limit} tokens") if tokens > limit else "no " * 2000

    return script


def test_a_repair_without_room_is_a_gap_and_a_question_without_room_an_error(tmp_path):
    with asking(tmp_path, _tight(500)) as (agent, server):
        (found,) = ask(agent)
        assert found.faults == ("there is no JSON in it",) and len(server.requests) == 2
        with pytest.raises(InputError, match="maximum context .* lower config field 'agents.prompt_tokens' or 'agents.answer_tokens'"):
            ask(agent, "w" * 4000)


def test_an_answer_without_end_is_shown_to_its_author_in_part(tmp_path):
    with asking(tmp_path, lambda request: "begin" + "x" * 1_000_000 + "end") as (agent, server):
        assert "cut off" in ask(agent)[0].faults[0] and len(server.requests) == 3
        shown = server.requests[1]["messages"][-2]["content"]
        assert len(shown) < 2000 and shown.startswith("begin") and "characters left out" in shown
        assert all(len(line["text"]) < 10_000 for line in agent._workdir.read_jsonl(EXCHANGES))


def test_a_budget_holds_where_tokens_are_shorter_than_estimated(tmp_path):
    def script(request):
        usage = {"prompt_tokens": sum(len(message["content"]) for message in request["messages"]), "completion_tokens": 10}
        return Reply(body=json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}), delay=0.02)

    with asking(tmp_path, script, concurrency=50, max_tokens=6000) as (agent, server):
        with pytest.raises(Unfinished, match="of 6,000 tokens"):
            ask(agent, *("word " * 50 + str(n) for n in range(60)), schema=None)
        spent = usage_of(agent._workdir)["total"]
        assert 5000 < spent.input_tokens + spent.output_tokens <= 6000 and spent.requests == len(server.requests)
