"""The vLLM side of samebits: a general plugin (`register`) with the MiniMax-M3 serving model, adapters in memory, and routes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading

_WATCH = "samebits-parent"


def register() -> None:
    """Entry point `vllm.general_plugins`. vLLM calls it in every process, more than once; repeated calls change nothing."""
    _end_with_parent()
    _hide_broken_torchvision()
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from . import quantization, settings, vllm_patches

    vllm_patches.apply()
    MODELS_CONFIG_MAP[settings.ARCHITECTURE] = settings.ConfigHook
    ModelRegistry.register_model(settings.ARCHITECTURE, f"{quantization.__package__}.model:MiniMaxM3ForCausalLM")


def _end_with_parent() -> None:
    """End an engine process with the process that spawned it: a server that is killed outright cannot stop its engine."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def _hide_broken_torchvision() -> None:
    """A CUDA build of torchvision beside a CPU build of torch raises when it is imported, and transformers imports it when it is there.

    Nothing here needs it, so a torchvision that cannot be imported is treated as absent.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
            del sys.modules[name]
        sys.modules["torchvision"] = None
