"""Safetensors files by their headers: reading what the library wrote, writing what it would write, and refusing broken files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.quant.shards import CheckpointError, Shards, ShardWriter, file_bytes, file_digest, read_header
from tests.support import random_m3, stored

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    f = torch.randn(6, 8, generator=g)
    return {
        "b": f.bfloat16(),
        "a": f,
        "half": f.half(),
        "codes": (f * 50).to(torch.uint8),
        "scale": f.to(torch.float8_e4m3fn),
        "exponents": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "scalar": torch.tensor(3.5),
        "é": torch.arange(3),
        "none": torch.zeros(0, 4),
    }


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def test_reads_what_safetensors_wrote(tensors, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    shards = Shards(tmp_path)
    assert set(shards.entries) == set(tensors)
    for name, want in tensors.items():
        got = shards.read(name)
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want)), name


def test_writes_the_bytes_that_safetensors_writes(tensors, tmp_path):
    from samebits.quant.shards import DTYPE_NAMES

    save_file(tensors, tmp_path / "want.safetensors", {"format": "pt"})
    specs = {n: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
    with ShardWriter(tmp_path / "got.safetensors", specs) as writer:
        for name, t in reversed(tensors.items()):
            for part in t.split(4) if t.dim() == 2 and len(t) else [t]:
                writer.write(name, part)
        assert not (tmp_path / "got.safetensors").exists()
    assert (tmp_path / "got.safetensors").read_bytes() == (tmp_path / "want.safetensors").read_bytes()
    assert file_bytes(specs) == (tmp_path / "want.safetensors").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["got.safetensors", "want.safetensors"]


def test_an_unfinished_file_never_gets_its_name(tmp_path):
    specs = {"a": ("F32", (4, 2)), "b": ("U8", (3,))}
    with pytest.raises(ValueError, match="b: 0 of 3 bytes"), ShardWriter(tmp_path / "x.safetensors", specs) as writer:
        writer.write("a", torch.zeros(4, 2))
    with pytest.raises(ValueError, match="a: more was written"), ShardWriter(tmp_path / "x.safetensors", specs) as writer:
        writer.write("a", torch.zeros(5, 2))
    with pytest.raises(ValueError, match="a is torch.float16, not F32"), ShardWriter(tmp_path / "x.safetensors", specs) as writer:
        writer.write("a", torch.zeros(4, 2).half())
    assert not list(tmp_path.iterdir())


def test_a_file_cut_anywhere_is_called_truncated(tensors, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 40, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"^{path} is truncated: "):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="does not match its header"):
        read_header(path)


def test_a_file_cut_after_it_was_opened_is_called_truncated(tensors, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    shards = Shards(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    last = max(shards.entries, key=lambda n: shards.entries[n].start + shards.entries[n].nbytes)
    with pytest.raises(CheckpointError, match="is truncated: it ends inside a tensor"):
        shards.read(last)


def _file(header: str | bytes, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is no safetensors file"),
        (_file("{ no json"), "header is unreadable"),
        (_file("[]"), "header is unreadable"),
        (_file(b"\xff\xfe"), "header is unreadable"),
        (_file('{"a": {"dtype": "U8", "shape": [-2], "data_offsets": [0, 2]}}', b"12"), "header is unreadable"),
        (_file('{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"1"), "dtype 'F4', which is not supported"),
        (_file('{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}', b"12"), "tensor a a place"),
        (_file('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', b"123"), "tensor a a place"),
        (
            _file(
                '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
                b"123",
            ),
            "tensor b a place",
        ),
        (
            _file(
                '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
                b"1",
            ),
            "a is there twice",
        ),
    ],
)
def test_broken_headers_are_refused(content, message, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{message}"):
        Shards(tmp_path)


@pytest.fixture
def two(tmp_path):
    return stored.write(tmp_path / "two", {n: torch.full((2,), i) for i, n in enumerate("abcd")}, shards=2)


def _edit(folder, **changes):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"][name] = file
        if file is None:
            del index["weight_map"][name]
    path.write_text(json.dumps(index))


def test_index_and_files_must_agree(two):
    assert set(Shards(two).entries) == set("abcd")
    _edit(two, d=None)
    with pytest.raises(CheckpointError, match=f"{B}: tensor d has no entry in"):
        Shards(two)
    _edit(two, d=A)
    with pytest.raises(CheckpointError, match=f"places tensor d in {A}, but {B} holds it"):
        Shards(two)
    _edit(two, d=B, e=A)
    with pytest.raises(CheckpointError, match=f"{A}: tensor e is missing"):
        Shards(two)
    _edit(two, e=None, d="../d.safetensors")
    with pytest.raises(CheckpointError, match="is no index"):
        Shards(two)
    (two / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no index"):
        Shards(two)


@pytest.mark.parametrize("index", [True, False])
def test_missing_and_left_over_shards_are_named(two, index):
    if not index:
        (two / "model.safetensors.index.json").unlink()
    data = (two / A).read_bytes()
    (two / A).unlink()
    with pytest.raises(CheckpointError, match=f"shard {A} is missing"):
        Shards(two)
    (two / A).write_bytes(data)
    (two / "other.safetensors").write_bytes(data)
    message = "other.safetensors is not named by" if index else f"tensor a is both in {A} and in other.safetensors"
    with pytest.raises(CheckpointError, match=message):
        Shards(two)


def test_a_tensor_in_two_shards_is_named(two):
    save_file({"b": torch.zeros(2), "d": torch.zeros(2), "a": torch.zeros(2)}, two / B)
    with pytest.raises(CheckpointError, match=f"tensor a is both in {A} and in {B}"):
        Shards(two)


def test_digest_is_of_the_whole_file(two):
    before = file_digest(two / A)
    data = bytearray((two / A).read_bytes())
    data[-1] ^= 1
    (two / A).write_bytes(data)
    assert file_digest(two / A) != before and len(before) == 32


# ------------------------------------------------------------------------------------------------------- sharded checkpoints


def test_checkpoint_opens_shards_by_the_index_and_reads_no_data_then(tmp_path, monkeypatch):
    from samebits.quant import shards as module
    from samebits.quant.checkpoint import quantization_config, quantize_tensors

    profile, source = get_profile("w4a16"), random_m3.tensors()
    quantized = quantize_tensors(source, profile)
    config = random_m3.config() | {
        "quantization_config": quantization_config(source, profile),
        "samebits": {"profile": "w4a16", "weights_hash": profile.weights_hash},
    }
    stored.write(tmp_path, quantized | {"vision_tower.x": torch.ones(2)}, shards=5, config=config)
    with monkeypatch.context() as patch:
        patch.setattr(module.Entry, "read", lambda self: pytest.fail("data was read"))
        checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.names) == set(quantized)
    for name, want in quantized.items():
        assert torch.equal(bits(checkpoint.tensor(name)), bits(want))
    (tmp_path / "model-00003-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard model-00003-of-00005.safetensors is missing"):
        Checkpoint(tmp_path)


def test_checkpoint_names_truncated_files_and_doubled_tensors(tmp_path):
    folder = random_m3.build(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"^{path} is truncated"):
        Checkpoint(folder)
    tensors = load_file(folder / "model.safetensors") if path.write_bytes(whole) else {}
    save_file(tensors | {"language_model.model.norm.weight": tensors["model.norm.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is there as .*model\.norm\.weight and as .*model\.norm\.weight"):
        Checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is unreadable"):
        Checkpoint(folder)
