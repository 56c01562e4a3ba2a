import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from trace_jax.preflight.hlo import parse, trip_count
from trace_jax.preflight.work import Collective, count_work

COLLECTIVES = """
import json
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from trace_jax.preflight.work import count_work

mesh = Mesh(jax.devices(), ("x",))

def layer(c, w):
    def inner(z, _):
        return jnp.sin(z) + 0.1 * jax.lax.psum(z, "x"), None
    y, _ = jax.lax.scan(inner, c @ w, None, length=3)
    whole = jax.lax.all_gather(w[:4], "x", tiled=True)
    return jnp.tanh(y @ whole) + jax.lax.ppermute(y, "x", [(i, (i + 1) % 4) for i in range(4)]), jax.lax.psum_scatter(y, "x", tiled=True)

def body(x, w):
    return jax.lax.scan(layer, x, w)

f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P(None, "x")), check_vma=False))
work = count_work(f.lower(jnp.zeros((32, 16)), jnp.zeros((5, 16, 16))).compile().as_text())
print(json.dumps([work.collectives, work.flops, sorted(work.unknown_loops)]))
"""


def compiled_work(f, *arguments):
    return count_work(jax.jit(f).lower(*arguments).compile().as_text())


def test_collectives_count_as_often_as_the_loops_around_them_run():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    run = subprocess.run([sys.executable, "-c", COLLECTIVES], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-4000:]
    collectives, flops, unknown = json.loads(run.stdout)
    array = 8 * 16 * 4  # bytes of one device's [8, 16]
    assert collectives == {
        "all-reduce": [15, 15 * array * 2 * 3 / 4, 0],
        "all-gather": [5, 5 * 3 * 4 * 16 * 4, 0],
        "reduce-scatter": [5, 5 * array * 3 / 4, 0],
        "collective-permute": [5, 5 * array, 0],
    }
    assert flops == 5 * 2 * (2 * 8 * 16 * 16) and unknown == []


def test_products_in_nested_scans_are_those_of_the_formula():
    def model(x, w):
        def layer(c, w):
            return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), c), None

        return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()

    x, w = jnp.ones((24, 32)), jnp.ones((7, 32, 32))
    assert compiled_work(model, x, w).flops == 7 * 3 * 2 * 24 * 32 * 32
    assert compiled_work(jax.grad(model, argnums=(0, 1)), x, w).flops >= 7 * 3 * 3 * 2 * 24 * 32 * 32


def test_batches_of_products_count_each_product_once():
    a, b = jnp.ones((3, 24, 32)), jnp.ones((3, 40, 32))
    assert compiled_work(lambda a, b: jnp.einsum("bik,bjk->bij", a, b), a, b).flops == 2 * 3 * 24 * 32 * 40


def test_a_convolution_counts_no_padding():
    x, w = jnp.ones((2, 20, 8)), jnp.ones((4, 1, 8))  # a causal depthwise convolution, as in the gated delta rule
    f = lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8)  # noqa: E731
    assert compiled_work(f, x, w).flops == 2 * 2 * 8 * (4 * 20 - 6)


def test_a_loop_on_data_counts_once_and_is_named():
    def f(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: c @ c, x)

    work = compiled_work(f, jnp.ones((16, 16)))
    assert work.flops == 2 * 16**3 and len(work.unknown_loops) == 1


def test_a_loop_that_may_end_earlier_counts_to_its_bound():
    def f(x, bound):
        return jax.lax.while_loop(lambda c: (c[0] < 9) & (jnp.sum(c[1]) < bound), lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))

    work = compiled_work(f, jnp.ones((16, 16)), 1e3)
    assert work.flops == 9 * 2 * 16**3 and not work.unknown_loops


def test_a_scan_reads_a_slice_of_its_stack_at_a_time_and_writes_in_place():
    def f(x, w):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w)

    x, w = jnp.ones((8, 64)), jnp.ones((50, 64, 64))
    once = w.nbytes + 50 * x.nbytes  # every layer's weights read, its input written
    assert once <= compiled_work(f, x, w).touched <= 5 * once  # the whole stack at every step would be 50 x


def test_of_two_branches_the_larger_counts():
    def f(x, which):
        return jax.lax.cond(which, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert compiled_work(f, jnp.ones((16, 16)), True).flops == 2 * 2 * 16**3


# What the TPU compiler writes, in short: no trip counts, products as convolutions, bounds carried through the loop, layouts with tiles.
LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%fused (p.0: bf16[4,32], p.1: bf16[32,64]) -> bf16[4,64] {
  %p.0 = bf16[4,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[4,64]{1,0:T(8,128)(2,1)} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}

%advance (p.2: s32[]) -> s32[] {
  %p.2 = s32[]{:T(128)} parameter(0)
  %constant.2 = s32[]{:T(128)} constant(STEP)
  ROOT %add.1 = s32[]{:T(128)} add(%p.2, %constant.2)
}

%all-reduce-scatter.1 (p.3: bf16[4,64]) -> bf16[4,16] {
  %p.3 = bf16[4,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[4,64]{1,0:T(8,128)(2,1)} all-reduce(%p.3), replica_groups=[2,4]<=[8], to_apply=%sum
  %constant.3 = s32[] constant(0)
  ROOT %dynamic-slice.1 = bf16[4,16]{1,0} dynamic-slice(%all-reduce.1, %constant.3, %constant.3), dynamic_slice_sizes={4,16}
}

%start (p.4: bf16[16,64]) -> (bf16[16,64], bf16[32,64], u32[]) {
  %p.4 = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[32,64]{1,0} all-gather(%p.4), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (bf16[16,64], bf16[32,64], u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.5: bf16[16,64]) -> bf16[32,64] {
  %p.5 = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.2 = bf16[32,64]{1,0} all-gather(%p.5), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.2 = bf16[32,64]{1,0} custom-call(%p.5, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%wide.body (p.6: (s32[], bf16[4,32], bf16[16,64], s32[])) -> (s32[], bf16[4,32], bf16[16,64], s32[]) {
  %p.6 = (s32[]{:T(128)}, bf16[4,32]{1,0:T(8,128)(2,1)}, bf16[16,64]{1,0}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%p.6), index=0
  %copy.1 = s32[]{:T(128)S(6)} copy(%get-tuple-element.1)
  %get-tuple-element.2 = bf16[4,32]{1,0:T(8,128)(2,1)} get-tuple-element(%p.6), index=1
  %get-tuple-element.3 = bf16[16,64]{1,0} get-tuple-element(%p.6), index=2
  %get-tuple-element.4 = s32[]{:T(128)} get-tuple-element(%p.6), index=3
  %async-collective-start = (bf16[16,64], bf16[32,64], u32[]{:S(2)}) fusion(%get-tuple-element.3), kind=kCustom, calls=%start
  %async-collective-done = bf16[32,64]{1,0} fusion(%get-tuple-element.3), kind=kCustom, calls=%done
  %fusion.1 = bf16[4,64]{1,0} fusion(%get-tuple-element.2, %async-collective-done), kind=kOutput, calls=%fused
  %fusion.2 = bf16[4,16]{1,0} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.1
  %gmm.7 = bf16[4,32]{1,0} custom-call(%fusion.2), custom_call_target="tpu_custom_call"
  %next = s32[]{:T(128)} fusion(%copy.1), kind=kLoop, calls=%advance
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[4,32]{1,0}, bf16[16,64]{1,0}, /*index=3*/s32[]) tuple(%next, %gmm.7, %get-tuple-element.3, /*index=3*/%get-tuple-element.4)
}

%condition (p.7: (s32[], bf16[4,32], bf16[16,64], s32[])) -> pred[] {
  %p.7 = (s32[]{:T(128)}, bf16[4,32]{1,0:T(8,128)(2,1)}, bf16[16,64]{1,0}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.5 = s32[]{:T(128)} get-tuple-element(%p.7), index=0
  %get-tuple-element.6 = s32[]{:T(128)} get-tuple-element(%p.7), index=3
  ROOT %compare.1 = pred[]{:T(512)} compare(%get-tuple-element.5, %get-tuple-element.6), direction=DIRECTION
}

ENTRY %main (x: bf16[4,32], w: bf16[16,64]) -> (s32[], bf16[4,32], bf16[16,64], s32[]) {
  %x = bf16[4,32]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(1)
  %constant.4 = s32[]{:T(128)} constant(FIRST)
  %copy.2 = s32[]{:T(128)} copy(%constant.4)
  %constant.5 = s32[]{:T(128)} constant(BOUND)
  %tuple.2 = (s32[]{:T(128)}, bf16[4,32]{1,0}, bf16[16,64]{1,0}, s32[]{:T(128)}) tuple(%copy.2, %x, %w, /*index=3*/%constant.5)
  ROOT %while.1 = (s32[]{:T(128)}, bf16[4,32]{1,0}, bf16[16,64]{1,0}, s32[]) while(%tuple.2), condition=%condition, body=%wide.body
}
"""  # noqa: E501


def tpu_loop(first: int = 0, step: int = 1, bound: int = 6, direction: str = "LT") -> str:
    text = LOOP
    for word, value in {"FIRST": first, "STEP": step, "BOUND": bound, "DIRECTION": direction}.items():
        text = text.replace(word, str(value))
    return text


def test_a_program_of_the_tpu_compiler_is_read():
    work = count_work(tpu_loop())
    assert work.flops == 6 * 2 * 4 * 32 * 64
    assert work.collectives == {
        "reduce-scatter": Collective(6, 6 * 4 * 64 * 2 * 3 / 4),
        "all-gather": Collective(6, 6 * 16 * 64 * 2, 6 * 16 * 64 * 2),  # a chain of fusions is one collective, beside other work
    }
    assert work.kernels == {"gmm": 6} and not work.unknown_loops


@pytest.mark.parametrize(
    "loop, trips",
    [
        ((0, 1, 6, "LT"), 6),
        ((0, 4, 6, "LT"), 2),
        ((2, 2, 6, "LE"), 3),
        ((5, -1, 0, "GE"), 6),
        ((5, -2, 0, "GT"), 3),
        ((0, 2, 6, "NE"), 3),
        ((6, 1, 6, "LT"), 0),
        ((0, -1, 6, "LT"), None),
        ((0, 0, 6, "LT"), None),
        ((0, 4, 6, "NE"), None),
    ],
)
def test_a_trip_count_is_worked_out_from_the_counter(loop, trips):
    module = parse(tpu_loop(*loop))
    assert trip_count(module.entry.root, module.entry, module) == trips


@pytest.mark.parametrize(
    "attributes, devices",
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp','tensor'}", 8),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([2,4]T(1,0)) {'a'}", 2),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ("replica_groups={}", 8),
        ("replica_groups={{0},{1}}", 1),
    ],
)
def test_groups_are_read_in_every_form(attributes, devices):
    text = f"""HloModule m, replica_count=1, num_partitions=8

ENTRY %main (x: f32[10]) -> f32[10] {{
  %x = f32[10]{{0}} parameter(0)
  ROOT %r = f32[10]{{0}} all-reduce(%x), {attributes}, to_apply=%sum
}}
"""
    sent = 2 * (devices - 1) / devices * 40
    assert count_work(text).collectives == ({"all-reduce": Collective(1, sent)} if devices > 1 else {})


def test_what_lies_on_the_chip_is_no_memory_traffic():
    text = """HloModule m

%cut (p: f32[50,64], i: s32[]) -> f32[1,64] {
  %p = f32[50,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0:S(1)} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
}

%put (q: f32[50,64], r: f32[1,64], j: s32[]) -> f32[50,64] {
  %q = f32[50,64]{1,0} parameter(0)
  %r = f32[1,64]{1,0:S(1)} parameter(1)
  %j = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %update = f32[50,64]{1,0} dynamic-update-slice(%q, %r, %j, %none)
}

ENTRY %main (a: f32[50,64], b: f32[50,64], k: s32[]) -> f32[50,64] {
  %a = f32[50,64]{1,0} parameter(0)
  %b = f32[50,64]{1,0} parameter(1)
  %k = s32[]{:S(6)} parameter(2)
  %x = f32[1,64]{1,0:S(1)} fusion(%a, %k), kind=kLoop, calls=%cut
  %y = f32[1,64]{1,0:S(1)} tanh(%x)
  %c = (f32[1,64]{1,0}, f32[1,64]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%y)
  %d = f32[1,64]{1,0} copy-done(%c)
  ROOT %z = f32[50,64]{1,0} fusion(%b, %y, %k), kind=kLoop, calls=%put
}
"""
    row = 64 * 4
    assert count_work(text).touched == 3 * row  # one read of `a`, the copy, one written into `b`


def test_a_scatter_writes_its_updates_and_work_of_another_core_counts_once():
    text = """HloModule m

%put (p: f32[50,64], i: s32[3,1], u: f32[3,64]) -> f32[50,64] {
  %p = f32[50,64]{1,0} parameter(0)
  %i = s32[3,1]{1,0} parameter(1)
  %u = f32[3,64]{1,0} parameter(2)
  ROOT %s = f32[50,64]{1,0} scatter(%p, %i, %u), update_window_dims={1}, to_apply=%sum
}

%look (q: f32[50,64], j: s32[3,1]) -> f32[3,64] {
  %q = f32[50,64]{1,0} parameter(0)
  %j = s32[3,1]{1,0} parameter(1)
  ROOT %g = f32[3,64]{1,0} gather(%q, %j), slice_sizes={1,64}
}

ENTRY %main (a: f32[50,64], b: s32[3,1]) -> f32[50,64] {
  %a = f32[50,64]{1,0} parameter(0)
  %b = s32[3,1]{1,0} parameter(1)
  %start = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%look
  %update = ((f32[50,64]{1,0}, s32[3,1]{1,0}), f32[3,64]{1,0}) call-update(%start, %a, %b)
  %done = f32[3,64]{1,0} call-done(%update)
  ROOT %z = f32[50,64]{1,0} fusion(%a, %b, %done), kind=kLoop, calls=%put
}
"""
    rows, indices = 3 * 64 * 4, 3 * 4
    assert count_work(text).touched == 2 * rows + 2 * rows + indices


@pytest.mark.parametrize("sync, overlapped", [("false", 30.0), ("true", 0.0)])
def test_a_collective_of_a_gpu_counts_at_its_start(sync, overlapped):
    text = f"""HloModule m, num_partitions=4

ENTRY %main (x: bf16[5]) -> bf16[20] {{
  %x = bf16[5]{{0}} parameter(0)
  %s = (bf16[5]{{0}}, bf16[20]{{0}}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={{0}}, backend_config={{"is_sync":{sync}}}
  ROOT %d = bf16[20]{{0}} all-gather-done(%s)
}}
"""
    assert count_work(text).collectives == {"all-gather": Collective(1, 30.0, overlapped)}


def test_a_batch_dimension_that_became_spatial_counts_each_product_once():
    text = """HloModule m

ENTRY %main (a: f32[8,5,3], b: f32[8,3,7]) -> f32[8,5,7] {
  %a = f32[8,5,3]{2,1,0} parameter(0)
  %b = f32[8,3,7]{2,1,0} parameter(1)
  ROOT %c = f32[8,5,7]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""
    assert count_work(text).flops == 2 * 8 * 5 * 3 * 7


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        count_work("HloModule m\n")
