"""Digests: the formula against plain Python, values that never change, and every fault that must change them."""

import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant import adapter, digests
from samebits.quant.digests import CHUNK, Digester, combine, digest, host_lanes, torch_sums
from tests.quant.plain_digest import plain_digest
from tests.support.digest_cases import cases, noise, stacked_cases
from tests.support.interpreter import interpreted

CASES = cases()
GOLDEN = {
    "empty": (torch.zeros(0), "f19dcf245ab72a09a71f88b777c8e430"),
    "zeros bf16 [2, 3]": (torch.zeros(2, 3, dtype=torch.bfloat16), "18bfc40ae738c1d7fb1a0df22ce12c86"),
    "arange fp32 [6]": (torch.arange(6.0), "98acf1c04e7afe27b11102d1299db732"),
    "arange int64 scalar": (torch.tensor(7), "6f708d1bb0216c919cbb0e950a740045"),
    "bytes": (torch.arange(251, dtype=torch.uint8), "1b7ab9c7ea8f356dd4102ebe2656466a"),
    "three chunks": (torch.arange(20_000, dtype=torch.int32), "f2d1a275d572462ad845b15949080a3a"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    """Digests of two versions of samebits are compared: another formula needs another name."""
    tensor, want = GOLDEN[name]
    assert digests.ALGORITHM == "multilinear64x4-1"
    assert digest(tensor) == want


def test_is_the_formula_on_every_dtype_size_and_view():
    assert digests.digests(CASES) == {name: plain_digest(t) for name, t in CASES.items()}


def test_torch_operations_give_the_same_sums(monkeypatch):
    tensors = [t.contiguous() for t in CASES.values()]
    sums = [torch_sums(t) for t in tensors]
    lanes = combine(torch.cat(sums).numpy().view(np.uint64), [len(s) for s in sums])
    assert (lanes == host_lanes([t[None] for t in tensors])).all()


def test_a_tensor_has_one_digest_alone_in_company_batched_and_threaded(monkeypatch):
    """However the work is divided."""
    large = noise(9 * 4 * CHUNK + 4321)
    alone = {name: digest(t) for name, t in (CASES | {"large": large}).items()}
    monkeypatch.setattr(digests, "_BATCH_BYTES", 50_000)
    assert digests.digests(CASES | {"large": large}) == alone
    monkeypatch.setattr(digests, "_THREADED_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(digests, "_ROWS", 2)
    monkeypatch.setattr(digests, "_WORKSPACE", threading.local())
    assert digests.digests(iter((CASES | {"large": large}).items())) == alone


def test_an_iterable_is_digested_as_it_goes(monkeypatch):
    """Base weights are made as fp32 one by one: they must not all be there at once."""
    monkeypatch.setattr(digests, "_BATCH_BYTES", 1000)
    storages = weakref.WeakSet()
    most = 0

    def made():
        nonlocal most
        for i in range(20):
            t = noise(400, i)
            memory = t.untyped_storage()
            storages.add(memory)
            most = max(most, len(storages))
            yield str(i), t

    assert len(digests.digests(made())) == 20 and most <= 5


def test_names_keep_their_order_and_are_used_once():
    assert list(digests.digests({"b": torch.ones(1), "a": torch.ones(2)})) == ["b", "a"]
    assert digests.digests({}) == {}
    digester = Digester()
    digester.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="'a' is digested already"):
        digester.add("a", torch.ones(1))


def test_strides_offset_and_gradient_are_no_part_of_it():
    x = noise(48).view(torch.bfloat16).reshape(4, 6)
    padded = torch.zeros(4, 9, dtype=torch.bfloat16)
    padded[:, 2:8] = x
    column = x.t().contiguous().t()
    for same in (x.clone(), padded[:, 2:8], column, torch.nn.Parameter(x.clone()), x.expand(1, 4, 6)[0]):
        assert digest(same) == digest(x)
    assert digest(x.t()) != digest(x) and digest(x.t()) == digest(x.t().contiguous())


def test_the_bits_count_and_not_the_values():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32)
    other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    assert digest(nan.view(torch.float32)) == digest(nan.clone().view(torch.float32)) != digest(other.view(torch.float32))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3 * 4 * CHUNK), st.data())
def test_one_changed_bit_changes_all_four_lanes(size, data):
    """Certain, not likely: any word, any bit, in the first, a middle or the last short chunk."""
    x = noise(size, size)
    y = x.clone()
    y[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert (host_lanes([x[None]]) != host_lanes([y[None]])).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 2 * CHUNK + 50), st.data())
def test_two_words_exchanged_change_it(words, data):
    x = noise(4 * words, words).view(torch.int32)
    i, j = (data.draw(st.integers(0, words - 1)) for _ in range(2))
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    assert (digest(y) == digest(x)) == torch.equal(x, y)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=2, max_size=6, unique=True), st.sampled_from([15, 31]))
def test_flipped_signs_change_it(places, bit):
    """Differences in the highest bits alone, where sums modulo 2^64 are weakest: bf16 signs in both halves of words."""
    x = noise(80_004).view(torch.int32)
    y = x.clone()
    y[places] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert (host_lanes([x[None]]) != host_lanes([y[None]])).any() and digest(x) != digest(y)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_shape_dtype_and_order_of_dimensions_change_it(shape, data):
    count = int(np.prod(shape))
    x = torch.arange(count, dtype=torch.int32).reshape(shape)
    others = [x.reshape(-1, 1), x[None], x.view(torch.float32), x.to(torch.int64), torch.cat((x, x)), x[:-1]]
    order = data.draw(st.permutations(range(len(shape))))
    others.append(x.permute(*order))
    for other in others:
        same = other.shape == x.shape and other.dtype == x.dtype and torch.equal(other, x)
        assert (digest(other) == digest(x)) == same


def test_moved_parts_of_a_large_tensor_change_it():
    """Chunks exchanged, rows shifted, halves of two tensors, a block that is stale, zeros that are more or less."""
    x = noise(5 * 4 * CHUNK).view(torch.bfloat16).reshape(-1, 256)
    old = noise(5 * 4 * CHUNK, 1).view(torch.bfloat16).reshape(-1, 256)
    chunk = 2 * CHUNK // 256
    swapped = x.clone()
    swapped[:chunk], swapped[chunk : 2 * chunk] = x[chunk : 2 * chunk], x[:chunk]
    half = torch.cat((x[:160], old[160:]))
    variants = [x, swapped, x.roll(1, 0), x.roll(1, 1), x.flip(0), half, -x, old, torch.cat((x, torch.zeros(1, 256, dtype=x.dtype)))]
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in (0, 1, 3, 4, 5, 4 * CHUNK, 4 * CHUNK + 1, 8 * CHUNK)]
    found = [digest(t) for t in (*variants, *zeros)]
    assert len(set(found)) == len(found)


def test_lanes_differ_among_each_other_and_keys_are_odd():
    keys, strides = digests.constants()
    assert len(keys) == CHUNK + 3 and (keys & np.uint64(1)).all() and (strides & np.uint64(1)).all()
    assert len(set(keys.tolist())) == len(keys) and len(set(strides.tolist())) == 4


def test_the_adapter_module_offers_the_same_digest():
    assert adapter.digest is digest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_in_the_interpreter_gives_the_lanes_of_numpy():
    assert interpreted("tests.quant.interpret_digest") == "same lanes"


def test_nothing_of_triton_is_imported_for_cpu_tensors():
    code = "import sys, torch; from samebits.quant.digests import digest; digest(torch.ones(3)); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_stack_has_the_digests_of_its_tensors_one_by_one(monkeypatch):
    for batch in (1, 1 << 30):
        monkeypatch.setattr(digests, "_BATCH_BYTES", batch)
        digester = Digester()
        for name, stack in stacked_cases().items():
            digester.add_stack(tuple(f"{name} {i}" for i in range(len(stack))), stack)
        want = {f"{name} {i}": digest(t.clone()) for name, stack in stacked_cases().items() for i, t in enumerate(stack)}
        found = digester.finish()
        assert list(found) == list(want) and found == want


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3 * 32_768), st.integers(0, 40), st.integers(0, 7), st.integers(0, 9))
def test_any_stack_has_the_digests_of_its_tensors(rows, size, gap, offset, seed):
    data = noise(offset + rows * (size + gap), seed)[offset:]
    stack = data.view(rows, size + gap)[:, :size]
    digester = Digester()
    digester.add_stack(tuple(map(str, range(rows))), stack)
    assert list(digester.finish().values()) == [digest(stack[i].clone()) for i in range(rows)]


def test_names_of_a_stack_are_as_many_as_its_tensors_and_all_different():
    x = torch.ones(2, 3)
    for names, says in (
        (("a",), "1 names are given for 2 tensors"),
        (("b", "b"), "'b' is given twice"),
        (("c", "a0"), "'a0' is digested already"),
    ):
        digester = Digester()
        digester.add("a0", x)
        with pytest.raises(ValueError, match=says):
            digester.add_stack(names, x)
