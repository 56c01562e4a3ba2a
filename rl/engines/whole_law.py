"""What SGLang and SGL-JAX are asked, so that they sample from the law that their log-probs are of: the whole vocabulary, nothing cut.

Only options that both know, each of them always: a server fills gaps from the model's generation_config.json, and an unknown one is an
error.
"""

from __future__ import annotations

from typing import Any

from rl.engines.protocol import EngineError, Request


def check_whole_law(request: Request, engine: str) -> None:
    """Refuses what cuts the law that is sampled; the log-probs would be of the whole one all the same."""
    if request.top_k or request.top_p != 1:
        raise EngineError(
            f"request of session {request.session!r}: top_k and top_p are not served: {engine}'s log-probs are not those of the law that "
            "it samples from then; leave them off"
        )


def sampling_params(request: Request, count: int) -> dict[str, Any]:
    """The options that ask for `count` tokens as a request wants them.

    Both end a turn at the model's own end tokens too, and cannot be told of others without; without any they are told to ignore them.
    """
    return {
        "max_new_tokens": count,
        "temperature": float(request.temperature),
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [int(token) for token in request.stop],
        "ignore_eos": not request.stop,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
