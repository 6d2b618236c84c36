"""Entry point of the training side: importing this module makes verl know samebits.

verl imports it in the driver and in every Ray worker when `VERL_USE_EXTERNAL_MODULES=samebits.trainer.plugin` is set. It registers
the CPU platform, the model configuration, the policy loss and the training engine, and applies the patches, in the order in which
verl needs them: the platform before anything asks for a device, the patches before anything copies what they replace.
"""

from __future__ import annotations

from verl.plugin.platform import platform_manager

from . import hf_config, objective, verl_patches
from .platform import CPUPlatform


def register() -> None:
    """Register everything. May be called again; raises in one line when verl is not the version this was built for."""
    if platform_manager.PlatformRegistry.get("cpu") is not CPUPlatform:
        platform_manager.PlatformRegistry.register("cpu")(CPUPlatform)
    _require_platform()
    verl_patches.apply()
    hf_config.register()
    objective.register()
    # The engine module imports verl's engines, which read the platform and the patched functions: last.
    from . import engine

    engine.register()


def _require_platform() -> None:
    """Refuse when verl decided about its platform before it knew ours, and took one that is not there."""
    resolved = platform_manager._current_platform
    if resolved is not None and not resolved.is_available() and platform_manager._detect_platform_name() == "cpu":
        raise RuntimeError(
            f"verl chose platform {resolved.device_name} before the samebits plugin was imported; "
            "set VERL_USE_EXTERNAL_MODULES=samebits.trainer.plugin"
        )


register()
