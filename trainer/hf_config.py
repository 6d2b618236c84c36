"""Configuration class by which transformers, and through it verl, reads a MiniMax-M3 checkpoint's config.json.

The pinned transformers does not know `minimax_m3_vl`. vLLM brings a class of its own and registers it right before it reads a
model, overwriting whatever is there; so both may live in one process, and nothing here depends on which of the two a config is.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE = "minimax_m3_vl"
ARCHITECTURE = "MiniMaxM3SparseForCausalLM"


class M3TextConfig(PreTrainedConfig):
    """The text backbone's entries, as attributes."""

    model_type = "minimax_m3_text"


class M3Config(PreTrainedConfig):
    """Top level of a MiniMax-M3 config.json, with the text backbone below `text_config`."""

    model_type = MODEL_TYPE

    def __init__(self, text_config: dict[str, Any] | M3TextConfig | None = None, **kwargs: Any) -> None:
        self.text_config = text_config if isinstance(text_config, M3TextConfig) else M3TextConfig(**(text_config or {}))
        self.hidden_size = getattr(self.text_config, "hidden_size", None)
        super().__init__(**kwargs)


def register() -> None:
    """Make `AutoConfig` read `minimax_m3_vl`, unless some class already does."""
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, M3Config)
