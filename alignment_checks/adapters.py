"""Does every replica hold exactly the adapter that was trained, is it used, and does nothing else move?

The chain is checked link by link, so that a break has a place: the optimizer's masters, what the export sends, what every rank of every
replica holds in the buffers that it multiplies with. Then the effect: for each role alone, output with the adapter against output without
it, and against W + BA computed by the plain reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebits.quant.adapter import AdapterError, Manifest, parse_name
from samebits.quant.digests import ALGORITHM, digests
from samebits.quant.roles import Role
from samebits.trainer.lora import rounded

from .pair import Pair
from .probes import Probes
from .report import CheckResult, Finding, Place
from .weights import answered, base_digests

EFFECT_TOKENS = 20
EFFECT_SCALE = 3.0
PROBE_VERSION = 1000
"""Versions from here on belong to checks; a job does not reach them."""


def place_of(name: str, **more: int) -> Place:
    """Layer and expert of an adapter tensor or of a base module."""
    try:
        module = parse_name(name)[0]
    except AdapterError:
        parts = name.split(".")
        layer = int(parts[2]) if name.startswith("model.layers.") else None
        expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else None
        return Place(tensor=name, layer=layer, expert=expert, **more)
    return Place(tensor=name, layer=module.layer, expert=module.expert if module.expert >= 0 else None, **more)


def compare_digests(result: CheckResult, expected: Mapping[str, str], found: Mapping[str, str], who: str, **where: int) -> None:
    """Same names, same digests; one finding a name that is missing, unknown or different."""
    result.compared += len(expected)
    problems = [(name, "is missing") for name in expected if name not in found]
    problems += [(name, "is unknown") for name in found if name not in expected]
    problems += [(name, "differs") for name, want in expected.items() if found.get(name, want) != want]
    result.findings += [Finding(f"{who}: {name} {what}", place_of(name, **where)) for name, what in problems]


def intended(pair: Pair) -> dict[str, Tensor]:
    """What must travel: the masters rounded to the wire's dtype, alpha / rank folded into B."""
    settings = pair.trainer.module.settings
    scale = settings.alpha / settings.rank
    return {n: rounded(t, scale if parse_name(n)[1] == "B" else 1.0) for n, t in pair.trainer.masters().items()}


def coverage(pair: Pair, result: CheckResult) -> None:
    """The masters are exactly layer x expert x projection x A/B of the recipe's roles, and the export sends exactly those, unchanged."""
    shapes = pair.trainer.spec.shapes()
    want = intended(pair)
    _same_shapes(result, shapes, want, "the trainer")
    sent, origin = pair.trainer.export()
    if pair.wire is not None:
        changed = pair.wire(pair.replicas[0], sent, dict(origin))
        if not result.require(changed is not None, "nothing is sent"):
            return
        sent, origin = changed
    _same_shapes(result, shapes, sent, "the export")
    compare_digests(result, digests(want), digests(sent), "what is sent is not the master weight")
    _name_scale(result, want, sent)
    version = pair.trainer.engine.adapter_version
    result.require(origin["version"] == version, f"the export says version {origin['version']}, the trainer is at {version}")
    profile = pair.trainer.profile.hash
    result.require(origin["profile"] == profile, f"the export says numerics profile {origin['profile']}, the trainer has {profile}")


def _same_shapes(result: CheckResult, shapes: Mapping[str, tuple[int, int]], tensors: Mapping[str, Tensor], who: str) -> None:
    for name in [*shapes, *(n for n in tensors if n not in shapes)]:
        if name not in tensors:
            result.require(False, f"{who} has no {name}", place_of(name))
        elif name not in shapes:
            result.require(False, f"{who} has {name}, which the recipe does not adapt", place_of(name))
        else:
            t = tensors[name]
            fits = tuple(t.shape) == shapes[name] and t.dtype == torch.bfloat16
            result.require(fits, f"{who}: {name} is {t.dtype} {tuple(t.shape)}, not bfloat16 {shapes[name]}", place_of(name))


def _name_scale(result: CheckResult, want: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """Where all B are one factor away from what they should be, say so."""
    factors = set()
    for name, t in want.items():
        if parse_name(name)[1] == "B" and name in sent and sent[name].shape == t.shape and t.abs().max() > 0:
            factors.add(round(float(sent[name].float().norm() / t.float().norm()), 3))
    if len(factors) == 1 and factors != {1.0}:
        result.require(False, f"every B is {factors.pop():g} times what alpha / rank gives")


def held(pair: Pair, result: CheckResult) -> None:
    """After a sync every rank of every replica holds what was meant, under the trainer's version, and uses it."""
    reports = pair.sync()
    version = pair.trainer.engine.adapter_version
    wanted = intended(pair)
    result.require(len(reports) == len(pair.replicas) > 0, f"{len(reports)} of {len(pair.replicas)} replicas reported")
    for replica, report in zip(pair.replicas, reports, strict=True):
        where = {"replica": replica.index}
        if not result.require(
            report is not None, f"replica {replica.index}: no adapter was ever synced, the trainer is at {version}", Place(**where)
        ):
            continue
        if not result.require(
            report["refused"] is None, f"replica {replica.index} refused the adapter: {report['refused']}", Place(**where)
        ):
            continue
        stale = f"replica {replica.index} uses adapter version {replica.version}, the trainer is at {version}: it was not updated"
        result.require(replica.version == version, stale, Place(**where))
        answers = _ask_held(replica, version)
        meant = Manifest.of(wanted, version, pair.trainer.profile.hash, world=replica.ranks)
        few = f"replica {replica.index}: {answered(len(answers), meant.ranks)}"
        result.require(len(answers) == meant.ranks, few, Place(**where))
        for rank, answer in enumerate(answers[: meant.ranks]):
            _compare_held(result, answer, meant, replica.index, rank)
        extra = replica.resident() - {version}
        result.require(not extra, f"replica {replica.index} still holds versions {sorted(extra)}: old adapters leak", Place(**where))


def _ask_held(replica: Any, version: int) -> list[Manifest | str]:
    try:
        return [Manifest.from_json(answer) for answer in replica.rpc("samebits_held_adapter", version)]
    except AdapterError as error:
        return [str(error)]


def _compare_held(result: CheckResult, answer: Manifest | str, meant: Manifest, replica: int, rank: int) -> None:
    who = f"replica {replica} rank {rank}"
    place = Place(replica=replica, rank=rank)
    if not result.require(not isinstance(answer, str), f"{who}: {answer}", place):
        return
    version, profile = meant.version, meant.profile
    result.require(answer.version == version, f"{who} holds version {answer.version}, the trainer is at {version}", place)
    result.require(answer.profile == profile, f"{who} computes with numerics profile {answer.profile}, the trainer with {profile}", place)
    if not result.require(answer.algorithm == ALGORITHM, f"{who} answers digests of {answer.algorithm}, not {ALGORITHM}", place):
        return
    message = f"{who} answers as rank {answer.rank} of {answer.world}, of {meant.ranks}"
    if result.require((answer.rank, answer.world) == (rank, meant.ranks), message, place):
        expected = meant.parts[rank] if meant.parts else meant.digests
        compare_digests(result, expected, answer.digests, f"{who} holds another adapter than was trained", replica=replica, rank=rank)


def base(pair: Pair, result: CheckResult) -> None:
    """Every frozen weight, as trainer and engines multiply with it, has the checkpoint's values."""
    expected = base_digests(pair.checkpoint, max((replica.ranks for replica in pair.replicas), default=1))
    compare_digests(result, expected.whole, pair.trainer.base_digests(), "the trainer's base")
    for replica in pair.replicas:
        answers, profiles = replica.rpc("samebits_base_digests"), replica.rpc("samebits_profile")
        few = f"replica {replica.index}: {answered(len(answers), replica.ranks)}"
        result.require(len(answers) == len(profiles) == replica.ranks, few, Place(replica=replica.index))
        for rank, (want, found) in enumerate(zip(expected.ranks, answers, strict=False)):
            compare_digests(result, want, found, f"base of replica {replica.index} rank {rank}", replica=replica.index, rank=rank)
        for rank, found in enumerate(profiles):
            who, ours = f"replica {replica.index} rank {rank}", pair.trainer.profile.hash
            message = f"{who} computes with numerics profile {found}, the trainer with {ours}"
            result.require(found == ours, message, Place(replica=replica.index, rank=rank))


def _random(pair: Pair, roles: tuple[Role, ...], seed: int) -> dict[str, Tensor]:
    """An adapter in which only `roles` have a B."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in pair.trainer.spec.shapes().items():
        module, side = parse_name(name)
        spread = shape[1] ** -0.5 if side == "A" else EFFECT_SCALE / pair.trainer.spec.rank**0.5
        t = (torch.randn(shape, generator=g) * spread).to(torch.bfloat16)
        out[name] = t if side == "A" or module.role in roles else torch.zeros_like(t)
    return out


@contextmanager
def _keeping_adapter(pair: Pair) -> Iterator[None]:
    """Give the pair its adapter back after the block, on both sides."""
    kept, version = pair.trainer.masters(), pair.trainer.engine.adapter_version
    try:
        yield
    finally:
        pair.trainer.put_masters(kept, version)
        pair.sync()


def effect(pair: Pair, probes: Probes, result: CheckResult, model: Any) -> None:
    """Each role's adapter alone changes the output of every replica, and as W + BA does."""
    ids = probes.prompts[3][:EFFECT_TOKENS]
    model.set_adapter({})
    plain = model.logprobs(ids)
    with _keeping_adapter(pair):
        for number, role in enumerate(pair.trainer.spec.roles):
            tensors = _random(pair, (role,), number)
            pair.trainer.set_masters(tensors, PROBE_VERSION + number)
            pair.sync()
            model.set_adapter(tensors)
            want = model.logprobs(ids)
            due = (want - plain).abs().max().item()
            for replica in pair.replicas:
                _check_effect(result, pair, replica, role, ids, plain, want, due)


def _check_effect(
    result: CheckResult, pair: Pair, replica: Any, role: Role, ids: list[int], plain: Tensor, want: Tensor, due: float
) -> None:
    where = Place(tensor=str(role), replica=replica.index)
    found = replica.run([ids])[0].prompt_logprobs
    moved = (found - plain).abs().max().item()
    message = f"replica {replica.index}: the adapter of role {role} changes logprobs by {moved:.2g}, W + BA changes them by {due:.2g}"
    used = result.require(
        due > pair.limits.effect and moved > pair.limits.effect, f"{message}: it is not used", where, moved, pair.limits.effect
    )
    if used:
        # Relative to the effect and over all tokens: where rounding lets a route flip, a single logprob says little.
        error = ((found - want).norm() / (want - plain).norm()).item()
        limit = pair.limits.effect_error
        result.require(error <= limit, f"{message}, and the result is {error:.0%} of that effect away from W + BA", where, error, limit)
        result.metrics["distance"] = max(error, result.metrics.get("distance", 0.0))


def isolation(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """Base logprobs keep their bits before, with and after an adapter; zero B has the bits of no adapter; the base keeps its digests."""
    prompts = [probes.prompts[2], probes.prompts[5]]
    for replica in pair.replicas:
        before = replica.rpc("samebits_base_digests")
        runs = {"with the adapter loaded": _bits(replica, prompts, None)}
        with _keeping_adapter(pair):
            pair.trainer.set_masters(_random(pair, pair.trainer.spec.roles, 2), PROBE_VERSION + 1)
            pair.sync()
            used = _bits(replica, prompts, replica.version)
            zero = {n: torch.zeros_like(t) if parse_name(n)[1] == "B" else t for n, t in _random(pair, (), 1).items()}
            pair.trainer.set_masters(zero, PROBE_VERSION)
            pair.sync()
            runs["with an adapter whose B is zero"] = _bits(replica, prompts, replica.version)
            for old in replica.resident():
                replica.rpc("samebits_remove_adapter", old)
            replica.version = None
            runs["after unloading"] = _bits(replica, prompts, None)
        first, *_ = runs.values()
        for name, values in runs.items():
            for i, (a, b) in enumerate(zip(first, values, strict=True)):
                same = torch.equal(a.view(torch.int32), b.view(torch.int32))
                token = None if same else int((a != b).int().argmax())
                message = f"replica {replica.index}: base logprobs {name} differ from those with the adapter loaded, first at token {token}"
                result.require(same, message, Place(replica=replica.index, sequence=i, token=token))
        moved = max((a - b).abs().max().item() for a, b in zip(first, used, strict=True))
        message = f"replica {replica.index}: a large adapter changes nothing: requests run on the base"
        result.require(moved > pair.limits.effect, message, Place(replica=replica.index), moved, pair.limits.effect)
        for rank, (a, b) in enumerate(zip(before, replica.rpc("samebits_base_digests"), strict=True)):
            compare_digests(
                result, a, b, f"base of replica {replica.index} rank {rank} after loading and unloading", replica=replica.index, rank=rank
            )


def _bits(replica: Any, prompts: list[list[int]], version: int | None) -> list[Tensor]:
    replica.drop_prefix_cache()
    return [s.prompt_logprobs for s in replica.run(prompts, version=version)]


def prefix_cache(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """After a sync nothing of the old adapter's keys and values is read: no cached tokens, and logprobs of a fresh engine."""
    prompt = probes.prompts[-1]
    with _keeping_adapter(pair):
        for replica in pair.replicas:
            replica.run([prompt], prompt_logprobs=False)
            warm = replica.run([prompt], prompt_logprobs=False)[0].cached
            result.require(
                warm >= 128, f"replica {replica.index}: a repeated prompt found {warm} tokens in the prefix cache", measured=warm
            )
        pair.trainer.set_masters(_random(pair, pair.trainer.spec.roles, 77), pair.trainer.engine.adapter_version)
        pair.sync()
        for replica in pair.replicas:
            after = replica.run([prompt], 4, prompt_logprobs=False)[0]
            place = Place(replica=replica.index)
            message = f"replica {replica.index}: {after.cached} tokens of the prefix cache outlived a sync"
            result.require(after.cached == 0, message, place, after.cached, 0)
            row = probes.score([after])[0][len(prompt) - 1 :]
            error = (row - after.logprobs).abs().max().item()
            message = (
                f"replica {replica.index}: logprobs after a sync differ from the new adapter's by {error:.2g}: keys and values are stale"
            )
            result.require(error <= pair.limits.max_abs, message, place, error, pair.limits.max_abs)
