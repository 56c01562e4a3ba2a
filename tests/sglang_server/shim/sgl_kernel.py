"""`sgl_kernel` for a CPU without its compiled operators: SGLang then takes PyTorch's own. One function is called all the same.

Its import comes before that of any LoRA code, which asks for pinned memory that torch refuses where there is no accelerator.
"""

import functools

import stubs
import torch

stubs.fill(__name__)


def assign_req_to_token_pool_cpu(requests, pool, starts, ends, locations, width: int) -> None:
    """Writes each request's new cache locations, which lie one after the other, into its row of the pool."""
    offset = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=False):
        pool[row, start:end] = locations[offset : offset + end - start]
        offset += end - start


def _without_pinning(make):
    @functools.wraps(make)
    def unpinned(*args, pin_memory: bool = False, **kwargs):
        return make(*args, **kwargs)

    return unpinned


if not torch.accelerator.is_available():
    for _name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, _name, _without_pinning(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self
