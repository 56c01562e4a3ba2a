import dataclasses

import pytest

from trace_jax.preflight.accelerators import find
from trace_jax.preflight.program import DoesNotFit, Program
from trace_jax.preflight.report import Settings, advice, fits, render, roofline
from trace_jax.preflight.work import Collective

GIB = 2**30
V5E = find("v5e:4x4")
SETTINGS = Settings(
    micro_rows=64, pack_length=4096, remat=False, lanes=32, mesh={"data": 2, "fsdp": 8, "expert": 1, "tensor": 1}, weights=3 * GIB
)
SMALL = Program(
    name="adapter gradient",
    arguments=4 * GIB,
    outputs=GIB,
    temporaries=3 * GIB,
    aliased=GIB,
    dot_flops=2e12,
    touched=10 * GIB,
    collectives={"all-gather": Collective(96, 2e9, 1.5e9), "all-reduce": Collective(3, 1e9)},
    kernels={"splash_fwd": 48},
    compile_seconds=12.3,
)


def change(**fields) -> Program:
    return dataclasses.replace(SMALL, **fields)


def test_the_terms_are_bytes_and_operations_over_rates():
    times = roofline(SMALL, V5E, 3e12)
    assert times.compute == 3e12 / V5E.flops and roofline(SMALL, V5E).compute == 2e12 / V5E.flops
    assert times.memory == 10 * GIB / V5E.bandwidth
    assert times.interconnect == 3e9 / V5E.interconnect and times.exposed == 1.5e9 / V5E.interconnect


@pytest.mark.parametrize(
    "fields, limit",
    [
        ({"dot_flops": 1e15}, "compute"),
        ({"collectives": {}}, "memory"),
        ({"collectives": {"all-to-all": Collective(1, 9e10)}}, "interconnect"),
    ],
)
def test_the_largest_term_limits(fields, limit):
    program = change(**fields)
    assert roofline(program, V5E).limit == limit
    assert any(
        line.startswith("limited by") and line.endswith(limit) for line in render("c", "v5e:4x4", V5E, [program], SETTINGS).splitlines()
    )


def test_collectives_that_nothing_hides_come_on_top():
    hidden, exposed = (change(dot_flops=1e15, collectives={"all-gather": Collective(1, 1e9, o)}) for o in (1e9, 0.0))
    assert roofline(hidden, V5E).step == 1e15 / V5E.flops
    assert roofline(exposed, V5E).step == pytest.approx(1e15 / V5E.flops + 1e9 / V5E.interconnect)


def test_the_table_has_every_figure_beside_each_other():
    decode = Program(name="decode", arguments=2 * GIB, outputs=0, temporaries=GIB // 2)
    text = render("tau2", "v5e:4x4", V5E, [SMALL, decode], SETTINGS, {"adapter gradient": 3e12})
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert text.startswith("tau2 on v5e:4x4: 16 x TPU v5 lite, each 15.75 GiB, 197 TFLOP/s")
    assert rows["arguments"] == ["arguments", "4.00", "GiB", "2.00", "GiB"]
    assert rows["peak"][1:] == ["7.00", "GiB", "2.50", "GiB"] and rows["together, of HBM"][-2:] == ["44.4%", "15.9%"]
    assert rows["FLOPs, analytic"][2:] == ["3", "T", "-"]
    assert rows["all-gather"][1:4] == ["96", "x,", "1.86"] and rows["all-gather"][-1] == "-"
    assert "kernel splash_fwd" in text and "48 x" in text
    assert "All 2 programs fit." in text and "train.remat" not in text
    assert max(map(len, text.splitlines())) <= 140


def lines(program, **changes) -> list[str]:
    return list(advice(program, V5E, dataclasses.replace(SETTINGS, **changes)))


def words_in_order(found: list[str], *words: str) -> None:
    assert len(found) == len(words), found
    for line, word in zip(found, words, strict=True):
        assert word in line, (word, line)


def test_temporaries_that_do_not_fit_are_answered_in_order():
    program = change(temporaries=30 * GIB)
    assert not fits(program, V5E) and "All" not in render("c", "v5e:4x4", V5E, [program], SETTINGS)
    # 0.9 x 15.75 - 4 = 10.175 GiB are left for 30: a third of 64 rows, in whole multiples of the 16 that the devices need
    shrunk = "temporaries of 30.00 GiB must become 10.18 GiB"
    verdict = "adapter gradient does not fit: 34.00 GiB of 15.75 GiB, 216%."
    words_in_order(
        lines(program), verdict, f"train.remat=true stores less: {shrunk}", "train.micro_rows=16, from 64", "mesh.data=1: 2 c", "x 4"
    )


def test_what_is_set_already_is_not_advised():
    found = lines(change(temporaries=30 * GIB), remat=True, micro_rows=16, mesh=SETTINGS.mesh | {"data": 1, "fsdp": 16})
    words_in_order(
        found,
        "does not fit",
        "with one row a device already, train.pack_length and rollout.context down from 4096 to 1280",
        "more chips: x 4",
    )


def test_weights_that_do_not_fit_can_only_be_split():
    found = lines(change(arguments=40 * GIB), weights=36 * GIB)
    words_in_order(
        found, "does not fit", "nothing in train or rollout helps: the weights alone take 36.00 GiB", "mesh.data=1", "more chips: x 4"
    )


def test_what_a_run_holds_beside_a_step_counts():
    program = change(beside=9 * GIB)
    assert not fits(program, V5E) and fits(SMALL, V5E)
    refused = DoesNotFit(name="gate gradient", needed=40 * GIB, available=V5E.hbm, message="", beside=14 * GIB)
    found = lines(refused, remat=True)
    words_in_order(found, "needs 40.00 GiB", "train.micro_rows=16, from 64", "rollout.lanes down from 32", "mesh.data=1", "more chips: x 8")
    assert "find no room beside the rest" in found[1]
    words_in_order(
        lines(program, remat=True),
        "16.00 GiB of 15.75 GiB",
        "train.micro_rows=16",
        "rollout.lanes down from 32",
        "mesh.data=1",
        "more chips",
    )


def test_a_step_that_barely_fits_is_warned_of():
    program = change(temporaries=11 * GIB)
    assert fits(program, V5E) and lines(program)[0].startswith("adapter gradient leaves too little room: 15.00 GiB of 15.75 GiB")


def test_decoding_has_knobs_of_its_own():
    found = lines(change(name="decode, 16 tokens", temporaries=30 * GIB))
    assert "rollout.lanes" in found[1] and not any("train." in line for line in found)


def test_what_the_compiler_gave_up_on_is_reported_with_its_words():
    refused = DoesNotFit(name="gate gradient", needed=34 * GIB, available=V5E.hbm, message="RESOURCE_EXHAUSTED: Ran out of memory on HBM")
    text = render("c", "v5e:4x4", V5E, [SMALL, refused], SETTINGS)
    assert "gate gradient does not fit: it needs 34.00 GiB of 15.75 GiB. RESOURCE_EXHAUSTED: Ran out" in text
    assert "train.remat" in text and "more chips: x 4" in text and not fits(refused, V5E)
    assert "arguments" not in render("c", "v5e:4x4", V5E, [refused], SETTINGS).split("\n\n")[0]


def test_what_the_counts_leave_open_is_said():
    text = render("c", "v5e:4x4", V5E, [change(unknown_loops=("while.3",))], SETTINGS, {"adapter gradient": 1e11})
    assert (
        "loops that data alone ends are counted once: while.3" in text
        and "20.0 x the analytic FLOPs" in text
        and "libtpu before 0.0.50" in text
    )
