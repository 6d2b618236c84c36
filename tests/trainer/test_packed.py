"""Attention of the training model as the kernels are called for it, here over their torch reference, beside the padded torch path."""

import types

import pytest
import torch

from samebits.kernels import msa_ops, taps
from samebits.kernels.msa_ops import Packed
from samebits.trainer import model as model_module
from samebits.trainer.m3_config import M3Dims
from samebits.trainer.packed import attend, kernels_attend, sequences
from tests.support import random_m3

BLOCK, TOPK = 128, 4  # of the random fixture
DIMS = M3Dims.from_config(random_m3.config())


@pytest.fixture
def on_kernels(monkeypatch):
    """Send the models' attention to the ops of the kernels."""
    return lambda: monkeypatch.setattr(model_module, "kernels_attend", lambda *_: True)


@pytest.mark.parametrize("lengths", [(7, 5 * BLOCK + 61, 130), (BLOCK, 3, 2 * BLOCK + 1)])
@pytest.mark.parametrize("kv_cache", ["auto", "nvfp4"])
def test_the_ops_of_the_kernels_give_what_the_padded_path_gives(make_model, packed, on_kernels, lengths, kv_cache):
    model, batch = make_model(kv_cache=kv_cache), packed(*lengths)
    weight = torch.linspace(-1, 1, len(batch[0]))
    results = []
    for switch in (lambda: None, on_kernels):
        switch()
        model.zero_grad()
        with taps.record(lambda point: "self_attn" in point) as recorder:
            out = model(*batch, capture=True)
        (out.logprobs * weight).sum().backward()
        results.append((out, recorder.tensors(), {n: p.grad.clone() for n, p in model.adapter_parameters()}))
    (padded, padded_taps, padded_grads), (out, points, grads) = results
    # Where K and V are rounded, sums in another order may push a few of them over a boundary.
    if kv_cache == "auto":
        assert torch.equal(out.blocks, padded.blocks)
        torch.testing.assert_close(out.logprobs, padded.logprobs, rtol=0, atol=1e-4)
    assert (out.logprobs - padded.logprobs).abs().median() < 1e-4
    assert list(points) == list(padded_taps)
    for point, value in points.items():
        assert value.shape == padded_taps[point].shape and value.dtype == padded_taps[point].dtype, point
        if kv_cache == "auto" and not point.endswith("blocks"):
            torch.testing.assert_close(value, padded_taps[point], rtol=0, atol=1e-3, msg=lambda m, p=point: f"{p}: {m}")
    total = sum(g.norm() ** 2 for g in padded_grads.values()).sqrt()
    assert sum((grads[n] - g).norm() ** 2 for n, g in padded_grads.items()).sqrt() < (1e-4 if kv_cache == "auto" else 0.05) * total


def test_replayed_blocks_win_row_by_row_on_the_kernels(make_model, packed, on_kernels):
    on_kernels()
    model, batch = make_model(), packed(5 * BLOCK + 40, 20)
    with torch.no_grad():
        own = model(*batch, capture=True)
        blocks = own.blocks.clone()
        blocks[5 * BLOCK + 39, 2] = torch.tensor([0, 1, 2, 5], dtype=torch.int16)
        blocks[::3] = -1  # these rows keep their own
        blocks[5 * BLOCK + 38] = own.blocks[5 * BLOCK + 38]
        out = model(*batch, blocks=blocks, capture=True)
    changed = 5 * BLOCK + 39
    assert changed % 3 and not torch.equal(blocks[changed], own.blocks[changed])
    others = torch.arange(len(batch[0])) != changed
    assert torch.equal(out.blocks[others], own.blocks[others]) and torch.equal(out.blocks[changed], blocks[changed])
    assert torch.equal(out.logprobs[others], own.logprobs[others]) and out.logprobs[changed] != own.logprobs[changed]


@pytest.mark.parametrize("lengths", [[3, 2 * BLOCK, 1, TOPK * BLOCK], [TOPK * BLOCK + 1, 2]])
def test_all_blocks_are_what_the_indexer_would_choose(lengths):
    seqs = sequences(lengths, DIMS, True, torch.device("cpu"))
    assert (seqs.every_block is not None) == (max(lengths) <= TOPK * BLOCK)
    assert seqs.batch.start.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)] and seqs.batch.most == max(lengths)
    assert seqs.position.tolist() == [p for n in lengths for p in range(n)]
    assert seqs.batch.request.tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]
    g = torch.Generator().manual_seed(0)
    index_q, index_k = torch.randn(sum(lengths), 2, 128, generator=g), torch.randn(sum(lengths), 128, generator=g)
    if seqs.every_block is not None:
        keys = Packed(index_k, None, seqs.batch.start[:-1], TOPK)
        assert torch.equal(seqs.every_block, msa_ops.index_topk(index_q, keys, seqs.batch, DIMS.sparse))


def test_a_short_sequence_is_computed_by_the_sparse_op_all_the_same(monkeypatch):
    """The engine does so, and its sums have another order than a dense layer's."""
    calls = []
    for name in ("sparse_attention", "dense_attention", "index_topk"):
        real = getattr(msa_ops, name)
        monkeypatch.setattr(msa_ops, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    for lengths, config, want in (
        ([5, 9], DIMS.sparse, ["sparse_attention"]),
        ([5, TOPK * BLOCK + 1], DIMS.sparse, ["index_topk", "sparse_attention"]),
        ([5, TOPK * BLOCK + 1], None, ["dense_attention"]),
    ):
        calls.clear()
        tokens = sum(lengths)
        q, k, v, index_q, index_k = (torch.randn(tokens, n, 128) for n in (4, 2, 2, 2, 1))
        seqs = sequences(lengths, DIMS, True, torch.device("cpu"))
        attend(q, k, v, seqs, 0.1, index_q, index_k[:, 0], config, None)
        assert calls == want


def test_which_models_attend_on_the_kernels(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert kernels_attend(DIMS, torch.bfloat16, cuda)
    assert not kernels_attend(DIMS, torch.float32, cuda) and not kernels_attend(DIMS, torch.bfloat16, cpu)

    def changed(**sizes):
        shape = types.SimpleNamespace(head_dim=128, heads=64, kv_heads=4)
        for name, size in sizes.items():
            setattr(shape, name, size)
        return types.SimpleNamespace(shape=shape, sparse=DIMS.sparse)

    assert kernels_attend(changed(), torch.bfloat16, cuda)
    assert not kernels_attend(changed(head_dim=64), torch.bfloat16, cuda) and not kernels_attend(changed(kv_heads=2), torch.bfloat16, cuda)
    for sparse in (DIMS.sparse._replace(topk=12), DIMS.sparse._replace(block=64)):
        dims = changed()
        dims.sparse = sparse
        assert not kernels_attend(dims, torch.bfloat16, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert not kernels_attend(DIMS, torch.bfloat16, cuda)
