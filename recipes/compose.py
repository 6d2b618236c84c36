"""Layers of YAML over verl's own configuration: files, overrides, verl's defaults, and what is refused while they are put together.

What the keys of a recipe mean is in `config`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RECIPES = Path(__file__).parent


class RecipeError(ValueError):
    """A recipe cannot be run as it stands. The message is one line."""


def parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """`key=value` words as a layer. Raises `RecipeError`."""
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"bad override: {_one_line(error)}") from None


def recipe_layers(path: Path, above: tuple[Path, ...] = ()) -> list[DictConfig]:
    """A recipe file and the files it builds on, the lowest first. Raises `RecipeError` on a missing file, bad YAML or a circle."""
    if not path.is_file():
        shipped = RECIPES / path.name
        if not shipped.is_file():
            raise RecipeError(f"no recipe at {path}")
        path = shipped
    try:
        layer = OmegaConf.load(path)
    except Exception as error:  # yaml's and omegaconf's errors have no common base
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: {error.problem}" if mark is not None else _one_line(error)
        raise RecipeError(f"{path}: {place}") from None
    if not isinstance(layer, DictConfig):
        raise RecipeError(f"{path}: a recipe is a mapping of keys")
    base = layer.get("base")
    if base is not None and not isinstance(base, str):
        raise RecipeError(f"{path}: base must name a recipe file, not {base!r}")
    if path.resolve() in above:
        raise RecipeError(f"{path}: base leads back to this file")
    return ([*recipe_layers(path.parent / base, (*above, path.resolve()))] if base else []) + [layer]


def verl_defaults() -> DictConfig:
    """A copy of verl's own default configuration, closed to unknown keys."""
    return copy.deepcopy(composed_defaults())


@functools.cache
def composed_defaults() -> DictConfig:
    """verl's default configuration; to be read alone."""
    if not GlobalHydra.instance().is_initialized():
        # By folder, since the module's name would import verl, which takes seconds that a refused recipe need not cost.
        verl = importlib.util.find_spec("verl")
        initialize_config_dir(str(Path(verl.origin).parent / "trainer" / "config"), version_base=None)
    config = hydra.compose("ppo_trainer")
    OmegaConf.set_struct(config, True)
    OmegaConf.set_struct(config.actor_rollout_ref.rollout.engine_kwargs, False)  # vLLM's own arguments, which vLLM checks
    return config


def refuse_verl_overlong(layer: DictConfig) -> None:
    """verl's overlong penalty lives in a reward manager that never runs here: setting it would do nothing."""
    for path in key_paths(layer):
        first, *rest = path.split(".")
        if first in ("reward", "reward_model") and any("overlong" in part for part in rest):
            raise RecipeError(f"{path}: verl's overlong settings do nothing here; set grading.overlong_buffer and grading.overlong_factor")


def refuse_nulls(verl: DictConfig) -> None:
    """What verl has a value for cannot be nothing."""
    for key, default in _filled_keys().items():
        if OmegaConf.select(verl, key) is None:
            raise RecipeError(f"{key} must not be null: it is {default} in verl's own configuration")


@functools.cache
def _filled_keys() -> dict[str, str]:
    """Keys and sections of verl's defaults that hold something, and what, in short."""
    defaults = composed_defaults()
    found = {key: OmegaConf.select(defaults, key) for key in key_paths(defaults) if _holds_value(defaults, key)}
    return {key: "a section" if isinstance(value, DictConfig) else repr(value) for key, value in found.items() if value is not None}


def _holds_value(config: DictConfig, key: str) -> bool:
    above, _, name = key.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    return not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name)


def merge(config: DictConfig, layer: dict[str, Any], suggest: Callable[[str], str]) -> DictConfig:
    """`config` with `layer` merged into it, in place: it is this recipe's own copy. `suggest`: what to say of an unknown key."""
    try:
        return OmegaConf.unsafe_merge(config, OmegaConf.create(layer))
    except OmegaConfBaseException as error:
        raise RecipeError(_one_line(error, suggest)) from None


def _one_line(error: Exception, suggest: Callable[[str], str] = lambda key: "") -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), None)
    first = lines[0] if lines else type(error).__name__
    if "is not in struct" in first or "not in 'Recipe'" in first or "not in '" in first:
        return f"unknown key {key or first}" + (suggest(key) if key else "")
    return f"{key}: {first}" if key else first


def key_paths(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted path of every section and key of `config`."""
    for key in config:
        yield f"{prefix}{key}"
        missing = OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key)
        if not missing and isinstance(config[key], DictConfig):
            yield from key_paths(config[key], f"{prefix}{key}.")
