"""The worker pool: equal results whatever happens to the workers, and faults that stay where they belong."""

import concurrent.futures
import os
import select
import signal
import threading
import time

import pytest

from envs import EnvironmentFault, Pool, Reply, Start
from envs.sandbox.host import KEPT
from envs.sandbox.process import exchange

ACT = ("call", ("list_codes", {}))
SAY = ("respond", ("done",))


def play(pool, packages, seeds):
    """Start, list, write, say and score of every (package, seed), in batches over all of them."""
    episodes = [pool.open(package, seed) for package, seed in zip(packages, seeds, strict=True)]
    steps = [("reset", ()), ACT, ("call", ("write_code", {"code": "7"})), SAY, ("score", ())]
    return [pool.batch([(episode, *step) for episode in episodes]) for step in steps], episodes


def test_an_episode_from_start_to_score(make_package):
    package = make_package()
    with Pool() as pool:
        episode = pool.open(package, 3, {"digits": 5})
        start = episode.reset()
        assert isinstance(start, Start) and start.messages[0]["role"] == "user"
        actions = pool.function(package, "oracle", 3, {"digits": 5})
        text, done = episode.call(actions[0]["name"], actions[0]["arguments"])
        assert actions[1]["arguments"]["code"] in text and len(actions[1]["arguments"]["code"]) == 5 and not done
        assert episode.call("write_code", actions[1]["arguments"]) == Reply("ok", False)
        assert not episode.done() and episode.respond("done") == Reply(None, True) and episode.done()
        score = episode.score()
        assert score.reward == 1.0 and score.checks["action:0"].passed and score.checks["action:0"].call == 1
        assert episode.reset() == start and not episode.done() and episode.score().reward == 0.0
        assert [tool["function"]["name"] for tool in pool.function(package, "tools")] == ["list_codes", "write_code"]


def test_results_do_not_depend_on_workers_company_or_recycling(make_package):
    package = make_package()
    with Pool(1) as one, Pool(2, recycle=7, hash_seed=1) as two:
        expected, _ = play(one, [package] * 20, range(20))
        found, _ = play(two, [package] * 20, range(20))
        assert found == expected and two.restarts > 0
        alone = [play(two, [package], [seed])[0] for seed in range(3)]
        assert [[answers[0] for answers in run] for run in alone] == [[answers[seed] for answers in expected] for seed in range(3)]


KILLERS = {  # what the tool does instead of its work, and words of the fault
    "deadline": ("while True: pass", "no reply within"),
    "crash": ("import os; os.write(2, b'goodbye'); os._exit(3)", "exit code 3; its last words: goodbye"),
    "signal": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "reply": ("import os; os.write(4, b'x' * 99)", "bytes where at most"),
}


@pytest.mark.parametrize("kind", KILLERS)
def test_a_killer_becomes_a_fault_and_the_others_never_notice(kind, make_package):
    code, words = KILLERS[kind]
    honest = make_package()
    killer = make_package(('return "ok"', code), gate=False, name="killer")
    packages = [honest, honest, killer, honest, honest]
    with Pool(1, deadline_s=3.0) as pool:  # a busy machine may take seconds over an innocent reply
        expected, _ = play(pool, [honest] * 5, range(5))
        found, episodes = play(pool, packages, range(5))
        for step in range(5):
            for index in (0, 1, 3, 4):
                assert found[step][index] == expected[step][index]
        fault = found[2][2]
        assert isinstance(fault, EnvironmentFault) and fault.kind == ("crash" if kind == "signal" else kind) and words in str(fault)
        assert "environment killer, seed 2, call" in str(fault)
        assert found[3][2] is fault and episodes[2].fault is fault and pool.restarts >= 2
        with pytest.raises(EnvironmentFault):
            episodes[2].score()


def test_a_package_that_kills_again_and_again_is_refused_unseen(make_package):
    killer = make_package(('return "ok"', "import os; os._exit(1)"), gate=False)
    with Pool(1, quarantine=2) as pool:
        found, _ = play(pool, [killer] * 6, range(6))
        assert sorted({fault.kind for fault in found[2]}) == ["crash", "quarantine"]
        with pytest.raises(EnvironmentFault, match="refused"):
            pool.open(killer, 9).reset()


RAISERS = {
    "raise KeyError('lost')": "KeyError: 'lost'",
    "raise SystemExit(0)": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "return self.call(name, arguments)": "RecursionError",
    "return {1, 2}": "not JSON serializable",
    "return 'x' * 2_000_000": "larger than",
    "return bytearray(1 << 40)": "MemoryError",
    "return 3": "call must return a string; got 3",
    "class E(Exception):\n            __str__ = None\n        raise E": "E",
}


def test_exceptions_and_wrong_values_end_their_own_episode_only(make_package):
    honest = make_package()
    bad = [make_package(('return "ok"', code), name=f"bad{index}") for index, code in enumerate(RAISERS)]
    with Pool(1) as pool:
        found, _ = play(pool, [honest, *bad, honest], range(len(bad) + 2))
        for fault, words in zip(found[2][1:-1], RAISERS.values(), strict=True):
            assert isinstance(fault, EnvironmentFault) and words in str(fault), (words, fault)
        assert found[2][0] == found[2][-1] == Reply("ok", False) and pool.restarts == 0
        assert "environment bad0, seed 1, call" in str(found[2][1]) and "raise KeyError('lost')" in str(found[2][1])


VERDICTS = {
    'float("nan")': "not JSON compliant",
    "1e999": "not JSON compliant",
    "1.5": "reward from 0 to 1; got 1.5",
    "True": "reward from 0 to 1; got True",
    "'1'": "reward from 0 to 1",
}


def test_forged_verdicts_are_faults(make_package):
    packages = [make_package(('"reward": float(passed)', f'"reward": {value}')) for value in VERDICTS]
    packages += [make_package(('"call": call}', f'"call": {value}}}')) for value in ("99", "-1", "True")]
    packages += [make_package(('"passed": passed,', '"passed": 1,')), make_package(('{"action:0": check}', "[check]"))]
    words = [*VERDICTS.values(), *["calls and texts"] * 3, "check 'action:0'", "checks by name"]
    with Pool(1) as pool:
        found, _ = play(pool, packages, range(len(packages)))
        assert all(isinstance(fault, EnvironmentFault) and word in str(fault) for fault, word in zip(found[4], words, strict=True)), found[
            4
        ]


def forger(make_package, reply):
    """A package that replaces the worker's encoder when it is scored for the first time."""
    forge = f"import gc; next(o for o in gc.get_objects() if type(o).__name__ == 'Worker').encode = lambda v: '[null,{reply}]'"
    return make_package(("writes = [", forge + "\n        writes = ["), gate=False)


def test_a_number_that_only_reads_as_infinite_is_a_fault(make_package):
    package = forger(make_package, '{"reward":1,"checks":{"a":{"passed":true,"expected":1e999,"actual":0,"call":null}}}')
    with Pool(1) as pool:
        episode = pool.open(package, 0)
        pool.batch([(episode, "reset", ()), (episode, "score", ())])
        with pytest.raises(EnvironmentFault, match="score must hold finite numbers only; got inf"):
            episode.score()


@pytest.mark.parametrize("reply", ["NaN", "0]] [[null,0"])
def test_a_worker_that_stops_speaking_json_is_replaced_and_the_request_repeated(reply, make_package):
    package = forger(make_package, reply)
    with Pool(1) as pool:
        episode = pool.open(package, 0)
        first = pool.batch([(episode, "reset", ()), (episode, "score", ())])[1]
        assert episode.score() == first and pool.restarts == 1


def test_an_environment_that_leaves_its_seed_is_found_at_replay(make_package):
    fickle = make_package(('return "ok"', "import time; return str(time.time_ns())"), gate=False)
    honest = make_package()
    with Pool(1, recycle=2) as pool:
        first, other = pool.open(fickle, 0), pool.open(honest, 0)
        pool.batch([(first, "reset", ()), (other, "reset", ())])
        pool.batch([(first, "call", ("write_code", {"code": "1"})), (other, *ACT)])
        pool.open(fickle, 1).reset()  # two episodes of it were opened, so its next request comes to a new worker
        fault, reply = pool.batch([(first, "score", ()), (other, *ACT)])
        assert isinstance(fault, EnvironmentFault) and fault.kind == "replay" and isinstance(reply, Reply)


def test_several_requests_of_one_episode_in_one_batch_keep_their_order(make_package):
    package = make_package()
    with Pool(1) as pool:
        episode = pool.open(package, 0)
        answers = pool.batch([(episode, "reset", ()), (episode, *ACT), (episode, *SAY), (episode, "score", ())])
        assert [type(answer).__name__ for answer in answers] == ["Start", "Reply", "Reply", "Score"] and answers[2].done


def test_misuse_is_an_error_of_the_caller_and_leaves_the_pool_usable(make_package):
    package = make_package()
    with Pool(1) as pool:
        episode = pool.open(package, 0)
        with pytest.raises(ValueError, match="never reset"):
            episode.score()
        with pytest.raises(ValueError, match="must be one of"):
            pool.batch([(episode, "dance", ())])
        with pytest.raises(ValueError, match="not JSON"):
            pool.batch([(episode, "reset", ()), (episode, "call", ("list_codes", {"x": object()}))])
        with pytest.raises(ValueError, match="not JSON"):
            pool.batch([(episode, "reset", ()), (episode, "score", ()), (episode, "call", ("list_codes", {"x": object()}))])
        with pytest.raises(ValueError, match="never reset"):
            episode.score()
        assert isinstance(episode.reset(), Start)
    with pytest.raises(ValueError, match="closed"):
        episode.score()


def test_dropped_handles_free_their_instances(make_package):
    counting = make_package(
        ("class Environment:", "class Environment:\n    live = 0\n    def __del__(self): Environment.live -= 1"),
        ("self.log, self.over = [], False", "self.log, self.over = [], False; Environment.live += 1"),
        ('return "ok"', "return str(Environment.live)"),
    )
    with Pool(1) as pool:
        episodes = [pool.open(counting, seed) for seed in range(50)]
        pool.batch([(episode, "reset", ()) for episode in episodes])
        last = episodes.pop()
        assert last.call("write_code", {"code": ""}).text == "50"
        del episodes
        assert last.call("write_code", {"code": ""}).text == "1"


def test_a_worker_that_died_between_batches_is_replaced_without_blame(make_package):
    package = make_package()
    with Pool(1, quarantine=1) as pool:
        episodes = [pool.open(package, seed) for seed in range(3)]
        pool.batch([(episode, "reset", ()) for episode in episodes])
        first = pool.batch([(episode, *ACT) for episode in episodes])
        process = pool._processes[0][package.digest].child
        process.kill()
        process.wait()
        assert pool.batch([(episode, *ACT) for episode in episodes]) == first and pool.restarts == 1


def test_an_interrupted_batch_leaves_no_reply_behind(make_package):
    def interrupt(*_):
        raise KeyboardInterrupt

    slow = make_package(('return "ok"', "[None for _ in range(10**9)]"))
    with Pool(1) as pool:
        episode = pool.open(slow, 0)
        start = episode.reset()
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                episode.call("write_code", {"code": "1"})
        finally:
            signal.signal(signal.SIGALRM, before)
        assert start.messages[0]["content"].split()[-1] in episode.call("list_codes", {}).text


def test_an_action_whose_reply_was_interrupted_is_not_done_twice(make_package, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    package = make_package()
    with Pool(1) as pool:
        right = pool.function(package, "oracle", 0)[1]["arguments"]
        episode = pool.open(package, 0)
        episode.reset()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("envs.sandbox.host.parse_message", interrupt)  # the worker has done it, and no log has it
            episode.call("write_code", right)
        for step in (("call", ("write_code", right)), SAY):
            pool.batch([(episode, *step)])
        assert episode.score().reward == 1.0


def test_a_pool_that_is_closed_while_another_thread_uses_it_leaves_the_descriptors_to_that_thread(make_package, monkeypatch):
    begun, closed = threading.Event(), []

    def slow(messages, deadline_s):
        begun.set()
        select.select([messages[0][0].read_end], [], [], 10)  # `close` has killed the worker
        time.sleep(0.1)
        closed.extend(process.closed for process, _, _ in messages)
        return exchange(messages, deadline_s)

    with Pool(1) as pool, concurrent.futures.ThreadPoolExecutor(1) as thread:
        episode = pool.open(make_package(), 0)
        episode.reset()
        monkeypatch.setattr("envs.sandbox.host.exchange", slow)
        answer = thread.submit(episode.call, "list_codes", {})
        assert begun.wait(10)
        pool.close()
        with pytest.raises(ValueError, match="the pool is closed"):
            answer.result(10)
    assert closed == [False]


def test_workers_see_a_clean_environment_and_inherit_no_files(make_package, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    site = "[p for p in sys.path if 'site' in p]"
    probe = f"import os, sys; return repr((sorted(os.environ), sorted(map(int, os.listdir('/proc/self/fd'))), {site}))"
    package = make_package(('return "ok"', probe), gate=False)
    with open(tmp_path / "open", "w") as file, Pool(1, sandbox="off") as pool:  # a locked worker cannot look
        os.set_inheritable(file.fileno(), True)
        episode = pool.open(package, 0)
        episode.reset()
        names, descriptors, site = eval(episode.call("write_code", {"code": ""}).text)
    assert set(names) <= {"PATH", "LANG", "PYTHONHASHSEED", "LC_CTYPE"} and site == []
    assert len(descriptors) <= 6  # three standard streams, two pipes, the listing itself


def test_text_that_no_encoder_accepts_is_replaced(make_package):
    package = make_package(('return "ok"', 'return "wrote " + arguments["code"]'))
    with Pool(1) as pool:
        episode = pool.open(package, 0)
        episode.reset()
        assert episode.call("write_code", {"code": "\ud800é"}).text == "wrote ?é"


def test_batched_steps_are_fast(make_package):
    """The bar is 20,000 steps a second and worker on an idle core; a shared test machine gets a fifth of it."""
    package = make_package()
    with Pool(1) as pool:
        episodes = [pool.open(package, seed) for seed in range(256)]
        pool.batch([(episode, "reset", ()) for episode in episodes])
        rates = []
        for _ in range(5):
            began = time.perf_counter()
            pool.batch([(episode, *ACT) for episode in episodes for _ in range(4)])
            rates.append(1024 / (time.perf_counter() - began))
    assert max(rates) > 4_000, rates


def test_packages_share_no_process_and_those_not_used_for_long_end(make_package):
    marker = ('return "ok"', "import sys; sys.seen = getattr(sys, 'seen', 0) + 1; return str(sys.seen)")
    packages = [make_package(marker, gate=False, version=str(number)) for number in range(KEPT + 2)]
    write = ("call", ("write_code", {"code": ""}))
    with Pool(1) as pool:
        episodes = [pool.open(package, 0) for package in packages]
        answers = pool.batch([(episode, *step) for episode in episodes for step in (("reset", ()), write)])
        assert [answer.text for answer in answers[1::2]] == ["1"] * len(packages)
        assert list(pool._processes[0]) == [package.digest for package in packages[2:]] and pool.restarts == 0
        assert episodes[0].call("write_code", {"code": ""}).text == "2"  # played again in a new one
        assert list(pool._processes[0]) == [package.digest for package in (*packages[3:], packages[0])]
