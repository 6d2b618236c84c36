"""vLLM's NVFP4 Marlin experts, with and without its LoRA kernels, as lines of `bench_moe`; where vLLM is not installed, why not.

Written for vLLM 0.28 to 0.31. What is called is what its Marlin experts class calls; the adapter goes in as that class does it: the delta
of gate and up before the activation, that of down before the sum over choices. The activation is SiLU, the cheaper one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def marlin_lines(tokens: tuple[int, ...], batches: Callable[..., Any], adapters: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Lines of (tokens, name, us), and None; or no lines, and what is missing."""
    try:
        import vllm
        from vllm.config import VllmConfig, set_current_vllm_config
    except ImportError as error:
        return [], f"vLLM Marlin: {error}"
    with set_current_vllm_config(VllmConfig()):
        return _lines(tokens, batches, adapters, vllm.__version__), None


def _lines(tokens: tuple[int, ...], batches: Callable[..., Any], adapters: Any, version: str) -> list[dict[str, Any]]:
    from vllm import _custom_ops as ops
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.scalar_type import scalar_types

    from .bench_moe import EXPERT_FLOP, EXPERTS, HIDDEN, TOP, WIDTH, graph_us

    def packed(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device="cuda")
        return codes, (torch.rand(EXPERTS, n, k // 16, device="cuda", dtype=torch.bfloat16) * 200 + 200).to(torch.float8_e4m3fn)

    layer = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=WIDTH, params_dtype=torch.bfloat16, workspace=None
    )
    scale = torch.full((EXPERTS,), 1 / 18000, device="cuda")
    (w13, s13), (w2, s2) = packed(2 * WIDTH, HIDDEN), packed(HIDDEN, WIDTH)
    w13, s13, g13, w2, s2, g2 = prepare_nvfp4_moe_layer_for_marlin(layer, w13, s13, scale, w2, s2, scale, True)
    most = max(tokens)
    config = SimpleNamespace(max_loras=1, specialize_active_lora=False, fully_sharded_loras=False)
    punica = PunicaWrapperGPU(most, 256, "cuda", lora_config=config)
    stacks = [(adapters.gate.a, adapters.up.a), (adapters.gate.b, adapters.up.b), (adapters.down.a,), (adapters.down.b,)]
    enabled = torch.ones(2, dtype=torch.int32, device="cuda")
    context = MoELoRAContext(*stacks, enabled, 1, TOP, 2, False, 0, 1, EXPERTS, punica, False)
    mixin = LoRAExpertsMixin()

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, lora: bool) -> torch.Tensor:
        count, out, state = len(x), torch.empty_like(x), {}

        def activate(kind, to, inner, *, topk_ids=None, expert_map=None):
            if lora:
                state["maps"] = mixin.apply_w13_lora(
                    context, y=inner, x=x, topk_ids=topk_ids, topk_weights=weights, expert_map=expert_map, w1=w13, w2=w2,
                    num_tokens=count, top_k_num=TOP,
                )  # fmt: skip
                state["act"] = to
            apply_moe_activation(kind, to, inner)

        def add_up(y, to, _ids, _map):
            if lora:
                rows, experts, padded, mapping = state["maps"]
                mixin.apply_w2_lora(
                    context, y=y, x=state["act"], topk_weights=weights, sorted_token_ids_lora=rows, expert_ids_lora=experts,
                    num_tokens_post_padded_lora=padded, token_lora_mapping=mapping, num_tokens=count, w1=w13, w2=w2, top_k_num=TOP,
                )  # fmt: skip
            ops.moe_sum(y, to)

        fused_marlin_moe(
            x, w13, w2, None, None, s13, s2, weights, ids.to(torch.int32), quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=EXPERTS, global_scale1=g13, global_scale2=g2, workspace=layer.workspace, activation_func=activate,
            moe_sum=add_up, output=out,
        )  # fmt: skip
        return out

    lines = []
    for count in tokens:
        made = batches(count, 8 if count <= 256 else 3)
        punica.token_mapping_meta.prepare_tensors(torch.zeros(count, dtype=torch.long, device="cuda"))
        for lora in (False, True):
            us = graph_us([lambda b=b, lora=lora: call(*b, lora) for b in made])
            name = f"vLLM {version} Marlin" + (", LoRA" if lora else "")
            lines.append({"tokens": count, "name": name, "us": us, "tflop_s": count * TOP * EXPERT_FLOP / us / 1e6})
    return lines
