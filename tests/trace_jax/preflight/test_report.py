import dataclasses

import pytest

from trace_jax.preflight.accelerators import find
from trace_jax.preflight.program import DoesNotFit, Program
from trace_jax.preflight.report import advice, fits, render, roofline
from trace_jax.preflight.work import Collective

GIB = 2**30
V5E = find("v5e:4x4")
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
    assert any(line.startswith("limited by") and line.endswith(limit) for line in render("c", "v5e:4x4", V5E, [program]).splitlines())


def test_collectives_that_nothing_hides_come_on_top():
    hidden, exposed = (change(dot_flops=1e15, collectives={"all-gather": Collective(1, 1e9, o)}) for o in (1e9, 0.0))
    assert roofline(hidden, V5E).step == 1e15 / V5E.flops
    assert roofline(exposed, V5E).step == pytest.approx(1e15 / V5E.flops + 1e9 / V5E.interconnect)


def test_the_table_has_every_figure_beside_each_other():
    decode = Program(name="decode", arguments=2 * GIB, outputs=0, temporaries=GIB // 2)
    text = render("tau2", "v5e:4x4", V5E, [SMALL, decode], {"adapter gradient": 3e12})
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert text.startswith("tau2 on v5e:4x4: 16 x TPU v5 lite, each 15.75 GiB, 197 TFLOP/s")
    assert rows["arguments"] == ["arguments", "4.00", "GiB", "2.00", "GiB"]
    assert rows["peak"][1:] == ["7.00", "GiB", "2.50", "GiB"] and rows["peak of HBM"][-2:] == ["44.4%", "15.9%"]
    assert rows["FLOPs, analytic"][2:] == ["3", "T", "-"]
    assert rows["all-gather"][1:4] == ["96", "x,", "1.86"] and rows["all-gather"][-1] == "-"
    assert "kernel splash_fwd" in text and "48 x" in text
    assert "All 2 programs fit." in text and "train.remat" not in text
    assert max(map(len, text.splitlines())) <= 140


def test_temporaries_that_do_not_fit_are_answered_in_order():
    program = change(temporaries=30 * GIB)
    lines = list(advice(program, V5E))
    assert not fits(program, V5E) and "All" not in render("c", "v5e:4x4", V5E, [program])
    assert lines[0] == "adapter gradient does not fit: 34.00 GiB of 15.75 GiB, 216%."
    for line, words in zip(lines[1:], ("train.remat", "train.micro_rows", "train.pack_length", "mesh.fsdp", "more chips"), strict=True):
        assert words in line
    # 0.9 x 15.75 - 4 = 10.175 GiB are left for 30
    assert "temporaries of 30.00 GiB must become 10.18 GiB" in lines[1] and "to 1/3" in lines[2]


def test_arguments_that_do_not_fit_can_only_be_split():
    lines = list(advice(change(arguments=40 * GIB), V5E))
    assert "nothing in train helps: 40.00 GiB are held" in lines[1]
    assert "mesh.fsdp" in lines[2] and "x 8: 40.00 GiB of arguments become 5.00 GiB" in lines[2] and "more chips: x 8" in lines[3]
    assert not any("micro_rows" in line for line in lines)


def test_a_step_that_barely_fits_is_warned_of():
    program = change(temporaries=11 * GIB)
    assert fits(program, V5E) and next(advice(program, V5E)).startswith("adapter gradient leaves too little room: 15.00 GiB of 15.75 GiB")


def test_decoding_has_knobs_of_its_own():
    lines = list(advice(change(name="decode, 16 tokens", temporaries=30 * GIB), V5E))
    assert "rollout.lanes" in lines[1] and "rollout.context" in lines[2] and not any("train." in line for line in lines)


def test_what_the_compiler_gave_up_on_is_reported_with_its_words():
    refused = DoesNotFit(name="gate gradient", needed=34 * GIB, available=V5E.hbm, message="RESOURCE_EXHAUSTED: Ran out of memory on HBM")
    text = render("c", "v5e:4x4", V5E, [SMALL, refused])
    assert "gate gradient does not fit: it needs 34.00 GiB of 15.75 GiB. RESOURCE_EXHAUSTED: Ran out" in text
    assert "train.remat" in text and "more chips: x 4" in text and not fits(refused, V5E)
    assert "arguments" not in render("c", "v5e:4x4", V5E, [refused]).split("\n\n")[0]


def test_what_the_counts_leave_open_is_said():
    text = render("c", "v5e:4x4", V5E, [change(unknown_loops=("while.3",))], {"adapter gradient": 1e11})
    assert (
        "loops that data alone ends are counted once: while.3" in text
        and "20.0 x the analytic FLOPs" in text
        and "libtpu before 0.0.50" in text
    )
