"""Compile every Triton kernel for a GPU that is not here: `python -m tests.kernels.compile_for cuda:100`, `cuda:90`, `hip:gfx950`.

The operations run on small CPU tensors with MiniMax-M3's head and block sizes; each launch is compiled for the target, down to machine
code, and not launched. What an operation returns is therefore memory as it was allocated. Prints one line for each kernel: name, kind of
its machine code, bytes.
"""

from __future__ import annotations

import sys
import warnings

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MACHINE = {"cuda": "cubin", "hip": "hsaco"}


class NoDevice(DriverBase):
    """A driver that knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        """It is set, not found."""
        return False

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """The only one."""

    def get_current_stream(self, device: int) -> int:
        """None."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No launcher is built."""
        raise NotImplementedError

    def get_benchmarker(self):
        """Nothing runs."""
        raise NotImplementedError


def compile_instead(target: GPUTarget) -> dict[str, int]:
    """Make every launch a compilation for `target`; returns the dictionary that it fills: kernel to bytes of machine code."""
    driver.set_active(NoDevice(target))
    original, found = JITFunction.run, {}

    def run(self, *args, grid, warmup, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        name = self.fn.__name__
        found[name] = max(found.get(name, 0), len(kernel.asm[MACHINE[target.backend]]))
        return kernel

    JITFunction.run = run
    return found


def experts() -> None:
    """Forward, forward of decode with two adapters, backward."""
    from samebits.kernels.activation import SwiGLU
    from samebits.kernels.expert_tiles import pack_experts
    from samebits.kernels.linear import LoRA
    from samebits.kernels.moe_fused import fused_experts
    from samebits.quant import nvfp4

    h, width, count, rank, slots = 256, 128, 4, 32, 2
    w13, w2 = (pack_experts(nvfp4.quantize(torch.randn(count, n, k))) for n, k in ((2 * width, h), (h, width)))

    def pair(n: int, k: int) -> LoRA:
        return LoRA(torch.zeros(slots, count, rank, k, requires_grad=True), torch.zeros(slots, count, n, rank, requires_grad=True))

    lora = (pair(width, h), pair(width, h), pair(h, width))
    for tokens in (2, 64, 600):
        ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
        weights = torch.rand(tokens, 2, requires_grad=True)
        x = torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=True)
        for adapter_ids in (None, torch.zeros(tokens, dtype=torch.int64)):
            out = fused_experts(x, w13, w2, ids, weights, SwiGLU(), lora, adapter_ids, False)
            out.backward(torch.zeros_like(out))
        fused_experts(x.detach(), w13, w2, ids, weights.detach(), SwiGLU(), None, None, False)


def linear() -> None:
    """Forward and backward, few and many tokens."""
    from samebits.kernels.linear import LoRA
    from samebits.kernels.linear_tiles import pack_linear
    from samebits.kernels.triton_linear import fused_linear
    from samebits.quant import mxfp8

    tiles = pack_linear(mxfp8.quantize(torch.randn(256, 384)))
    lora = LoRA(torch.zeros(1, 32, 384, requires_grad=True), torch.zeros(1, 256, 32, requires_grad=True))
    for tokens in (1, 64, 300):
        x = torch.randn(tokens, 384, dtype=torch.bfloat16, requires_grad=True)
        out = fused_linear(x, tiles, lora, None)
        out.backward(torch.zeros_like(out))


def msa() -> None:
    """Choice and attention over pages of every format; training forward and backward; inserting."""
    from samebits.kernels import triton_msa
    from samebits.kernels.msa import SparseConfig
    from samebits.kernels.msa_ops import Norms, Packed, Pages, batch_of

    heads, groups, dim, pages = 64, 4, 128, 20
    batch, config = batch_of([1, 1], [2500, 130]), SparseConfig()
    table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages)
    q, index_q = torch.zeros(2, heads, dim, dtype=torch.bfloat16), torch.zeros(2, groups, dim, dtype=torch.bfloat16)
    norms = Norms(*(torch.zeros(dim, dtype=torch.bfloat16) for _ in range(4)), 1e-6)
    angles = torch.zeros(4096, 32)
    k, v = (torch.zeros(2, groups, dim, dtype=torch.bfloat16) for _ in range(2))
    index_k = torch.zeros(2, dim, dtype=torch.bfloat16)
    slots = torch.tensor([3, 200])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        packed = dtype is torch.uint8
        main = torch.zeros((2 * pages, 2 * groups, 128, 72) if packed else (2 * pages, groups, 128, 256), dtype=dtype)
        index = torch.zeros((2 * pages, 128, 72) if packed else (2 * pages, 128, 128), dtype=dtype)
        chosen = triton_msa.index_topk(index_q, Pages(index, table), batch, config, None)
        triton_msa.sparse_attention(q, Pages(main, table), chosen, batch, 0.1)
        triton_msa.kv_insert(q, k, v, index_q, index_k, norms, (angles, angles), batch.position, slots, main, index)
    tokens = 160
    batch = batch_of([tokens])
    q, k, v = (torch.zeros(tokens, n, dim, dtype=torch.bfloat16, requires_grad=True) for n in (heads, groups, groups))
    chosen = torch.zeros(tokens, groups, 16, dtype=torch.int32)
    out = triton_msa.sparse_attention(q, Packed(k, v, batch.start[:1], 2), chosen, batch, 0.1)
    out.backward(torch.zeros_like(out))


def formats() -> None:
    """Quantizers and digests."""
    from samebits.quant import triton_quant

    x = torch.randn(64, 256, dtype=torch.bfloat16)
    for name in ("nvfp4_quantize", "mxfp8_quantize"):
        if hasattr(triton_quant, name):
            getattr(triton_quant, name)(x)


def main(name: str) -> None:
    """Compile all for the target `name` and print what came out."""
    backend, arch = name.split(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)
    found = compile_instead(target)
    failed = []
    for part in (experts, linear, msa):
        try:
            part()
        except Exception as error:  # reported below, and the exit status says so
            failed.append(f"{part.__name__}: {type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}")
    for kernel, size in sorted(found.items()):
        print(f"{kernel} {MACHINE[backend]} {size}")
    for line in failed:
        print(f"FAILED {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
