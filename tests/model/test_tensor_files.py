"""Any part of any tensor of a folder or bucket, byte for byte what the safetensors library stored, and nothing else read."""

import json
import os
import subprocess
import sys
import weakref

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from model import tensor_files
from model.errors import CheckpointError
from model.files import BucketFile, DiskFile, exists, read_text
from model.tensor_files import LazyTensor, open_tensors, write_tensors

DTYPES = ["float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
BOXES = [
    (),
    (slice(2, 5),),
    (slice(None), slice(3, 4)),
    (slice(None), slice(None), slice(1, 3)),
    (slice(1, 4), slice(2, 7), slice(0, 2)),
    (slice(-2, None), slice(None), slice(4, 100)),
    (slice(3, 3),),
]


def random(shape, dtype, seed=0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 50).astype(dtype)


@pytest.fixture(params=["local", "bucket"])
def stored(request, tmp_path):
    """Saves tensors with the safetensors library and gives their folder, on disk or in a bucket."""
    upload = request.getfixturevalue("bucket").upload if request.param == "bucket" else lambda folder: folder

    def store(tensors, stem="model"):
        save_file(tensors, tmp_path / f"{stem}.safetensors")
        return upload(tmp_path)

    return store


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """(start, bytes) of every read of a file."""
    seen = []
    for kind in (DiskFile, BucketFile):

        def read_into(self, start, target, original=kind.read_into):
            seen.append((start, len(target)))
            original(self, start, target)

        monkeypatch.setattr(kind, "read_into", read_into)
    return seen


def test_every_type_and_shape_comes_back(stored):
    tensors = {str(np.dtype(dtype)): random((3, 5), dtype) for dtype in DTYPES}
    tensors |= {"scalar": np.array(2.5, np.float32), "row": random((7,), "float32"), "empty": np.zeros((0, 4), np.float32)}
    with open_tensors(stored(tensors)) as files:
        assert sorted(files.names()) == sorted(tensors)
        for name, expected in tensors.items():
            got = files.read(name)
            assert (files.shape(name), files.dtype(name)) == (got.shape, got.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(got, expected)
            assert got.ctypes.data % 64 == 0 or not got.size


@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
def test_slices_of_each_axis(stored, monkeypatch, gap):
    monkeypatch.setattr(tensor_files, "BLOCK", 100)
    for kind in (DiskFile, BucketFile):
        monkeypatch.setattr(kind, "gap", gap)
    x = random((5, 8, 6), ml_dtypes.bfloat16)
    with open_tensors(stored({"other": random((9,), "float32"), "x": x})) as files:
        for box, got in zip(BOXES, files.read_all([("x", box) for box in BOXES]), strict=True):
            np.testing.assert_array_equal(got, x[box], err_msg=str(box))
        with pytest.raises(IndexError, match="steps of 1"):
            files.read("x", (slice(0, 4, 2),))
        with pytest.raises(IndexError, match="4 slices of x, which has 3 axes"):
            files.read("x", (slice(None),) * 4)


def test_only_what_is_asked_for_is_read(stored, reads, monkeypatch):
    for kind in (DiskFile, BucketFile):
        monkeypatch.setattr(kind, "gap", 0)
    x = random((64, 32, 16), "float32")
    with open_tensors(stored({"x": x, "y": x})) as files:
        for box in [(slice(8, 16),), (slice(None), slice(4, 8)), (slice(0, 2), slice(None), slice(3, 5)), (slice(5, 5),)]:
            reads.clear()
            files.read("x", box)
            assert sum(size for _, size in reads) == x[box].nbytes


def test_short_gaps_are_read_in_one_go(stored, reads):
    x = random((64, 32), "float32")
    with open_tensors(stored({"x": x})) as files:
        reads.clear()
        np.testing.assert_array_equal(files.read("x", (slice(10, 20), slice(3, 5))), x[10:20, 3:5])
        assert [size for _, size in reads] == [10 * 32 * 4]


def test_a_bucket_is_read_by_ranges_of_one_generation(bucket, tmp_path, monkeypatch):
    from google.api_core.exceptions import PreconditionFailed
    from google.cloud.storage import Blob

    ranges, download = [], Blob.download_as_bytes

    def spy(self, **options):
        ranges.append((options["start"], options["end"]))
        if self.bucket.get_blob(self.name).generation != options["if_generation_match"]:  # the emulator does not look at it
            raise PreconditionFailed("conditionNotMet")
        return download(self, **options)

    monkeypatch.setattr(Blob, "download_as_bytes", spy)
    monkeypatch.setattr("model.files.BLOCK", 1024)
    monkeypatch.setattr(tensor_files, "BLOCK", 1024)
    x = random((64, 32), "float32")
    save_file({"x": x}, tmp_path / "model.safetensors")
    folder = bucket.upload(tmp_path, "deep/down")
    with open_tensors(folder) as files:
        ranges.clear()
        np.testing.assert_array_equal(files.read("x", (slice(10, 30),)), x[10:30])
        header = (tmp_path / "model.safetensors").stat().st_size - x.nbytes
        assert sorted(ranges) == [(header + row * 128, header + min(row + 8, 30) * 128 - 1) for row in (10, 18, 26)]
        bucket.put("deep/down/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match="tensor x cannot be read: gs://.*model.safetensors was replaced or deleted while"):
            files.read("x")


def test_small_files_of_folders_and_buckets(bucket, tmp_path):
    (tmp_path / "config.json").write_text('{"größe": 1}', encoding="utf-8")
    (tmp_path / "empty").touch()
    url = bucket.upload(tmp_path)
    for folder in (tmp_path, url, url + "/", url.replace("//", "/")):
        assert json.loads(read_text(folder, "config.json")) == {"größe": 1}
        assert read_text(folder, "empty") == ""
        assert exists(folder, "config.json")
        assert not exists(folder, "generation_config.json")
        with pytest.raises(FileNotFoundError, match="generation_config.json"):
            read_text(folder, "generation_config.json")


def test_the_bucket_library_is_imported_only_for_buckets(tmp_path):
    save_file({"x": random((2,), "float32")}, tmp_path / "model.safetensors")
    code = f"import sys; from model.tensor_files import open_tensors; open_tensors({str(tmp_path)!r}).close()"
    code += "; assert not any(name.startswith('google.') for name in sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "."})


def header(entries, data=b"", metadata=None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start, stop, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"abc", "it has 3 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header would take"),
        (header(b"{not json}"), "cannot be understood"),
        (header(b"\xff\xfe{}"), "cannot be understood"),
        (header([1, 2]), "cannot be understood"),
        (header({"x": {"dtype": "F32"}}), "cannot be understood: KeyError"),
        (header({"x": entry(0, 8)}, bytes(4)), "tensors end at byte .* the file at"),
        (header({"x": entry(0, 8)}, bytes(12)), "tensors end at byte .* the file at"),
        (header({"x": entry(0, 12)}, bytes(12)), r"x has 12 bytes for F32 \[2\]"),
        (header({"x": entry(0, 8), "y": entry(4, 12)}, bytes(12)), "y begins at byte 4 of the tensors, the one before it ends at 8"),
        (header({"x": entry(0, 8), "y": entry(12, 20)}, bytes(20)), "y begins at byte 12"),
        (header({"x": entry(0, 1, "F4")}, bytes(1)), "x has the unknown type F4"),
        (header({"x": entry(0, 8, ["F32"])}, bytes(8)), "x has the unknown type"),
        (header({"x": entry(0, 8, shape=(-2,))}, bytes(8)), "odd numbers for x"),
        (header({"x": entry(0, 8, shape=(2.0,))}, bytes(8)), "odd numbers for x"),
        (header({"x": entry(0, 8) | {"data_offsets": [0, 4, 8]}}, bytes(8)), "odd numbers for x"),
    ],
)
def test_files_that_are_not_whole_are_refused(tmp_path, content, reason):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors is not a whole safetensors file .*{reason}.*; download it again"):
        open_tensors(tmp_path)


def test_a_truncated_download_is_refused(stored, tmp_path, request):
    save_file({"x": random((50,), "float32")}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "whole.safetensors").unlink()
    folder = stored({"x": random((5,), "float32")})
    if str(folder).startswith("gs:"):
        request.getfixturevalue("bucket").put("checkpoint/model.safetensors", content[:-4])
    else:
        (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match="model.safetensors is not a whole safetensors file"):
        open_tensors(folder)


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path):
    save_file({"x": random((50,), "float32")}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as files:
        os.truncate(tmp_path / "model.safetensors", 100)
        with pytest.raises(CheckpointError, match="model.safetensors: tensor x cannot be read: the file ends at byte 100"):
            files.read("x")


@pytest.fixture(params=["local", "bucket"])
def sharded(request, tmp_path):
    """Two shards and their index; gives the function that finishes the folder."""
    save_file({"x": random((4,), "float32")}, tmp_path / "model-1.safetensors")
    save_file({"y": random((4,), "float32")}, tmp_path / "model-2.safetensors")

    def finish(weight_map):
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (tmp_path / "model.safetensors.index.json").write_text(text)
        return request.getfixturevalue("bucket").upload(tmp_path) if request.param == "bucket" else tmp_path

    return finish


BOTH = {"x": "model-1.safetensors", "y": "model-2.safetensors"}


def test_an_index_leads_to_its_files(sharded, tmp_path):
    with open_tensors(sharded(BOTH)) as files:
        np.testing.assert_array_equal(files.read("y"), load_file(tmp_path / "model-2.safetensors")["y"])
        assert files.names() == ["x", "y"]
        with pytest.raises(CheckpointError, match="has no tensor z"):
            files.read("z")


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (BOTH | {"z": "model-3.safetensors"}, "model-3.safetensors does not exist, but the index lists it; download it"),
        (BOTH | {"z": "model-1.safetensors"}, "index.json says that model-1.safetensors holds z, which it does not; download both"),
        (BOTH | {"x": "model-2.safetensors", "z": "model-1.safetensors"}, "says that model-2.safetensors holds x, which it does not"),
        (BOTH | {"x": "../model-1.safetensors"}, "index.json is not a safetensors index: .*name of a file"),
        ({}, "index.json is not a safetensors index"),
        ("{}", "index.json is not a safetensors index: KeyError"),
        ("[", "index.json is not a safetensors index: JSONDecodeError"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(sharded, weight_map, reason):
    with pytest.raises(CheckpointError, match=reason):
        open_tensors(sharded(weight_map))


def test_a_tensor_in_two_files_is_refused(sharded, tmp_path):
    save_file({"x": random((4,), "float32"), "y": random((4,), "float32")}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="model-1.safetensors and .*model-2.safetensors both hold x; keep one"):
        open_tensors(sharded(BOTH))


def test_missing_folders_are_named(bucket, tmp_path):
    for folder in (tmp_path / "nowhere", bucket.url, "gs://no-such-bucket/model"):
        with pytest.raises(CheckpointError, match="model.safetensors does not exist, nor does model.safetensors.index.json"):
            open_tensors(folder)


def test_no_descriptor_is_left_open(sharded, tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd"))

    folder = sharded(BOTH)
    open_tensors(folder).close()  # the connections to a bucket stay
    before = count()
    open_tensors(folder).close()
    (tmp_path / "model-2.safetensors").write_bytes(b"short")
    if not str(folder).startswith("gs:"):
        with pytest.raises(CheckpointError):
            open_tensors(folder)
    assert count() == before


MIXED = {"odd": random((3,), "int8"), "w": random((5, 4), ml_dtypes.bfloat16), "a": random((7,), "float32"), "s": np.array(3, np.float32)}


def test_one_file_that_safetensors_reads(tmp_path):
    write_tensors(tmp_path / "new", MIXED | {"jax": jnp.arange(6.0).reshape(2, 3)})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    got = load_torch(tmp_path / "new" / "model.safetensors")
    assert got.keys() == MIXED.keys() | {"jax"}
    for name, expected in MIXED.items():
        assert str(got[name].dtype).removeprefix("torch.") == expected.dtype.name
        np.testing.assert_array_equal(got[name].float().numpy(), np.asarray(expected, np.float32))
    with open_tensors(tmp_path / "new") as files:
        for name, expected in MIXED.items():
            np.testing.assert_array_equal(files.read(name), expected)


def test_shards_that_safetensors_and_transformers_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    net = transformers.Qwen3ForCausalLM(config)
    config.save_pretrained(tmp_path)
    tensors = {name: x.detach().numpy() for name, x in net.named_parameters()}
    write_tensors(tmp_path, tensors, shard_bytes=4000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all((tmp_path / name).stat().st_size < 4000 + 1000 for name in names)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    merged = {name: x for path in tmp_path.glob("*.safetensors") for name, x in load_file(path).items()}
    again = dict(transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).named_parameters())
    with open_tensors(tmp_path) as files:
        assert files.names() and set(files.names()) == merged.keys() == tensors.keys() == index["weight_map"].keys()
        for name, expected in tensors.items():
            for got in (merged[name], again[name].detach().numpy(), files.read(name)):
                np.testing.assert_array_equal(got, expected)


def test_lazy_tensors_are_made_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK", 64)
    x = random((9, 6), "float32")
    alive = [0, 0]

    def gone():
        alive[0] -= 1

    def make():
        alive[0] += 1
        alive[1] = max(alive)
        value = x.T.copy()
        weakref.finalize(value, gone)
        return value.T  # not contiguous

    write_tensors(tmp_path, {f"t{i}": LazyTensor((9, 6), np.float32, make) for i in range(4)}, shard_bytes=500)
    assert alive == [0, 1]
    with open_tensors(tmp_path) as files:
        for name in files.names():
            np.testing.assert_array_equal(files.read(name), x)


def test_a_failed_write_leaves_the_old_files(tmp_path):
    write_tensors(tmp_path, MIXED, shard_bytes=30)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for bad, error in [
        (LazyTensor((3,), np.float32, lambda: np.zeros(4, np.float32)), "announced as .*float32.* \\(3,\\) and is float32 \\(4,\\)"),
        (np.array(["text"]), "bad is <U4, which safetensors does not have"),
    ]:
        with pytest.raises(ValueError, match=error):
            write_tensors(tmp_path, {"good": MIXED["w"], "bad": bad}, shard_bytes=30)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="local folders only"):
        write_tensors("gs://bucket/model", MIXED)


def test_older_files_of_the_same_name_are_removed(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "model-of-mine.safetensors").touch()
    kept = {"config.json", "model-of-mine.safetensors"}
    for shard_bytes, count in [(1000, 1), (30, 4), (50, 2), (1000, 1)]:
        write_tensors(tmp_path, MIXED, shard_bytes=shard_bytes)
        names = {path.name for path in tmp_path.iterdir()} - kept
        assert len(names) == count + (count > 1) and kept < {path.name for path in tmp_path.iterdir()}
        with open_tensors(tmp_path) as files:
            assert sorted(files.names()) == sorted(MIXED)
    write_tensors(tmp_path, {"lora": MIXED["a"]}, stem="adapter_model")
    with open_tensors(tmp_path, "adapter_model") as files:
        assert files.names() == ["lora"]
