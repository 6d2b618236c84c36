"""The sync verdict must fail on every way in which an engine can hold something else, and name it."""

import dataclasses
import json

import pytest
import torch

from samebits.alignment_checks.weights import (
    WeightMismatch,
    base_digests,
    checkpoint_digests,
    verify_base,
    verify_sync,
    verify_unchanged_base,
)
from samebits.kernels.linear import values
from samebits.quant.adapter import Manifest
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.digests import digest
from samebits.quant.ranks import Ranks
from tests.support import random_m3

NAMES = ["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]


def manifest(version=3, profile="p", change=None) -> Manifest:
    tensors = {name: torch.full((2, 3), float(i), dtype=torch.bfloat16) for i, name in enumerate(NAMES)}
    if change:
        tensors[change][0, 0] += 1
    return Manifest.of(tensors, version, profile)


def of_two(version=3, change=None) -> Manifest:
    """Sent to a replica of two ranks."""
    tensors = {NAMES[0]: torch.zeros(2, 3).bfloat16(), NAMES[1]: torch.arange(8.0).view(4, 2).bfloat16()}
    if change is not None:
        tensors[NAMES[1]][change] += 64
    return Manifest.of(tensors, version, "p", world=2)


def answers(sent: Manifest, *ranks: int) -> list[Manifest]:
    """What ranks say that hold just that."""
    return [dataclasses.replace(sent, digests=sent.parts[rank], parts=[], rank=rank, world=2) for rank in ranks]


def report(sent: Manifest, *held: Manifest, replica=0) -> dict:
    said = [m.to_json() for m in held]
    return {"replica": replica, "tensors": 2, "bytes": sent.bytes, "seconds": 0.5 + replica, "sent": sent.to_json(), "held": said}


def test_equal_manifests_agree_and_are_counted():
    sent, two = manifest(), of_two()
    verdict = verify_sync([report(two, *answers(two, 0, 1), replica=replica) for replica in (0, 1)], 3, "p")
    assert (verdict.ranks, verdict.replicas, verdict.tensors, verdict.version, verdict.seconds) == (4, 2, 2, 3, 1.5)
    assert verdict.bytes == two.bytes == 28
    assert verdict.digest == verify_sync([report(two, *answers(two, 0, 1))], 3, "p").digest, "the number of replicas is in it"
    verdict = verify_sync([report(sent, sent)], 3, "p")
    other = manifest(change=NAMES[1])
    assert verdict.digest != verify_sync([report(other, other)], 3, "p").digest


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([], "no engine replica"),
        ([None], "replica 0: no adapter was ever synced"),
        ([report(manifest())], "replica 0: no rank answered"),
        ([report(manifest(), manifest(change=NAMES[1]))], f"replica 0 rank 0: {NAMES[1]} differs"),
        ([report(of_two(), *answers(of_two(change=(3, 1)), 0, 1))], f"replica 0 rank 1: {NAMES[1]} differs"),
        ([report(of_two(), *answers(of_two(change=(0, 1)), 0, 1))], f"replica 0 rank 0: {NAMES[1]} differs"),
        ([report(of_two(), *answers(of_two(), 0))], "replica 0: 1 of 2 ranks answered what they hold"),
        ([report(of_two(), *answers(of_two(), 1, 0))], "replica 0 rank 0: rank 1 of 2 answered in its place, of 2"),
        ([report(of_two(), manifest(), manifest())], "replica 0 rank 0: rank 0 of 1 answered in its place, of 2"),
        ([report(manifest(), manifest(), manifest())], "replica 0: 2 of 1 ranks answered what they hold"),
        ([report(manifest(), manifest()), report(manifest(), manifest(change=NAMES[0]), replica=1)], "replica 1 rank 0"),
        (
            [report(manifest(), manifest()), report(manifest(change=NAMES[1]), manifest(change=NAMES[1]), replica=1)],
            f"replica 1: its trainer rank sent it another adapter than replica 0 was sent: {NAMES[1]}",
        ),
        ([report(manifest(2), manifest(2))], "version 2 is held, the trainer is at 3"),
        (
            [report(manifest(), manifest(2))],
            f"not updated: version 2 is held, the trainer is at 3; all 2 tensors are stale, first {NAMES[0]}",
        ),
        ([report(manifest(profile="q"), manifest(profile="q"))], "numerics profile q, the trainer has p"),
        ([report(manifest(), manifest(profile="q"))], "engine computes with numerics profile q"),
    ],
)
def test_every_difference_fails_and_is_named(reports, says):
    with pytest.raises(WeightMismatch, match=says.replace("(", r"\(")):
        verify_sync(reports, 3, "p")


def test_missing_and_unknown_tensors_are_named():
    sent = manifest()
    held = dataclasses.replace(sent, digests={NAMES[0]: sent.digests[NAMES[0]], "other": "00"})
    with pytest.raises(WeightMismatch, match="lora_B.weight is missing; other is unknown"):
        verify_sync([report(sent, held)], 3, "p")


def test_one_flipped_byte_of_the_base_is_named(tmp_path):
    expected = checkpoint_digests(Checkpoint(random_m3.build(tmp_path / "m")))
    assert verify_base(expected, dict(expected), "replica 0") == len(expected) > 80
    path = tmp_path / "m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = "model.layers.2.block_sparse_moe.experts.5.w2"
    start = header[f"{name}.weight"]["data_offsets"][0] + 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 0x02
    path.write_bytes(data)
    held = checkpoint_digests(Checkpoint(tmp_path / "m"))
    with pytest.raises(WeightMismatch, match=f"{name} differs"):
        verify_base(expected, held, "replica 0")


def test_parts_of_a_base_are_those_of_its_values_and_cover_it(tmp_path, monkeypatch):
    checkpoint = Checkpoint(random_m3.build(tmp_path / "m"))
    found = base_digests(checkpoint, 2)
    assert found.whole == checkpoint_digests(checkpoint) == base_digests(checkpoint, 1).ranks[0]
    q, embedding = "model.layers.1.self_attn.q_proj", "model.embed_tokens"
    rows, columns = values(checkpoint.weight(q)).split(256), checkpoint.weight(embedding).float().split(32, dim=1)
    for rank in range(2):
        assert found.ranks[rank][q] == digest(rows[rank]) and found.ranks[rank][embedding] == digest(columns[rank])
        experts = {int(n.split(".")[5]) for n in found.ranks[rank] if ".experts." in n}
        assert experts == set(range(4 * rank, 4 * rank + 4))
    for name in ("model.norm", "model.layers.1.self_attn.index_q_proj", "model.layers.1.block_sparse_moe.gate"):
        assert found.ranks[0][name] == found.ranks[1][name] == found.whole[name]
    whole = Ranks.weight

    def less(self, rank, name, shape):
        return None if rank == 1 and name == q else whole(self, rank, name, shape)

    monkeypatch.setattr(Ranks, "weight", less)
    with pytest.raises(WeightMismatch, match=r"model\.layers\.1\.self_attn\.q_proj: 2 ranks hold \[\(0, 0, 256\)\] of \(512, 64\)"):
        base_digests(checkpoint, 2)


def test_base_coverage_is_exact(tmp_path):
    expected = checkpoint_digests(Checkpoint(random_m3.build(tmp_path / "m")))
    less = {k: v for k, v in expected.items() if "experts.3.w1" not in k}
    with pytest.raises(WeightMismatch, match="experts.3.w1 is missing"):
        verify_base(expected, less, "replica 0")
    with pytest.raises(WeightMismatch, match="extra is unknown"):
        verify_base(expected, expected | {"extra": "00"}, "replica 0")


def test_a_base_that_changed_since_the_start_stops_a_resumed_run(tmp_path):
    record, base = tmp_path / "base.json", {"a": "01", "b": "02"}
    verify_unchanged_base(record, base, fresh=True)
    verify_unchanged_base(record, base, fresh=False)
    with pytest.raises(WeightMismatch, match="since this run started: base weights: b differs"):
        verify_unchanged_base(record, base | {"b": "03"}, fresh=False)
    with pytest.raises(WeightMismatch, match="b is missing"):
        verify_unchanged_base(record, {"a": "01"}, fresh=False)
    verify_unchanged_base(record, {"a": "07"}, fresh=True)  # a new start with another base
    verify_unchanged_base(record, {"a": "07"}, fresh=False)
    for broken in ("{", "3", "[1]", '{"algorithm": "multilinear64x4-1"}'):
        record.write_text(broken)
        with pytest.raises(WeightMismatch, match="cannot be read"):
            verify_unchanged_base(record, base, fresh=False)


def test_a_base_record_of_another_algorithm_is_one_clear_line(tmp_path):
    record, base = tmp_path / "base.json", {"a": "01", "b": "02"}
    verify_unchanged_base(record, base, fresh=True)
    assert json.loads(record.read_text()) == {"algorithm": "multilinear64x4-1", "digests": base}
    for text, algorithm in (({"algorithm": "other-2", "digests": base}, "other-2"), (base, "blake2b-128")):
        record.write_text(json.dumps(text))
        with pytest.raises(WeightMismatch) as raised:
            verify_unchanged_base(record, base, fresh=False)
        line = f"{record} holds digests of {algorithm}, which cannot be compared with today's multilinear64x4-1: "
        assert str(raised.value) == line + "start a new run, or remove the file to take the base as it is now"
    verify_unchanged_base(record, base, fresh=True)
    verify_unchanged_base(record, base, fresh=False)
