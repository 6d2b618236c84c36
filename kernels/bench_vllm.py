"""vLLM's routed experts as lines of `bench_moe`: NVFP4 Marlin with and without its LoRA kernels, and bf16 Triton experts.

Written for vLLM 0.28 to 0.31. What is called is what its Marlin experts class calls; the adapter goes in as that class does it: the delta
of gate and up before the activation, that of down before the sum over choices. The activation is SiLU, the cheaper one. Two tokens are
compared with fp32 arithmetic over the same weights first, so that a peer that computes less shows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant import nvfp4
from samebits.quant.nvfp4 import NVFP4Tensor

from .bench_record import absence
from .moe import ExpertLoRA

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [T, H], ids int32 [T, k], weights fp32 [T, k]) to [T, H]


class Peer:
    """A side of the comparison: its name, what it computes, on which weights."""

    def __init__(self, name: str, call: Experts, weights: tuple[NVFP4Tensor, NVFP4Tensor] | tuple[Tensor, Tensor], lora: ExpertLoRA | None):
        self.name, self.call, self.weights, self.lora = name, call, weights, lora

    def error(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        """Relative error in norm of some tokens."""
        want = torch.stack([self._token(*one) for one in zip(x.float(), ids.tolist(), weights.tolist(), strict=True)])
        return ((self.call(x, ids, weights).float() - want).norm() / want.norm()).item()

    def _token(self, x: Tensor, ids: list[int], weights: list[float]) -> Tensor:
        out = torch.zeros_like(x)
        for e, weight in zip(ids, weights, strict=True):
            w13, w2 = (
                nvfp4.dequantize(NVFP4Tensor(*(part[e] for part in w))) if isinstance(w, NVFP4Tensor) else w[e].float()
                for w in self.weights
            )

            def delta(pair, v, e=e):
                return 0 if self.lora is None else pair.b[0, e].float() @ (pair.a[0, e].float() @ v)

            gate, up = (w13 @ x).chunk(2)
            act = F.silu(gate + delta(self.lora and self.lora.gate, x)) * (up + delta(self.lora and self.lora.up, x))
            out += weight * (w2 @ act + delta(self.lora and self.lora.down, act))
        return out


def peers(
    most: int, shape: tuple[int, int, int, int], adapters: ExpertLoRA, dense: tuple[Tensor, Tensor], device: str = "cuda"
) -> tuple[list[Peer], Callable[[int], None]]:
    """vLLM's three sides for up to `most` tokens and (hidden, width, experts, top), and what to call before a batch of so many tokens.

    Raises whatever vLLM raises; `ImportError` where it is not installed or has moved what is needed.
    """
    import vllm
    from vllm import _custom_ops as ops
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.model_executor.layers.fused_moe import activation, fused_moe
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    hidden, width, experts, top = shape

    def packed(n: int, k: int) -> NVFP4Tensor:
        codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        scales = (torch.rand(experts, n, k // 16, device=device, dtype=torch.bfloat16) * 200 + 200).to(torch.float8_e4m3fn)
        return NVFP4Tensor(codes, scales.view(torch.uint8), torch.full((experts,), 1 / 18000, device=device))

    packed13, packed2 = packed(2 * width, hidden), packed(hidden, width)
    layer = SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=width, params_dtype=torch.bfloat16, workspace=None
    )
    flat = (part.view(torch.float8_e4m3fn) if at == 1 else part for w in (packed13, packed2) for at, part in enumerate(w))
    w13, s13, g13, w2, s2, g2 = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(layer, *flat, True)
    # Locks that Marlin leaves as it found them: made once, as an engine's are.
    locks = marlin_utils.marlin_make_workspace_new(torch.device(device, 0) if device == "cuda" else torch.device(device), 4)
    config = SimpleNamespace(max_loras=1, specialize_active_lora=False, fully_sharded_loras=False)
    punica = punica_gpu.PunicaWrapperGPU(most, 256, device, lora_config=config)
    stacks = [(adapters.gate.a, adapters.up.a), (adapters.gate.b, adapters.up.b), (adapters.down.a,), (adapters.down.b,)]
    enabled = torch.ones(2, dtype=torch.int32, device=device)
    context = MoELoRAContext(*stacks, enabled, 1, top, 2, False, 0, 1, experts, punica, False)
    mixin = LoRAExpertsMixin()

    def marlin(x: Tensor, ids: Tensor, weights: Tensor, lora: bool) -> Tensor:
        count, out, state = len(x), torch.empty_like(x), {}

        def activate(kind, to, inner, *, topk_ids=None, expert_map=None):
            if lora:
                state["maps"] = mixin.apply_w13_lora(
                    context, y=inner, x=x, topk_ids=topk_ids, topk_weights=weights, expert_map=expert_map, w1=w13, w2=w2,
                    num_tokens=count, top_k_num=top,
                )  # fmt: skip
                state["act"] = to
            activation.apply_moe_activation(kind, to, inner, topk_ids=topk_ids, expert_map=expert_map)

        def add_up(y, to, _ids, _map):
            if lora:
                rows, which, padded, mapping = state["maps"]
                mixin.apply_w2_lora(
                    context, y=y, x=state["act"], topk_weights=weights, sorted_token_ids_lora=rows, expert_ids_lora=which,
                    num_tokens_post_padded_lora=padded, token_lora_mapping=mapping, num_tokens=count, w1=w13, w2=w2, top_k_num=top,
                )  # fmt: skip
            ops.moe_sum(y, to)

        marlin_moe.fused_marlin_moe(
            x, w13, w2, None, None, s13, s2, weights, ids, quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=experts, global_scale1=g13, global_scale2=g2, workspace=locks, activation_func=activate,
            moe_sum=add_up, output=out,
        )  # fmt: skip
        return out

    def triton(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return fused_moe.fused_experts(x, *dense, weights, ids)

    version = vllm.__version__
    sides = [
        Peer(f"vLLM {version} Marlin", lambda *batch: marlin(*batch, False), (packed13, packed2), None),
        Peer(f"vLLM {version} Marlin, LoRA", lambda *batch: marlin(*batch, True), (packed13, packed2), adapters),
        Peer(f"vLLM {version} fused experts bf16", triton, dense, None),
    ]
    return sides, lambda tokens: punica.token_mapping_meta.prepare_tensors(torch.zeros(tokens, dtype=torch.long, device=device))


def vllm_lines(
    made: dict[int, list[tuple[Tensor, Tensor, Tensor]]],
    shape: tuple[int, int, int, int],
    adapters: ExpertLoRA,
    dense: tuple[Tensor, Tensor],
    line: Callable[..., dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """Lines of each side and number of tokens, and None; or no lines, and what is missing.

    `line` is given a name, batches, the side's call, and what gives its relative error; see `bench_moe.expert_line`.
    """
    try:
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            sides, announce = peers(max(made), shape, adapters, dense)
    except Exception as error:  # not installed, of another version, or the device's: the other figures of the run stand without
        return [], f"vLLM: {absence(error)}"
    lines = []
    with set_current_vllm_config(config):
        for count, batches in made.items():
            batches = [(x, ids.to(torch.int32), weights) for x, ids, weights in batches]  # as vLLM's router gives them
            few = tuple(part[:2].contiguous() for part in batches[0])
            for side in sides:

                def error(side=side, few=few) -> float:
                    announce(len(few[0]))
                    return side.error(*few)

                announce(count)
                lines.append(line(side.name, batches, side.call, error))
    return lines, None
