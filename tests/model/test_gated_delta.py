"""The gated delta net mixer against transformers' torch functions and module, and against itself: packed, in pieces, by token."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from model.gated_delta import DeltaDims, DeltaState, chunked_delta_rule, mix, recurrent_delta_rule, short_convolution, unit_lower_inverse

torch.set_num_threads(1)
WIDTH = 40
chunked = jax.jit(chunked_delta_rule, static_argnames="chunk")
recurrent = jax.jit(recurrent_delta_rule)


def rule_inputs(batch=2, length=37, key_heads=2, value_heads=4, key_width=8, value_width=12, decay=1.0, seed=0):
    """q, k, v, log_decay, beta as NumPy float32."""
    rng = np.random.default_rng(seed)
    shapes = [(key_heads, key_width), (key_heads, key_width), (value_heads, value_width)]
    q, k, v = (rng.normal(size=(batch, length, *shape)) for shape in shapes)
    log_decay = -decay * rng.exponential(size=(batch, length, value_heads))
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=(batch, length, value_heads))))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta)]


def no_starts(inputs):
    return np.zeros(inputs[0].shape[:2], bool)


def starts_at(batch, length, *places):
    starts = np.zeros((batch, length), bool)
    starts[:, list(places)] = True
    return starts


def reference(inputs, state=None):
    """transformers' recurrence."""
    tensors = [torch.tensor(x, dtype=torch.float32) for x in inputs]
    state = None if state is None else torch.tensor(state)
    out, state = hf.torch_recurrent_gated_delta_rule(*tensors, state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out.numpy(), state.numpy()


def close(got, want, tolerance=1e-5):
    """Within the tolerance times the largest entry, or one."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.max(np.abs(y), initial=1.0))


# ---- the rule ----


@pytest.mark.parametrize(
    "length, chunk, heads", [(1, 64, (2, 2)), (5, 64, (2, 6)), (16, 16, (2, 2)), (70, 32, (1, 3)), (100, 8, (2, 2)), (100, 1, (2, 4))]
)
def test_chunks_equal_tokens_equal_transformers(length, chunk, heads):
    inputs = rule_inputs(length=length, key_heads=heads[0], value_heads=heads[1])
    state = np.random.default_rng(1).normal(size=(2, heads[1], 8, 12)).astype(np.float32)
    want = reference(inputs, state)
    close(chunked(*inputs, no_starts(inputs), state, chunk=chunk), want)
    close(recurrent(*inputs, no_starts(inputs), state), want)


def test_chunks_equal_the_chunks_of_transformers_at_its_size():
    inputs = rule_inputs(length=150, key_heads=2, value_heads=4, key_width=32, value_width=32)
    out, state = hf.torch_chunk_gated_delta_rule(
        *map(torch.tensor, inputs), chunk_size=64, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    close(chunked(*inputs, no_starts(inputs)), (out.numpy(), state.numpy()))


def test_a_chunk_size_that_does_not_halve_is_refused():
    inputs = rule_inputs(length=9)
    with pytest.raises(ValueError, match="power of two"):
        chunked(*inputs, no_starts(inputs), chunk=48)


@pytest.mark.parametrize("places", [(0,), (0, 8, 16), (3, 5, 6, 7, 8, 9, 30), (0, 15, 16, 17, 36)])
def test_packed_segments_equal_their_own_runs(places):
    inputs = rule_inputs()
    state = np.random.default_rng(1).normal(size=(2, 4, 8, 12)).astype(np.float32)
    starts = starts_at(2, 37, *places)
    borders = [0, *[p for p in places if p], 37]
    outs = []
    for first, last in zip(borders[:-1], borders[1:], strict=True):
        out, final = reference([x[:, first:last] for x in inputs], state if first not in places else None)
        outs.append(out)
    want = np.concatenate(outs, axis=1), final
    close(chunked(*inputs, starts, state, chunk=8), want)
    close(recurrent(*inputs, starts, state), want)


def test_rows_have_their_own_segments():
    inputs = rule_inputs()
    starts = no_starts(inputs)
    starts[1, 11] = True
    out, state = chunked(*inputs, starts, chunk=8)
    close((out[0], state[0]), [x[0] for x in reference(inputs)])
    close((out[1, 11:], state[1]), [x[1] for x in reference([x[:, 11:] for x in inputs])])


def test_gradients_equal_torch():
    inputs = rule_inputs(length=37)
    weight = np.random.default_rng(2).normal(size=(2, 37, 4, 12)).astype(np.float32)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    start = np.random.default_rng(3).normal(size=(2, 4, 8, 12)).astype(np.float32)
    state = torch.tensor(start, requires_grad=True)
    out, final = hf.torch_chunk_gated_delta_rule(*tensors, 64, state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    ((out * torch.tensor(weight)).sum() + (final**2).sum()).backward()

    @jax.jit
    def grads(inputs, state):
        def loss(inputs, state):
            out, final = chunked_delta_rule(*inputs, no_starts(inputs), state, chunk=8)
            return jnp.sum(out * weight) + jnp.sum(final**2)

        return jax.grad(loss, argnums=(0, 1))(inputs, state)

    want = [t.grad.numpy() for t in tensors], state.grad.numpy()
    close(grads(inputs, start), want, 1e-4)


def test_packed_gradients_equal_unpacked_gradients():
    inputs = rule_inputs(length=40)
    weight = np.random.default_rng(2).normal(size=(2, 40, 4, 12)).astype(np.float32)

    @jax.jit
    def grad(inputs, weight, starts):
        return jax.grad(lambda inputs: jnp.sum(chunked_delta_rule(*inputs, starts, chunk=8)[0] * weight))(inputs)

    packed = grad(inputs, weight, starts_at(2, 40, 0, 20))
    halves = [[x[:, :20] for x in (*inputs, weight)], [x[:, 20:] for x in (*inputs, weight)]]
    parts = [grad(half[:-1], half[-1], starts_at(2, 20)) for half in halves]
    close(packed, [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)])

    # one-token segments: no gradient crosses a start, at a chunk's border (16) or inside
    weight[:, [3, 15, 16]] = 0
    got = grad(inputs, weight, starts_at(2, 40, 3, 4, 15, 16, 17))
    assert all(not x[:, [3, 15, 16]].any() and np.isfinite(x).all() for x in got)
    close([x[:, :3] for x in got], [x[:, :3] for x in grad(inputs, weight * (np.arange(40) < 3)[:, None, None], starts_at(2, 40))])


def test_extreme_decays_stay_finite_and_right():
    inputs = rule_inputs(batch=4, length=40)
    inputs[3][:] = np.array([-30.0, -1000.0, -1e-6, 0.0])[:, None, None]
    starts = starts_at(4, 40, 0, 5, 16)

    @jax.jit
    def run(inputs):
        def loss(inputs):
            out, state = chunked_delta_rule(*inputs, starts, chunk=16)
            return jnp.sum(out**2) + jnp.sum(state**2), (out, state)

        return jax.grad(loss, has_aux=True)(inputs)

    grads, got = run(inputs)
    assert all(np.isfinite(x).all() for x in grads)
    close(got, recurrent(*inputs, starts))


def test_weak_decays_after_strong_ones_keep_their_digits():
    """Differences of running sums would leave errors of 1e-4 here."""
    inputs = rule_inputs(length=64, decay=1e-3)
    inputs[3][:, :32:2] = -200.0
    close(chunked(*inputs, no_starts(inputs)), reference(inputs), 2e-6)


def test_a_run_of_equal_keys_keeps_its_digits():
    """Equal tokens give equal keys; the powers of their matrix reach 1e14 at 64 tokens, its inverse stays below 1."""
    a = jnp.tril(jnp.ones((64, 64)), -1)
    close(unit_lower_inverse(a), jnp.eye(64) - jnp.eye(64, k=-1), 1e-6)
    inputs = rule_inputs(length=130, decay=1e-4)
    inputs[1][:], inputs[4][:] = inputs[1][:, :1], 1.0
    close(chunked(*inputs, no_starts(inputs)), reference(inputs))


def test_bfloat16_inputs_keep_a_float32_state():
    inputs = rule_inputs(length=40)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]] + inputs[3:]
    for rule in (chunked, recurrent):
        out, state = rule(*narrow, no_starts(inputs))
        assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        want_out, want_state = reference([np.asarray(x, np.float32) for x in narrow])
        close(state, want_state)
        close(out.astype(np.float32), want_out, 1e-2)


def test_the_backward_pass_of_long_rows_keeps_little():
    length, batch, heads, width = 32768, 1, 2, 16
    shapes = [(batch, length, heads, width)] * 3 + [(batch, length, heads)] * 2
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    starts = jax.ShapeDtypeStruct((batch, length), bool)
    grad = jax.grad(lambda inputs, starts: jnp.sum(chunked_delta_rule(*inputs, starts)[0] ** 2))
    memory = jax.jit(grad).lower(inputs, starts).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * length * heads * width * 4  # a dozen arrays of the size of v


# ---- the convolution ----


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_equals_torch_and_stops_at_starts(width):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 13, 6)).astype(np.float32), rng.normal(size=(6, width)).astype(np.float32)

    def torch_conv(x):
        out = hf.causal_conv1d_fn(torch.tensor(x).transpose(1, 2), torch.tensor(weight), activation="silu")
        return out.transpose(1, 2).numpy()

    y, window = short_convolution(x, weight, no_starts([x]))
    assert window is None
    close(y, torch_conv(x))
    y, _ = short_convolution(x, weight, starts_at(2, 13, 5, 6, 9))
    parts = [torch_conv(part) for part in np.split(x, [5, 6, 9], axis=1)]
    close(y, np.concatenate(parts, axis=1))


# ---- the mixer ----


def make_module(key_heads=2, value_heads=4, width=4, seed=0):
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    module = hf.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module, DeltaDims(key_heads, value_heads, 8, 12, config.rms_norm_eps)


def parameters(module):
    own = {name: x.detach().numpy() for name, x in module.named_parameters()}
    w = {"conv": own["conv1d.weight"][:, 0], "dt_bias": own["dt_bias"], "A_log": own["A_log"], "delta_norm": own["norm.weight"]}
    names = {"qkv": "in_proj_qkv", "z": "in_proj_z", "a": "in_proj_a", "b": "in_proj_b", "out": "out_proj"}
    return w, {ours: own[f"{theirs}.weight"].T for ours, theirs in names.items()}


def make_run(module, dims):
    """run(h, starts, count, state) with the module's weights."""
    w, linear = parameters(module)
    return jax.jit(lambda h, starts, count=None, state=None: mix(h, w, lambda n, x: x @ linear[n], dims, starts, count, state))


def hidden(length, batch=3, seed=5):
    return np.random.default_rng(seed).normal(size=(batch, length, WIDTH)).astype(np.float32)


def module_out(module, h, rule=hf.torch_recurrent_gated_delta_rule):
    """By tokens, since transformers' float32 chunks take differences of running sums: 1.3e-5 off float64 where we are 3e-6 off."""
    with torch.no_grad(), mock.patch.object(hf, "torch_chunk_gated_delta_rule", rule):
        return module(torch.tensor(h)).numpy()


def empty_state(dims, width=4, batch=3, fill=0.0):
    channels = 2 * dims.key_heads * dims.key_width + dims.value_heads * dims.value_width
    conv = jnp.full((batch, width - 1, channels), fill)
    return DeltaState(conv, jnp.full((batch, dims.value_heads, dims.key_width, dims.value_width), fill))


@pytest.mark.parametrize("key_heads, value_heads, width", [(2, 2, 4), (2, 4, 2), (1, 3, 4)])
def test_mixer_equals_the_module(key_heads, value_heads, width):
    module, dims = make_module(key_heads, value_heads, width)
    h = hidden(70)
    y, state = make_run(module, dims)(h, starts_at(3, 70, 0))
    assert state is None
    close(y, module_out(module, h))
    close(y, module_out(module, h, hf.torch_chunk_gated_delta_rule), 1e-4)


def test_packed_mixer_equals_the_module_on_each_segment():
    module, dims = make_module()
    h, places = hidden(70), [0, 1, 2, 20, 64, 69]
    y, _ = make_run(module, dims)(h, starts_at(3, 70, *places))
    parts = [module_out(module, part) for part in np.split(h, places[1:], axis=1)]
    close(y, np.concatenate(parts, axis=1))


def test_mixer_gradients_equal_torch():
    module, dims = make_module()
    w, linear = parameters(module)
    h, weight = hidden(21), hidden(21, seed=6)
    tensor = torch.tensor(h, requires_grad=True)
    (module(tensor) * torch.tensor(weight)).sum().backward()

    @jax.jit
    def grads(h, w, linear):
        def loss(h, w, linear):
            return jnp.sum(mix(h, w, lambda n, x: x @ linear[n], dims, starts_at(3, 21, 0))[0] * weight)

        return jax.grad(loss, argnums=(0, 1, 2))(h, w, linear)

    dh, dw, dlinear = grads(h, w, linear)
    for parameter in module.parameters():
        parameter.data = parameter.grad
    close((dh, dw, dlinear), (tensor.grad.numpy(), *parameters(module)), 2e-4)


@pytest.mark.parametrize("width", [2, 4])
def test_decode_in_uneven_pieces_equals_the_whole(width):
    """Prefill of ragged prompts, steps of one token and pieces of several; a row without tokens keeps its state bit by bit."""
    module, dims = make_module(width=width)
    run, h = make_run(module, dims), hidden(30)
    want, done, state = module_out(module, h), np.zeros(3, int), empty_state(dims, width, fill=7.0)
    calls = [(9, [9, 2, 0]), (1, [1, 1, 1]), (1, [0, 1, 1]), (9, [3, 9, 1]), (1, [1, 0, 1]), (9, [0, 5, 9]), (9, [7, 1, 2])]
    for length, counts in calls:
        counts = np.array(counts, np.int32)
        piece = np.full((3, length, WIDTH), 3.0, np.float32)
        for row, count in enumerate(counts):
            piece[row, :count] = h[row, done[row] : done[row] + count]
        starts = (np.arange(length) + done[:, None] == 0) & (counts[:, None] > 0)
        y, new = run(piece, starts, counts, state)
        for row, count in enumerate(counts):
            close(y[row, :count], want[row, done[row] : done[row] + count])
            if count == 0:
                assert (new.conv[row] == state.conv[row]).all() and (new.state[row] == state.state[row]).all()
        state, done = new, done + counts
    assert done.tolist() == [21, 19, 15]


def test_all_tokens_count_without_a_count():
    module, dims = make_module()
    run, h, none = make_run(module, dims), hidden(12), np.zeros((3, 6), bool)
    first, state = run(h[:, :6], none, None, empty_state(dims))
    last, _ = run(h[:, 6:], none, None, state)
    close(np.concatenate([first, last], axis=1), module_out(module, h))


def test_a_lane_is_refilled_by_a_start():
    """Also by a first piece shorter than the window, and by a start that comes after other tokens."""
    module, dims = make_module()
    run, h = make_run(module, dims), hidden(7)
    want = module_out(module, h)
    used, none = empty_state(dims, fill=7.0), np.zeros((3, 6), bool)
    y, state = run(h[:, :1], starts_at(3, 1, 0), None, used)
    close(y, want[:, :1])
    close(run(h[:, 1:], none, None, state)[0], want[:, 1:])
    behind = np.concatenate([hidden(5, seed=9), h[:, :1]], axis=1)
    y, state = run(behind, starts_at(3, 6, 5), None, used)
    close(y[:, 5:], want[:, :1])
    close(run(h[:, 1:], none, None, state)[0], want[:, 1:])


def test_bfloat16_mixer_keeps_a_float32_state():
    module, dims = make_module()
    w, linear = parameters(module)
    h = jnp.asarray(hidden(9), jnp.bfloat16)
    empty = empty_state(dims)
    empty = DeltaState(empty.conv.astype(jnp.bfloat16), empty.state)
    narrow = {name: jnp.asarray(x, jnp.bfloat16) for name, x in linear.items()}
    run = jax.jit(lambda h, state: mix(h, w, lambda n, x: x @ narrow[n], dims, starts_at(3, 9, 0), None, state))
    y, state = run(h, empty)
    assert (y.dtype, state.conv.dtype, state.state.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want = module_out(module, np.asarray(h, np.float32))
    assert np.linalg.norm(np.asarray(y, np.float32) - want) < 0.03 * np.linalg.norm(want)
