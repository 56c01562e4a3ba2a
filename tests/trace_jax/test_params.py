import json

from model import init_bank, init_gate, read_config
from trace_jax import cli


def test_the_counts_are_those_of_the_arrays(tmp_path, capsys):
    import jax

    config = {"model_type": "qwen3", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["params", "--config=quickstart", f"--config.model.path={tmp_path}", "--config.train.rank=4"]) == 0
    printed = capsys.readouterr().out

    model, key = read_config(tmp_path), jax.random.key(0)
    adapter = sum(x.size for x in jax.tree.leaves(init_bank(model, 1, 4, 4.0, key).factors))
    gate = sum(x.size for x in jax.tree.leaves(init_gate(model, 5, 5.0, key)))
    for count in (adapter, gate):
        assert f"{count:,}" in printed


def test_a_model_that_cannot_be_run_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert cli.main(["params", "--config=quickstart", f"--config.model.path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "'model.path'" in error and "'llama'" in error and error.count("\n") == 1
