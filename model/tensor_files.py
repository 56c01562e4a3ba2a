"""Folders of safetensors files, local or `gs://`: any part of any tensor by name, and the files written back.

A host needs only the slices of its devices, and a checkpoint may be larger than its memory, so everything is read by byte range
(`model.files`). The reader parses the header itself, because the safetensors library maps local files only (which counts every page that
was touched as memory, and ends the process where a file shrinks) and its NumPy side has no float8.
The format is 8 bytes of length, a JSON header and the tensors without gaps: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.errors import CheckpointError
from model.files import BLOCK, File, exists, open_file, read_text

Index = tuple[slice, ...]

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
_DTYPES = {name: np.dtype(dtype) for name, dtype in _DTYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_ALIGNMENT = 64  # bytes: what JAX asks of an array that it adopts
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers too
_THREADS = 8  # reads of a block in flight, the memory beyond the result; google-cloud-storage keeps ten connections


@dataclass(frozen=True)
class _Tensor:
    file: File
    offset: int  # from the beginning of the file
    shape: tuple[int, ...]
    dtype: np.dtype


class TensorFiles:
    """All tensors of a folder by name; made by `open_tensors`. A context manager. Threads may share it."""

    def __init__(self, folder: str, tensors: Mapping[str, _Tensor], files: ExitStack, pool: ThreadPoolExecutor):
        self.folder = folder
        self._tensors, self._files, self._pool = tensors, files, pool

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensor(name).dtype

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """The elements `tensor[index]` of one tensor; see `read_all`."""
        return self.read_all([(name, index)])[0]

    def read_all(self, requests: Iterable[tuple[str, Index]]) -> list[np.ndarray]:
        """The elements `tensor[index]` of several tensors, read side by side, which hides the latency of a bucket.

        An index has at most one slice an axis, of step 1; axes that it leaves out are whole. The arrays are new, in row-major order and
        aligned to 64 bytes, so that JAX adopts them on a CPU instead of copying. What is read beyond their elements is less than `gap`
        bytes of a file between two runs of them. Raises `CheckpointError` if there is no such tensor or its file cannot be read.
        """
        results, reads = [], []
        for name, index in requests:
            tensor = self._tensor(name)
            result, jobs = _prepare(tensor, _box(index, tensor.shape, name))
            results.append(result)
            reads += [(name, tensor.file.url, self._pool.submit(job)) for job in jobs]
        try:
            for name, url, future in reads:
                try:
                    future.result()
                except OSError as error:
                    raise CheckpointError(f"{url}: tensor {name} cannot be read: {error}") from error
        finally:
            for _, _, future in reads:  # after a failure, what has not begun need not begin
                future.cancel()
        return results

    def close(self) -> None:
        self._pool.shutdown()  # first, for its reads need the files
        self._files.close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._tensors[name]


def _box(index: Index, shape: tuple[int, ...], name: str) -> list[range]:
    """The indices along each axis."""
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} slices of {name}, which has {len(shape)} axes")
    box = [range(*part.indices(size)) for part, size in itertools.zip_longest(index, shape, fillvalue=slice(None))]
    if any(part.step != 1 for part in box):
        raise IndexError(f"{name} is read in steps of 1, not by {index}")
    return box


def _prepare(tensor: _Tensor, box: list[range]) -> tuple[np.ndarray, list[Callable[[], None]]]:
    """The empty result of reading `box`, and the reads that fill it.

    Each read takes some rows of one axis, `depth`, whole, and cuts what it needs out of them. The axes before `depth` are walked; it is
    the first one for which little is cut away.
    """
    shape, itemsize, gap = tensor.shape or (1,), tensor.dtype.itemsize, tensor.file.gap
    result = _aligned_empty(tuple(len(part) for part in box), tensor.dtype)
    if not result.size:
        return result, []
    box = box or [range(1)]
    target = result.reshape([len(part) for part in box])
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    unread = [(size - len(part)) * stride for size, part, stride in zip(shape, box, strides, strict=True)]
    depth = next(axis for axis in range(len(shape)) if sum(unread[axis + 1 :]) <= gap)
    cut = tuple(slice(part.start, part.stop) for part in box[depth + 1 :])

    def read(start: int, part: np.ndarray) -> None:
        whole = part if not sum(unread[depth + 1 :]) else np.empty((len(part), *shape[depth + 1 :]), part.dtype)
        tensor.file.read_into(start, whole.reshape(-1).view(np.uint8).data)
        if whole is not part:
            part[...] = whole[:, *cut]

    reads, rows, step = [], box[depth], max(1, BLOCK // strides[depth])
    for outer in itertools.product(*box[:depth]):
        start = tensor.offset + sum(i * stride for i, stride in zip(outer, strides, strict=False))
        block = target[tuple(i - part.start for i, part in zip(outer, box, strict=False))]
        for row in range(0, len(rows), step):
            reads.append(functools.partial(read, start + rows[row] * strides[depth], block[row : row + step]))
    return result, reads


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def open_tensors(folder: str | Path, stem: str = "model") -> TensorFiles:
    """The tensors of `model.safetensors`, or else of the files that `model.safetensors.index.json` lists; `stem` replaces `model`.

    The first wins, as it does in transformers. Headers are read and checked here, tensors when they are asked for. Raises `CheckpointError`
    naming the file that is missing, cut short or no safetensors file, and the tensors on which index and files disagree.
    """
    single, index_name = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="tensor-files"))
        listed = None
        if not _checked(exists, folder, single):
            if not _checked(exists, folder, index_name):
                raise CheckpointError(
                    f"{os.path.join(folder, single)} does not exist, nor does {index_name}; point to a folder of safetensors files"
                )
            listed = _read_index(folder, index_name)
        names = sorted(set(listed.values())) if listed is not None else [single]
        futures = [pool.submit(_checked, open_file, folder, name) for name in names]
        for future in futures:  # all that opened are closed again if one did not
            if future.exception() is None:
                stack.enter_context(closing(future.result()))
        files = [future.result() for future in futures]
        found: dict[str, _Tensor] = {}
        for tensors in pool.map(_read_header, files):
            for name in sorted(found.keys() & tensors.keys()):
                raise CheckpointError(f"{found[name].file.url} and {tensors[name].file.url} both hold {name}; keep one of the two")
            found |= tensors
        for name, file in (listed or {}).items():
            if name not in found or os.path.basename(found[name].file.url) != file:
                raise CheckpointError(
                    f"{os.path.join(folder, index_name)} says that {file} holds {name}, which it does not; download both again"
                )
        return TensorFiles(str(folder), found, stack.pop_all(), pool)


def _checked(act: Callable[[str | Path, str], Any], folder: str | Path, name: str) -> Any:
    path = os.path.join(folder, name)
    try:
        return act(folder, name)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, but the index lists it; download it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error}") from error


def _read_index(folder: str | Path, index_name: str) -> dict[str, str]:
    """{tensor: file}"""
    try:
        listed = json.loads(_checked(read_text, folder, index_name))["weight_map"]
        if not listed or not all(isinstance(file, str) and file == os.path.basename(file) for file in listed.values()):
            raise ValueError("weight_map must give the name of a file for each tensor")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.path.join(folder, index_name)} is not a safetensors index: {error!r}; download it again") from None
    return listed


def _read_header(file: File) -> dict[str, _Tensor]:
    """Raises `CheckpointError` unless the header is sound and its tensors fill the rest of the file without a gap or an overlap."""

    def expect(condition: bool, reason: str) -> None:
        if not condition:
            raise CheckpointError(f"{file.url} is not a whole safetensors file ({reason}); download it again")

    def read(start: int, size: int) -> bytearray:
        data = bytearray(size)
        try:
            file.read_into(start, memoryview(data))
        except OSError as error:
            raise CheckpointError(f"{file.url} cannot be read: {error}") from error
        return data

    expect(file.size >= 8, f"it has {file.size} bytes")
    begin = 8 + int.from_bytes(read(0, 8), "little")
    expect(begin <= min(file.size, _HEADER_LIMIT), f"its header would take {begin} of {file.size} bytes")
    try:
        entries = json.loads(read(8, begin - 8))
        entries.pop("__metadata__", None)
        spans = [(*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expect(False, f"its header cannot be understood: {error!r}")
    tensors, end = {}, 0
    for span in spans:
        expect(len(span) == 5 and all(type(n) is int and n >= 0 for n in (*span[:2], *span[-1])), f"odd numbers for {span[-3]}")
    for start, stop, name, dtype, shape in sorted(spans, key=lambda span: span[:2]):
        expect(type(dtype) is str and dtype in _DTYPES, f"{name} has the unknown type {dtype}")
        expect(start == end, f"{name} begins at byte {start} of the tensors, the one before it ends at {end}")
        expect(stop - start == math.prod(shape) * _DTYPES[dtype].itemsize, f"{name} has {stop - start} bytes for {dtype} {list(shape)}")
        tensors[name], end = _Tensor(file, begin + start, shape, _DTYPES[dtype]), stop
    expect(begin + end == file.size, f"its tensors end at byte {begin + end}, the file at {file.size}")
    return tensors


@dataclass(frozen=True)
class LazyTensor:
    """An array of known shape and dtype that is made when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], Any]  # gives a NumPy or JAX array


def write_tensors(folder: str | Path, tensors: Mapping[str, Any], *, stem: str = "model", shard_bytes: int = 5_000_000_000) -> None:
    """Writes `model.safetensors`, or if that were longer than `shard_bytes`, `model-00001-of-0000N.safetensors` ... and their index.

    Values are NumPy arrays, JAX arrays or `LazyTensor`s; one at a time is in memory. Files appear under their names when all are whole, the
    index last, and older files of the same `stem` are removed. `folder` is local and is made if need be.
    """
    if str(folder).startswith("gs:"):
        raise ValueError(f"{folder}: tensors are written to local folders only; write there and copy the folder to the bucket")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _into_shards(tensors, shard_bytes)
    index = folder / f"{stem}.safetensors.index.json"
    paths = [folder / f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    paths = [*paths, index] if len(shards) > 1 else [folder / f"{stem}.safetensors"]
    parts = [path.with_name(f"{path.name}.part") for path in paths]
    try:
        for part, names in zip(parts, shards, strict=False):
            _write_file(part, {name: tensors[name] for name in names})
        if len(shards) > 1:
            weight_map = {name: path.name for path, names in zip(paths, shards, strict=False) for name in names}
            metadata = {"total_size": sum(map(_bytes, tensors.values()))}
            parts[-1].write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
            index.unlink(missing_ok=True)  # an old index must not name new files
        for part, path in zip(parts, paths, strict=True):
            os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    for path in folder.iterdir():
        if path not in paths and re.fullmatch(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", path.name):
            path.unlink()


def _bytes(tensor: Any) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _into_shards(tensors: Mapping[str, Any], shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a file would grow beyond `shard_bytes`; at least one file, and one tensor a file."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _bytes(tensor) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(tensor)
    return shards


def _write_file(path: Path, tensors: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    # wide elements first, as the library does: each tensor is then aligned to its own
    names = sorted(tensors, key=lambda name: -np.dtype(tensors[name].dtype).itemsize)
    for name in names:
        start, end = end, end + _bytes(tensors[name])
        dtype = np.dtype(tensors[name].dtype)
        if dtype not in _NAMES:
            raise ValueError(f"{name} is {dtype}, which safetensors does not have")
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors[name]
            array = np.asarray(tensor.make() if isinstance(tensor, LazyTensor) else tensor)
            if (array.shape, array.dtype) != (tuple(tensor.shape), np.dtype(tensor.dtype)):
                raise ValueError(f"{name} was announced as {tensor.dtype} {tuple(tensor.shape)} and is {array.dtype} {array.shape}")
            rows = array if array.ndim else array[None]
            step = max(1, BLOCK * len(rows) // max(1, array.nbytes))
            for row in range(0, len(rows), step):  # by blocks, for a transposed array is copied here
                file.write(np.ascontiguousarray(rows[row : row + step]).reshape(-1).view(np.uint8).data)
            del array, rows
        file.flush()
        os.fsync(file.fileno())
