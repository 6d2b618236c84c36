"""Where rows go: every rank's plan against the others', with a mark on every token, pair and result."""

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebits.kernels.expert_routes import make_routes, owned, part_edges


@st.composite
def worlds(draw):
    world, parts, k = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    tokens = draw(st.lists(st.integers(0, 7), min_size=world, max_size=world))
    few = draw(st.booleans())  # routes that leave most experts without tokens
    seed = draw(st.integers(0, 2**31))
    return world, parts, k, experts, tokens, few, seed


def routing(world, k, experts, tokens, few, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.full((world, max(tokens), k), -1)
    for rank, count in enumerate(tokens):
        ids[rank, :count] = torch.randint(experts - 1 if few else 0, experts, (count, k), generator=g).sort(-1).values
    return ids, torch.randint(-1, 3, ids.shape[:2], generator=g).int(), torch.rand(ids.shape, generator=g)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_every_pair_is_computed_once_and_comes_home(case):
    world, parts, k, experts, tokens, few, seed = case
    ids, slots, weights = routing(world, k, experts, tokens, few, seed)
    plans = [make_routes(ids, slots, weights, tokens, experts, parts, r) for r in range(world)]
    edges = part_edges(experts, world, parts)
    # Tokens travel as (source, token).
    rows = []
    for rank, plan in enumerate(plans):
        mine, offsets = [(rank, t) for t in range(tokens[rank])], [0] * world
        for g in range(parts):
            for source, other in enumerate(plans):
                count = plan.recv[g][source]
                assert other.send[g][rank] == count
                before = sum(sum(other.send[h]) for h in range(g)) + sum(other.send[g][:rank])
                mine += [(source, int(t)) for t in other.sent[before : before + count]]
                offsets[source] += count
        assert len(mine) == plan.rows == len(plan.slots) and len(set(mine)) == len(mine)  # a token is sent to a rank once
        assert [int(slots[s, t]) for s, t in mine] == plan.slots.tolist()
        rows.append(mine)
    # Each result says which pair it is of, and the row must be there when its part is computed.
    results = []
    for rank, plan in enumerate(plans):
        there, made = tokens[rank], []
        for g, pairs in enumerate(plan.pairs):
            there += sum(plan.recv[g])
            first, end = edges[rank * parts + g : rank * parts + g + 2]
            assert all(0 <= e < end - first for e in pairs.expert.tolist())
            assert all(r < there for r in pairs.row.tolist())
            out = [None] * len(pairs.row)
            listed = []
            for e, r, target in zip(pairs.expert.tolist(), pairs.row.tolist(), pairs.target.tolist(), strict=True):
                assert out[target] is None
                out[target] = (*rows[rank][r], e + first)
                listed.append(rows[rank][r])
                assert int(pairs.slot[target]) == int(slots[rows[rank][r]])
            assert listed == sorted(listed)  # the order of one rank that has all tokens
            assert len(out) == sum(plan.give[g]) + plan.own[g]
            made.append((out, pairs.weight))
        results.append(made)
    for home, plan in enumerate(plans):
        came = []
        for g in range(parts):
            for owner, other in enumerate(plans):
                count = plan.take[g][owner]
                assert other.give[g][home] == count
                begin = sum(other.give[g][:home])
                out, weight = results[owner][g]
                came += list(zip(out[begin : begin + count], weight[begin : begin + count].tolist(), strict=True))
            out, weight = results[home][g]
            others = sum(plan.give[g])
            came += list(zip(out[others:], weight[others:].tolist(), strict=True))
        assert plan.place.shape == (tokens[home], k)
        for t in range(tokens[home]):
            have = [came[p] for p in plan.place[t]]
            assert have == [((home, t, int(e)), float(w)) for e, w in zip(ids[home, t], weights[home, t], strict=True)]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 8))
def test_ranges_cover_all_experts_in_order(experts, world, parts):
    ranges = [owned(experts, world, r) for r in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == experts
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1
    edges = part_edges(experts, world, parts)
    assert len(edges) == world * parts + 1 and edges == sorted(edges)
    assert edges[::parts] == [a for a, _ in ranges] + [experts]
