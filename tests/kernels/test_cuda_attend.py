"""Decode attention in one launch, without a GPU: its kernel compiled for the CPU and run there, and what a launch gives to the driver."""

import ctypes
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebits.kernels import cuda_attend, cuda_module, cuda_prefill, msa_ops
from samebits.kernels.cuda_attend import Constants, Variant
from samebits.kernels.msa_ops import Batch, Pages
from tests.support import cuda_shim, ordered_attention
from tests.support.cuda_attend_cases import SCALE, all_values, exact_case, random_choice, with_any_scales
from tests.support.cuda_on_cpu import COMPILER, library, on_cpu
from tests.support.interpreter import interpreted
from tests.support.msa_cases import make
from tests.support.msa_gpu import distance, same
from tests.support.stand_in_libcuda import installed

TWO_POWER = 0.125 * 0.6931471805599453
"""Softmax scale which times log2(e) is a power of two in fp32."""
compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
VARIANTS = [Variant(2, tiles=8), Variant(2, wide=True), Variant(4, wide=True), Variant(4), Variant(4, mixed=False, quarters=True)]
VARIANTS += [Variant(16), Variant(16, quarters=True)]


@compiler
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_it_has_the_bits_of_the_triton_kernels():
    assert interpreted("tests.kernels.interpret_cuda_attend") == "same bits"


@pytest.fixture
def emulated():
    if COMPILER is None:
        pytest.skip("needs g++")
    with on_cpu():
        yield


@pytest.mark.parametrize("rounded", [False, True])
def test_attention_is_within_rounding_of_fp32(emulated, rounded):
    """Random values, several tokens of a request, more blocks than are chosen, any scales, NaN where no key is, two groups."""
    case = make([1, 2], [2306, 129], "nvfp4", groups=2, heads=6, seed=3)
    if rounded:
        with_any_scales(case.cache.data)
    chosen = random_choice(case.batch.position, 2, torch.Generator().manual_seed(0))
    have, lse = cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.1, lse=True, rounded=rounded, variant=Variant(4))
    want = msa_ops.sparse_attention(case.q.float(), case.cache, chosen, case.batch, 0.1, rounded=rounded)
    assert distance(have, want) < 6e-3
    assert lse.isfinite().all()


def test_variants_and_orders_of_warps_have_the_same_bits(emulated):
    case = make([1, 1], [2306, 1500], "nvfp4", groups=1, heads=16, seed=4)
    chosen = random_choice(case.batch.position, 1, torch.Generator().manual_seed(0))
    results = [cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.1, lse=True, variant=variant) for variant in VARIANTS]
    with on_cpu(seed=77):
        results.append(cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.1, lse=True, variant=Variant(16)))
    for out, lse in results[1:]:
        assert same(out, results[0][0]) and same(lse, results[0][1])


@pytest.mark.skipif(not cuda_shim.AVAILABLE, reason="needs g++ on x86-64")
@pytest.mark.parametrize("variant", [Variant(16), Variant(4), Variant(2, wide=True)])
def test_sums_that_round_are_made_in_the_order_of_the_triton_kernels(emulated, variant):
    case = make([1, 2, 1], [2306, 129, 1500], "nvfp4", groups=2, heads=12, seed=5)
    chosen = random_choice(case.batch.position, 2, torch.Generator().manual_seed(0))
    plan = cuda_prefill.plan(case.q, case.cache, chosen, case.batch, TWO_POWER, True)
    exp2, log2 = (lambda x, i=i: cuda_shim.functions(plan, x)[i] for i in range(2))
    out, lse = ordered_attention.attend(case.q, case.packed, chosen, case.batch, 0.125, exp2, log2)
    have = cuda_attend.attend(case.q, case.cache, chosen, case.batch, TWO_POWER, lse=True, variant=variant)
    assert same(have[0], out) and same(have[1], lse)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 2300), st.integers(1, 3)), min_size=1, max_size=3), st.integers(0, 2**20))
def test_any_lengths(emulated, requests, seed):
    """Sums are exact: fp64 has their bits, up to the rounding of the softmax's division."""
    total, new = [n for n, _ in requests], [min(n, k) for n, k in requests]
    case = exact_case(new, total, groups=2, heads=3, seed=seed)
    have, lse = cuda_attend.attend(case.q, case.cache, case.chosen, case.batch, SCALE, lse=True, variant=Variant(4))
    want = msa_ops.sparse_attention(case.q.double(), case.cache, case.chosen, case.batch, SCALE)
    assert (have.double() - want).abs().max() <= 2**-8 * want.abs().max() + 1e-30
    assert distance(have, want) < 3e-3 and lse.isfinite().all()


def test_padding_reads_no_page_and_gives_zeros(emulated):
    case = make([2, 1], [300, 129], "nvfp4", groups=1, heads=16, seed=5)
    position, table = case.batch.position.clone(), case.cache.table.clone()
    chosen = random_choice(position, 1, torch.Generator().manual_seed(0))
    position[2], chosen[2], table[1] = -1, -1, 2**30
    batch = case.batch._replace(position=position)
    for unit in (4, 16):
        out, lse = cuda_attend.attend(case.q, Pages(case.cache.data, table), chosen, batch, 0.1, lse=True, variant=Variant(unit))
        assert not out[2].any() and not out[2].signbit().any() and (lse[2] == -torch.inf).all() and out[:2].flatten(1).any(1).all()


@compiler
@pytest.mark.parametrize(("mixed", "rounded"), [(False, False), (True, False), (True, True)])
def test_every_code_under_every_scale(mixed, rounded):
    """At each of the eight places of a word, beside other codes and another scale: value * 2^-7, zeros with the sign of their code."""
    decode, four = library(Constants(4, 1, 16, True, rounded, 2, mixed, False, False)).decode_word, (ctypes.c_uint32 * 4)()
    words = [sum((first + 5 * place) % 16 << 4 * place for place in range(8)) for first in range(16)]
    found, values = [], all_values(rounded) / 128
    for scale in range(256):
        for word in words:
            decode(word, scale, scale * 37 + 11 & 0xFF, four)
            found.append(list(four))
    have = torch.tensor(found, dtype=torch.int64).view(256, 16, 4)
    scale, first = torch.meshgrid(torch.arange(256), torch.arange(16), indexing="ij")
    for i in range(4):
        for half, which in ((0, scale), (1, scale * 37 + 11 & 0xFF)):
            want = values[(first + 5 * (i + 4 * half)) % 16, which]
            bits = have[..., i] >> 16 * half & 0xFFFF
            assert torch.equal(bits << 16, want.view(torch.int32).long() & 0xFFFFFFFF), (i, half)


@compiler
def test_log2_is_within_an_ulp_or_two():
    log2 = library(Constants(4, 1, 16, True, False, 2, True, False, False)).log2_alone
    x = torch.cat((torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 2048 + 2**-10, 2.0 ** torch.arange(-10, 12)))
    have = torch.tensor([log2(v) for v in x.tolist()])
    assert torch.allclose(have.double(), x.double().log2(), rtol=2e-7, atol=1e-7)


BAD = {
    "queries must be bf16": dict(q=torch.zeros(1, 4, 128)),
    "a group has 1 to 16 query heads": dict(q=torch.zeros(1, 34, 128).bfloat16()),
    "chosen blocks must be int32": dict(chosen=torch.zeros(1, 2, 8, dtype=torch.int32)),
    "pages must be uint8": dict(data=torch.zeros(3, 2, 128, 72, dtype=torch.uint8)),
    "multiples of 16 bytes": dict(data=torch.zeros(3 * 36872, dtype=torch.uint8).as_strided((3, 4, 128, 72), (36872, 9216, 72, 1))),
    "the table must be int32": dict(table=torch.zeros(1, 3, dtype=torch.int64)),
    "request and position": dict(position=torch.zeros(2, dtype=torch.int32)),
    "unit must be one of": dict(variant=Variant(3)),
    "tiles must be one of": dict(variant=Variant(4, tiles=3)),
    "a block has four warps": dict(variant=Variant(16, wide=True)),
}


@pytest.mark.parametrize("text", BAD)
def test_what_the_kernel_has_no_form_for_is_refused(text):
    given = dict(q=torch.zeros(1, 4, 128).bfloat16(), chosen=torch.zeros(1, 2, 16, dtype=torch.int32), variant=Variant(4))
    given |= dict(data=torch.zeros(3, 4, 128, 72, dtype=torch.uint8), table=torch.zeros(1, 3, dtype=torch.int32))
    given |= dict(position=torch.zeros(1, dtype=torch.int32)) | BAD[text]
    batch = Batch(torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), given["position"], 1)
    with pytest.raises(ValueError, match=text):
        cuda_attend.attend(given["q"], Pages(given["data"], given["table"]), given["chosen"], batch, 0.1, variant=given["variant"])


@pytest.fixture
def driver(tmp_path, monkeypatch):
    cuda_module._loaded.cache_clear()
    found = installed(tmp_path, monkeypatch)
    found.expect("ppppppppllf")
    yield found
    cuda_module._loaded.cache_clear()


@pytest.mark.parametrize(("unit", "wide"), [(2, False), (2, True), (4, False), (4, True), (16, False)])
def test_what_the_driver_is_given(driver, unit, wide):
    case = make([1, 1, 2], [129, 306, 700], "nvfp4", groups=2, heads=32)
    chosen = torch.zeros(4, 2, 16, dtype=torch.int32)
    ctas, threads = 16 // unit, 32 * unit * (4 if wide else 1)
    for lse in (False, True):
        constants = Constants(unit, 2, 16, lse, False, 2, True, False, wide)
        out, sums = cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.25, lse=lse, variant=Variant(unit, wide=wide))
        load, name, attribute, launch = driver.heard()[-4:]  # with and without sums
        defines = dict(UNIT=unit, GROUPS=2, HEADS=16, LSE=int(lse), ROUNDED=0, TILES=2, MIXED=1, QUARTERS=0, WIDE=int(wide))
        assert load == f"load cuda_attend.cu sm_90a {defines}" and name.startswith("get attend of") and constants.shared <= 232448
        assert attribute == f"set 8 {constants.shared}"
        how, given = launch.split(" | ")
        cluster = f" cluster {ctas},1,1" if ctas > 1 else ""
        assert how == f"launch 2000000002 {4 * 2 * ctas},1,1 {threads},1,1 {constants.shared} 7700000077:{cluster} 6=1"
        tensors = (case.q, case.cache.data, case.cache.table, case.batch.request, case.batch.position, chosen, out, sums)
        given = given.split()
        assert given[:8] == [f"{0 if x is None else x.data_ptr():x}" for x in tensors]
        assert given[8:10] == [str(4 * 9216), str(case.cache.table.stride(0))]
        assert float(given[10]) == pytest.approx(0.25 * 1.4426950408889634 * 128)
        again = len(driver.heard())
        cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.25, lse=lse, variant=Variant(unit, wide=wide))
        assert len(driver.heard()) == again + 1, "what is loaded is launched again"


def test_a_failing_launch_names_the_status(driver):
    driver.fail(999)
    case = make([1], [129], "nvfp4", groups=1, heads=1)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: CUDA_ERROR_SOMETHING \(999\)"):
        cuda_attend.attend(case.q, case.cache, torch.zeros(1, 1, 16, dtype=torch.int32), case.batch, 0.25, variant=Variant(4))


def test_decode_over_nvfp4_pages_on_hopper_is_taken_and_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cuda_module, "_bindings_found", lambda: found)
    q = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    data, table = torch.zeros(3, 4, 128, 72, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.int32)
    chosen, batch, capability, found = torch.zeros(1, 2, 16), Batch(None, None, None, 8), (9, 0), True
    assert cuda_attend.takes(q, Pages(data, table), chosen, batch)
    shifted = torch.zeros(4 * 9216 + 8, dtype=torch.uint8)[8:].view(1, 4, 128, 72)
    for others in (
        (SimpleNamespace(dtype=torch.float32, device=torch.device("cuda")), Pages(data, table), chosen, batch),
        (SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu")), Pages(data, table), chosen, batch),
        (q, Pages(data.to(torch.bfloat16), table), chosen, batch),
        (q, Pages(shifted, table), chosen, batch),
        (q, msa_ops.Packed(data, data, table[0], 3), chosen, batch),
        (q, Pages(data, table), chosen[..., :8], batch),
        (q, Pages(data, table), chosen, batch._replace(most=9)),
    ):
        assert not cuda_attend.takes(*others)
    capability = (10, 0)
    assert not cuda_attend.takes(q, Pages(data, table), chosen, batch)
    capability, found = (9, 0), False
    assert not cuda_attend.takes(q, Pages(data, table), chosen, batch)


def test_blocks_of_a_program_follow_the_number_of_queries(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    found = [cuda_attend._constants(Variant(), rows, 4, 16, False, False, "cuda") for rows in (4, 16, 17, 33, 34, 66, 67, 128, 1024)]
    assert [c.unit for c in found] == [2, 2, 4, 4, 4, 4, 16, 16, 16]
    assert [c.wide for c in found] == [True] * 4 + [False] * 5
    assert not cuda_attend._constants(Variant(wide=False), 4, 4, 16, False, False, "cuda").wide


@pytest.mark.parametrize(("unit", "wide"), [(2, True), (4, False), (4, True), (16, False)])
def test_the_compiler_of_the_gpu_takes_it(unit, wide):
    """Without a GPU, where NVRTC is installed."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for rounded in (False, True):
        assert (
            cuda_module.compiled(cuda_attend.SOURCE, Constants(unit, 4, 16, True, rounded, 2, True, wide, wide).defines)[:4] == b"\x7fELF"
        )
