"""The one matrix product of the house, with the CPU's traps behind it.

XLA's CPU backend fuses the elementwise producers of `dy` into the products of the backward pass and runs them as naive loops over the 3-D
layout. Flattening to 2-D and a barrier on `dy` keep both products on the library kernel. The kernel transposes its left operand first, so
the gradient of a tall matrix (an adapter's A) is made with the narrow operand on the left: 2 to 10 times faster. bfloat16 operands
accumulate in float32, which every accelerator does anyway and which lets a CPU use its bfloat16 units.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def _product(x: jax.Array, w: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: jax.Array, w: jax.Array, wide: bool = False) -> jax.Array:
    """x[..., in] @ w[in, out] -> [..., out] in the dtype of `x`, or if `wide` the float32 sums as they are.

    The gradient of a frozen `w` costs nothing: nobody asks for it, and dead code goes when the step is compiled.
    """
    return _dense(x, w, wide)[0]


def _dense(x: jax.Array, w: jax.Array, wide: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    flat = x.reshape(-1, x.shape[-1])
    y = _product(flat, w.astype(x.dtype), (1, 0))
    return (y if wide else y.astype(x.dtype)).reshape(*x.shape[:-1], w.shape[1]), (x, w)


def _dense_bwd(wide: bool, residual: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residual
    dy = jax.lax.optimization_barrier(dy.astype(x.dtype).reshape(-1, dy.shape[-1]))
    flat = x.reshape(-1, x.shape[-1])
    dx = _product(dy, w.astype(dy.dtype), (1, 1)).astype(x.dtype).reshape(x.shape)
    if w.shape[0] <= w.shape[1]:
        dw = _product(flat, dy, (0, 0))
    else:  # the barrier keeps the transposition out of the product
        dw = jax.lax.optimization_barrier(_product(dy, flat, (0, 0))).T
    return dx, dw.astype(w.dtype)


dense.defvjp(_dense, _dense_bwd)
