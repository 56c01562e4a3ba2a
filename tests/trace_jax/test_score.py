"""The command as its user runs it, against transformers and PEFT."""

import json

import jax
import numpy as np
import peft
import pytest

from model import constant_gate, export_composed, read_config, save_peft
from tests.model import tiny
from trace_jax import cli

LENGTHS = (5, 1, 0, 40, 33, 12)


def rows() -> list[list[int]]:
    return [tiny.tokens(n, seed=n).tolist() for n in LENGTHS]


def write(path, rows):
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", tiny.BASES)
def test_log_probs_are_those_of_transformers_with_and_without_an_adapter(kind, tmp_path):
    net = tiny.checkpoint(tmp_path / "model", kind)
    config = read_config(tmp_path / "model")
    save_peft(tiny.bank(config), config, tmp_path / "adapter")
    write(tmp_path / "in.jsonl", rows())
    for adapter in (None, tmp_path / "adapter"):
        flags = ["score", f"--model={tmp_path / 'model'}", f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
        assert cli.main([*flags, *([f"--adapter={adapter}"] if adapter else [])]) == 0
        found = [json.loads(line)["logprobs"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [len(row) for row in found] == list(LENGTHS)
        if adapter:
            net = peft.PeftModel.from_pretrained(net, adapter)
        for tokens, logprobs in zip(rows(), found, strict=True):
            if not tokens:
                continue
            assert logprobs[0] is None
            if len(tokens) > 1:
                log = jax.nn.log_softmax(tiny.torch_logits(net, [tokens])[0], axis=-1)
                np.testing.assert_allclose(logprobs[1:], np.asarray(log)[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-4)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"tokens": [1, 97]}', "token 97 is not in the model's vocabulary of 97"),
        ('{"tokens": [1, 2.5]}', "list of integers"),
        ('{"tokens": [true]}', "list of integers"),
        ('{"token": [1]}', 'expected {"tokens"'),
        ("[1, 2]", 'expected {"tokens"'),
        ("{", 'expected {"tokens"'),
    ],
)
def test_a_bad_line_is_named_before_any_weight_loads(line, complaint, tmp_path, capsys):
    tiny.checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    write(tmp_path / "in.jsonl", [[1, 2]]).open("a").write(line + "\n")
    (tmp_path / "out.jsonl").write_text("kept")
    flags = [f"--model={tmp_path / 'model'}", f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    assert cli.main(["score", *flags]) == 2
    error = capsys.readouterr().err
    assert "in.jsonl:2: " in error and complaint in error
    assert (tmp_path / "out.jsonl").read_text() == "kept"


def test_a_composed_model_is_refused_with_what_loads_it(tmp_path, capsys):
    tiny.checkpoint(tmp_path / "model")
    config = read_config(tmp_path / "model")
    export_composed(tmp_path / "model", tiny.bank(config), constant_gate(config, 2, 1), tmp_path / "composed", ("base", "x"))
    write(tmp_path / "in.jsonl", [[1, 2]])
    capsys.readouterr()
    flags = [f"--model={tmp_path / 'composed'}", f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    assert cli.main(["score", *flags]) == 2
    assert "is a composed model, base, adapters and gate in one; load it with transformers" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["model", "adapter", "input"])
def test_a_missing_file_is_one_line(flag, tmp_path, capsys):
    tiny.checkpoint(tmp_path / "model")
    write(tmp_path / "in.jsonl", [[1, 2]])
    flags = {"model": tmp_path / "model", "input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"} | {flag: tmp_path / "absent"}
    capsys.readouterr()  # what the checkpoint's writer said
    assert cli.main(["score", *(f"--{name}={path}" for name, path in flags.items())]) == 2
    error = capsys.readouterr().err
    assert "absent" in error and error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()
