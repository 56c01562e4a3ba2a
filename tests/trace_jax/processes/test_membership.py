"""Processes that meet, are refused, and hear of each other's end; here threads of one process, without JAX."""

import contextlib
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rl.test_learner_mesh import free_port
from trace_jax.errors import InputError, Unfinished
from trace_jax.processes import membership
from trace_jax.processes.membership import Member, come, gather

SETTINGS = bytes.fromhex("000018040000000000")  # how a gRPC server, which JAX's service is, begins to speak


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(membership, "_AGAIN", 0.02)
    monkeypatch.setattr(membership, "_LATE", 0.2)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def member(index, count=3, **facts):
    return Member(index, count, f"host-{index}", 100 + index, facts)


def meet(pool, address, members, seconds=5, check=lambda members: None):
    """Future of each, process 0 first."""
    return [pool.submit(gather, m, address, seconds, check) if m.index == 0 else pool.submit(come, m, address, seconds) for m in members]


@contextlib.contextmanager
def met(pool, address, count=3):
    found = [future.result() for future in meet(pool, address, [member(i, count) for i in range(count)])]
    try:
        yield found
    finally:
        for one in found:
            for line in one._lines.values():
                line.close()


def test_all_begin_when_all_have_come_and_know_each_other(pool, address):
    seen = []
    futures = meet(pool, address, [member(i, rank=str(i % 2)) for i in range(2)], check=seen.extend)
    time.sleep(0.1)
    assert not any(future.done() for future in futures)
    futures.append(pool.submit(come, member(2, rank="0"), address, 5))
    for index, found in enumerate(future.result() for future in futures):
        assert found.index == index and [str(m) for m in found.members] == [f"process {i} on host host-{i}" for i in range(3)]
    assert [m.facts for m in seen] == [{"rank": "0"}, {"rank": "1"}, {"rank": "0"}]


def test_what_process_0_finds_wrong_all_say(pool, address):
    for future in meet(pool, address, [member(i) for i in range(3)], check=lambda members: f"{members[2]} is another"):
        with pytest.raises(InputError, match="process 2 on host host-2 is another"):
            future.result()


@pytest.mark.parametrize("hosts, missing", [("", "process 1, process 3"), ("a,b,c,d", "1 on b, 3 on d")])
def test_those_that_do_not_come_are_named_to_all_that_did(pool, address, hosts, missing, monkeypatch, capsys):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    monkeypatch.setattr(membership, "_REPORT", 0.1)
    for future in meet(pool, address, [member(0, 4), member(2, 4)], seconds=0.3):
        with pytest.raises(Unfinished, match=f"2 of 4 processes did not come to {address} in 0 s: {missing}; there were 0 on host-0, 2 on"):
            future.result()
    assert f"waiting for {missing}, 0 s more" in capsys.readouterr().err


def test_a_second_one_of_an_index_and_one_of_another_count_are_refused_and_disturb_nobody(pool, address, capsys):
    futures = meet(pool, address, [member(0), member(1)])
    time.sleep(0.1)
    with pytest.raises(InputError, match=r"process 1 on host host-1 \(pid 101\) comes second: host host-1 has a process 1 too"):
        come(member(1), address, 5)
    with pytest.raises(InputError, match="process 2 on host host-2 was started with --num_processes=5, process 0 on host host-0 with 3"):
        come(member(2, 5), address, 5)
    with pytest.raises(InputError, match="comes second"):
        come(member(0), address, 5)
    futures.append(pool.submit(come, member(2), address, 5))
    assert [future.result().index for future in futures] == [0, 1, 2]
    assert capsys.readouterr().err.count("trace-jax: refused: ") == 3


def test_whatever_else_finds_the_port_is_ignored_and_one_that_died_may_come_again(pool, address):
    futures = meet(pool, address, [member(0, 4), member(1, 4)])
    host, port = address.split(":")
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"member": {"index": 2}}\n', b'{"member": 3}\n', SETTINGS):
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                stranger = socket.create_connection((host, int(port)))
                break
            time.sleep(0.02)
        stranger.sendall(said)
        stranger.close()
    dead = socket.create_connection((host, int(port)))
    membership._send(dead, {"member": {"index": 2, "count": 4, "host": "x", "pid": 1, "facts": {}}})
    time.sleep(0.1)
    dead.close()
    futures += [pool.submit(come, member(index, 4), address, 5) for index in (2, 3)]
    assert [future.result().members[2].host for future in futures] == ["host-2"] * 4


def test_one_that_comes_when_the_others_have_begun_is_refused(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    line = server.accept()[0]
                    line.sendall(SETTINGS)
                    line.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(Unfinished, match=f"the run at {address} has begun without process 2 on host host-2: this one comes too late"):
            come(member(2), address, 5)
        with pytest.raises(Unfinished, match=f"port {port} is in use on host .* end it, or give all processes another port"):
            gather(member(0), address, 5, lambda _: None)
        server.shutdown(socket.SHUT_RDWR)


def test_an_earlier_run_at_the_address_may_end_before_the_next_begins(pool, address, monkeypatch):
    monkeypatch.setattr(membership, "_LATE", 5)
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:
        futures = meet(pool, address, [member(0, 2), member(1, 2)])
        line = server.accept()[0]
        line.sendall(SETTINGS)
        line.close()
    assert [future.result().index for future in futures] == [0, 1]


def heard(one):
    found = queue.Queue()
    one.listen(lambda member, ended, line: found.put((member.index, ended, line)))
    return found


@pytest.mark.parametrize("lost", [0, 1])
def test_the_end_of_one_is_heard_by_all(pool, address, lost):
    with met(pool, address) as found:
        queues = {one.index: heard(one) for one in found if one.index != lost}
        for line in found[lost]._lines.values():
            line.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that dies
        for found in queues.values():
            assert found.get(timeout=5) == (lost, "lost", "") and found.empty()


def test_last_words_are_passed_on_and_a_connection_that_ends_after_them_is_no_loss(pool, address):
    with met(pool, address) as found:
        queues = [heard(one) for one in found]
        found[2].tell("failed", "the disk is full")
        found[2].tell("done")  # said once
        for index in (0, 1):
            assert queues[index].get(timeout=5) == (2, "failed", "the disk is full")
        found[0].tell("terminated")
        assert queues[1].get(timeout=5) == queues[2].get(timeout=5) == (0, "terminated", "")
        found[1].tell("done")
        assert queues[0].get(timeout=5) == queues[2].get(timeout=5) == (1, "done", "")
        for one in found:
            for line in one._lines.values():
                line.shutdown(socket.SHUT_RDWR)
        time.sleep(0.1)
        assert all(one.empty() for one in queues)
