"""Whatever happens to a real file, it gives trajectories or an InputError that names it; its settings are echoed nowhere."""

import gzip
import json
import pathlib
import random

import pytest

from trace_jax.benchmarks.results import read_result_file
from trace_jax.errors import InputError

DATA = pathlib.Path(__file__).parents[4] / "tests" / "data" / "tau2"
FOLDER, LIST = DATA / "v1.0.1_mock_folder", DATA / "taubench_airline_excerpt.json"
TOKEN = "sk-proj-4f9aTTwQx81Lz"
ODD = [
    None,
    True,
    -1,
    0,
    3,
    1e400,
    0.5,
    "",
    "word",
    "1",
    [],
    {},
    [None],
    [[]],
    ["word"],
    {"": None},
    {"id": 3},
    [{}],
    10**30,
    "\ud800",
    "\x00",
    TOKEN,
]


@pytest.fixture(scope="module")
def small():
    """One file of each generation, a few kilobytes."""
    airline = json.loads((DATA / "gpt-4o_airline_excerpt.json").read_text())
    kept = {s["task_id"] for s in airline["simulations"][:3]}
    airline["simulations"] = airline["simulations"][:3]
    airline["tasks"] = [t for t in airline["tasks"] if t["id"] in kept]
    for s in airline["simulations"]:
        s["messages"] = s["messages"][:12]
        s["reward_info"]["action_checks"] = [c for c in s["reward_info"]["action_checks"] or [] if not c["action_match"]][:2]
    new = json.loads((FOLDER / "results.json").read_text())
    new["simulations"] = [json.loads((FOLDER / "simulations" / f"{e['id']}.json").read_text()) for e in new.pop("simulation_index")]
    old = [entry | {"traj": entry["traj"][:8]} for entry in json.loads(LIST.read_text())]
    return {"0.x": airline, "1.0": new, "list": old}


def places(value, path=()):
    """The path of every value inside."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def mutated(data, path, change):
    """A copy in which the value at the path is changed: replaced, or left out."""
    data = json.loads(json.dumps(data))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if change is DELETE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = change
    return data


DELETE = object()


def trajectories_or_error(path):
    """The trajectories, which can be written, or the text of the error."""
    try:
        return "".join(json.dumps(t.to_json(), allow_nan=False) for t in read_result_file(path))
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return str(error)


FORMS = ["0.x", "1.0", "list"]


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_a_changed_value_anywhere_gives_trajectories_or_an_error_of_the_input(form, count, small, tmp_path):
    data, draw, file = small[form], random.Random(count), tmp_path / "results.json"
    everywhere = [path for path in places(data) if path]
    # shallow values decide most, deep ones are many
    for path in draw.choices(everywhere, [8.0 / len(path) ** 3 for path in everywhere], k=count):
        file.write_text(json.dumps(mutated(data, path, draw.choice([DELETE, *ODD]))))
        trajectories_or_error(file)


@pytest.mark.parametrize("form", FORMS)
def test_changed_bytes_give_trajectories_or_an_error_of_the_input(form, small, tmp_path):
    text, draw, file = json.dumps(small[form]).encode(), random.Random(1), tmp_path / "results.json"
    for _ in range(30):
        cut, end = sorted(draw.choices(range(len(text)), k=2))
        end = min(end, cut + draw.choice([0, 1, 9, 5000]))
        file.write_bytes(text[:cut] + draw.choice([b"", b"\xff", b"\x00", b'"', b"}", b"NaN", b"1e999", b"[" * 5000]) + text[end:])
        trajectories_or_error(file)


@pytest.mark.parametrize("form", FORMS)
def test_a_byte_order_mark_and_repeated_keys_do_no_harm(form, small, tmp_path):
    plain, marked = tmp_path / "plain.json", tmp_path / "marked.json"
    plain.write_text(json.dumps(small[form]))
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b'"reward":', b'"reward": 7, "reward":'))
    assert trajectories_or_error(marked) == trajectories_or_error(plain)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (gzip.compress, "compressed with gzip; unpack it"),
        (lambda text: text.decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (lambda text: text.replace(b'"reward": 0.0', b'"reward": NaN'), "not valid JSON before byte"),
        (lambda text: text.replace(b'"reward": 0.0', b'"reward": 1e999'), "a number is too large"),
        (lambda text: text + b" {}", "trailing garbage"),
        (lambda text: b"", "not a result file"),
    ],
)
def test_files_that_are_no_plain_json_are_named_with_what_helps(change, says, small, tmp_path):
    file = tmp_path / "results.json"
    file.write_bytes(change(json.dumps(small["0.x"]).encode()))
    assert says in trajectories_or_error(file)


def test_a_file_of_0x_with_simulations_of_1x_is_read_as_both(small, tmp_path):
    mixed, file = small["0.x"] | {"tasks": small["0.x"]["tasks"] + small["1.0"]["tasks"]}, tmp_path / "results.json"
    mixed["simulations"] = small["0.x"]["simulations"] + small["1.0"]["simulations"]
    file.write_text(json.dumps(mixed))
    assert len(list(read_result_file(file))) == len(small["0.x"]["simulations"]) + 4


def test_tasks_of_two_domains_in_one_file_are_refused(small, tmp_path):
    data, file = json.loads(json.dumps(small["0.x"])), tmp_path / "results.json"
    data["tasks"][0]["user_scenario"]["instructions"]["domain"] = "retail"
    file.write_text(json.dumps(data))
    assert "tasks of several domains: airline, retail" in trajectories_or_error(file)


def test_simulations_may_stand_before_what_they_need(small, tmp_path):
    forwards, backwards = tmp_path / "forwards.json", tmp_path / "backwards.json"
    forwards.write_text(json.dumps(small["1.0"]))
    backwards.write_text(json.dumps(dict(reversed(small["1.0"].items()))))
    assert trajectories_or_error(backwards) == trajectories_or_error(forwards)


def test_the_verdicts_of_an_llm_are_refused(tmp_path):
    file = tmp_path / "run.llm-judge-verdicts.json"
    file.write_text(json.dumps({"total_judged": 1, "entries": [{"task_id": "0", "tau2_reward": 1.0, "judge_verdict": "satisfied"}]}))
    assert "verdicts of an LLM that judged a run, which never decide what passed" in trajectories_or_error(file)


def test_what_an_llm_judged_is_marked(small, tmp_path):
    data, file = json.loads(json.dumps(small["1.0"])), tmp_path / "results.json"
    graded = data["simulations"][0]["reward_info"]
    graded["reward_basis"] = ["DB", "NL_ASSERTION"]
    graded["nl_assertions"] = [{"nl_assertion": "The agent is polite.", "met": True, "justification": "It says please."}]
    file.write_text(json.dumps(data))
    checks = next(read_result_file(file)).checks
    assert checks["nl:0"]["judge"] == "llm" and not any("judge" in check for name, check in checks.items() if name != "nl:0")


def test_a_key_in_any_setting_is_echoed_nowhere(small, tmp_path):
    file = tmp_path / "results.json"
    for form in ("0.x", "1.0"):
        info = small[form]["info"]
        args = {"api_key": TOKEN, "extra_headers": {"Authorization": f"Bearer {TOKEN}"}, "metadata": [TOKEN]}
        for path in places(info):
            # the policy is what the agent saw, the domain a name; everything else is a setting
            if path and path[-1] not in ("policy", "domain_name", "environment_info"):
                for change in (TOKEN, args):
                    file.write_text(json.dumps(small[form] | {"info": mutated(info, path, change)}))
                    assert TOKEN not in trajectories_or_error(file), path
        whole = json.dumps(small[form] | {"info": info | {"agent_info": info["agent_info"] | {"llm_args": args}}})
        for cut in range(whole.index(TOKEN) - 5, whole.rindex(TOKEN) + 80, 7):
            for damage in (whole[:cut], f"{whole[:cut]}\x01{whole[cut + 1 :]}"):
                file.write_text(damage)
                assert TOKEN not in trajectories_or_error(file)


def test_a_key_in_the_error_of_an_old_run_is_taken_out(small, tmp_path):
    file = tmp_path / "results.json"
    entry = small["list"][0] | {"info": {"error": f"Incorrect API key provided: {TOKEN}", "traceback": TOKEN}}
    file.write_text(json.dumps([entry, *small["list"][1:]]))
    text = trajectories_or_error(file)
    assert "Incorrect API key" in text and TOKEN not in text
