"""`trace-jax score --model=DIR [--adapter=DIR] --input=FILE --output=FILE`: log-probs of given tokens.

A line `{"tokens": [...]}` in, a line `{"logprobs": [null, ...]}` out: the natural log-prob of each token after those before it, the first
has none. Lines are read a window at a time and scored in rows of like length, so a file of any size needs the memory of one window. The
output appears under its name when it is whole.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import AdapterBank, CausalLM, CheckpointError, ConfigError, load_peft, load_pretrained, read_config, token_logprobs
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.progress import Progress

_WINDOW = 2048  # lines read at a time
_TOKENS = 8192  # of one call of the device, unless a single line is longer


def main(arguments: Arguments) -> None:
    """Scores the file.

    Raises:
      InputError: the model or the adapter cannot be loaded, or a line of the input is not what it should be; the line is named.
    """
    source, target = pathlib.Path(arguments.input), pathlib.Path(arguments.output)
    try:
        config = read_config(arguments.model)
        total = _check_input(source, config.vocab_size)
        bank = load_peft(arguments.adapter, config) if arguments.adapter else None
        model = load_pretrained(arguments.model)
    except (ConfigError, CheckpointError) as error:
        raise InputError(str(error)) from error
    part = target.with_name(target.name + ".part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output={target}: {error.strerror}; give a file that can be written") from error
    try:
        with file, Progress({"score": 1.0}) as progress, progress.stage("score", total) as stage:
            lines = _read(source, config.vocab_size)
            while window := list(itertools.islice(lines, _WINDOW)):
                for logprobs in score(model, window, bank):
                    values = [None, *(round(float(x), 7) for x in logprobs[1:])] if len(logprobs) else []
                    file.write(json.dumps({"logprobs": values}) + "\n")
                stage.advance(len(window))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    print(f"{total:,} lines scored: {target}")


def score(model: CausalLM, rows: Sequence[np.ndarray], bank: AdapterBank | None = None) -> list[np.ndarray]:
    """The log-probs of each row's tokens, float32 of the row's length; the first of a row is 0.

    Rows go through the model padded to a power of two of tokens, so that a few programs serve all lengths.
    """
    graphdef, state = nnx.split(model)
    found: list[np.ndarray] = [np.zeros(len(row), np.float32) for row in rows]
    lengths = {index: 1 << max(5, (len(row) - 1).bit_length()) for index, row in enumerate(rows) if len(row) > 1}
    for length, group in itertools.groupby(sorted(lengths, key=lengths.get), lengths.get):
        indices, count = list(group), max(1, _TOKENS // length)
        for start in range(0, len(indices), count):
            chosen = indices[start : start + count]
            tokens, segments = np.zeros((2, count, length), np.int32)
            for row, index in enumerate(chosen):
                tokens[row, : len(rows[index])] = rows[index]
                segments[row, : len(rows[index])] = 1
            logprobs = np.asarray(_logprobs(graphdef, state, bank, tokens, segments))
            for row, index in enumerate(chosen):
                found[index][1:] = logprobs[row, : len(rows[index]) - 1]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(graphdef: nnx.GraphDef, state: nnx.State, bank: AdapterBank | None, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    hidden = model.forward(tokens, segment_ids=segments, adapters=bank).hidden
    return token_logprobs(model, hidden[:, :-1], jnp.asarray(tokens)[:, 1:])[0]


def _check_input(source: pathlib.Path, vocabulary: int) -> int:
    """The number of lines, all of them right; before any weight loads."""
    return sum(1 for _ in _read(source, vocabulary))


def _read(source: pathlib.Path, vocabulary: int) -> Iterator[np.ndarray]:
    try:
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _tokens(line, f"{source}:{number}", vocabulary)
    except OSError as error:
        raise InputError(f'--input={source}: {error.strerror}; give a file of lines {{"tokens": [...]}}') from error
    except UnicodeDecodeError as error:
        raise InputError(f"--input={source}: not UTF-8 text ({error.reason})") from error


def _tokens(line: str, where: str, vocabulary: int) -> np.ndarray:
    try:
        tokens = json.loads(line)["tokens"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f'{where}: expected {{"tokens": [...]}}, found {line.strip()[:60]!r}') from error
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InputError(f"{where}: tokens must be a list of integers")
    if odd := [token for token in tokens if not 0 <= token < vocabulary]:
        raise InputError(f"{where}: token {odd[0]} is not in the model's vocabulary of {vocabulary}")
    return np.asarray(tokens, np.int32)
