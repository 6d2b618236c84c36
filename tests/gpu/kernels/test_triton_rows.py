"""The kernels of rows on a GPU: what they compute, that no row depends on its company, and that a CUDA graph can hold them."""

import pytest
import torch

from samebits.kernels import rope
from samebits.kernels.activation import SwiGLU, swiglu_oai, swiglu_oai_halves
from samebits.kernels.linear import frozen_linear
from samebits.kernels.logprobs import token_logprob_rows
from samebits.kernels.moe import route_topk, route_weights
from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add
from tests.support import row_checks
from tests.support.row_checks import same

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROWS = 4097
HIDDEN, EXPERTS, VOCABULARY = 6144, 128, 200064
NAMES = (
    "norm", "norm of heads", "norm and sum", "rotation", "activation", "activation of one tensor",
    "router", "choice", "weights", "head", "fp32 head", "logprobs",
)  # fmt: skip


@pytest.mark.parametrize(("each", "width", "warps"), [(1, 128, 1), (8, 128, 1), (8, 128, 8), (1, 8192, 4), (1, 8192, 16), (2, 8192, 8)])
def test_the_tree_is_the_same_in_every_layout(each, width, warps):
    row_checks.sums("cuda", 37, width, each, warps)


@pytest.mark.parametrize("hidden", [6144, 8192, 100])
def test_norm_has_the_bits_of_the_tree(hidden):
    row_checks.norm_bits("cuda", 70, hidden)
    row_checks.norm_bits("cuda", 1, hidden)


@pytest.mark.parametrize("hidden", [6144, 128])
def test_gradients_of_the_norm(hidden):
    row_checks.norm_gradients("cuda", 70, hidden)


def test_rotation_has_the_bits_of_torch():
    row_checks.rotation_bits("cuda", 300)


def test_activation():
    row_checks.activation("cuda", 70, 3072)


@pytest.mark.parametrize("tokens", [2, 300])
def test_routing(tokens):
    row_checks.routing("cuda", tokens)


PRODUCTS = [(70, 128, 6144), (1, 256, 520), (2100, 128, 1024), (200, 5000, 2080), (17, 1030, 6144), (33, 70, 550)]


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(shape):
    row_checks.products("cuda", *shape)


@pytest.mark.parametrize("shape", [(9, 200064), (300, 1001)], ids=str)
def test_logprobs(shape):
    row_checks.logprobs("cuda", *shape)


def test_temperature_divides_as_a_kernel_before_it_would():
    from tests.support.row_kernels import divide_kernel

    _, logits, ids, temperature = logprob_case(40)
    before = logits.clone()
    divide_kernel[(40, -(-VOCABULARY // 8192))](before, temperature, VOCABULARY, BLOCK=8192)
    same("two steps", token_logprob_rows(before, ids)[0], token_logprob_rows(logits, ids, temperature)[0])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(len(shape) + shape[-1])).to(dtype)


def angles(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(t[torch.arange(rows, device="cuda") * 7 % 3001] for t in rope.rope_table(3001, 64, 5e6, "cuda"))


def cases(rows: int) -> dict[str, tuple]:
    """Operation and its inputs by row, at MiniMax-M3's shapes."""
    hidden, heads = normal(rows, HIDDEN), normal(rows, 64, 128)
    weight, head_weight, bias = normal(HIDDEN) * 0.2, normal(128) * 0.2, normal(EXPERTS, dtype=torch.float32) * 0.1
    router, params = normal(EXPERTS, HIDDEN, dtype=torch.float32) / 80, SwiGLU()
    logits = normal(rows, EXPERTS, dtype=torch.float32)
    head, wide_head = normal(9000, HIDDEN), normal(1500, HIDDEN, dtype=torch.float32)
    return {
        "norm": (lambda x: gemma_rms_norm(x, weight, 1e-6), hidden),
        "norm of heads": (lambda x: gemma_rms_norm(x, head_weight, 1e-6), heads),
        "norm and sum": (lambda x, r: gemma_rms_norm_add(x, r, weight, 1e-6), hidden, normal(rows, HIDDEN).flip(0)),
        "rotation": (rope.apply_rope, heads, *angles(rows)),
        "activation": (lambda g, u: swiglu_oai_halves(g, u, params, torch.bfloat16), normal(rows, 3072), normal(rows, 3072).flip(0)),
        "activation of one tensor": (lambda x: swiglu_oai(x, params), hidden),
        "router": (lambda x: frozen_linear(x, router), hidden),
        "choice": (lambda x: route_topk(x, bias, 4, 2.5), logits),
        "weights": (lambda x, i: route_weights(x, i, 2.5), logits, (logits * 8).long().remainder(EXPERTS)[:, :4]),
        "head": (lambda x: frozen_linear(x, head), hidden),
        "fp32 head": (lambda x: frozen_linear(x, wide_head), hidden),
    }


def logprob_case(rows: int) -> tuple:
    ids = torch.arange(rows, device="cuda")[:, None] * 7919 % VOCABULARY
    return token_logprob_rows, normal(rows, VOCABULARY, dtype=torch.float32), ids, torch.linspace(0.5, 2, rows, device="cuda")


def results(call, inputs: list[torch.Tensor], grads: bool) -> list[torch.Tensor]:
    """Outputs, and gradients of floating inputs for output gradients that depend on the output alone."""
    inputs = [x.detach().requires_grad_(grads and x.is_floating_point()) for x in inputs]
    out = call(*inputs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    if not grads:
        return outs
    floats = [o for o in outs if o.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    back = torch.autograd.grad(floats, wanted, [o.detach() * 3 for o in floats], allow_unused=True)
    return [o.detach() for o in outs] + [g for g in back if g is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_its_bits_in_any_company(name):
    """Forward and backward, alone, among 7, 64 and 4097, and in another place."""
    rows = 300 if name == "logprobs" else ROWS
    call, *inputs = logprob_case(rows) if name == "logprobs" else cases(rows)[name]
    whole = results(call, inputs, True)
    mixed = torch.randperm(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    every = torch.arange(rows, device="cuda")
    for part in (every[:1], every[5:12], every[100:164], every[-1:], mixed[:150], mixed):
        for i, (have, want) in enumerate(zip(results(call, [x[part] for x in inputs], True), whole, strict=True)):
            same(f"{name}, result {i}, {len(part)} rows", have, want[part])


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_holds_each_forward(name):
    """Captured on other values than it is replayed on, at two sizes."""
    for rows in (1, 33):
        call, *inputs = logprob_case(rows) if name == "logprobs" else cases(rows)[name]
        want = [o.clone() for o in results(call, inputs, False)]
        held = [x.roll(1, -1) if x.is_floating_point() else x.clone() for x in inputs]
        results(call, held, False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = results(call, held, False)
        for place, x in zip(held, inputs, strict=True):
            place.copy_(x)
        graph.replay()
        for i, (have, wanted) in enumerate(zip(out, want, strict=True)):
            same(f"{name}, result {i}, {rows} rows", have, wanted)


@pytest.mark.parametrize("tokens", [1, 3, 100, 3000])
def test_rows_of_a_matrix_have_the_bits_that_they_have_in_all_of_it(tokens):
    row_checks.rows_of_a_matrix("cuda", tokens, 1600, 3072)
