"""Operations of a forward pass, counted from the configuration: two for each multiply-add of a matrix product."""

from __future__ import annotations

from model.config import Config
from model.gated_delta import CHUNK


def forward_flops(config: Config, tokens: int, length: int, *, rank: int = 0, keys: int | None = None) -> float:
    """Of `tokens` tokens in rows of `length`: linear layers, the causal half of attention, the delta rule, the head.

    Args:
      rank: rank dimensions of adapters on all projections, those of all adapters of a bank together.
      keys: cache entries that each token sees, when it is decoded; else half of its row.
    """
    per_token = float(config.vocab_size * config.hidden_size)
    for projection in config.projections().values():
        times = config.count(projection.part) * (config.num_experts_per_tok if projection.experts else 1)
        per_token += times * (projection.width * projection.out + rank * (projection.width + projection.out))
    per_token += config.count("sparse") * config.hidden_size * config.num_experts
    seen = (length + 1) / 2 if keys is None else keys
    per_token += 2 * config.count("attention") * config.num_attention_heads * config.head_dim * seen
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    chunk = config.linear_num_value_heads * (config.linear_key_head_dim + config.linear_value_head_dim) * CHUNK
    per_token += config.count("delta") * (3 * state + (chunk if keys is None else 0))
    return 2.0 * per_token * tokens


def adapter_step_flops(config: Config, tokens: int, length: int, rank: int, *, remat: bool) -> float:
    """Of the gradient of adapters of `rank`: forward, the gradient of every input, the adapters' own gradient, and with `remat` the forward
    pass once more. Attention's backward pass makes its scores again, which counts as one more of its forward passes."""
    forward = forward_flops(config, tokens, length, rank=rank)
    adapters = forward - forward_flops(config, tokens, length)
    scores = 4.0 * config.count("attention") * config.num_attention_heads * config.head_dim * (length + 1) / 2 * tokens
    return (3 if remat else 2) * forward + adapters + 1.5 * scores
