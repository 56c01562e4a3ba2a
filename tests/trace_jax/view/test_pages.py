"""What the pages say: the list, one rollout, two side by side; of whole, damaged, growing and hostile workdirs."""

import dataclasses
import html
import json
import os
import re
import shutil
import urllib.parse
from html.parser import HTMLParser

import numpy as np
import pytest
import zstandard

from rl.trajectory import Trajectory
from tests.trace_jax import example_run
from tests.trace_jax.view import made
from tests.trace_jax.view.made import HOSTILE, get, opened, rows, said
from trace_jax.config import Config
from trace_jax.workdir import Workdir

TOTAL = 6 + 230 + 4 + 3 + 4 + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return made.fill(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture(scope="module")
def client(path):
    with opened(path) as client:
        yield client


# --- the list


def test_all_shards_of_a_workdir_and_of_those_within_it_are_listed(client):
    page = get(client, "/")
    assert f"{TOTAL} rollouts" in said(page) and len(rows(page)) == 100
    for choice, count in (("this run", 243), ("rounds/2", 4), ("capabilities/1", 1), ("adapter:x", 230), ("deadline", 1), ("quoting", 1)):
        assert f"{choice} ({count})" in said(page)


def test_choices_combine_and_the_address_holds_them(client):
    page = get(client, "/?policy=adapter:x&reward=success&sort=-id")
    assert said(page).count("adapter:x (76)") == 1 and "76 rollouts, success 100.0 %" in said(page)
    mixture = said(get(client, "/"))
    assert f"{TOTAL} rollouts; success by policy and split: choose one of each" in mixture and "%" not in mixture
    assert rows(page)[0].startswith("/rollout/rollouts/adapter-x/training/00002/") and "sort=-id" in rows(page)[0]
    assert 'aria-sort="descending"' in page
    asked = client.get("/?policy=base&split=&low=&page=&text=", follow_redirects=False)
    assert asked.status_code == 303 and asked.headers["location"] == "/?policy=base"


def test_the_diagnosis_s_labels_choose_rollouts(client):
    page = get(client, "/?capability=quoting&label=LACKING")
    assert rows(page) == ["/rollout/rollouts/base/train/00000/1?capability=quoting&label=LACKING"]
    assert len(rows(get(client, "/?label=PRESENT"))) == 3


def test_pages_follow_each_other(client):
    shown = [rows(get(client, f"/?policy=adapter:x&page={page}")) for page in (1, 2, 3)]
    assert [len(page) for page in shown] == [100, 100, 30] and len({row.partition("?")[0] for page in shown for row in page}) == 230
    first = get(client, "/?policy=adapter:x")
    assert 'rel="next" href="/?policy=adapter%3Ax&amp;page=2"' in first and 'rel="prev"' not in first
    assert rows(get(client, "/?policy=adapter:x&page=77")) == [row.replace("page=3", "page=77") for row in shown[2]]


def test_a_choice_that_nothing_meets_says_so(client):
    assert "No rollout is like that" in said(get(client, "/?policy=nobody"))


# --- one rollout


def test_a_rollout_tells_all_that_is_known_of_it(client):
    page = get(client, "/rollout/rollouts/base/train/00000/1")
    words = said(page)
    assert "success 1.00, ended with done" in words and "policy base" in words and "desk:1, seed 1" in words
    assert "Checks of the grader: 1 of 1 passed" in words and '<a href="#m4">4</a>' in page and 'id="m4"' in page
    assert "calls get_order" in words and "answer of get_order" in words and 'class="thought"' in page and "that was easy" in words
    assert "<mark>I have  returned it.</mark>" in page and "LACKING quoting: says so" in words
    assert 'title="log-prob -0.500, p 0.607"' in page


def test_tokens_take_the_colours_of_their_slots_in_the_chosen_layer(client, path):
    with Workdir.look(path) as workdir:
        slots = example_run.trajectory(1, tokens=240, slots=4).slots
        names = workdir.read_json("gate/routing.json")["slots"]
    address = "/rollout/rollouts/composed/heldout/00000/0"
    for layer in (None, 0, 3):
        page = get(client, address + ("" if layer is None else f"?layer={layer}"))
        tokens = re.search(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)[1]
        colours = [int(slot) for slot in re.findall(r'<i class="(?:o )?s(\d)"', tokens)]
        assert colours == ([np.bincount(row).argmax() for row in slots] if layer is None else slots[:, layer].tolist())
        assert f'title="{names[colours[0]]}"' in page
    assert "slots=yes" in get(client, "/?slots=yes") and len(rows(get(client, "/?slots=yes"))) == 4
    assert get(client, f"{address}?layer=99") == get(client, address)  # no such layer


def test_more_tokens_than_a_page_holds_are_shown_when_asked_for(path, tmp_path):
    made_of = example_run.trajectory(1, tokens=5000)
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("base", "train", 0, [dataclasses.replace(made_of, slots=None)])
    with opened(tmp_path) as client:
        page = get(client, "/rollout/rollouts/base/train/00000/0")
        assert page.count("<i") == 4000 and "All 5,000 tokens" in page and "[" in page  # no texts of tokens here: ids
        assert get(client, "/rollout/rollouts/base/train/00000/0?tokens=all").count("<i") == 5000


def test_the_hint_is_told_and_its_tokens_marked(client):
    page = get(client, "/rollout/rollouts/base/odd/00000/2")
    assert "sampled this with a hint" in said(page) and "look first" in page and page.count('class="h"') == 2
    assert "ended with max turns" in said(page)


def test_what_infrastructure_failed_is_told(client):
    assert "failed by infrastructure deadline: 30 s" in said(get(client, "/rollout/rollouts/base/odd/00000/1"))


def test_neighbours_are_those_of_the_choice_and_its_order(client):
    order = rows(get(client, "/?policy=adapter:x&reward=zero&sort=-id"))
    page = get(client, order[5])
    assert "6 of 77" in said(page)
    assert f'rel="prev" href="{html.escape(order[4])}"' in page and f'rel="next" href="{html.escape(order[6])}"' in page
    assert 'rel="prev"' not in get(client, order[0])
    third = rows(get(client, "/?policy=adapter:x&sort=-id&page=3"))[0]
    assert 'href="/?policy=adapter%3Ax&amp;sort=-id&amp;page=3"' in get(client, third)  # the way back


def test_its_group_and_the_same_task_under_other_policies_are_linked(client):
    page = get(client, "/rollout/rollouts/adapter-x/training/00000/5")
    assert "Trials of its group: 1 of 4 succeeded" in said(page) and "trial 1, this one" in said(page)
    assert "The same task under other policies" in said(page) and "base" in said(page)
    beside = html.unescape(re.search(r'href="(/beside[^"]*)" aria-label="this rollout beside trial 0 of base"', page)[1])
    both = get(client, beside)
    assert "adapter:x beside base" in said(both) and 'id="a0"' in both and 'id="b0"' in both and "order 5" in both
    assert "please return order #1" in said(both).lower()
    assert said(both).count("They differ from the first message on") == 2


def test_beside_each_other_two_conversations_show_their_common_beginning_folded_and_where_they_part(tmp_path):
    told = [{"role": role, "content": text} for role, text in (("system", "Rules"), ("user", "Hello"), ("assistant", "A"), ("user", "B"))]
    all_messages = (told[:3], told, [*told[:2], {"role": "assistant", "content": "C"}])
    with Workdir.open(tmp_path, Config()) as workdir:
        found = [dataclasses.replace(made.light(n), messages=messages) for n, messages in enumerate(all_messages)]
        workdir.write_shard("base", "alike", 0, found)

    def beside(a, b):
        return get(opened_client, f"/beside?a=rollouts/base/alike/00000/{a}&b=rollouts/base/alike/00000/{b}")

    with opened(tmp_path) as opened_client:
        parted, longer, same = said(beside(0, 2)), said(beside(0, 1)), said(beside(0, 0))
    assert parted.count("The first 2 messages are the same in both") == parted.count("Here they part") == 2
    assert longer.count("This one ends here, the other goes on") == longer.count("Here they part") == 1
    assert same.count("All of it is the same in both") == 2


def test_the_raw_line_is_the_shard_s(client, path):
    with Workdir.look(path) as workdir:
        expected = list(workdir.read_shards("base", "train"))[3]
    answer = client.get("/raw/rollouts/base/train/00000/3")
    assert answer.headers["content-type"] == "application/json"
    assert made.same(Trajectory.from_json(answer.json()), expected)


def test_a_megabyte_of_tool_output_is_folded_and_whole_elsewhere(client):
    page = get(client, "/rollout/rollouts/base/odd/00000/0")
    assert len(page) < 120_000 and "line 10 of the listing" in page and "line 1000 of the listing" in page
    address = html.unescape(re.search(r'href="(/text/[^"]*)"', page)[1])
    answer = client.get(address)
    assert answer.text == made.LONG.strip("\n") or answer.text == made.LONG
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    get(client, "/text/rollouts/base/odd/00000/0?of=99:0", 404)


@pytest.mark.parametrize(
    "key", ["rollouts/base/train/00000/6", "%2e%2e%2f%2e%2e%2fetc/passwd", "config.json", "rollouts/base/train/00000/-1"]
)
def test_what_is_not_in_the_list_is_not_there(client, key):
    for page in ("rollout", "raw", "text"):
        assert "There is no rollout" in said(get(client, f"/{page}/{key}", 404))
    get(client, f"/beside?a={key}&b={key}", 404)


# --- workdirs that are not as they should be


def test_without_an_index_the_shards_say_the_same(path, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(path, bare, ignore=shutil.ignore_patterns("*.index.json"))
    with opened(path) as one, opened(bare) as other:
        assert one.rollouts.now().rows == other.rollouts.now().rows


def test_an_empty_workdir_says_what_fills_it(tmp_path):
    with opened(tmp_path) as client:
        assert f"trace-jax run --config=quickstart --workdir={tmp_path}" in said(get(client, "/"))


def test_nothing_is_written(path):
    def state():
        return {file: (os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in sorted(path.rglob("*"))}

    before = state()
    with opened(path) as client:
        for address in ("/", "/rollout/rollouts/base/train/00000/1", "/raw/rollouts/base/train/00000/1"):
            get(client, address)
    assert state() == before


def test_a_workdir_within_another_shows_what_it_shares(path):
    with Workdir.open(path, lock=False) as workdir:
        workdir.within("capabilities/2", ["rollouts/base/train"])
    with opened(path / "capabilities/2") as client:
        assert "6 rollouts" in said(get(client, "/")) and "success 1.00" in said(get(client, "/rollout/rollouts/base/train/00000/1"))


# --- result files


def test_result_files_are_shown_alone_and_with_the_workdir_that_was_diagnosed_from_them(tmp_path):
    file = str(example_run.__file__).replace("trace_jax/example_run.py", "data/tau2/gpt-4o_airline_excerpt.json")
    with opened(None, [file]) as client:
        page = get(client, "/")
        assert "tau2/airline" in said(page) or "airline" in said(page)
        assert f"trace-jax diagnose --results={file} --workdir=DIR" in said(page)
        first = rows(page)[0]
        assert "Conversation" in said(get(client, first)) and "tokens" not in re.findall(r'id="(\w+)"', get(client, first))
        assert json.loads(get(client, first.replace("/rollout/", "/raw/")))["environment"]
        name = client.rollouts.now().rows[0].id
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_json("diagnosis/mined.json", {"results": [file, str(tmp_path / "gone.json")][:1], "tasks": []})
        label = {"trajectory": name, "capability": "quoting", "value": "LACKING", "message_index": 1, "reason": "r", "quote": ""}
        workdir.append_jsonl("diagnosis/evidence.jsonl", label)
    with opened(tmp_path) as client:
        assert len(rows(get(client, "/?capability=quoting"))) == 1


def test_what_lines_of_results_do_not_tell_is_left_out(tmp_path):
    line = {
        "id": "7#0",
        "task_id": "7",
        "environment": "own",
        "success": True,
        "reward": 1,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    (tmp_path / "own.jsonl").write_text(json.dumps(line) + "\n")
    with opened(None, [str(tmp_path / "own.jsonl")]) as client:
        facts = said(get(client, rows(get(client, "/"))[0]).partition("</dl>")[0])
    assert "success 1.00" in facts and not [name for name in ("policy", "version", "group") if name in facts.partition("outcome")[2]]


def test_a_result_file_that_is_gone_is_a_notice(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_json("diagnosis/mined.json", {"results": [str(tmp_path / "gone.json")], "tasks": []})
    with opened(tmp_path) as client:
        assert "gone.json: no such file" in said(get(client, "/"))


# --- safety


class Tags(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes, self._open = set(), set(), []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in ("meta", "link", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_hostile_text_stays_text(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("base", "train", 0, [made.hostile()])
        label = {"trajectory": HOSTILE, "capability": HOSTILE, "value": HOSTILE, "message_index": 1, "reason": HOSTILE, "quote": HOSTILE}
        workdir.append_jsonl("diagnosis/evidence.jsonl", label)
        surrogates = {"id": "\ud800\udc00 \ud800", "environment": "\udfff", "task_id": "\ud800", "reward": 0.0, "stop_reason": "done"}
        surrogates["messages"] = [{"role": "user", "content": "\ud800 alone"}]
        workdir.write_shard("base", "heldout", 0, [])
        data = zstandard.compress(json.dumps(surrogates).encode() + b"\n")  # our writer cannot write them, another may
        workdir.write_bytes("rollouts/base/heldout/00000.jsonl.zst", data)
        workdir.write_json("rollouts/base/heldout/manifest.json", {"shards": {"00000": {"trajectories": 1, "bytes": len(data)}}})
    with opened(tmp_path) as client:
        key = "rollouts/base/train/00000/0"
        other = "rollouts/base/heldout/00000/0"
        chosen = f"/?{urllib.parse.urlencode({'environment': HOSTILE, 'task': HOSTILE, 'sort': HOSTILE, 'policy': HOSTILE})}"
        pages = [f"/rollout/{key}", f"/beside?a={key}&b={other}", "/", chosen, f"/rollout/{other}"]
        for page in pages:
            text = get(client, page)
            tags = Tags(text)
            assert not tags.names & {"script", "img", "iframe", "style", "base"} and not {a for a in tags.attributes if a.startswith("on")}
            assert "\u202e" not in text and "\x1b" not in text and ("\\u202e" in text or page == pages[-1])
        assert Tags(get(client, f"/rollout/{urllib.parse.quote(HOSTILE)}", 404)).names
        assert json.loads(get(client, f"/raw/{other}"))["task_id"] == "\ud800"
        answer = client.get(f"/text/{key}?of=0:0")
        assert answer.text == HOSTILE and answer.headers["content-type"].startswith("text/plain")


def test_headers_forbid_whatever_a_page_does_not_need(client):
    for address, status in (("/", 200), ("/view.css", 200), ("/raw/rollouts/base/train/00000/1", 200), ("/nothing", 404)):
        answer = client.get(address)
        assert answer.status_code == status
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "script-src" not in policy
        assert "unsafe" not in policy and answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1"])
def test_this_machine_s_names_are_answered(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["example.com", "localhost.example.com:8000", "10.0.0.5", "127.0.0.1.nip.example", "", "[::1"])
def test_other_names_for_this_machine_are_refused(client, host):
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421 and "rollout" not in answer.text
