"""`convert`: the bytes of a converted checkpoint, whatever the shards, workers, kills and source formats; and refusals before any write."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits.quant import convert as module
from samebits.quant import nvfp4
from samebits.quant.checkpoint import Checkpoint, quantize_tensors, write_checkpoint
from samebits.quant.convert import STATE, convert
from samebits.quant.nvfp4 import NonFiniteWeight, NVFP4Tensor
from samebits.quant.profile import get_profile
from samebits.quant.shards import INDEX, CheckpointError
from tests.support import random_m3, stored

PROFILE = get_profile("w4a16")
SIDE = (
    "tokenizer.json tokenizer_config.json vocab.json merges.txt spiece.model qwen.tiktoken added_tokens.json special_tokens_map.json "
    "chat_template.json tools.jinja generation_config.json preprocessor_config.json LICENSE modeling_x.py"
).split()
EXPERT = "model.layers.2.block_sparse_moe.experts.5."


@pytest.fixture(scope="module")
def tensors():
    return random_m3.tensors()


@pytest.fixture(scope="module")
def want(tensors):
    return quantize_tensors(tensors, PROFILE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, tensors):
    """Six shards, dealt round robin: most gates lie apart from their ups."""
    folder = stored.write(tmp_path_factory.mktemp("source"), tensors, shards=6)
    for name in SIDE:
        (folder / name).write_text(f"this is {name}")
    (folder / "notes.txt").write_text("not copied")
    (folder / "hf_quant_config.json").write_text("not copied")
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory, sharded):
    folder = tmp_path_factory.mktemp("converted") / "out"
    convert(sharded, folder, PROFILE, workers=1)
    return folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def held(folder) -> dict[str, torch.Tensor]:
    return {n: t for p in sorted(folder.glob("*.safetensors")) for n, t in load_file(p).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def bits(t):
        return t.reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(bits(a[n]), bits(b[n])) for n in a
    )


# ------------------------------------------------------------------------------------------------------------------ what is written


def test_one_file_is_byte_equal_to_a_written_checkpoint(tmp_path, tensors):
    source = stored.write(tmp_path / "source", tensors)
    convert(source, tmp_path / "out", PROFILE)
    write_checkpoint(tmp_path / "want", tensors, random_m3.config(), PROFILE)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "want/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "want/config.json").read_text())


def test_shards_hold_the_reference_s_tensors(converted, want):
    assert same(held(converted), want)
    index = json.loads((converted / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(converted / file)
    checkpoint = Checkpoint(converted)
    assert set(checkpoint.names) == set(want) and checkpoint.weights_hash == PROFILE.weights_hash
    for shard, file in enumerate(sorted(p.name for p in converted.glob("*.safetensors")), 1):
        assert file == f"model-{shard:05d}-of-00006.safetensors"


def test_gate_and_up_in_different_shards_share_their_scale(sharded, converted):
    placed = json.loads((sharded / INDEX).read_text())["weight_map"]
    apart = [n for n in placed if n.endswith(".w1.weight") and placed[n] != placed[n.replace(".w1.", ".w3.")]]
    assert len(apart) > 8
    found = held(converted)
    for name in apart:
        scale = name + "_scale_2"
        assert torch.equal(found[scale], found[scale.replace(".w1.", ".w3.")])


def test_side_files_are_copied_and_nothing_else(sharded, converted):
    assert {p.name for p in converted.iterdir() if p.suffix != ".safetensors"} == {*SIDE, "config.json", INDEX}
    for name in SIDE:
        assert (converted / name).read_bytes() == (sharded / name).read_bytes()


def test_bytes_do_not_depend_on_workers(sharded, converted, tmp_path):
    for workers in (2, 6):
        convert(sharded, tmp_path / str(workers), PROFILE, workers=workers)
        assert contents(tmp_path / str(workers)) == contents(converted)


def test_bytes_do_not_depend_on_how_a_matrix_is_cut(sharded, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 300)
    convert(sharded, tmp_path / "out", PROFILE)
    assert contents(tmp_path / "out") == contents(converted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_quantized_by_the_same_rules(tmp_path, tensors, dtype):
    source = {n: t.to(dtype) for n, t in tensors.items()}
    stored.write(tmp_path / "source", source, shards=3)
    convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert same(held(tmp_path / "out"), quantize_tensors(source, PROFILE))


def test_prefixed_vision_language_checkpoint(tmp_path, tensors, want):
    source = {f"language_model.{n}": t for n, t in tensors.items()}
    vision = {"vision_tower.vision_model.x.weight": torch.randn(3, 5), "patch_merge_mlp.linear_1.bias": torch.randn(4).bfloat16()}
    mtp = {"language_model.model.mtp.layers.0.enorm.weight": torch.zeros(4), "mtp.layers.0.hnorm.weight": torch.zeros(4)}
    config = random_m3.config()
    config["text_config"]["num_mtp_modules"] = 1
    stored.write(tmp_path / "source", source | vision | mtp, shards=4, config=config)
    report = convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert same(held(tmp_path / "out"), {f"language_model.{n}": t for n, t in want.items()} | vision)
    assert report.left_out == {"tensors of the MTP module": 2}
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["num_mtp_modules"] == 0
    assert "language_model.model.layers.0.self_attn.q_proj" in written["quantization_config"]["quantized_layers"]
    assert not any("vision" in n for n in written["quantization_config"]["quantized_layers"])
    assert set(Checkpoint(tmp_path / "out").names) == set(want)


def test_memory_holds_one_module_at_a_time(tmp_path, monkeypatch):
    """At no time do tensors that were read weigh more than the largest pair of experts and a little."""
    import weakref

    from samebits.quant import shards

    big = random_m3.tensors(hidden=256, intermediate=512, experts=16)
    source = stored.write(tmp_path / "source", big, shards=2, config=random_m3.config(hidden=256, intermediate=512, experts=16))
    alive, peak = 0, 0
    read = shards.Entry.read

    def counted(self):
        nonlocal alive, peak
        t = read(self)
        alive += t.nbytes
        peak = max(peak, alive)

        def gone(size=t.nbytes):
            nonlocal alive
            alive -= size

        weakref.finalize(t, gone)
        return t

    monkeypatch.setattr(shards.Entry, "read", counted)
    convert(source, tmp_path / "out", PROFILE, workers=1)
    largest = max(t.nbytes for t in big.values())
    assert largest <= peak <= 4 * largest < sum(t.nbytes for t in big.values()) / 10


# ------------------------------------------------------------------------------------------------------------- foreign checkpoints


def test_modelopt_is_taken_over_byte_for_byte(tmp_path, tensors, want):
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = random_m3.config() | {"quantization_config": declared, "compression_config": {}}
    config["text_config"]["quantization_config"] = declared
    source = stored.modelopt(tensors) | {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}
    stored.write(tmp_path / "source", source, shards=5, config=config)
    report = convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert same(held(tmp_path / "out"), want)
    assert report.taken_over == 2 * 8 * 3 + sum(n.endswith("_proj.weight") for n in tensors)
    assert report.left_out == {
        "activation scales, which profile w4a16 does not use": 48,
        "KV cache scales; profiles write the cache with scale 1": 1,
    }
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["quantization_config"]["producer"] == {"name": "samebits"}
    assert "compression_config" not in written and "quantization_config" not in written["text_config"]


def test_a_samebits_checkpoint_is_taken_over_byte_for_byte(converted, want, tmp_path):
    convert(converted, tmp_path / "out", PROFILE)
    assert contents(tmp_path / "out") == contents(converted)


def test_w4a4_keeps_activation_scales(tmp_path, tensors):
    source = stored.modelopt(tensors)
    stored.write(tmp_path / "source", source)
    convert(tmp_path / "source", tmp_path / "out", get_profile("w4a4"))
    assert same(held(tmp_path / "out"), {n: t.float() if n.endswith("gate.weight") else t for n, t in source.items()})


def test_minimax_mxfp8_with_experts_in_16_bits(tmp_path, tensors, want):
    config = random_m3.config() | {"quantization_config": {"quant_method": "mxfp8"}}
    stored.write(tmp_path / "source", stored.minimax(tensors), shards=3, config=config)
    convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert same(held(tmp_path / "out"), want)


def test_compressed_tensors_scales_become_multiplicative(tmp_path, tensors):
    def dividing(ts, name):
        return 1 / stored.pair_scale(ts, name)

    source = stored.compressed_tensors(tensors, dividing)
    config = random_m3.config() | {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}
    stored.write(tmp_path / "source", source, shards=5, config=config)
    convert(tmp_path / "source", tmp_path / "out", PROFILE)
    found = held(tmp_path / "out")
    for e in range(8):
        for leaf in ("w1", "w2", "w3"):
            name = f"model.layers.1.block_sparse_moe.experts.{e}.{leaf}.weight"
            assert torch.equal(found[name], source[f"{name}_packed"])
            assert torch.equal(found[f"{name}_scale"].view(torch.uint8), source[f"{name}_scale"].view(torch.uint8))
            assert torch.equal(found[f"{name}_scale_2"], 1 / source[f"{name}_global_scale"].reshape(()))
    Checkpoint(tmp_path / "out").weight(f"{EXPERT}w1")


def test_pairs_whose_scales_differ_by_a_power_of_two_are_joined(tmp_path, tensors):
    def scale(ts, name):
        return torch.tensor(2.0**-10 if ".w1." in name else 2.0**-8)

    source = stored.modelopt(tensors, scale)
    stored.write(tmp_path / "source", source, shards=5)
    convert(tmp_path / "source", tmp_path / "out", PROFILE)
    checkpoint, found = Checkpoint(tmp_path / "out"), held(tmp_path / "out")
    changed = 0
    for name in source:
        if not name.endswith((".w1.weight", ".w3.weight")):
            continue
        assert found[f"{name}_scale_2"] == found[f"{name}_scale_2".replace(".w3.", ".w1.")]
        old = NVFP4Tensor(source[name], source[f"{name}_scale"].view(torch.uint8), source[f"{name}_scale_2"])
        new = checkpoint.weight(name.removesuffix(".weight"))
        assert torch.equal(nvfp4.dequantize(new).view(torch.int32), nvfp4.dequantize(old).view(torch.int32))
        changed += not torch.equal(new.block_scales, old.block_scales)
    assert changed == 16  # every gate's


def test_other_pairs_are_refused_with_layer_and_expert(tmp_path, tensors):
    def scale(ts, name):
        return stored.amax(ts[name]) / 2688  # each its own, as some tools leave them

    stored.write(tmp_path / "source", stored.modelopt(tensors, scale))
    with pytest.raises(CheckpointError, match=r"model\.layers\.\d\.block_sparse_moe\.experts\.\d\.w1.* and .*w3.* cannot be made one"):
        convert(tmp_path / "source", tmp_path / "out", PROFILE)


def test_a_pair_in_two_formats_is_refused(tmp_path, tensors):
    up = {n: t for n, t in stored.modelopt(tensors).items() if f"{EXPERT}w3" in n}
    stored.write(tmp_path / "source", tensors | up)
    with pytest.raises(CheckpointError, match=f"{EXPERT}w1 and .*{EXPERT}w3 are stored in different formats"):
        convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert not (tmp_path / "out").exists()


def test_nothing_is_quantized_twice(tmp_path, tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    t = nvfp4.quantize(tensors[name])
    source = {n: w for n, w in tensors.items() if n != name}
    source |= {name: t.codes, f"{name}_scale": t.block_scales.view(torch.float8_e4m3fn), f"{name}_scale_2": t.global_scale}
    stored.write(tmp_path / "source", source)
    with pytest.raises(CheckpointError, match=f"{name} is in nvfp4, profile w4a16 has attn.q in mxfp8, and nothing is quantized twice"):
        convert(tmp_path / "source", tmp_path / "out", PROFILE)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------------------ refusals


def assert_refused(source, target, match, **more):
    before = contents(target) if target.is_dir() else target.exists()
    with pytest.raises(CheckpointError, match=match) as caught:
        convert(source, target, PROFILE, **more)
    assert "\n" not in str(caught.value)
    assert (contents(target) if target.is_dir() else target.exists()) == before, "something was written"


@pytest.fixture
def source(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "source")


def test_every_file_is_checked_before_anything_is_written(source, tmp_path):
    path = source / "model-00006-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(source, tmp_path / "out", rf"^{path} is truncated: ")


def test_bad_sources_are_refused_before_anything_is_written(source, tmp_path, tensors):
    out = tmp_path / "out"
    assert_refused(tmp_path / "nothing", out, "^no folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", out, "holds no config.json")
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config[:50])
    assert_refused(source, out, "config.json is unreadable")
    (source / "config.json").write_text(config.replace('"hidden_size"', '"hidden"'))
    assert_refused(source, out, "config.json: model config has no key 'hidden_size'")
    (source / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 128'))
    assert_refused(source, out, r"has shape \[.*64\], not \[.*128\] as in config.json")
    (source / "config.json").write_text(config)
    (source / "model-00002-of-00006.safetensors").unlink()
    assert_refused(source, out, "shard model-00002-of-00006.safetensors is missing")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.layers.0.nonsense.weight": torch.zeros(2)}, "model.layers.0.nonsense.weight is unknown"),
        ({"model.layers.0.self_attn.q_proj.zero_point": torch.zeros(2)}, "q_proj.zero_point is unknown"),
        ({"model.layers.0.self_attn.index_q_proj.weight": torch.zeros(64, 64)}, "index_q_proj.weight is unknown: config.json"),
        ({f"{EXPERT}w1.weight": None}, f"tensor {EXPERT}w1.weight is missing"),
        ({"model.layers.1.block_sparse_moe.e_score_correction_bias": None}, "tensor .*e_score_correction_bias is missing"),
        ({f"{EXPERT}w1.weight": torch.zeros(96, 64, dtype=torch.int32)}, f"{EXPERT}w1.weight is I32"),
        ({f"{EXPERT}w1.weight": torch.zeros(64, 96)}, r"has shape \[64, 96\], not \[96, 64\]"),
        ({"language_model.model.norm.weight": torch.zeros(64)}, "model.norm.weight is there under"),
        ({"vision_tower.x.weight": torch.zeros(64, dtype=torch.uint8)}, "vision_tower.x.weight is U8"),
    ],
)
def test_bad_tensors_are_named_before_anything_is_written(tmp_path, tensors, change, message):
    changed = {n: t for n, t in (tensors | change).items() if t is not None}
    stored.write(tmp_path / "source", changed)
    assert_refused(tmp_path / "source", tmp_path / "out", message)


def test_a_width_that_is_no_multiple_of_the_block_is_named(tmp_path):
    sizes = dict(hidden=72)
    stored.write(tmp_path / "source", random_m3.tensors(**sizes), config=random_m3.config(**sizes))
    assert_refused(tmp_path / "source", tmp_path / "out", r"_proj\.weight has shape \[\d+, 72\], no width that is a multiple of 32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", [f"{EXPERT}w3.weight", f"{EXPERT}w2.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
)
def test_non_finite_weights_are_named_and_nothing_unfinished_is_left(tmp_path, tensors, name, value):
    broken = tensors[name].clone()
    broken.view(-1)[-1] = value
    stored.write(tmp_path / "source", tensors | {name: broken}, shards=4)
    with pytest.raises(NonFiniteWeight, match=f"^{name}: "):
        convert(tmp_path / "source", tmp_path / "out", PROFILE, workers=2)
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert STATE in left and "config.json" not in left and INDEX not in left and not any("tmp" in n for n in left)
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path / "out")


def test_a_nan_in_the_partner_stops_the_gate_too(tmp_path, tensors):
    """The two lie in different shards; the gate's must not be finished with a scale that the up's NaN made."""
    name = f"{EXPERT}w3.weight"
    broken = tensors[name].clone()
    broken[0, 0] = float("nan")
    stored.write(tmp_path / "source", tensors | {name: broken}, shards=2, place=lambda n, _: int(n == name))
    with pytest.raises(NonFiniteWeight, match=f"^{name}: "):
        convert(tmp_path / "source", tmp_path / "out", PROFILE, workers=1)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_fp32_that_bf16_cannot_hold_is_named(tmp_path, tensors):
    norm = torch.full((64,), 3.4e38)
    stored.write(tmp_path / "source", tensors | {"model.norm.weight": norm})
    with pytest.raises(NonFiniteWeight, match="^model.norm.weight"):
        convert(tmp_path / "source", tmp_path / "out", PROFILE)


def test_targets_that_are_something_else_are_left_alone(sharded, converted, tmp_path):
    assert_refused(sharded, sharded, "is the source itself")
    assert_refused(sharded, sharded / ".." / sharded.name, "is the source itself")
    assert_refused(sharded, converted, "already holds a finished checkpoint")
    (tmp_path / "file").write_text("x")
    assert_refused(sharded, tmp_path / "file", "is no folder")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    assert_refused(sharded, tmp_path / "other", "other is not empty")


def test_a_full_disk_is_told_beforehand(sharded, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage._replace(free=600_000))
    with pytest.raises(CheckpointError, match=r"out has no room: 0\.0 GB are needed, 0\.0 GB are free"):
        convert(sharded, tmp_path / "out", PROFILE)
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage._replace(free=700_000))
    convert(sharded, tmp_path / "out", PROFILE)


def test_a_disk_that_fills_up_is_one_line(sharded, tmp_path, monkeypatch, converted):
    from samebits.quant import shards

    with monkeypatch.context() as patch:

        def full(fd, data, at):
            raise OSError(28, "No space left on device")

        patch.setattr(shards.os, "pwrite", full)
        with pytest.raises(CheckpointError, match="out: No space left on device"):
            convert(sharded, tmp_path / "out", PROFILE)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {STATE}
    convert(sharded, tmp_path / "out", PROFILE)
    assert contents(tmp_path / "out") == contents(converted)


# -------------------------------------------------------------------------------------------------------------------------- resume


class Interrupted(Exception):
    pass


def interrupt(source, target, after: int, **more):
    """Stop a conversion after some units of work."""
    count = 0

    def on_bytes(_):
        nonlocal count
        count += 1
        if count > after:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(source, target, PROFILE, workers=1, on_bytes=on_bytes, **more)


def test_finished_shards_are_verified_and_not_written_again(sharded, converted, tmp_path):
    out = tmp_path / "out"
    interrupt(sharded, out, after=60)
    finished = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert 0 < len(finished) < 6 and not any("tmp" in p.name for p in out.iterdir())
    assert not (out / "config.json").exists()
    report = convert(sharded, out, PROFILE)
    assert report.resumed == len(finished) and contents(out) == contents(converted)
    assert all((out / n).stat().st_mtime_ns == t for n, t in finished.items())


def test_a_damaged_or_lost_shard_is_written_again(sharded, converted, tmp_path):
    out = tmp_path / "out"
    interrupt(sharded, out, after=80)
    first, second = sorted(out.glob("*.safetensors"))[:2]
    data = bytearray(first.read_bytes())
    data[-5] ^= 1
    first.write_bytes(data)
    second.unlink()
    (out / ".samebits-tmp-from-an-older-version.part").write_text("left behind")
    convert(sharded, out, PROFILE)
    assert contents(out) == contents(converted)


def test_progress_counts_every_source_byte_once(sharded, tmp_path, tensors):
    totals, done = [], []
    out = tmp_path / "out"
    interrupt(sharded, out, after=60)
    convert(sharded, out, PROFILE, on_start=totals.append, on_bytes=done.append)
    assert totals == [sum(t.nbytes for t in tensors.values())] and sum(done) == totals[0]


def test_another_source_or_profile_does_not_go_on(sharded, tmp_path, source):
    out = tmp_path / "out"
    interrupt(source, out, after=60)
    other = get_profile("w4a16").replace(name="other", rules="others")
    with pytest.raises(CheckpointError, match="holds an unfinished conversion of another source or profile"):
        convert(source, out, other)
    os.utime(source / "model-00004-of-00006.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="holds an unfinished conversion of another source or profile"):
        convert(source, out, PROFILE)
    (out / STATE).write_text("{")
    assert_refused(source, out, "holds an unfinished conversion of another source or profile")


def test_files_that_do_not_belong_there_are_named(sharded, tmp_path):
    out = tmp_path / "out"
    interrupt(sharded, out, after=60)
    save_file({"x": torch.zeros(1)}, out / "extra.safetensors")
    assert_refused(sharded, out, "extra.safetensors is no part of this conversion")


def test_two_at_once_are_refused(sharded, tmp_path):
    out = tmp_path / "out"

    def second(_):
        with pytest.raises(CheckpointError, match="is being written by another process"):
            convert(sharded, out, PROFILE)

    convert(sharded, out, PROFILE, on_start=second)
    assert (out / "config.json").exists()


def test_killed_at_any_moment_and_run_again_gives_the_same_bytes(sharded, converted, tmp_path):
    """Real processes, really killed. Each is a fork of this one, so that it starts at once; reading is slowed down in them alone."""
    from samebits.quant import shards

    def run(target, slow: float) -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                read = shards.Entry.read
                shards.Entry.read = lambda self: (time.sleep(slow), read(self))[1]
                convert(sharded, target, PROFILE, workers=2)
                status = 0
            finally:
                os._exit(status)
        return pid

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    try:
        start = time.perf_counter()
        assert os.waitpid(run(tmp_path / "whole", 0.002), 0)[1] == 0
        takes = time.perf_counter() - start
        g = torch.Generator().manual_seed(0)
        killed, out, midway = 0, tmp_path / "out", 0
        for _ in range(100):
            if killed >= 10 and midway >= 3:
                break
            if (out / "config.json").exists() and not (out / STATE).exists():
                shutil.rmtree(out)  # it got to the end: begin anew
            pid = run(out, 0.002)
            time.sleep(torch.rand((), generator=g).item() * takes)
            os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0)[1] != signal.SIGKILL:
                continue
            killed += 1
            for path in out.glob("*.safetensors") if out.exists() else ():
                assert path.read_bytes() == (converted / path.name).read_bytes(), "a final name held less than the whole file"
            midway += out.exists() and any(n.name.startswith(".samebits-tmp-") for n in out.iterdir())
        assert killed >= 10 and midway >= 3
        if not (out / "config.json").exists() or (out / STATE).exists():
            convert(sharded, out, PROFILE)
    finally:
        torch.set_num_threads(threads)
    assert contents(out) == contents(converted) == contents(tmp_path / "whole")
