"""Does every engine hold exactly the weights that it should?

An adapter is compared by the manifest that was sent with it and the digests that every rank of every replica computes over its own
buffers. Base weights are compared by digests over fp32 values: the engine's, read back from its own parameters, and the checkpoint's.
Where a replica has several ranks, each is held against its own parts (`quant.ranks`), which together are every tensor.
Nothing here trusts that a transfer succeeded; a missing answer is a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.kernels.linear import values
from samebits.quant.adapter import AdapterError, Manifest
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.digests import ALGORITHM, FORMER_ALGORITHM, Digester
from samebits.quant.ranks import LayoutError, Part, Ranks, require_cover
from samebits.quant.threads import side_by_side


class WeightMismatch(AdapterError):
    """An engine does not hold the weights that it should. The message names the first differences."""


@dataclass(frozen=True)
class SyncVerdict:
    """A sync that every replica confirmed."""

    version: int
    tensors: int
    bytes: int
    """Bytes of one copy of the adapter, as sent to each replica."""
    seconds: float
    """The slowest replica, from export to verified."""
    ranks: int
    """Engine ranks that answered."""
    replicas: int
    digest: str
    """BLAKE2b of all digests: one for the adapter that every trainer rank sent and every engine rank holds."""


def verify_sync(reports: Sequence[Mapping[str, Any] | None], version: int, profile_hash: str) -> SyncVerdict:
    """Check one sync over all replicas.

    Args:
        reports: for each replica the fields of `rollout.server.SyncReport`, or None where nothing was ever sent.
        version: adapter version that the trainer holds. profile_hash: the trainer's numerics profile.
    Raises:
        WeightMismatch: naming replica, rank and what is missing, stale or different; also where two replicas were sent different bits.
    """
    ranks = 0
    if not reports:
        raise WeightMismatch("there is no engine replica to check")
    first: Manifest | None = None
    for replica, report in enumerate(reports):
        if report is None:
            raise WeightMismatch(f"replica {replica}: no adapter was ever synced, the trainer is at version {version}")
        sent = Manifest.from_json(report["sent"])
        if len(report["held"]) != sent.ranks:
            raise WeightMismatch(f"replica {replica}: {answered(len(report['held']), sent.ranks)}")
        for rank, answer in enumerate(report["held"]):
            where = f"replica {replica} rank {rank}"
            held = Manifest.from_json(answer)
            if (held.rank, held.world) != (rank, sent.ranks):
                raise WeightMismatch(f"{where}: rank {held.rank} of {held.world} answered in its place, of {sent.ranks}")
            if held.version != version:
                stale = next(iter(held.digests), "no tensor")
                raise WeightMismatch(
                    f"{where}: adapter was not updated: version {held.version} is held, the trainer is at {version}; "
                    f"all {len(held.digests)} tensors are stale, first {stale}"
                )
            if sent.profile != profile_hash:
                raise WeightMismatch(f"{where}: sync was sent for numerics profile {sent.profile}, the trainer has {profile_hash}")
            try:
                sent.require(held, where)
            except AdapterError as error:
                raise WeightMismatch(str(error)) from None
            ranks += 1
        if first is None:
            first = sent
        elif (first.digests, first.algorithm) != (sent.digests, sent.algorithm):
            # Each replica gets what a trainer rank of its own gathered: that it holds it says nothing yet of the other replicas.
            names = [name for name, digest in first.digests.items() if sent.digests.get(name) != digest] or ["other tensors"]
            raise WeightMismatch(f"replica {replica}: its trainer rank sent it another adapter than replica 0 was sent: {names[0]}")
    return SyncVerdict(
        version=version,
        tensors=int(reports[0]["tensors"]),
        bytes=int(reports[0]["bytes"]),
        seconds=max(float(r["seconds"]) for r in reports),
        ranks=ranks,
        replicas=len(reports),
        digest=hashlib.blake2b(json.dumps(first.digests, sort_keys=True).encode(), digest_size=8).hexdigest(),
    )


def answered(count: int, ranks: int) -> str:
    """How many ranks of a replica said what they hold, in words."""
    return f"{f'{count} of {ranks} ranks' if count else 'no rank'} answered what {'they hold' if count else 'it holds'}"


@dataclass(frozen=True)
class BaseDigests:
    """Digests of the fp32 values of a checkpoint's weights, by module path (routing biases under their tensor name)."""

    whole: dict[str, str]
    ranks: list[dict[str, str]]
    """Of the parts that each rank of a replica must hold; of a replica of one rank those are whole."""


def checkpoint_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digest of the fp32 values of every weight of a checkpoint, by module path (routing biases under their tensor name)."""
    return base_digests(checkpoint, 1).whole


def base_digests(checkpoint: Checkpoint, world: int) -> BaseDigests:
    """Digests of a checkpoint, and of the parts that the ranks of replicas of `world` ranks must hold.

    Raises `WeightMismatch` when the parts do not make up every weight.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    ranks = Ranks(world, text["num_local_experts"])
    biases = [name for name in checkpoint.names if name.endswith("e_score_correction_bias")]
    names = [*checkpoint.modules, *biases]
    shapes: dict[str, tuple[int, ...]] = {}
    held: list[dict[str, Part]] = [{} for _ in range(world)]
    found: dict[str, str] = {}

    def taken(name: str) -> tuple[tuple[int, ...], list[Part | None], dict[str, str]]:
        value = checkpoint.tensor(name).float() if name in biases else values(checkpoint.weight(name))
        parts = [ranks.weight(rank, name, value.shape) for rank in range(world)]
        digester = Digester()
        digester.add(name, value)
        for part in {part for part in parts if part is not None and not part.is_whole(value.shape)}:
            digester.add(f"{name}{tuple(part)}", part.of(value))
        return tuple(value.shape), parts, digester.finish()

    # A weight is rebuilt by many small operations within a core's cache, so each core takes weights of its own.
    for name, (shape, parts, digests) in zip(names, side_by_side(taken, names), strict=True):
        shapes[name] = shape
        found |= digests
        for rank, part in enumerate(parts):
            if part is not None:
                held[rank][name] = part
    try:
        require_cover(shapes, held)
    except LayoutError as error:
        raise WeightMismatch(str(error)) from None

    def key(name: str, part: Part) -> str:
        return name if part.is_whole(shapes[name]) else f"{name}{tuple(part)}"

    return BaseDigests({n: found[n] for n in shapes}, [{n: found[key(n, part)] for n, part in parts.items()} for parts in held])


def verify_base(expected: Mapping[str, str], held: Mapping[str, str], where: str) -> int:
    """Compare an engine's base digests with the checkpoint's; returns how many tensors were compared. Raises `WeightMismatch`."""
    problems = [f"{name} is missing" for name in expected if name not in held]
    problems += [f"{name} is unknown" for name in held if name not in expected]
    problems += [f"{name} differs" for name, want in expected.items() if held.get(name, want) != want]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightMismatch(f"{where}: base weights: {'; '.join(problems[:3])}{more}")
    return len(expected)


def verify_unchanged_base(record: Path, now: Mapping[str, str], fresh: bool) -> None:
    """Hold the base against the one that this run started with, whose digests lie in the JSON file `record`.

    A fresh run, or one without a record, writes it. Raises `WeightMismatch` naming the first tensors that changed since, or the
    algorithm of the record when that is another.
    """
    if record.is_file() and not fresh:
        algorithm, before = _recorded_base(record)
        if algorithm != ALGORITHM:
            raise WeightMismatch(
                f"{record} holds digests of {algorithm}, which cannot be compared with today's {ALGORITHM}: "
                "start a new run, or remove the file to take the base as it is now"
            )
        verify_base(before, now, "since this run started")
        return
    staging = record.with_suffix(".tmp")
    staging.write_text(json.dumps({"algorithm": ALGORITHM, "digests": dict(now)}, indent=1) + "\n")
    os.replace(staging, record)


def _recorded_base(record: Path) -> tuple[str, dict[str, str]]:
    """(algorithm, digests) of a record. Records used to be the digests alone."""
    try:
        found = json.loads(record.read_text())
        if "algorithm" in found:
            return str(found["algorithm"]), dict(found["digests"])
        return FORMER_ALGORITHM, dict(found)
    except (ValueError, TypeError, KeyError):
        raise WeightMismatch(f"{record} cannot be read: it should hold the digests of the base that this run started with") from None
