"""Attention against the plain formula: values, gradients, segments, caches, kernels, meshes, memory."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import _cudnn, attend, attend_cached, choose, segment_positions, segment_starts
from tests.devices import environment

GROUPS = {"each its own": (3, 3, 8), "two share": (4, 2, 7), "four share": (4, 1, 24)}  # H, K, Dh


def naive(q, k, v, segment_ids=None):
    """The formula, with the T x T matrix."""
    groups, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / np.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((1, length, length), bool))
    if segment_ids is not None:
        seen &= segment_ids[:, :, None] == segment_ids[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")


def draw(length, heads=4, kv_heads=2, width=8, batch=2, seed=0, dtype=jnp.float32):
    """q, k, v and a direction to differentiate along."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal((batch, length, n, width)), dtype) for n in (heads, kv_heads, kv_heads, heads)]


def rows(kind, length, batch=2):
    """Segment ids [B, T], another row each."""
    random, ids = np.random.default_rng(1), np.ones((batch, length), np.int32)
    for row in ids:
        cut = int(random.integers(0, length + 1)) // 2
        if kind == "left padding":
            row[:cut] = 0
        elif kind == "right padding":
            row[length - cut :] = 0
        elif kind == "many segments":
            row[:] = 1 + np.cumsum(random.random(length) < 0.1)
            row[length - cut // 4 :] = 0
    return None if kind == "none" else jnp.asarray(ids)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(f, q, k, v, dout, segment_ids):
    out, backward = jax.vjp(lambda *x: f(*x, segment_ids), q, k, v)
    return out, *backward(dout)


def close(ours, theirs, tolerance=1e-5):
    for x, y in zip(ours, theirs, strict=True):
        scale = max(1.0, float(jnp.max(jnp.abs(y.astype(jnp.float32)))))
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=tolerance * scale)


@pytest.mark.parametrize("kind", ["none", "left padding", "right padding", "many segments"])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300])
def test_values_and_gradients_are_those_of_the_formula(length, kind):
    x, ids = draw(length), rows(kind, length)
    close(with_gradients(attend, *x, ids), with_gradients(naive, *x, ids))


@pytest.mark.parametrize("heads, kv_heads, width", GROUPS.values(), ids=GROUPS)
def test_query_heads_share_key_heads(heads, kv_heads, width):
    x, ids = draw(70, heads, kv_heads, width), rows("many segments", 70)
    close(with_gradients(attend, *x, ids), with_gradients(naive, *x, ids))


@pytest.mark.parametrize("kind", ["none", "many segments"])
def test_a_long_row_has_the_values_and_gradients_of_the_formula(kind):
    x, ids = draw(1100, batch=1), rows(kind, 1100, batch=1)
    close(with_gradients(attend, *x, ids), with_gradients(naive, *x, ids))


def test_bfloat16_has_a_float32_softmax():
    x, ids = draw(200, dtype=jnp.bfloat16), rows("many segments", 200)
    ours = with_gradients(attend, *x, ids)
    assert all(y.dtype == jnp.bfloat16 for y in ours)
    close(ours, with_gradients(naive, *(y.astype(jnp.float32) for y in x), ids), 0.02)


def test_large_scores_do_not_overflow():
    q, k, v, dout = draw(150)
    close(with_gradients(attend, 60 * q, 60 * k, v, dout, None), with_gradients(naive, 60 * q, 60 * k, v, dout, None), 2e-3)


def test_packed_rows_compute_what_their_parts_compute():
    lengths = (5, 70, 5, 70)
    parts = [draw(n, batch=1, seed=i) for i, n in enumerate(lengths)]
    packed = [jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
    ids = jnp.asarray(np.repeat([1, 2, 3, 0], lengths)[None])
    alone = [with_gradients(attend, *x, None) for x in parts]
    close(with_gradients(attend, *packed, ids), [jnp.concatenate(x, axis=1) for x in zip(*alone, strict=True)])


def test_segments_start_where_the_id_changes():
    ids = jnp.asarray([[0, 0, 1, 1, 1, 2, 0], [3, 4, 4, 3, 3, 3, 3]])
    np.testing.assert_array_equal(segment_starts(ids), [[1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(segment_positions(ids), [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 0, 1, 2, 3]])


def test_memory_is_linear_in_the_length_and_the_program_does_not_grow():
    def compiled(length):
        x = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1, 2)]
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return with_gradients.lower(attend, *x, ids).compile()

    short, long = compiled(16_384), compiled(32_768)
    assert long.memory_analysis().temp_size_in_bytes < 2.1 * short.memory_analysis().temp_size_in_bytes < 64 * 2**20
    assert long.as_text().count("\n") < 1.1 * short.as_text().count("\n")


@pytest.mark.parametrize("implementation", ["splash", "triton"])
@pytest.mark.parametrize("length, kind", [(100, "none"), (300, "many segments")])
def test_kernels_of_accelerators_agree_with_ours(implementation, length, kind):
    x, ids = draw(length, heads=2, kv_heads=1, width=16), rows(kind, length)
    theirs = with_gradients(functools.partial(attend, implementation=implementation), *x, ids)
    close(with_gradients(attend, *x, ids), theirs, 1e-4)


def test_rows_of_one_segment_need_only_their_lengths():
    """What cuDNN is asked for, given by the other implementation of the same function; padding may hold anything."""
    x, ids = draw(70), rows("right padding", 70)
    real = (ids > 0)[..., None, None]
    x[3] *= real  # no loss reads padding
    spoilt = [jnp.where(real, y, jnp.nan) for y in x[:3]]
    ours = with_gradients(functools.partial(_cudnn, implementation="xla"), *spoilt, x[3], ids)
    assert 0 < jnp.sum(real) < real.size and all(jnp.all(jnp.where(real, 0, y) == 0) for y in ours)
    close(ours, [y * real for y in with_gradients(naive, *x, ids)])


@pytest.mark.parametrize("ids", [None, "right padding"])
def test_rows_of_one_segment_are_lowered_to_cudnn(ids, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91_200)  # there is none here, and none is called
    x, ids = draw(64, width=64, dtype=jnp.bfloat16), ids and rows(ids, 64)
    step = jax.jit(lambda *x: with_gradients(functools.partial(attend, packed=False, implementation="cudnn"), *x))
    text = step.trace(*x, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == 1
    assert ("PADDING_CAUSAL" in text) == (ids is not None) and "CAUSAL" in text
    assert "triton" not in text


@pytest.mark.parametrize(
    "platform, capability, dtype, width, segments, expected",
    [
        ("gpu", "9.0", jnp.bfloat16, 128, False, "cudnn"),
        ("gpu", "9.0", jnp.bfloat16, 256, False, "cudnn"),
        ("gpu", "8.0", jnp.bfloat16, 256, False, "triton"),  # more than cuDNN takes before Hopper
        ("gpu", "9.0", jnp.bfloat16, 128, True, "triton"),  # it knows no segments
        ("gpu", "9.0", jnp.float32, 128, False, "triton"),
        ("gpu", "9.0", jnp.float16, 100, False, "triton"),
        ("gpu", "7.0", jnp.float16, 64, False, "triton"),
        ("gpu", "gfx942", jnp.bfloat16, 128, False, "triton"),  # not NVIDIA's
        ("tpu", "", jnp.bfloat16, 128, False, "splash"),
        ("cpu", "", jnp.bfloat16, 128, False, "xla"),
    ],
)
def test_each_device_gets_the_kernel_that_it_can_run(platform, capability, dtype, width, segments, expected):
    assert choose(platform, capability, dtype, width, segments) == expected


MESH = """
import functools, jax, numpy as np
from jax.sharding import Mesh
from model.attention import attend
from tests.model.test_attention import close, draw, naive, rows, with_gradients

mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
for implementation, batch, kv_heads in (("xla", 4, 2), ("xla", 6, 1), ("splash", 4, 2)):
    x, ids = draw(70, batch=batch, kv_heads=kv_heads), rows("many segments", 70, batch)
    ours = with_gradients(functools.partial(attend, implementation=implementation, mesh=mesh), *x, ids)
    close(ours, with_gradients(naive, *x, ids), 1e-4)
assert len(ours[0].addressable_shards[0].data) == 1 and ours[0].addressable_shards[0].data.shape[2] == 2
print(len(jax.devices()), "devices agree")
"""


def test_a_mesh_changes_nothing():
    env = environment(8)
    run = subprocess.run([sys.executable, "-c", MESH], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "8 devices agree" in run.stdout, run.stderr[-4000:]


def test_an_implementation_that_cannot_is_refused():
    q, k, v, _ = draw(8)
    with pytest.raises(ValueError, match="'flash' is unknown; choose one of auto, xla"):
        attend(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="knows no segments; use 'triton', 'auto', or rows that are not packed"):
        attend(q, k, v, rows("left padding", 8), implementation="cudnn")


@pytest.mark.parametrize("heads, kv_heads, width", GROUPS.values(), ids=GROUPS)
def test_a_cache_gives_what_the_whole_row_gives(heads, kv_heads, width):
    q, k, v, _ = draw(20, heads, kv_heads, width)
    whole, step = jax.jit(attend)(q, k, v), jax.jit(attend_cached)
    cache = [jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, 9), (0, 0)), constant_values=7.0) for x in (k, v)]
    close([step(q, *cache, jnp.tile(jnp.arange(20), (2, 1)))], [whole])
    ragged = jnp.asarray([[3], [17]])  # each row stands elsewhere
    close([step(jnp.take_along_axis(q, ragged[..., None, None], 1), *cache, ragged)], [whole[[0, 1], [3, 17]][:, None]])


def test_a_long_prefill_goes_in_blocks():
    batch, time, entries = 1, 2100, 4096
    random = np.random.default_rng(0)
    q = jnp.asarray(random.standard_normal((batch, time, 8, 4), np.float32))
    k, v = (jnp.asarray(random.standard_normal((batch, 1, entries, 4), np.float32)) for _ in range(2))
    positions = jnp.asarray(np.sort(random.integers(0, entries, (batch, time))))
    step = jax.jit(attend_cached)
    compiled = step.lower(q, k, v, positions).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 600 * 2**20  # all scores at once: 275 MB, and their softmax as much again
    picked = np.array([0, 1, 1023, 1024, 1500, 2099])
    close([step(q, k, v, positions)[:, picked]], [step(q[:, picked], k, v, positions[:, picked])])
