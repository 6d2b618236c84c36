"""Folders that are packed, cut into slices, carried and put together: equal bytes, sizes that are kept, and refusals by name."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.measure import pack
from tools.measure.pack import MANIFEST, PackError, Sizes, main, read_manifest, slice_to, unpack

SMALL = Sizes(part=2500, slice=6000, files=4)
NAMES = st.text("abc.é _-", min_size=1, max_size=8).filter(lambda name: name.strip(".") != "")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
# Bytes that xz makes smaller, bytes that it does not, and both in one file.
CONTENTS = st.one_of(
    st.binary(max_size=3000),
    st.integers(0, 1500).map(lambda n: b"same " * n),
    st.integers(0, 2**32).map(lambda seed: __import__("random").Random(seed).randbytes(9000)),
    st.tuples(st.binary(max_size=500), st.integers(0, 2000)).map(lambda two: two[0] + b"0" * two[1] + two[0]),
)


def build(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Write files, as far as no file of them is a folder of another."""
    kept = {path: data for path, data in files.items() if not any(other.startswith(path + "/") for other in files)}
    for path, data in kept.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return kept


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@given(
    st.dictionaries(PATHS, CONTENTS, min_size=1, max_size=12),
    st.sampled_from([512, 700, 8192]),
    st.sampled_from([30000, 200000]),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_what_is_put_together_from_slices_has_the_bytes_of_what_was_packed(files, block, slice_bytes, executable):
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        (here / "from").mkdir()
        kept = build(here / "from", files)
        first = next(iter(kept))
        (here / "from" / first).chmod(0o755 if executable else 0o640)
        manifest = pack.pack(here / "from", here / "parts", sizes=Sizes(part=8192, slice=slice_bytes, files=4), block=block)
        carried = []
        for number, names in enumerate(manifest["slices"]):
            carried.append(here / f"slice{number}")
            assert slice_to(here / "parts", number, carried[-1]) == names
            inside = list(carried[-1].iterdir())
            assert len(inside) <= 4 and all(path.stat().st_size <= 8192 for path in inside if path.name != MANIFEST)
            assert sum(path.stat().st_size for path in inside) <= slice_bytes
        assert sorted(name for names in manifest["slices"] for name in names) == [part["name"] for part in manifest["parts"]]
        unpack(here / "to", carried[::-1])  # in any order
        assert content(here / "to") == kept
        assert (here / "to" / first).stat().st_mode & 0o777 == (0o755 if executable else 0o640)
        unpack(here / "to", carried)  # what is there with the same bytes is no difference


@pytest.fixture
def packed(tmp_path):
    """A folder of several slices, and the folders to which they were carried."""
    build(tmp_path / "from", {"a/one.bin": os.urandom(9000), "b.txt": b"text " * 1000, "empty": b""})
    manifest = pack.pack(tmp_path / "from", tmp_path / "parts", sizes=SMALL)
    carried = [tmp_path / f"s{i}" for i in range(len(manifest["slices"]))]
    for number, folder in enumerate(carried):
        slice_to(tmp_path / "parts", number, folder)
    assert len(carried) >= 2
    return tmp_path, manifest, carried


def refused(tmp_path: Path, carried: list[Path], **how) -> str:
    with pytest.raises(PackError) as error:
        unpack(tmp_path / "to", carried, **how)
    assert not (tmp_path / "to").exists() or not any(path.name.endswith(".unpacking") for path in (tmp_path / "to").rglob("*"))
    return str(error.value)


@pytest.mark.parametrize("how", ["changed", "shorter", "longer"])
def test_a_damaged_part_is_named_and_nothing_is_written(packed, how):
    tmp_path, manifest, carried = packed
    part = carried[-1] / manifest["slices"][-1][-1]
    data = bytearray(part.read_bytes())
    if how == "changed":
        data[len(data) // 2] ^= 1
    part.write_bytes({"changed": data, "shorter": data[:-1], "longer": data + b"0"}[how])
    assert refused(tmp_path, carried) == f"{part} is damaged" and not (tmp_path / "to").exists()


def test_missing_slices_are_named(packed):
    tmp_path, manifest, carried = packed
    gone = manifest["slices"][-1]
    assert refused(tmp_path, carried[:-1]) == (
        f"missing are {len(gone)} of {len(manifest['parts'])} parts, of slices {len(carried) - 1}: {gone[0]} first"
    )
    assert not (tmp_path / "to").exists()


def test_slices_of_two_packings_are_not_mixed(packed):
    tmp_path, _, carried = packed
    (tmp_path / "from" / "b.txt").write_bytes(b"other")
    pack.pack(tmp_path / "from", tmp_path / "again", sizes=SMALL)
    slice_to(tmp_path / "again", 0, tmp_path / "other")
    assert refused(tmp_path, [carried[0], tmp_path / "other"]) == f"{tmp_path / 'other'} is of another packing than {carried[0]}"


def test_a_changed_manifest_is_refused(packed):
    tmp_path, manifest, carried = packed
    manifest["files"][0]["path"] = "../outside"
    (carried[0] / MANIFEST).write_text(json.dumps(manifest))
    assert refused(tmp_path, carried[:1]) == f"{carried[0] / MANIFEST} is damaged"
    manifest["id"] = pack._identity(manifest)  # by somebody who knows how
    for folder in carried:
        (folder / MANIFEST).write_text(json.dumps(manifest))
    assert refused(tmp_path, carried) == "'../outside' is no path inside of the folder" and not (tmp_path / "outside").exists()
    (carried[0] / MANIFEST).write_text("[]")
    assert refused(tmp_path, carried[:1]) == f"{carried[0] / MANIFEST} is damaged (TypeError)"
    with pytest.raises(PackError, match="No such file"):
        read_manifest(tmp_path)


def test_files_with_other_bytes_are_kept_unless_told(packed):
    tmp_path, _, carried = packed
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "b.txt").write_text("mine")
    assert refused(tmp_path, carried) == f"{tmp_path / 'to' / 'b.txt'} is there with other bytes; --replace overwrites it"
    assert content(tmp_path / "to") == {"b.txt": b"mine"}
    unpack(tmp_path / "to", carried, replace=True)
    assert content(tmp_path / "to") == content(tmp_path / "from")


def run_folder(folder: Path, finished: bool) -> None:
    step = "checkpoints/global_step_{}/actor/{}"
    build(
        folder,
        {
            "metrics.jsonl": b"{}\n",
            "config.yaml": b"a: 1",
            ".job.lock": b"",
            "data/train.parquet": b"rows",
            "data/dataset.json": b"{}",
            "adapters/step_20/adapter_config.json": b"{}",
            "checkpoints/latest_checkpointed_iteration.txt": b"40",
            step.format(20, "state/__0_0.distcp"): b"old",
            step.format(40, "state/__0_0.distcp"): b"new",
            step.format(40, "state/.metadata"): b"meta",
            step.format(40, "peft/adapter_config.json"): b"{}",
            step.format(40, "samebits_trainer.json"): b"{}",
            **({"summary.json": b"{}"} if finished else {}),
        },
    )


def test_results_have_no_weights_and_state_has_what_a_run_goes_on_from(tmp_path):
    run_folder(tmp_path / "runs" / "over", finished=True)
    run_folder(tmp_path / "runs" / "open", finished=False)
    build(
        tmp_path,
        {"status.json": b"{}", "log/a.log": b"said", "results/t.xml": b"<a/>", "mini/model.safetensors": b"w", "mini/pretrain.json": b"{}"},
    )
    build(tmp_path, {"env/bin/python": b"x", "env/site/a.json": b"{}", "cache/triton/a.json": b"{}", "mini.partial/build.json": b"{}"})
    kept = ["config.yaml", "data/dataset.json", "metrics.jsonl"]
    results = ["log/a.log", "mini/pretrain.json", "results/t.xml", *(f"runs/{run}/{name}" for run in ("open", "over") for name in kept)]
    results += ["runs/over/summary.json", "status.json"]
    assert pack.selected(tmp_path, "results") == sorted(results)
    here = "runs/open/checkpoints/"
    state = [f"{here}global_step_40/actor/{name}" for name in ("samebits_trainer.json", "state/.metadata", "state/__0_0.distcp")]
    assert pack.selected(tmp_path, "state") == sorted([*results, *state, f"{here}latest_checkpointed_iteration.txt"])
    assert len(pack.selected(tmp_path, "all")) == len(content(tmp_path))


def test_the_command_says_what_it_did_and_what_is_wrong_in_one_line(tmp_path, capsys):
    build(tmp_path / "from", {"a": b"0" * 100_000, "b/c": os.urandom(20_000)})
    folder, parts = str(tmp_path / "from"), str(tmp_path / "parts")
    sizes = ["--part-bytes", "10000", "--slice-bytes", "12000", "--files", "3"]
    assert main(["pack", folder, parts, *sizes]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 files of 120,000 bytes in 3 parts of 2") and said.endswith(": 3 slices, from 0 on\n")
    for number in range(3):
        assert main(["slice", parts, str(number), str(tmp_path / "carried" / str(number))]) == 0
    assert main(["unpack", str(tmp_path / "to"), *(str(tmp_path / "carried" / str(n)) for n in range(3))]) == 0
    assert content(tmp_path / "to") == content(tmp_path / "from")
    capsys.readouterr()
    for words, says in {
        ("pack", folder, parts): f"{parts} is not empty",
        ("pack", f"{folder}/none", parts): f"{folder}/none is no folder",
        ("pack", folder, f"{parts}2", "--what", "results"): f"{folder} holds nothing of results",
        (
            "pack",
            folder,
            f"{parts}2",
            "--files",
            "1",
        ): "a slice holds at least two files, the manifest and a part, and as many bytes as a part",
        ("pack", folder, f"{parts}3", "--part-bytes", "300", "--slice-bytes", "300"): "the manifest of so many files has",
        ("slice", parts, "3", folder): f"{parts} has slices 0 to 2, not 3",
        ("unpack", folder, str(tmp_path / "nothing")): f"{tmp_path / 'nothing' / MANIFEST}: No such file or directory",
    }.items():
        assert main(list(words)) == 2
        told = capsys.readouterr()
        assert told.err.startswith(f"measure: {says}") and told.err.count("\n") == 1 and not told.out


def test_a_folder_that_changes_while_it_is_packed_is_refused(tmp_path, monkeypatch):
    build(tmp_path / "from", {"a": b"1", "b": b"2"})
    names = pack.selected(tmp_path / "from", "all")
    monkeypatch.setattr(pack, "selected", lambda *_: names)
    (tmp_path / "from" / "b").unlink()
    with pytest.raises(PackError, match="it changed while it was packed: pack again"):
        pack.pack(tmp_path / "from", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts")
