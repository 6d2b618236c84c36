"""Quantized weights of the engine: what parameters hold while a samebits checkpoint is loaded, and what is multiplied afterwards.

`SamebitsConfig` takes over the ModelOpt MIXED_PRECISION checkpoints that samebits writes. The model copies the packed bytes into the
parameters made here, a rank's part of them. vLLM calls `process_weights_after_loading` then, and what happens depends on who multiplies:

**Kernels** (CUDA, bf16 activations): the bytes stay packed, in the order in which the Triton kernels read them (`expert_tiles`,
`linear_tiles`), and are decoded in registers.
**Torch** (everything else): values are rebuilt once, in fp32. fp32 is where `kernels.linear` multiplies, and it holds every NVFP4 and
MXFP8 value exactly as `quant` defines it, which a bf16 copy would not (code times block scale times global scale has more bits than
bf16). Rebuilding them in each call gives the same bits and costs ten to a hundred times more on a CPU.

Digests of the base are taken over the values of what is multiplied, whichever it is.

A layer may carry an adapter (see `slots.py`); its delta goes into the same fp32 sum, before the one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from samebits.kernels.expert_tiles import CHUNK, pack_experts, stack_part, takes_tiles, unpack_experts
from samebits.kernels.linear import frozen_linear, lora_linear
from samebits.kernels.linear_tiles import pack_linear, unpack_linear
from samebits.quant import mxfp8, nvfp4
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor

NAME = "samebits"
_VALUE_BYTES = 256 << 20
"""Of the larger stack of some experts, rebuilt to be looked at."""


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class MXFP8Linear(QuantizeMethodBase):
    """A projection in MXFP8, with its adapter."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Packed weight [N, K] and exponents [N, K/32] of the layer's rows here."""
        n, k = sum(output_partition_sizes), input_size_per_partition
        layer.inputs, layer.tiles, layer.compute_dtype = k, None, params_dtype
        layer.register_parameter("weight", _parameter((n, k), torch.float8_e4m3fn))
        layer.register_parameter("weight_scale", _parameter((n, k // mxfp8.BLOCK), torch.uint8))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reorder the bytes for the kernels, or rebuild the values in fp32."""
        packed = MXFP8Tensor(layer.weight.data.view(torch.uint8), layer.weight_scale.data)
        if takes_tiles(packed.codes.device, layer.compute_dtype):
            layer.tiles = pack_linear(packed, layer.prefix)
            del layer.weight
        else:
            layer.weight = _frozen(mxfp8.dequantize(packed))
        del layer.weight_scale

    @staticmethod
    def value(layer: nn.Module) -> Tensor:
        """fp32 [N, K], what is multiplied."""
        return layer.weight if layer.tiles is None else mxfp8.dequantize(unpack_linear(layer.tiles))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] to [T, N] in x's dtype."""
        if layer.tiles is not None:
            lora, adapter_ids = (None, None) if layer.adapter is None else layer.adapter.select(x.shape[0])
            return lora_linear(x, layer.tiles, lora, adapter_ids)
        out = frozen_linear(x, layer.weight)
        if layer.adapter is not None:
            out = layer.adapter.add(out, x)
        return out.to(x.dtype)


class NVFP4Experts(QuantizeMethodBase):
    """Routed experts of a layer that are here, in NVFP4; see `model.Experts` for the forward. Experts are counted from the first here."""

    def create_weights(self, layer: nn.Module, experts: int, hidden: int, intermediate: int, dtype: torch.dtype = torch.float32) -> None:
        """Packed stacks w13 [E, 2I, H/2] (gate rows first) and w2 [E, H, I/2] with their block and global scales.

        `dtype` is that of activations.
        """
        for name, n, k in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
            layer.register_parameter(f"{name}_weight", _parameter((experts, n, k // 2), torch.uint8))
            layer.register_parameter(f"{name}_weight_scale", _parameter((experts, n, k // nvfp4.BLOCK), torch.float8_e4m3fn))
        layer.compute_dtype = dtype
        # One global scale a matrix: w1 and w3 of an expert share theirs, which is checked and not assumed.
        layer.register_parameter("w13_weight_scale_2", _parameter((experts, 2), torch.float32))
        layer.register_parameter("w2_weight_scale_2", _parameter((experts, 1), torch.float32))

    @staticmethod
    def target(layer: nn.Module, leaf: str, expert: int, which: str) -> Tensor:
        """The part of the layer's parameters that tensor `experts.{expert}.{which}.{leaf}` fills; `which` is w1, w2 or w3."""
        stack = getattr(layer, f"{'w2' if which == 'w2' else 'w13'}_{leaf}").data[expert]
        if which == "w2":
            return stack[0] if leaf == "weight_scale_2" else stack
        index = 0 if which == "w1" else 1
        return stack[index] if leaf == "weight_scale_2" else stack.chunk(2)[index]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """To `w13` [E, 2I, H] and `w2` [E, H, I]: tiles for the kernels, or values in fp32.

        Raises `ValueError` when w1 and w3 of an expert disagree on their scale.
        """
        scales = layer.w13_weight_scale_2.data
        unequal = (scales[:, 0] != scales[:, 1]).nonzero().flatten().tolist()
        if unequal:
            raise ValueError(f"{layer.prefix}: w1 and w3 of experts {unequal[:4]} have different global scales")
        for name, scale in (("w13", scales[:, 0]), ("w2", layer.w2_weight_scale_2.data[:, 0])):
            codes = getattr(layer, f"{name}_weight").data
            blocks = getattr(layer, f"{name}_weight_scale").data.view(torch.uint8)
            packed = NVFP4Tensor(codes, blocks, scale)
            if takes_tiles(codes.device, layer.compute_dtype):
                setattr(layer, name, pack_experts(packed, f"{layer.prefix}.{name}"))
            else:
                layer.register_parameter(name, _frozen(nvfp4.dequantize(packed)))
            for leaf in ("weight", "weight_scale", "weight_scale_2"):
                delattr(layer, f"{name}_{leaf}")

    @staticmethod
    def values(layer: nn.Module) -> Iterator[tuple[int, Tensor, Tensor]]:
        """What is multiplied: (first expert, fp32 w13 [E', 2I, H], w2 [E', H, I]) of runs of experts, all of them once.

        A run of what has to be rebuilt is as long as fits into `_VALUE_BYTES`.
        """
        if isinstance(layer.w13, Tensor):
            yield 0, layer.w13, layer.w2
            return
        experts, matrix = len(layer.w13.codes), layer.w13.scales[0].numel() * CHUNK * torch.float32.itemsize
        step = max(1, _VALUE_BYTES // matrix)
        for first in range(0, experts, step):
            some = slice(first, first + step)
            yield first, *(nvfp4.dequantize(unpack_experts(stack_part(weight, some))) for weight in (layer.w13, layer.w2))

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Unused: the experts module calls `kernels.moe` itself."""
        raise NotImplementedError("routed experts are multiplied by kernels.moe")


@register_quantization_config(NAME)
class SamebitsConfig(QuantizationConfig):
    """Formats by role, as the checkpoint's numerics profile has them."""

    def get_name(self) -> str:
        """Name under which vLLM knows the method."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """bf16, and fp32 for the CPU profile."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Plain torch operations: any GPU."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SamebitsConfig:
        """Nothing to read: the weights hash in config.json stands for the formats."""
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> str | None:
        """Take over the checkpoints that samebits wrote."""
        return NAME if hf_quant_cfg.get("producer", {}).get("name") == NAME else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """None: our layers bring their own method, and the model has no others."""
        return None
