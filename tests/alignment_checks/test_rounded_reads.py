"""An NVFP4 cache read as E4M3 (`NumericsProfile.kv_read`): the trainer computes the engine's bits, over rows and over pages."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from samebits.alignment_checks import suite
from samebits.alignment_checks.bisect import first_difference
from samebits.kernels.msa_ops import Norms, batch_of, rotate_heads
from samebits.kernels.rope import rope_table
from samebits.quant import kv
from samebits.rollout import paged, pages
from samebits.rollout.paged import PAGE, PagedCache, StepPlan, plan
from samebits.rollout.pages import PageCache, PageStep
from samebits.trainer import packed
from samebits.trainer.m3_config import M3Dims
from tests.support import random_m3

DIMS = M3Dims.from_config(random_m3.config())
TOPK, LENGTH = DIMS.sparse.topk, 700  # more blocks than the 4 that are chosen
HEADS, GROUPS, DIM = 4, 2, 128


def engine_attention(kind: type, parts: list[torch.Tensor], norms: Norms, table, sparse: bool, rounded: bool) -> torch.Tensor:
    """A request of LENGTH tokens prefilled by the engine's layer, whose pages lie anywhere."""
    cache = object.__new__(kind)
    torch.nn.Module.__init__(cache)
    cache.num_heads, cache.kv_heads, cache.dim, cache.packed, cache.rounded = HEADS, GROUPS, DIM, True, rounded
    cache.dtype, cache.scale, cache.prefix, cache.sparse = torch.float32, 0.1, "layer", DIMS.sparse if sparse else None
    count = -(-LENGTH // PAGE)
    cache.bind_kv_cache(torch.zeros(count + 2, 1, PAGE, 5 * 72, dtype=torch.uint8))
    order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(5))[:count].int()[None]
    at = torch.arange(LENGTH)
    slots = order[0].long()[at // PAGE] * PAGE + at % PAGE
    if kind is PageCache:
        step = PageStep(batch_of([LENGTH]), slots, order, LENGTH)
        pages.get_forward_context = lambda: SimpleNamespace(attn_metadata={"layer": step})
        return cache.run(parts, norms, table)
    step = StepPlan(slots, plan(torch.tensor([0, LENGTH]).numpy(), torch.tensor([LENGTH]).numpy(), order, HEADS))
    paged.get_forward_context = lambda: SimpleNamespace(attn_metadata={"layer": step})
    q, k, v, *index = rotated(parts, norms, table, None)
    return cache(q, k, v, *index)


def rotated(parts: list[torch.Tensor], norms: Norms, table, form: str | None) -> list[torch.Tensor]:
    """Normed and turned heads; K, V and the index key as a cache of `form` gives them back."""
    index_k = parts[4][:, 0] if len(parts) > 3 else None
    q, k, v, index_q, index_k = rotate_heads(*parts[:3], parts[3] if len(parts) > 3 else None, index_k, norms, table, POSITION, form)
    return [q, k, v] + ([index_q, index_k[:, None]] if index_q is not None else [])


POSITION = torch.arange(LENGTH, dtype=torch.int32)


def trainer_attention(kernels: bool, parts: list[torch.Tensor], norms: Norms, table, sparse: bool, rounded: bool) -> torch.Tensor:
    """The same by the trainer's attention, on the ops of the kernels or on padded batches."""
    seqs = packed.sequences([LENGTH], DIMS, kernels, torch.device("cpu"))
    q, k, v, *index = rotated(parts, norms, table, "nvfp4")
    index_q, index_k = (index[0], index[1][:, 0]) if index else (None, None)
    return packed.attend(q, k, v, seqs, 0.1, index_q, index_k, DIMS.sparse if sparse else None, None, rounded)[0]


@pytest.mark.parametrize("kind", [PagedCache, PageCache])
@pytest.mark.parametrize("sparse", [True, False])
def test_attention_of_trainer_and_engine_is_equal_bit_for_bit(kind, sparse, monkeypatch):
    for module in (paged, pages):
        monkeypatch.setattr(module, "get_forward_context", None)
    g = torch.Generator().manual_seed(0)
    sizes = (HEADS, GROUPS, GROUPS, GROUPS, 1) if sparse else (HEADS, GROUPS, GROUPS)
    parts = [torch.randn(LENGTH, n, DIM, generator=g) * 3 for n in sizes]
    parts[2][::7] *= 400  # values beyond 448, where E4M3 saturates
    weights = [torch.randn(DIM, generator=g) * 0.2 for _ in range(4)]
    norms = Norms(*(weights if sparse else (*weights[:2], None, None)), 1e-6)
    table = rope_table(LENGTH, DIM // 2, 5e6)
    kernels = kind is PageCache
    for rounded in (True, False):
        ours = trainer_attention(kernels, parts, norms, table, sparse, rounded)
        assert torch.equal(ours, engine_attention(kind, parts, norms, table, sparse, rounded)) and ours.isfinite().all()
        other = engine_attention(kind, parts, norms, table, sparse, not rounded)
        assert (ours - other).norm() > 1e-3 * ours.norm()  # one side that does not round is seen


def test_gradients_pass_straight_through_the_rounding():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, n, DIM, generator=g).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
    seqs = packed.sequences([9], DIMS, False, torch.device("cpu"))
    out, _ = packed.attend(q, k, v, seqs, 0.1, None, None, None, None, True)
    scale = torch.randn(out.shape, generator=g)
    have = torch.autograd.grad((out * scale).sum(), (q, k, v))
    leaves = [kv.round_e4m3(x.detach()).requires_grad_() for x in (q, k, v)]
    out, _ = packed.attend(*leaves, seqs, 0.1, None, None, None, None)
    assert all(torch.equal(a, b) for a, b in zip(have, torch.autograd.grad((out * scale).sum(), leaves), strict=True))


@pytest.fixture(scope="session")
def rounded_pair():
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    from samebits.alignment_checks import pair as pairs
    from samebits.alignment_checks.limits import Limits
    from samebits.recipes.config import load_recipe
    from samebits.recipes.validate import validate
    from samebits.recipes.verify_cli import _vocabulary

    recipe, verl = load_recipe("recipes/tiny_m3_grpo.yaml", ["device=cpu", "numerics.kv_cache=nvfp4-e4m3"])
    validate(recipe, verl)
    return pairs.start(verl, recipe.model_path, Limits.of(recipe.profile), _vocabulary(recipe.model_path))


@pytest.mark.slow
def test_a_profile_with_rounded_reads_reaches_both_models(rounded_pair):
    """Every point of both real forwards, past the chosen blocks; and the one that differs where one side does not round."""
    trainer, replica = rounded_pair.trainer, rounded_pair.replicas[0]
    attention = [layer.self_attn.attn for layer in replica.model.model.layers]
    assert trainer.profile.rounded_reads and all(cache.rounded for cache in attention)
    tokens = torch.randint(3, 40, (2200,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = trainer.record(tokens), replica.record(tokens, version=None)
    assert first_difference(ours, theirs) is None
    for layer, point in ((0, "attention"), (1, "blocks")):  # dense; sparse, whose choice comes first
        attention[layer].rounded = False
        assert first_difference(ours, replica.record(tokens, version=None)).point == f"model.layers.{layer}.self_attn.{point}"
        attention[layer].rounded = True
    trainer.module.layers[0].attention.rounded_reads = False
    assert first_difference(trainer.record(tokens), theirs).point == "model.layers.0.self_attn.attention"
    trainer.module.layers[0].attention.rounded_reads = True


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, 3, 11])
def test_sampled_tokens_have_the_bits_of_the_trainer_in_every_company(rounded_pair, prompts):
    """Decoded a token at a time among few others, scored in one packed batch: no K or V may round to another code."""
    g = torch.Generator().manual_seed(prompts)
    drawn = [torch.randint(3, 40, (int(torch.randint(1, 30, (1,), generator=g)),), generator=g).tolist() for _ in range(prompts)]
    suite.prepare(rounded_pair)
    samples = rounded_pair.replicas[0].run(drawn, tokens=24, prompt_logprobs=False, seed=0)
    for sample, row in zip(samples, rounded_pair.trainer.logprobs(samples), strict=True):
        assert torch.equal(row[len(sample.prompt) - 1 :], sample.logprobs)
