"""`trace-jax view WORKDIR`: every rollout of a workdir in a browser, while it is being filled or afterwards.

`rollouts` knows what there is, `query` is a state of the list and its address, `conversation` and `tokens` are what a page shows of one
rollout, `app` puts pages together. Nothing here writes, holds the workdir, or starts JAX.
"""
