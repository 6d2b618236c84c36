"""MSA against brute force: block choice, attention over chosen blocks, decode, packing, padding. Contexts go well beyond top-k blocks."""

import math

import pytest
import torch

from samebits.kernels.msa import SparseConfig, attend, packed_attention, pad_packed, select_blocks

FOUR, SIXTEEN = SparseConfig(topk=4), SparseConfig(topk=16)
HEADS, GROUPS, DIM = 4, 2, 32
SCALE = DIM**-0.5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute_blocks(index_q, index_k, pos: int, config: SparseConfig) -> list[list[int]]:
    """Chosen blocks of one query [G, D] at `pos`, in fp64, written as the rule reads."""
    own = pos // config.block
    out = []
    for q in index_q.double():
        score = {}
        for b in range(own + 1):
            keys = index_k[b * config.block : min((b + 1) * config.block, pos + 1)].double()
            score[b] = (keys @ q).max().item()
            if b < config.init_blocks:
                score[b] = 1e30
            if b > own - config.local_blocks:
                score[b] = 1e29
        chosen = sorted(score, key=lambda b, s=score: (-s[b], b))[: config.topk]
        out.append(sorted(chosen) + [-1] * (config.topk - len(chosen)))
    return out


def brute_attend(q, k, v, pos: int, blocks=None, block: int = 128):
    """One query [H, D] at `pos` over keys [K, G, D], in fp64; `blocks` a list for each group."""
    out = []
    for h in range(q.shape[0]):
        g = h // (q.shape[0] // k.shape[1])
        keys = [j for j in range(pos + 1) if blocks is None or j // block in blocks[g]]
        scores = k[keys, g].double() @ q[h].double() * SCALE
        out.append(scores.softmax(0) @ v[keys, g].double())
    return torch.stack(out)


# --------------------------------------------------------------------------------------------------------------- block choice


@pytest.mark.parametrize("length", [1, 127, 128, 129, 513, 700, 2049, 2500])
@pytest.mark.parametrize("config", [FOUR, SIXTEEN], ids=["top4", "top16"])
def test_choice_equals_brute_force(length, config):
    index_q, index_k = randn(1, length, GROUPS, DIM, seed=length), randn(1, length, DIM, seed=length + 1)
    positions = sorted({p for p in (0, 1, 126, 127, 128, 255, 512, 639, 2047, 2048, length - 2, length - 1) if 0 <= p < length})
    ids = select_blocks(index_q[:, positions], index_k, torch.tensor([positions]), config)
    assert ids.dtype == torch.int32 and ids.shape == (1, len(positions), GROUPS, config.topk)
    for i, pos in enumerate(positions):
        assert ids[0, i].tolist() == brute_blocks(index_q[0, pos], index_k[0], pos, config), pos
    if length > 128 * config.topk:
        assert (ids[0, -1] >= 0).all() and ids[0, -1, 0].tolist() != ids[0, -1, 1].tolist()  # groups choose for themselves


@pytest.mark.parametrize(("init", "local"), [(0, 1), (1, 1), (2, 1), (0, 2), (1, 3), (0, 0)])
def test_forced_blocks(init, local):
    config = SparseConfig(topk=4, init_blocks=init, local_blocks=local)
    index_q, index_k = randn(1, 1, GROUPS, DIM, seed=5), randn(1, 1000, DIM, seed=6)
    index_k[0, :128] *= 0.01  # the first block would never be chosen,
    index_k[0, 896:] *= 0.01  # nor would the last
    ids = select_blocks(index_q, index_k, torch.tensor([[999]]), config)
    assert ids[0, 0].tolist() == brute_blocks(index_q[0, 0], index_k[0], 999, config)
    for group in ids[0, 0].tolist():
        assert set(range(init)) | set(range(8 - local, 8)) <= set(group)


def test_more_forced_blocks_than_there_is_room_for():
    config = SparseConfig(topk=2, init_blocks=1, local_blocks=3)
    index_q, index_k = randn(1, 1, 1, DIM), randn(1, 1000, DIM, seed=1)
    assert select_blocks(index_q, index_k, torch.tensor([[999]]), config)[0, 0, 0].tolist() == [0, 5]


def test_ties_go_to_the_lower_block():
    index_k = torch.zeros(1, 1024, DIM)
    index_k[0, [300, 500, 700], 0] = 1.0  # blocks 2, 3 and 5 tie above the rest, which tie at zero
    index_q = torch.zeros(1, 1, 1, DIM)
    index_q[..., 0] = 1.0
    pos = torch.tensor([[1023]])
    assert select_blocks(index_q, index_k, pos, FOUR)[0, 0, 0].tolist() == [2, 3, 5, 7]
    assert select_blocks(index_q, index_k, pos, SparseConfig(topk=3))[0, 0, 0].tolist() == [2, 3, 7]
    assert select_blocks(index_q, index_k, pos, SparseConfig(topk=6))[0, 0, 0].tolist() == [0, 1, 2, 3, 5, 7]


def test_a_block_is_scored_by_its_best_key_and_not_by_the_future():
    index_k = torch.zeros(1, 1024, DIM)
    index_k[0, 130, 0] = 5.0  # one key in block 1
    index_k[0, 256:512, 0] = 1.0  # block 2 and 3: every key
    index_k[0, 901, 0] = 100.0  # after the query
    index_q = torch.zeros(1, 1, 1, DIM)
    index_q[..., 0] = 1.0
    chosen = select_blocks(index_q, index_k, torch.tensor([[900]]), SparseConfig(topk=2))[0, 0, 0].tolist()
    assert chosen == [1, 7]
    # Keys after the query have no say, whatever they are.
    index_k[0, 901:] = float("nan")
    assert select_blocks(index_q, index_k, torch.tensor([[900]]), SparseConfig(topk=2))[0, 0, 0].tolist() == chosen


def test_choice_of_a_query_depends_on_its_prefix_alone():
    index_q, index_k = randn(1, 1500, GROUPS, DIM), randn(1, 1500, DIM, seed=1)
    pos = torch.arange(1500)[None]
    whole = select_blocks(index_q, index_k, pos, FOUR)
    part = select_blocks(index_q[:, :900], index_k[:, :900], pos[:, :900], FOUR)
    assert torch.equal(whole[:, :900], part)


def test_padding_queries_choose_nothing():
    index_q, index_k = randn(2, 3, GROUPS, DIM), randn(2, 700, DIM, seed=1)
    pos = torch.tensor([[699, -1, 5], [-1, 600, -1]])
    ids = select_blocks(index_q, index_k, pos, FOUR)
    assert (ids[pos < 0] == -1).all() and (ids[pos >= 0][:, :, 0] >= 0).all()
    assert torch.equal(ids[1, 1:2], select_blocks(index_q[1:, 1:2], index_k[1:], pos[1:, 1:2], FOUR)[0])


# ------------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
def test_dense_attention_equals_brute_force(length):
    q, k, v = randn(1, length, HEADS, DIM), randn(1, length, GROUPS, DIM, seed=1), randn(1, length, GROUPS, DIM, seed=2)
    out = attend(q, k, v, torch.arange(length)[None], SCALE)
    for pos in {0, length // 2, length - 1}:
        torch.testing.assert_close(out[0, pos].double(), brute_attend(q[0, pos], k[0], v[0], pos), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "config"), [(129, FOUR), (700, FOUR), (1300, FOUR), (2049, SIXTEEN), (2500, SIXTEEN)])
def test_sparse_attention_equals_brute_force(length, config):
    positions = sorted({0, 127, 128, length // 2, length - 2, length - 1})
    q, k, v = randn(1, len(positions), HEADS, DIM), randn(1, length, GROUPS, DIM, seed=1), randn(1, length, GROUPS, DIM, seed=2)
    index_q, index_k = randn(1, len(positions), GROUPS, DIM, seed=3), randn(1, length, DIM, seed=4)
    q_pos = torch.tensor([positions])
    blocks = select_blocks(index_q, index_k, q_pos, config)
    out = attend(q, k, v, q_pos, SCALE, blocks)
    for i, pos in enumerate(positions):
        want = brute_attend(q[0, i], k[0], v[0], pos, blocks[0, i].tolist())
        torch.testing.assert_close(out[0, i].double(), want, rtol=1e-5, atol=1e-5)
    if length > 128 * config.topk:
        assert not torch.allclose(out[0, -1], attend(q, k, v, q_pos, SCALE)[0, -1], atol=1e-3)


@pytest.mark.parametrize(("length", "config"), [(513, FOUR), (640, FOUR), (1300, FOUR), (2049, SIXTEEN), (2500, SIXTEEN)])
def test_decode_equals_the_mask_path(length, config):
    """One query over a long context reads its blocks by gather; among two queries the same one goes through the mask."""
    pos = torch.tensor([[length - 1], [length - 200]])
    q, k, v = randn(2, 1, HEADS, DIM), randn(2, length, GROUPS, DIM, seed=1), randn(2, length, GROUPS, DIM, seed=2)
    blocks = select_blocks(randn(2, 1, GROUPS, DIM, seed=3), randn(2, length, DIM, seed=4), pos, config)
    gathered = attend(q, k, v, pos, SCALE, blocks)
    masked = attend(q.repeat(1, 2, 1, 1), k, v, pos.repeat(1, 2), SCALE, blocks.repeat(1, 2, 1, 1))
    torch.testing.assert_close(gathered[:, 0], masked[:, 0], rtol=1e-5, atol=1e-6)
    for r in range(2):
        want = brute_attend(q[r, 0], k[r], v[r], int(pos[r, 0]), blocks[r, 0].tolist())
        torch.testing.assert_close(gathered[r, 0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2], ids=["gather", "mask"])
def test_unused_keys_have_no_effect(queries):
    """Everything outside the chosen blocks and after the query may hold NaN, as an engine's fresh cache does."""
    length, pos = 1300, 1200
    q_pos = torch.full((1, queries), pos)
    q, k, v = randn(1, queries, HEADS, DIM), randn(1, length, GROUPS, DIM, seed=1), randn(1, length, GROUPS, DIM, seed=2)
    blocks = torch.tensor([[[0, 3, 9, -1], [2, 5, 8, 9]]]).int()[:, None].repeat(1, queries, 1, 1)
    want = attend(q, k, v, q_pos, SCALE, blocks)
    for g in range(GROUPS):
        unused = torch.tensor([j > pos or j // 128 not in blocks[0, 0, g].tolist() for j in range(length)])
        k[0, unused, g], v[0, unused, g] = float("nan"), float("nan")
    assert torch.equal(attend(q, k, v, q_pos, SCALE, blocks), want)


def test_keys_after_a_dense_query_have_no_effect():
    q, k, v = randn(1, 3, HEADS, DIM), randn(1, 300, GROUPS, DIM, seed=1), randn(1, 300, GROUPS, DIM, seed=2)
    q_pos = torch.tensor([[10, 199, -1]])
    want = attend(q, k, v, q_pos, SCALE)
    k[0, 200:], v[0, 200:] = float("nan"), float("nan")
    assert torch.equal(attend(q, k, v, q_pos, SCALE), want)


def test_padding_queries_give_zeros_and_leave_others_alone():
    q, k, v = randn(2, 4, HEADS, DIM), randn(2, 700, GROUPS, DIM, seed=1), randn(2, 700, GROUPS, DIM, seed=2)
    q_pos = torch.tensor([[0, 300, 699, -1], [5, -1, -1, -1]])
    blocks = select_blocks(randn(2, 4, GROUPS, DIM, seed=3), randn(2, 700, DIM, seed=4), q_pos, FOUR)
    for b in (None, blocks):
        clean = attend(q, k, v, q_pos, SCALE, b)
        assert not clean[q_pos < 0].any()
        dirty_q = q.masked_fill((q_pos < 0)[..., None, None], float("nan"))
        dirty = attend(dirty_q, k, v, q_pos, SCALE, b)
        assert torch.equal(dirty[q_pos >= 0], clean[q_pos >= 0])


def test_gradients_equal_autograd_in_fp64():
    length = 700
    q_pos = torch.tensor([[699, 520, 3]])
    q, k, v = randn(1, 3, HEADS, DIM), randn(1, length, GROUPS, DIM, seed=1), randn(1, length, GROUPS, DIM, seed=2)
    blocks = select_blocks(randn(1, 3, GROUPS, DIM, seed=3), randn(1, length, DIM, seed=4), q_pos, FOUR)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attend(*leaves, q_pos, SCALE, blocks).square().sum().backward()
    q64, k64, v64 = (t.double().requires_grad_() for t in (q, k, v))
    torch.stack(
        [brute_attend(q64[0, i], k64[0], v64[0], int(q_pos[0, i]), blocks[0, i].tolist()) for i in range(3)]
    ).square().sum().backward()
    for a, b in zip(leaves, (q64, k64, v64), strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("lengths", [[5], [3, 0, 7, 1], [700, 10, 650, 12, 11, 1], [1, 1, 1]])
def test_buckets_hold_every_token_once(lengths):
    buckets = pad_packed(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = {}
    for index, q_pos in buckets:
        assert index.shape == q_pos.shape and (index[q_pos < 0] == 0).all()
        assert q_pos.numel() <= 1.5 * (q_pos >= 0).sum()
        for row, position in zip(index[q_pos >= 0].tolist(), q_pos[q_pos >= 0].tolist(), strict=True):
            assert row not in seen
            seen[row] = position
    assert seen == {s + j: j for s, n in zip(starts, lengths, strict=True) for j in range(n)}


@pytest.mark.parametrize("config", [None, FOUR], ids=["dense", "sparse"])
def test_packed_sequences_equal_each_alone(config):
    lengths = [700, 1, 40, 0, 128, 690, 129, 2]
    total = sum(lengths)
    q, k, v = randn(total, HEADS, DIM), randn(total, GROUPS, DIM, seed=1), randn(total, GROUPS, DIM, seed=2)
    index_q, index_k = randn(total, GROUPS, DIM, seed=3), randn(total, DIM, seed=4)

    def run(rows: slice, lengths: list[int]):
        return packed_attention(q[rows], k[rows], v[rows], pad_packed(lengths), SCALE, index_q[rows], index_k[rows], config)

    out, chosen = run(slice(None), lengths)
    start = 0
    for n in lengths:
        if n:
            alone, blocks = run(slice(start, start + n), [n])
            torch.testing.assert_close(out[start : start + n], alone, rtol=1e-5, atol=1e-6)
            if config:
                assert torch.equal(chosen[start : start + n], blocks)
        start += n
    assert (chosen is None) == (config is None)


def test_packed_sparse_attention_equals_brute_force_beyond_the_top_blocks():
    lengths = [1200, 30]
    total = sum(lengths)
    q, k, v = randn(total, HEADS, DIM), randn(total, GROUPS, DIM, seed=1), randn(total, GROUPS, DIM, seed=2)
    index_q, index_k = randn(total, GROUPS, DIM, seed=3), randn(total, DIM, seed=4)
    out, chosen = packed_attention(q, k, v, pad_packed(lengths), SCALE, index_q, index_k, FOUR)
    for start, pos in [(0, 0), (0, 600), (0, 1199), (1200, 29)]:
        end = 1200 if start == 0 else total
        blocks = brute_blocks(index_q[start + pos], index_k[start:end], pos, FOUR)
        assert chosen[start + pos].tolist() == blocks
        want = brute_attend(q[start + pos], k[start:end], v[start:end], pos, blocks)
        torch.testing.assert_close(out[start + pos].double(), want, rtol=1e-5, atol=1e-5)


def test_replayed_blocks_are_used_and_returned():
    total = 1200
    q, k, v = randn(total, HEADS, DIM), randn(total, GROUPS, DIM, seed=1), randn(total, GROUPS, DIM, seed=2)
    index_q, index_k = randn(total, GROUPS, DIM, seed=3), randn(total, DIM, seed=4)
    buckets = pad_packed([total])
    own, chosen = packed_attention(q, k, v, buckets, SCALE, index_q, index_k, FOUR)
    again, returned = packed_attention(q, k, v, buckets, SCALE, index_q.flip(0), index_k, FOUR, chosen)
    assert torch.equal(own, again) and torch.equal(chosen, returned)
    other = chosen.clone()
    other[1199] = torch.tensor([0, 1, 2, 9])
    changed, returned = packed_attention(q, k, v, buckets, SCALE, index_q, index_k, FOUR, other)
    assert torch.equal(returned, other) and torch.equal(changed[:1199], own[:1199])
    want = brute_attend(q[1199], k, v, 1199, [[0, 1, 2, 9]] * 2)
    torch.testing.assert_close(changed[1199].double(), want, rtol=1e-5, atol=1e-5)


def test_packed_gradients_flow_to_q_k_v_only():
    lengths = [600, 20]
    q, k, v, index_q, index_k = (
        t.requires_grad_()
        for t in (
            *(randn(620, n, DIM, seed=i) for i, n in enumerate((HEADS, GROUPS, GROUPS))),
            randn(620, GROUPS, DIM, seed=3),
            randn(620, DIM, seed=4),
        )
    )
    out, _ = packed_attention(q, k, v, pad_packed(lengths), SCALE, index_q, index_k, FOUR)
    out.square().sum().backward()
    # The first token of a sequence sees itself alone: its value has a gradient, its query has none.
    assert v.grad.flatten(1).any(-1).all() and (q.grad.flatten(1).any(-1) == (torch.arange(620) % 600 > 0)).all()
    assert k.grad.any() and index_q.grad is None and index_k.grad is None


def test_scale_is_applied_before_the_softmax():
    q, k, v = torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0]], [[0.0, 0.0]]]]), torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    out = attend(q, k, v, torch.tensor([[1]]), 2.0)
    assert out[0, 0, 0, 0].item() == pytest.approx(math.e**2 / (math.e**2 + 1), rel=1e-6)
