"""What SGLang servers say, read as if a stranger had written it."""

import base64
import dataclasses

import numpy as np
import pytest

from rl.engines.sglang.replica import read_info
from rl.engines.sglang.wire import Failure, read_generated
from tests.model import tiny

CONTEXT = 48


def test_what_servers_compute_otherwise_or_do_not_tell_is_refused():
    told = read_info({"enable_return_routed_experts": False}, {"model_type": "qwen3_moe"})
    config = dataclasses.replace(tiny.CONFIGS["qwen3_moe"], tie_word_embeddings=False)
    assert told.problems(config, CONTEXT, experts=False) == []
    assert "--enable-return-routed-experts" in told.problems(config, CONTEXT, experts=True)[0]
    for change in ({"mlp_only_layers": (1,)}, {"tie_word_embeddings": True}):
        other = dataclasses.replace(config, **change)
        assert "neither dense layers nor tied embeddings" in told.problems(other, CONTEXT, experts=False)[0]


def reply(config, tokens=2, **meta) -> dict:
    return {
        "meta_info": {
            "finish_reason": {"type": "length"},
            "prompt_tokens": 3,
            "completion_tokens": tokens,
            "output_token_logprobs": [[-1.0, 5, None]] * tokens,
        }
        | meta
    }


def test_the_experts_of_sparse_layers_are_read():
    config = dataclasses.replace(tiny.CONFIGS["qwen3_moe"], mlp_only_layers=(1,))
    rows = np.random.default_rng(0).integers(0, config.num_experts, (4, config.num_hidden_layers, 2)).astype(np.int32)
    found = read_generated(reply(config, routed_experts=base64.b64encode(rows.tobytes()).decode()), 3, 2, config).experts
    assert found.dtype == np.int16 and (found[:-1] == rows[:, [0, 2]]).all() and (found[-1] == -1).all() and len(found) == 5
    for bad in ("!", "AAAA", base64.b64encode((rows + 90).tobytes()).decode(), 7):
        with pytest.raises(Failure, match="routed_experts"):
            read_generated(reply(config, routed_experts=bad), 3, 2, config)


@pytest.mark.parametrize(
    "meta",
    [
        {"completion_tokens": 0},
        {"completion_tokens": 3},
        {"completion_tokens": True},
        {"prompt_tokens": 2},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-1.0, 5], [-1.0, 97]]},
        {"output_token_logprobs": [[-1.0, 5], [None, 5]]},
        {"output_token_logprobs": [[-1.0, 5], [-1.0, 5.0]]},
        {"output_token_logprobs": [[-1.0, 5], "no"]},
        {"finish_reason": None},
        {"finish_reason": {"type": "other"}},
    ],
)
def test_a_reply_that_does_not_add_up_is_garbage(meta):
    with pytest.raises(Failure) as caught:
        read_generated(reply(tiny.CONFIG, **meta), 3, 2, tiny.CONFIG)
    assert caught.value.kind == "garbage"
