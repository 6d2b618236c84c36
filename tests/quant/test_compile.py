"""Every public operation traces into one graph and gives the eager bits. Backends without a C++ compiler: eager and aot_eager."""

import pytest
import torch

from samebits.quant import activations, kv, layouts, mxfp8, nvfp4

X = (torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
SCALES = torch.arange(130 * 5).to(torch.uint8).view(130, 5)
SLOTS = torch.tensor([3, 130, 255])


def through_pages(x):
    pages = torch.zeros(kv.page_shape(2, 4, 64), dtype=torch.uint8)
    kv.write_pages(pages, SLOTS, x, -x)
    return pages, *kv.read_pages(pages, SLOTS, 64, rounded=True)


OPERATIONS = {
    "nvfp4": lambda x: nvfp4.quantize(x),
    "nvfp4 given scale": lambda x: nvfp4.quantize(x, torch.ones(3)),
    "nvfp4 back": lambda x: nvfp4.dequantize(nvfp4.quantize(x), torch.bfloat16),
    "mxfp8": lambda x: mxfp8.quantize(x),
    "mxfp8 back": lambda x: mxfp8.dequantize(mxfp8.quantize(x), torch.bfloat16),
    "kv row": lambda x: kv.read(kv.write(x), 64, torch.bfloat16, rounded=True),
    "kv round trip": lambda x: kv.round_trip(x),
    "kv pages": through_pages,
    "static activations": lambda x: activations.quantize_static(x, torch.tensor(0.01)),
    "token activations": lambda x: activations.quantize_per_token(x),
    "activations round trip": lambda x: activations.round_trip(x),
    "swizzle": lambda x: layouts.swizzle(SCALES),
    "unswizzle": lambda x: layouts.unswizzle(layouts.swizzle(SCALES), 130, 5),
}


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    """An engine that another test started may have switched compilation off for this process."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_graph_with_the_same_bits(name, backend):
    torch._dynamo.reset()
    operation = OPERATIONS[name]
    have, want = torch.compile(operation, fullgraph=True, backend=backend)(X), operation(X)
    for a, b in zip(have, want, strict=True) if isinstance(want, tuple) else [(have, want)]:
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("quantize", [nvfp4.quantize, mxfp8.quantize])
def test_nan_raises_in_a_traced_graph_too(quantize):
    torch._dynamo.reset()
    bad = X.clone()
    bad[1, 2, 3] = float("nan")
    with pytest.raises(RuntimeError, match="weight: holds NaN or infinity"):
        torch.compile(quantize, fullgraph=True, backend="aot_eager")(bad)
