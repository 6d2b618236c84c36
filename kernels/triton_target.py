"""For what a kernel is compiled: NVIDIA, whose instructions some kernels write out (PTX), anything else, or the interpreter.

Where there is no PTX the same values are made by plain operations: slower, and with the same bits, since every value is exact in the type
in which it is made. Nothing is run on other GPUs here: kernels compile for them (`tests/kernels/compile_for.py`), and the operations of
`kernels` do not call them there (`quant.blocks.fast_path`).
"""

from __future__ import annotations

import os
from typing import Any

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

# Triton's interpreter (TRITON_INTERPRET=1, CPU) has no inline assembly and wrong bf16 dots: fp32 there, by plain operations.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
OPERAND = tl.constexpr(tl.float32 if INTERPRETED.value else tl.bfloat16)
"""Of the products of tiles."""


@constexpr_function
def has_ptx():
    """Whether what is launched now is compiled for NVIDIA; inside of a kernel and outside."""
    target = None if INTERPRETED.value else current_target()
    return target is not None and target.backend == "cuda"


def nvidia_options(**options: Any) -> dict[str, Any]:
    """Options of a launch that only NVIDIA's compiler knows."""
    return options if has_ptx() else {}
