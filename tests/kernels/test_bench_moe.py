"""The experts' benchmark on a CPU: a side that fails leaves its error and no more; vLLM is called as its own source wants to be called."""

import inspect
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.nn.functional as F

from samebits.kernels import bench_moe, bench_vllm
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA
from samebits.quant import nvfp4
from samebits.quant.nvfp4 import NVFP4Tensor

HIDDEN, WIDTH, EXPERTS, TOP, RANK = 64, 48, 5, 2, 4
CEILING = {"copy_gb_s": 4000.0, "dense_tflop_s": 700.0}
G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=G)


def adapters() -> ExpertLoRA:
    def pair(n: int, k: int) -> LoRA:
        return LoRA((normal(1, EXPERTS, RANK, k) / k**0.5).bfloat16(), normal(1, EXPERTS, n, RANK).bfloat16())

    return ExpertLoRA(pair(WIDTH, HIDDEN), pair(WIDTH, HIDDEN), pair(HIDDEN, WIDTH))


def batch(tokens: int) -> bench_moe.Batch:
    ids = torch.stack([torch.randperm(EXPERTS, generator=G)[:TOP] for _ in range(tokens)])
    return normal(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOP, generator=G)


def test_a_line_has_its_time_or_its_error(monkeypatch):
    made = [batch(3)]
    monkeypatch.setattr(bench_moe, "graph_us", lambda calls: 100.0 if all(call() for call in calls) else None)
    line = bench_moe.expert_line("samebits, LoRA", made, lambda *b: True, CEILING, lambda: 0.25)
    hit = len(made[0][1].unique())
    assert line["us"] == 100 and line["relative_error"] == 0.25 and line["experts_hit"] == hit and "error" not in line
    assert line["floor_bytes_us"] == pytest.approx(hit * (bench_moe.EXPERT_BYTES + bench_moe.ADAPTER_BYTES) / 4e6)
    bf16 = bench_moe.expert_line("torch grouped_mm bf16", made, lambda *b: True, CEILING)
    assert bf16["floor_bytes_us"] == pytest.approx(hit * bench_moe.DENSE_BYTES / 4e6)

    def fail(*b):
        raise RuntimeError("no kernel image\nmore")

    for call, error in ((fail, None), (lambda *b: True, fail)):
        line = bench_moe.expert_line("vLLM Marlin", made, call, CEILING, error)
        assert line["error"] == "RuntimeError: no kernel image" and "us" not in line


def test_like_is_compared_with_like():
    names = {"samebits": 10, "samebits, LoRA": 12, "vLLM 1 Marlin": 20, "vLLM 1 Marlin, LoRA": 30, "one dense bf16 expert for all pairs": 1}
    lines = [{"tokens": 4, "name": name, "us": us} for name, us in names.items()]
    lines += [{"tokens": 8, "name": "samebits", "error": "x"}, {"tokens": 8, "name": "vLLM 1 Marlin", "us": 3}]
    (row,) = bench_moe.compared(lines)
    assert row["tokens"] == 4 and row["adapter_costs"] == pytest.approx(0.2)
    assert row["times_as_long"] == {"vLLM 1 Marlin": 2, "vLLM 1 Marlin, LoRA": 2.5}


def test_without_vllm_there_are_no_lines_and_a_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm.config", None)
    lines, why_not = bench_vllm.vllm_lines({1: [batch(1)]}, (HIDDEN, WIDTH, EXPERTS, TOP), adapters(), (None, None), None)
    assert lines == [] and why_not.startswith("vLLM: ")


@pytest.fixture
def vllm(monkeypatch):
    """vLLM with its GPU kernels done in torch, each behind the signature of the installed source; keeps what was announced."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops as ops
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.model_executor.layers.fused_moe import activation, fused_moe
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

    def replace(module, name, by):
        monkeypatch.setattr(module, name, create_autospec(getattr(module, name), side_effect=by))

    real, seen = punica_gpu.PunicaWrapperGPU, []

    class Punica:
        def __init__(self, *args, **kwargs):
            inspect.signature(real.__init__).bind(self, *args, **kwargs)
            self.token_mapping_meta = SimpleNamespace(prepare_tensors=lambda ids: seen.append(len(ids)))

        def add_lora_w13(self, *args, **kwargs):
            a = inspect.signature(real.add_lora_w13).bind(self, *args, **kwargs).arguments
            for pair in range(len(a["y"])):
                e, x = a["topk_ids"][pair // TOP, pair % TOP], a["x"][pair // TOP].float()
                parts = zip(a["lora_a_stacked"], a["lora_b_stacked"], strict=True)
                a["y"][pair] += torch.cat([right[0, e].float() @ (left[0, e].float() @ x) for left, right in parts]).bfloat16()
            return "rows", a["topk_ids"], "padded", "mapping"

        def add_lora_w2(self, *args, **kwargs):
            a = inspect.signature(real.add_lora_w2).bind(self, *args, **kwargs).arguments
            (left,), (right,) = a["lora_a_stacked"], a["lora_b_stacked"]
            for pair in range(len(a["x"])):
                token, choice = pair // TOP, pair % TOP
                e = a["expert_ids_lora"][token, choice]
                delta = right[0, e].float() @ (left[0, e].float() @ a["x"][pair].float())
                a["y"][token, choice] += (a["topk_weights"][token, choice] * delta).bfloat16()

    def experts(x, w13, w2, weights, ids, activate, add_up):
        inner = torch.stack([w13[e] @ x[t].float() for t, row in enumerate(ids.tolist()) for e in row]).bfloat16()
        act = inner.new_empty(len(inner), inner.shape[1] // 2)
        activate("silu", act, inner, topk_ids=ids, expert_map=None)
        y = torch.stack([weights.flatten()[p] * (w2[e] @ act[p].float()) for p, e in enumerate(ids.flatten().tolist())])
        out = torch.empty_like(x)
        add_up(y.bfloat16().view(len(x), TOP, -1), out, ids, None)
        return out

    def marlin(x, w13, w2, _b1, _b2, s13, s2, weights, ids, **given):
        assert ids.dtype == torch.int32 and given["global_num_experts"] == EXPERTS
        scales = (s13, given["global_scale1"]), (s2, given["global_scale2"])
        dense = (nvfp4.dequantize(NVFP4Tensor(w, s.view(torch.uint8), g)) for w, (s, g) in zip((w13, w2), scales, strict=True))
        given["output"].copy_(experts(x, *dense, weights, ids, given["activation_func"], given["moe_sum"]))

    def silu(kind, to, inner, **_):
        gate, up = inner.float().chunk(2, dim=1)
        to.copy_(F.silu(gate) * up)

    def add_up(y, to, *_):
        to.copy_(y.float().sum(1))

    monkeypatch.setattr(punica_gpu, "PunicaWrapperGPU", Punica)
    replace(
        marlin_utils_fp4, "prepare_nvfp4_moe_layer_for_marlin", lambda layer, w13, s13, g13, w2, s2, g2, gated: (w13, s13, g13, w2, s2, g2)
    )
    replace(marlin_utils, "marlin_make_workspace_new", lambda device, blocks: torch.zeros(1))
    replace(marlin_moe, "fused_marlin_moe", marlin)
    replace(activation, "apply_moe_activation", silu)
    replace(ops, "moe_sum", add_up)
    replace(
        fused_moe,
        "fused_experts",
        lambda x, w13, w2, weights, ids: experts(
            x, w13.float(), w2.float(), weights, ids, lambda kind, to, inner, **_: silu(kind, to, inner), lambda y, to, *_: add_up(y, to)
        ),
    )
    return seen


def test_the_sides_of_vllm_compute_the_experts_with_the_adapter_where_it_belongs(vllm, monkeypatch):
    dense = tuple((normal(EXPERTS, *shape) / shape[1] ** 0.5).bfloat16() for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    lora, real = adapters(), bench_vllm.peers
    monkeypatch.setattr(bench_vllm, "peers", lambda *args: real(*args, device="cpu"))
    made = {4: [batch(4)], 1: [batch(1)]}

    def line(name, batches, call, error):
        assert all(torch.isfinite(call(*one)).all() for one in batches)
        return {"name": name, "tokens": len(batches[0][0]), "relative_error": error()}

    lines, why_not = bench_vllm.vllm_lines(made, (HIDDEN, WIDTH, EXPERTS, TOP), lora, dense, line)
    assert why_not is None and [one["tokens"] for one in lines] == [4] * 3 + [1] * 3
    assert all(one["relative_error"] < 3e-2 for one in lines), lines
    assert [one["name"].split(maxsplit=2)[2] for one in lines[:3]] == ["Marlin", "Marlin, LoRA", "fused experts bf16"]
    assert vllm == [4, 2, 4, 2, 4, 2] + [1] * 6
    # The reference tells an adapter that is left out, or that sits on another projection.
    sides, _ = real(4, (HIDDEN, WIDTH, EXPERTS, TOP), lora, dense, device="cpu")
    x, ids, weights = made[4][0]
    for other in (None, lora._replace(gate=lora.up, up=lora.gate)):
        sides[1].lora = other
        assert sides[1].error(x[:2], ids[:2].int(), weights[:2]) > 0.1


def test_what_vllm_raises_is_the_reason(vllm, monkeypatch):
    def fail(*args):
        raise TypeError("no such argument\nmore")

    monkeypatch.setattr(bench_vllm, "peers", fail)
    assert bench_vllm.vllm_lines({1: [batch(1)]}, (HIDDEN, WIDTH, EXPERTS, TOP), adapters(), (None, None), None) == (
        [],
        "vLLM: cannot be used: TypeError: no such argument",
    )
