"""Compile every Triton kernel for a GPU that is not here: `python -m tests.kernels.compile_for cuda:100`, `cuda:90`, `hip:gfx950`.

The operations run on small CPU tensors with MiniMax-M3's head and block sizes; each launch is compiled for the target, down to machine
code, and not launched. What an operation returns is therefore memory as it was allocated. Prints one line for each kernel: name, kind of
its machine code, bytes.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from types import SimpleNamespace

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


def on_kernels() -> None:
    """Send every operation to its kernel, as on CUDA."""
    from samebits.quant import blocks

    blocks.fast_path = lambda x: True  # before anything imports it by name
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from samebits.trainer import packed

    packed.kernels_attend = lambda dims, dtype, device: True


def experts() -> None:
    """What an engine does: two adapters in a batch, and none. `training` has the rest."""
    from samebits.kernels.activation import SwiGLU
    from samebits.kernels.expert_tiles import pack_experts
    from samebits.kernels.linear import LoRA
    from samebits.kernels.moe import ExpertLoRA, moe
    from samebits.quant import nvfp4

    h, width, count, rank, slots = 256, 128, 4, 32, 2
    w13, w2 = (pack_experts(_quantized(nvfp4, torch.randn(count, n, k))) for n, k in ((2 * width, h), (h, width)))

    def pair(n: int, k: int) -> LoRA:
        return LoRA(torch.zeros(slots, count, rank, k, requires_grad=True), torch.zeros(slots, count, n, rank, requires_grad=True))

    lora = ExpertLoRA(pair(width, h), pair(width, h), pair(h, width))
    for tokens in (2, 600):
        ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
        weights, x = torch.rand(tokens, 2), torch.randn(tokens, h, dtype=torch.bfloat16)
        with torch.no_grad():
            moe(x, w13, w2, ids, weights, SwiGLU(), lora, torch.zeros(tokens, dtype=torch.int64))
            moe(x, w13, w2, ids, weights, SwiGLU())


def _quantized(form, x: torch.Tensor):
    """By the reference: the kernels of the formats do not run here."""
    from samebits.quant import blocks

    kernels, blocks.fast_path = blocks.fast_path, lambda x: False
    previous, form.fast_path = form.fast_path, lambda x: False
    try:
        return form.quantize(x)
    finally:
        blocks.fast_path, form.fast_path = kernels, previous


def pages() -> None:
    """What an engine does in a layer, in decode for pages of every format, in prefill for NVFP4 and bf16; NVFP4 read as E4M3 in decode.

    The indexer alone and, in decode of NVFP4, as one of two ranks over peer memory and as one of two over an all-gather.
    """
    from samebits.kernels.index_parallel import Ranks, share_of, split_index_topk
    from samebits.kernels.msa import SparseConfig
    from samebits.kernels.msa_ops import Norms, Pages, batch_of, dense_attention, index_topk, kv_insert, sparse_attention

    heads, groups, dim, count = 64, 4, 128, 20
    config = SparseConfig()
    norms = Norms(*(torch.zeros(dim, dtype=torch.bfloat16) for _ in range(4)), 1e-6)
    angles = torch.zeros(4096, 32)
    table = torch.arange(2 * count, dtype=torch.int32).view(2, count)
    for new in ([1, 1], [100, 3]):
        batch, tokens = batch_of(new, [2500, 130]), sum(new)
        q, k, v, index_q = (torch.zeros(tokens, n, dim, dtype=torch.bfloat16) for n in (heads, groups, groups, groups))
        index_k, slots = torch.zeros(tokens, dim, dtype=torch.bfloat16), torch.arange(tokens)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)[:: 1 if tokens == 2 else 2]:
            packed = dtype is torch.uint8
            main = torch.zeros((2 * count, 2 * groups, 128, 72) if packed else (2 * count, groups, 128, 256), dtype=dtype)
            index = torch.zeros((2 * count, 128, 72) if packed else (2 * count, 128, 128), dtype=dtype)
            kv_insert(q, k, v, index_q, index_k, norms, (angles, angles), batch.position, slots, main, index)
            # One of four ranks: its KV head, the index heads of all.
            own = (q[:, :16], k[:, :1], v[:, :1], index_q, index_k)
            kv_insert(*own, norms, (angles, angles), batch.position, slots, main[:, : 2 if packed else 1], index)
            kv_insert(q, k, v, None, None, norms._replace(index_q=None, index_k=None), (angles, angles), batch.position, slots, main, None)
            chosen = index_topk(index_q, Pages(index, table), batch, config)
            for rounded in (False, True) if packed and tokens == 2 else (False,):
                sparse_attention(q, Pages(main, table), chosen, batch, 0.1, rounded)
                dense_attention(q, Pages(main, table), batch, 0.1, rounded)
            for shared in (object(), None) if packed and tokens == 2 else ():
                words, calls = torch.zeros(2, 2, tokens * groups, 16, dtype=torch.int64), torch.zeros(tokens * groups, dtype=torch.int32)
                ranks = Ranks(2, 0, gather=lambda heard, mine: None)
                inbox = SimpleNamespace(
                    shared=shared, words=words, calls=calls, addresses=words[:, 0, 0, 0], room=tokens * groups, ranks=ranks
                )
                split_index_topk(index_q, Pages(index, table[:, ::2]), share_of(batch, 2, 0), config, inbox, rounded=True)


def training() -> None:
    """Forward and backward of the whole model: norms, projections, dense and sparse attention, experts, head."""
    import tempfile
    from pathlib import Path

    from samebits.quant.checkpoint import Checkpoint
    from samebits.quant.profile import get_profile
    from samebits.quant.roles import LORA_ROLES
    from samebits.trainer.lora import LoRASettings
    from samebits.trainer.model import M3ForTraining

    sizes = dict(vocab=128, hidden=256, heads=16, kv_heads=2, layers=2, experts=4, top_k=2, intermediate=128, dense=256, blocks=16)
    with tempfile.TemporaryDirectory() as folder:
        _written(Path(folder), sizes)
        for kv in (None, "nvfp4"):
            settings = LoRASettings(32, 32, LORA_ROLES)
            model = M3ForTraining(Checkpoint(folder), get_profile("w4a16", kv), settings, pack_on=torch.device("cpu"))
            lengths = [40, 2300]
            tokens = torch.zeros(sum(lengths), dtype=torch.int64)
            out = model(tokens, lengths, tokens, torch.ones(len(tokens)), entropy=True)
            out.logprobs.sum().backward()


def _written(folder, sizes: dict[str, int]) -> None:
    """A random checkpoint, quantized by the reference in a process of its own."""
    import subprocess

    code = f"from pathlib import Path; from tests.support import random_m3; random_m3.build(Path({str(folder)!r}), **{sizes!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def main(name: str, *wanted: str) -> None:
    """Compile all, or the parts named, for the target `name` and print what came out."""
    backend, arch = name.split(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)
    found = compile_instead(target)
    on_kernels()
    failed = []
    parts = (experts, pages, training)
    for part in [p for p in parts if not wanted or p.__name__ in wanted]:
        try:
            part()
        except Exception:  # reported below, and the exit status says so
            failed.append(f"{part.__name__}: {traceback.format_exc(limit=-4)}")
    for kernel, size in sorted(found.items()):
        print(f"{kernel} {MACHINE[backend]} {size}")
    for line in failed:
        print(f"FAILED {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
