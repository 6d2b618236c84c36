"""Do both sides send each token to the same experts, and does replaying the engine's choice do what it should?

Convention: routes of a sequence are int16 [prompt + response - 1, layers, k], by absolute layer index, logical expert ids in ascending
order, -1 in layers without experts. Row t holds the choices made while token t was read; the last token is never read by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.kernels.msa import SparseConfig

from .limits import Limits
from .pair import Pair, Sample
from .probes import Probes
from .report import CheckResult, Place

REPEATED = 16
"""In a sequence of this many rows a layer must have chosen at least two different sets."""


def check_rows(result: CheckResult, routes: Sequence[np.ndarray | None], tokens: Sequence[int], dims) -> None:
    """Row count, layers, id range, order, repeats and constancy of routes, naming sequence, token and layer.

    Args:
        routes: of each sequence. tokens: prompt + response length of each. dims: the trainer's `M3Dims`.
    """
    shape, k = dims.shape, dims.top_k
    for i, (found, count) in enumerate(zip(routes, tokens, strict=True)):
        if not result.require(found is not None, f"sequence {i} has no routes", Place(sequence=i)):
            continue
        rows = f"sequence {i} has {found.shape[0]} rows of routes for {count} tokens, expected prompt + response - 1 = {count - 1}"
        if not result.require(found.shape[0] == count - 1, rows, Place(sequence=i), found.shape[0], count - 1):
            continue
        size = f"routes of sequence {i} have shape {found.shape}, expected ({count - 1}, {shape.layers}, {k})"
        if not result.require(found.shape[1:] == (shape.layers, k), size, Place(sequence=i)):
            continue
        for layer in range(shape.layers):
            _check_layer(result, found[:, layer].astype(np.int64), i, layer, layer in shape.moe_layers, shape.experts)


def _check_layer(result: CheckResult, ids: np.ndarray, sequence: int, layer: int, moe: bool, experts: int) -> None:
    def first(wrong: np.ndarray) -> Place:
        token = int(wrong.argmax()) if wrong.any() else None
        return Place(layer=layer, sequence=sequence, token=token)

    if not moe:
        wrong = (ids != -1).any(1)
        place = first(wrong)
        result.require(
            not wrong.any(),
            f"layer {layer} is dense, but token {place.token} of sequence {sequence} has ids {_row(ids, place)} there (padding is -1)",
            place,
        )
        return
    wrong = (ids < 0).any(1) | (ids >= experts).any(1)
    place = first(wrong)
    message = f"token {place.token} of sequence {sequence} in layer {layer} has ids {_row(ids, place)}, outside 0..{experts - 1}"
    if not result.require(not wrong.any(), message, place):
        return
    wrong = (np.diff(ids, axis=1) <= 0).any(1)
    place = first(wrong)
    message = (
        f"token {place.token} of sequence {sequence} in layer {layer} has ids {_row(ids, place)}, not ascending: not captured, or reordered"
    )
    if not result.require(not wrong.any(), message, place):
        return
    if len(ids) >= REPEATED:
        message = f"all {len(ids)} tokens of sequence {sequence} have the same experts in layer {layer}: one row was repeated"
        result.require(bool((ids != ids[0]).any()), message, Place(layer=layer, sequence=sequence))


def _row(ids: np.ndarray, place: Place) -> list[int]:
    return ids[place.token].tolist() if place.token is not None else []


def check_agreement(result: CheckResult, engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray], dims, limits: Limits) -> dict:
    """Share of tokens at which both sides choose the same experts, by layer; returns the drawing's data.

    Where a layer disagrees, the message says which other layer or which shift by a token would agree: offsets keep every shape.
    """
    layers = list(dims.shape.moe_layers)
    shares, by_expert = [], []
    for layer in layers:
        ours, theirs = (np.concatenate([r[:, layer] for r in side]) for side in (trainer, engine))
        same = (ours == theirs).all(1)
        share = float(same.mean())
        shares.append(share)
        by_expert.append([_expert_share(ours, theirs, e) for e in range(dims.shape.experts)])
        result.metrics[f"agreement/layer_{layer}"] = share
        worst = min((s, e) for e, s in enumerate(by_expert[-1]) if s is not None)
        hint = _offset_hint(engine, trainer, layer, layers)
        message = f"layer {layer}: both sides choose the same experts for {share:.2%} of tokens, least for expert {worst[1]}{hint}"
        place = Place(layer=layer, expert=worst[1] if worst[0] < limits.agreement else None)
        result.require(share >= limits.agreement, message, place, share, limits.agreement)
    return {"layers": layers, "share": shares, "experts": by_expert}


def _expert_share(ours: np.ndarray, theirs: np.ndarray, expert: int) -> float | None:
    """Of the tokens that either side gave to `expert`, the share that both did."""
    a, b = (ours == expert).any(1), (theirs == expert).any(1)
    return float((a & b).sum() / (a | b).sum()) if (a | b).any() else None


def _offset_hint(engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray], layer: int, layers: list[int]) -> str:
    def share(pairs) -> float:
        found = [(a == b).all(1) for a, b in pairs if len(a)]
        return float(np.concatenate(found).mean()) if found else 0.0

    base = share((t[:, layer], e[:, layer]) for t, e in zip(trainer, engine, strict=True))
    candidates = [
        (share((t[:, layer], e[:, other]) for t, e in zip(trainer, engine, strict=True)), f"; the engine's layer {other} fits better")
        for other in range(engine[0].shape[1])
        if other != layer
    ]
    for shift in (-1, 1):
        pairs = [_shifted(t[:, layer], e[:, layer], shift) for t, e in zip(trainer, engine, strict=True)]
        candidates.append((share(pairs), f"; shifted by {shift:+d} token the engine's rows fit better"))
    best, text = max(candidates)
    return text if best > base + 0.2 else ""


def _shifted(ours: np.ndarray, theirs: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
    return (ours[1:], theirs[:-1]) if shift > 0 else (ours[:-1], theirs[1:])


def rows(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """Routes of every replica's samples are complete and plausible."""
    for samples in probes.samples:
        check_rows(result, [s.routes for s in samples], [len(s.tokens) for s in samples], pair.trainer.dims)


def agreement(pair: Pair, probes: Probes, result: CheckResult) -> dict:
    """The trainer alone takes the engine's experts, layer by layer."""
    _require_comparable(probes.samples[0])
    return check_agreement(result, [s.routes for s in probes.samples[0]], probes.natural, pair.trainer.dims, pair.limits)


def replay(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """Replaying has an effect: other routes, other loss; every route is replayed; and ids outside the top-k keep weight and gradient."""
    samples = [s for s in probes.samples[0] if 1 < len(s.tokens) < 400]
    _require_comparable(samples)
    routes = [s.routes for s in samples]
    dims, trainer = pair.trainer.dims, pair.trainer
    advantages = [torch.linspace(-1, 1, len(s.ids)) for s in samples]
    loss, metrics, _ = trainer.loss_and_gradients(samples, advantages, routes)
    layers, total = len(dims.shape.moe_layers), sum(len(r) for r in routes)
    found = metrics.get("replay/layers", 0)
    result.require(found == layers, f"routes were replayed in {found:.0f} layers, the model has {layers} with experts", measured=found)
    found = metrics.get("replay/rows", 0)
    result.require(found == total, f"routes of {found:.0f} tokens were replayed, the batch has {total}", measured=found, limit=total)
    for layer in dims.shape.moe_layers:
        changed = [r.copy() for r in routes]
        for r in changed:
            r[:, layer] = np.sort((r[:, layer] + 1) % dims.shape.experts, axis=1)
        other = trainer.loss_and_gradients(samples, advantages, changed)[0]
        message = f"layer {layer}: replaying other experts leaves the loss at {loss:.6f}: the replay has no effect"
        result.require(other != loss, message, Place(layer=layer), other, loss)
    for layer in dims.shape.moe_layers:
        _check_replayed_router(result, pair, layer)


def _check_replayed_router(result: CheckResult, pair: Pair, layer: int) -> None:
    """Replayed ids outside the live top-k: weights are those of the dense logits, and their gradient reaches the activations.

    The gradient is held against a central difference along one direction, in fp32.
    """
    dims, block = pair.trainer.dims, pair.trainer.module.layers[layer]
    device = next(pair.trainer.module.parameters()).device
    g = torch.Generator().manual_seed(layer)
    x = torch.randn(8, dims.shape.hidden, generator=g).to(device)
    direction, weight = (torch.randn(x.shape, generator=g).to(device) for _ in range(2))
    block.unshard()
    try:
        gate, bias = block.mlp.gate.value().float(), block.mlp.bias.value().float()
        scores = torch.sigmoid(x @ gate.t())
        far = (scores + bias).argsort(dim=-1)[:, : dims.top_k].sort(dim=-1).values  # the least likely experts

        def forward(h: Tensor) -> Tensor:
            return (block.mlp(h, None, far)[0].double() * weight).sum()

        probe = x.clone().requires_grad_()
        forward(probe).backward()
        analytic = (probe.grad.double() * direction).sum().item()
        step = 1e-2 / direction.norm().item() * x.norm().item()
        with torch.no_grad():
            numeric = (forward(x + step * direction) - forward(x - step * direction)).item() / (2 * step)
            fixed = _with_fixed_weights(block, far, scores.gather(-1, far))
            frozen = ((fixed(x + step * direction) - fixed(x - step * direction)).double() * weight).sum().item() / (2 * step)
            out, used = block.mlp(x, None, far)[:2]
            want = fixed(x)
    finally:
        block.reshard()
    kept = torch.equal(used.long(), far.long())
    result.require(kept, f"layer {layer}: the trainer did not use the replayed experts", Place(layer=layer))
    error, limit = ((out - want).abs().max() / want.pow(2).mean().sqrt()).item(), max(pair.limits.relative, 1e-3)
    message = f"layer {layer}: weights of replayed experts outside the top-k are not those of the dense logits: output off by {error:.2g}"
    gate = Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.gate")
    result.require(error <= limit, message, gate, error, limit)
    error = abs(analytic - numeric)
    # Without the router's part the gradient would be `frozen`: the two must be told apart, or nothing was shown.
    apart = abs(numeric - frozen)
    message = (
        f"layer {layer}: gradient through replayed experts outside the top-k is {analytic:.5g}, a central difference gives {numeric:.5g} "
        f"({frozen:.5g} without the router's part)"
    )
    result.require(error < 0.25 * apart, message, gate, error, 0.25 * apart)


def _with_fixed_weights(block: Any, ids: Tensor, scores: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer with the experts' weights held at normalised `scores` [T, k]: what is left when the router passes no gradient."""
    from samebits.kernels.moe import moe

    mlp = block.mlp
    fixed = scores / scores.sum(-1, keepdim=True) * mlp.dims.routed_scale
    return lambda h: moe(h, mlp.w13.value(), mlp.w2.value(), ids, fixed, mlp.dims.activation) + mlp.shared(h, None)


def batching(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """A token's route does not depend on what else is in the batch, on either side, nor on how the batch was padded."""
    dims = pair.trainer.dims
    for i, (prompt, many) in enumerate(zip(probes.prompts, probes.samples[0], strict=False)):
        alone = pair.trainer.capture([many.tokens]).routes.cpu().numpy()[:-1]
        _same_routes(result, alone, probes.natural[i], i, "the trainer packed with others", dims, pair.limits)
        replica = pair.replicas[0]
        replica.drop_prefix_cache()
        single = replica.run([prompt], 1)[0]
        if result.require(single.routes is not None and many.routes is not None, f"sequence {i} has no routes", Place(sequence=i)):
            _same_routes(result, single.routes, many.routes[: len(single.routes)], i, "the engine in a batch", dims, pair.limits)
    _check_padding(result, probes.samples[0][: len(probes.prompts)], pair)


def _same_routes(result: CheckResult, alone: np.ndarray, other: np.ndarray, sequence: int, who: str, dims, limits: Limits) -> None:
    if not result.require(
        alone.shape == other.shape, f"sequence {sequence}: {who} gives {other.shape}, alone {alone.shape}", Place(sequence=sequence)
    ):
        return
    moe = list(dims.shape.moe_layers)
    wrong = (alone[:, moe] != other[:, moe]).any(2)
    share = 1 - float(wrong.mean()) if wrong.size else 1.0
    token, slot = (int(v[0]) for v in np.nonzero(wrong)) if wrong.any() else (None, None)
    place = Place(sequence=sequence, token=token, layer=None if slot is None else moe[slot])
    result.require(
        share >= limits.agreement,
        f"sequence {sequence}: {who} takes other experts than alone, first at {place}",
        place,
        share,
        limits.agreement,
    )


def _check_padding(result: CheckResult, samples: Sequence[Sample], pair: Pair) -> None:
    """verl's padded layouts (prompts padded left, responses right) lead to the same route for each token as the packed batch."""
    from tensordict import TensorDict
    from verl.workers.utils.padding import left_right_2_no_padding

    from samebits.trainer.batch import ROUTES, pack

    width_p, width_r = max(len(s.prompt) for s in samples) + 3, max(len(s.ids) for s in samples) + 2
    dims = pair.trainer.dims
    n, size = len(samples), width_p + width_r
    ids, mask = torch.zeros(n, size, dtype=torch.int64), torch.zeros(n, size, dtype=torch.int64)
    routes = torch.full((n, size, dims.shape.layers, dims.top_k), -1, dtype=torch.int16)
    for i, s in enumerate(samples):
        first = width_p - len(s.prompt)
        ids[i, first : first + len(s.tokens)] = torch.tensor(s.tokens)
        mask[i, first : first + len(s.tokens)] = 1
        routes[i, first : first + len(s.routes)] = torch.from_numpy(s.routes.astype(np.int16))
    response = torch.tensor([[1] * len(s.ids) + [0] * (width_r - len(s.ids)) for s in samples])
    batch = TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "response_mask": response,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "prompts": ids[:, :width_p],
            "responses": ids[:, width_p:],
            ROUTES: routes,
        },
        batch_size=[n],
    )
    batch = left_right_2_no_padding(batch)
    batch["temperature"] = torch.ones(n)
    packed = pack(batch, replay=True)
    starts = np.cumsum([0, *packed.lengths])
    for i, s in enumerate(samples):
        tokens = packed.tokens[starts[i] : starts[i + 1]].tolist()
        if result.require(tokens == s.tokens, f"sequence {i}: unpadding changes its tokens", Place(sequence=i)):
            have = packed.routes[starts[i] : starts[i + 1] - 1].numpy()
            wrong = (have != s.routes).any((1, 2))
            token = int(wrong.argmax()) if wrong.any() else None
            result.require(not wrong.any(), f"sequence {i}: unpadding gives token {token} another route", Place(sequence=i, token=token))


def blocks(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """The indexer's choice beyond its top-k: causal, with the local block, and the same on both sides at every query and group."""
    ours, theirs = probes.long_taps
    config: SparseConfig = pair.trainer.dims.sparse
    sparse = [p for p in ours if p.endswith("self_attn.blocks")]
    result.require(len(sparse) == len(pair.trainer.dims.sparse_layers), f"block choices were recorded in {len(sparse)} layers")
    for point in sparse:
        layer = int(point.split(".")[2])
        if not result.require(point in theirs, f"layer {layer}: the engine reported no block choice", Place(layer=layer)):
            continue
        length = ours[point].shape[0]
        size = f"layer {layer}: the engine chose blocks of {theirs[point].shape[0]} tokens, the prompt has {length}"
        if not result.require(theirs[point].shape == ours[point].shape, size, Place(layer=layer)):
            continue
        _check_choice(result, theirs[point].long(), layer, config, "engine")
        _check_choice(result, ours[point].long(), layer, config, "trainer")
        differ = (ours[point] != theirs[point]).any(-1)
        share = 1 - float(differ.float().mean())
        result.metrics[f"blocks/agreement_layer_{layer}"] = share
        token = int(differ.any(-1).int().argmax()) if differ.any() else None
        message = f"layer {layer}: engine and trainer choose the same blocks for {share:.2%} of queries, first difference at token {token}"
        result.require(share >= pair.limits.agreement, message, Place(layer=layer, token=token), share, pair.limits.agreement)
        _check_scores(result, theirs, point, layer, config)


def _check_choice(result: CheckResult, chosen: Tensor, layer: int, config: SparseConfig, who: str) -> None:
    """Ids ascend, none lies after its query, the query's own block is among them, and as many as there are up to the top-k."""
    own = (torch.arange(len(chosen)) // config.block)[:, None]
    count = torch.minimum(own + 1, torch.tensor(config.topk))
    valid = chosen >= 0
    problems = {
        "reads a block that lies after it": (chosen > own[..., None]).any(-1).any(-1),
        "does not read its own block": ~(chosen == own[..., None]).any(-1).all(-1),
        "reads another number of blocks than the top-k": (valid.sum(-1) != count).any(-1),
        "reads a block twice": ((chosen[..., 1:] <= chosen[..., :-1]) & valid[..., 1:]).any(-1).any(-1),
    }
    for what, wrong in problems.items():
        token = int(wrong.int().argmax()) if wrong.any() else None
        result.require(not wrong.any(), f"{who}, layer {layer}: token {token} {what}", Place(layer=layer, token=token))


def _check_scores(result: CheckResult, theirs: dict[str, Tensor], point: str, layer: int, config: SparseConfig) -> None:
    """The engine's choice against fp64 scores of the index vectors that it reported; near ties may go either way."""
    q, k = (theirs[point.replace("blocks", name)].double() for name in ("index_q", "index_k"))
    length = q.shape[0]
    count = -(-length // config.block)
    at = torch.arange(length)
    for first in range(0, length, 256):
        part = slice(first, min(first + 256, length))
        scores = torch.einsum("tgd,kd->tgk", q[part], k[:, 0]).masked_fill((at > at[part, None])[:, None], float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, count * config.block - length), value=float("-inf"))
        best = scores.unflatten(-1, (count, config.block)).amax(-1)
        own = at[part] // config.block
        best.scatter_(2, own[:, None, None].expand(-1, best.shape[1], 1), float("inf"))
        chosen = theirs[point][part].long()
        taken = torch.zeros(best.shape).scatter_add(2, chosen.clamp_min(0), (chosen >= 0).float()) > 0
        lowest = best.masked_fill(~taken, float("inf")).amin(-1)
        highest = best.masked_fill(taken, float("-inf")).amax(-1)
        scale = best[best.isfinite()].abs().mean().item() if best.isfinite().any() else 1.0
        wrong = (highest > lowest + 1e-4 * scale).any(-1)
        token = first + int(wrong.int().argmax()) if wrong.any() else None
        message = f"layer {layer}: token {token} leaves out a block that scores higher than one it reads"
        result.require(not wrong.any(), message, Place(layer=layer, token=token))


def _require_comparable(samples: Sequence[Sample]) -> None:
    missing = [i for i, s in enumerate(samples) if s.routes is None or s.routes.shape[0] != len(s.tokens) - 1]
    if missing:
        raise ValueError(f"routes of sequence {missing[0]} are missing or have another number of rows; see routing.rows")
