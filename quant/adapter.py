"""Adapters between trainer, wire, engine and disk: which tensors there must be, what they are called, and whether they arrived.

An adapter is one LoRA pair (A, B) for each adapted module: A [r, K] and B [N, r], in the profile's LoRA dtype. The scale
alpha / rank is multiplied into B by the trainer before B is rounded, so everyone downstream applies scale 1 and the file on disk
says `lora_alpha = r`. Names are PEFT's, one pair for each expert:
`base_model.model.model.layers.3.block_sparse_moe.experts.7.w1.lora_A.weight`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .digests import ALGORITHM, FORMER_ALGORITHM, Digester, digests
from .digests import digest as digest
from .ranks import Part, Ranks
from .roles import (
    ATTENTION_ROLES,
    DENSE_ROLES,
    EXPERT_ROLES,
    LORA_ROLES,
    MODULE_PATHS,
    SHARED_ROLES,
    ModuleId,
    Role,
    module_id,
)

PREFIX = "base_model.model."
_TENSORS = "adapter_model.safetensors"
SIDES = ("A", "B")
TARGET_GROUPS: dict[str, tuple[Role, ...]] = {
    "all": LORA_ROLES,
    "attention": ATTENTION_ROLES,
    "experts": EXPERT_ROLES,
    "shared": SHARED_ROLES,
    "dense": DENSE_ROLES,
}


class AdapterError(ValueError):
    """An adapter is not what it must be: a tensor is missing, unknown, stale or different."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a MiniMax-M3 text model that an adapter depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_intermediate: int
    shared_intermediate: int
    dense_intermediate: int
    experts: int
    moe_layers: tuple[int, ...]
    """Absolute indices of the layers with routed experts."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a checkpoint's config.json (with or without `text_config`). Raises `ValueError` naming a missing key."""
        text = config.get("text_config", config)
        try:
            layers = text["num_hidden_layers"]
            freq = text.get("moe_layer_freq") or [1] * layers
            return cls(
                layers=layers,
                hidden=text["hidden_size"],
                heads=text["num_attention_heads"],
                kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                expert_intermediate=text["intermediate_size"],
                shared_intermediate=text["intermediate_size"] * text.get("n_shared_experts", 1),
                dense_intermediate=text["dense_intermediate_size"],
                experts=text["num_local_experts"],
                moe_layers=tuple(i for i, f in enumerate(freq) if f),
            )
        except KeyError as error:
            raise ValueError(f"model config has no key {error.args[0]!r}") from None

    def matrix(self, role: Role) -> tuple[int, int]:
        """(N, K) of a projection: output and input width."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            Role.ATTN_Q: (q, self.hidden),
            Role.ATTN_K: (kv, self.hidden),
            Role.ATTN_V: (kv, self.hidden),
            Role.ATTN_O: (self.hidden, q),
            Role.SHARED_GATE: (self.shared_intermediate, self.hidden),
            Role.SHARED_UP: (self.shared_intermediate, self.hidden),
            Role.SHARED_DOWN: (self.hidden, self.shared_intermediate),
            Role.DENSE_GATE: (self.dense_intermediate, self.hidden),
            Role.DENSE_UP: (self.dense_intermediate, self.hidden),
            Role.DENSE_DOWN: (self.hidden, self.dense_intermediate),
            Role.EXPERT_GATE: (self.expert_intermediate, self.hidden),
            Role.EXPERT_UP: (self.expert_intermediate, self.hidden),
            Role.EXPERT_DOWN: (self.hidden, self.expert_intermediate),
        }[role]

    def modules(self, roles: Iterable[Role]) -> list[ModuleId]:
        """Every module with one of `roles`, in order of layer, role and expert."""
        wanted = set(roles)
        found = []
        for layer in range(self.layers):
            moe = layer in self.moe_layers
            for role in LORA_ROLES:
                if role not in wanted or role in (DENSE_ROLES if moe else SHARED_ROLES + EXPERT_ROLES):
                    continue
                experts = range(self.experts) if role in EXPERT_ROLES else (-1,)
                found += [ModuleId(role, layer, e) for e in experts]
        return found


def target_roles(targets: str | Iterable[str]) -> tuple[Role, ...]:
    """Roles of a recipe's `lora` entry: group names (all, attention, experts, shared, dense) or role names, comma-separated or listed.

    Raises `ValueError` on a name that is neither, and on a role that takes no adapter.
    """
    names = [n.strip() for n in targets.split(",")] if isinstance(targets, str) else list(targets)
    roles: list[Role] = []
    for name in names:
        if name in TARGET_GROUPS:
            roles += TARGET_GROUPS[name]
        elif name in {str(r) for r in LORA_ROLES}:
            roles.append(Role(name))
        else:
            known = ", ".join([*TARGET_GROUPS, *map(str, LORA_ROLES)])
            raise ValueError(f"unknown LoRA target {name!r}; known: {known}")
    return tuple(dict.fromkeys(roles))


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What an adapter must consist of."""

    shape: ModelShape
    rank: int
    roles: tuple[Role, ...]
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Exact key set: tensor name to shape, A [r, K] and B [N, r] of every adapted module."""
        return dict(_shapes(self))

    def check_names(self, names: Mapping[str, Any]) -> None:
        """Raise `AdapterError` naming the first tensors that are missing or unknown."""
        expected = _shapes(self)
        if names.keys() != expected.keys():
            raise AdapterError(_summary(_name_problems(expected, names)))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `AdapterError` naming the first tensors that are missing, unknown, or of another shape or dtype."""
        expected = self.shapes()
        problems = _name_problems(expected, tensors)
        for name in expected.keys() & tensors.keys():
            t = tensors[name]
            if tuple(t.shape) != expected[name]:
                problems.append(f"{name} has shape {tuple(t.shape)}, not {expected[name]}")
            elif _dtype_name(t) != self.dtype:
                problems.append(f"{name} is {_dtype_name(t)}, not {self.dtype}")
        if problems:
            raise AdapterError(_summary(problems))


@lru_cache(maxsize=8)
def _shapes(spec: AdapterSpec) -> dict[str, tuple[int, int]]:
    """Kept: every sync asks for all names, of which a large model has tens of thousands."""
    out: dict[str, tuple[int, int]] = {}
    for module in spec.shape.modules(spec.roles):
        n, k = spec.shape.matrix(module.role)
        out[tensor_name(module, "A")] = (spec.rank, k)
        out[tensor_name(module, "B")] = (n, spec.rank)
    return out


def tensor_name(module: ModuleId, side: str) -> str:
    """PEFT name of one side ('A' or 'B') of a module's pair."""
    return f"{PREFIX}{module.path}.lora_{side}.weight"


def parse_name(name: str) -> tuple[ModuleId, str]:
    """Inverse of `tensor_name`; accepts names without the PEFT prefix. Raises `AdapterError`."""
    for side in SIDES:
        suffix = f".lora_{side}.weight"
        if name.endswith(suffix):
            try:
                return module_id(name.removesuffix(suffix)), side
            except ValueError as error:
                raise AdapterError(str(error)) from None
    raise AdapterError(f"{name!r} is no adapter tensor")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a sync carries, or what an engine's rank says it holds: a version, the numerics and a digest for each tensor.

    A sync carries the digests of whole tensors and, for replicas of several ranks, of each rank's parts; a rank answers with its own.
    """

    version: int
    """Number of optimizer steps in the adapter."""
    profile: str
    """Hash of the numerics profile."""
    digests: dict[str, str]
    bytes: int = 0
    algorithm: str = ALGORITHM
    """What the digests were taken with."""
    parts: list[dict[str, str]] = field(default_factory=list)
    """Of a sync to replicas of several ranks: digests of what each rank must hold (`quant.ranks`)."""
    rank: int = 0
    """Of an answer: which rank of its replica gives it."""
    world: int = 1
    """Of an answer: ranks of its replica."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], version: int, profile: str, taken: Taken | None = None, world: int = 1) -> Manifest:
        """Manifest of `tensors` for replicas of `world` ranks. `taken`: their digests, where they were taken before they were copied here.

        Raises `LayoutError` when an adapter of these tensors does not cover `world` ranks.
        """
        if taken is None:
            taking = Taking({name: tuple(t.shape) for name, t in tensors.items()}, world)
            for name, t in tensors.items():
                taking.add(name, t)
            taken = taking.finish()
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        return cls(version, profile, dict(taken.whole), total, parts=[dict(part) for part in taken.parts])

    @property
    def ranks(self) -> int:
        """Of a sync: ranks of the replicas that it is for."""
        return len(self.parts) or 1

    def to_json(self) -> str:
        """As one JSON object. Names are one text and digests another: what a parser has to look at are a few strings, not thousands."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {"digests": _joined(self.digests), "parts": [_joined(part) for part in self.parts]})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Inverse of `to_json`. A text that names no algorithm is from before there were two.

        Raises `AdapterError` when it has not a digest for each name.
        """
        fields = {"algorithm": FORMER_ALGORITHM} | json.loads(text)
        parts = [_taken_apart(part) for part in fields.get("parts", [])]
        return cls(**(fields | {"digests": _taken_apart(fields["digests"]), "parts": parts}))

    def differences(self, held: Manifest) -> list[str]:
        """What is wrong with `held` (the engine's answer), one short sentence each; empty when it holds exactly this."""
        problems = []
        if held.version != self.version:
            problems.append(f"adapter version {held.version} is held, {self.version} was sent")
        if held.profile != self.profile:
            problems.append(f"engine computes with numerics profile {held.profile}, trainer with {self.profile}")
        if held.algorithm != self.algorithm:
            return [*problems, f"digests of {held.algorithm} cannot be compared with those sent, of {self.algorithm}"]
        if held.world != self.ranks or not 0 <= held.rank < held.world:
            return [*problems, f"rank {held.rank} of {held.world} answered, the adapter was sent to {self.ranks}"]
        expected = self.parts[held.rank] if self.parts else self.digests
        if held.digests == expected:
            return problems
        problems += _name_problems(expected, held.digests)
        problems += [
            f"{name} differs: {held.digests[name]} is held, {want} was sent"
            for name, want in expected.items()
            if held.digests.get(name, want) != want
        ]
        return problems

    def agrees(self, answers: Sequence[Manifest]) -> bool:
        """Did every rank of one replica answer, in order, that it holds exactly this?"""
        return [held.rank for held in answers] == list(range(self.ranks)) and not any(map(self.differences, answers))

    def require(self, held: Manifest, where: str) -> None:
        """Raise `AdapterError` with one line when `held` is not exactly this. `where` names the replica and rank."""
        problems = self.differences(held)
        if problems:
            raise AdapterError(f"{where}: {_summary(problems)}")


def _joined(digests: Mapping[str, str]) -> list[str]:
    """[names, digests], a line each."""
    return ["\n".join(digests), "\n".join(digests.values())]


def _taken_apart(joined: Sequence[str]) -> dict[str, str]:
    names, digests = (text.split("\n") if text else [] for text in joined)
    found = dict(zip(names, digests, strict=False))
    if not len(found) == len(names) == len(digests):
        raise AdapterError(f"a manifest has {len(digests)} digests for {len(names)} names, of which {len(set(names))} are different")
    return found


class Taken(NamedTuple):
    """Digests of an adapter's tensors."""

    whole: dict[str, str]
    parts: list[dict[str, str]]
    """Of what each rank holds; empty where a replica is one rank."""


class Taking:
    """Takes the digests of an adapter as its tensors come, on whatever device each is: of the whole, and of the parts of `world` ranks."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], world: int = 1) -> None:
        """`shapes`: of all tensors that will come. Raises `LayoutError` when their parts do not cover them."""
        self.shapes = shapes
        self._ranks = _ranks(tuple((name, tuple(shape)) for name, shape in shapes.items()), world) if world > 1 else _Ranks({}, [])
        self._digester = Digester()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, which must keep its values until `finish`. Raises `AdapterError` when it was not announced."""
        self.add_stack((name,), tensor[None])

    def add_stack(self, names: tuple[str, ...], stack: Tensor) -> None:
        """`add` of the tensors along the first dimension of `stack`."""
        if not self.shapes.keys() >= set(names):
            raise AdapterError(f"{next(name for name in names if name not in self.shapes)} is no tensor of this adapter")
        self._digester.add_stack(names, stack)
        for name in self._ranks.cuts.keys() & set(names):
            for part in self._ranks.cuts[name]:
                self._digester.add(_part_name(name, part), part.of(stack[names.index(name)]))

    def finish(self) -> Taken:
        """All digests, in the order of the shapes. Raises `AdapterError` when a tensor that was announced did not come."""
        found = self._digester.finish()
        missing = [name for name in self.shapes if name not in found]
        if missing:
            raise AdapterError(f"{missing[0]} was announced and did not come ({len(missing)} such tensors)")
        parts = [{name: found[key] for name, key in keys.items()} for keys in self._ranks.keys]
        return Taken({name: found[name] for name in self.shapes}, parts)


class _Ranks(NamedTuple):
    """What the ranks of a replica hold, as digests are taken of it."""

    cuts: dict[str, list[Part]]
    """Parts by tensor, of those that some ranks hold in part."""
    keys: list[dict[str, str]]
    """Of each rank: tensor to the name under which the digest of what it holds is taken."""


@lru_cache(maxsize=4)
def _ranks(shapes: tuple[tuple[str, tuple[int, ...]], ...], world: int) -> _Ranks:
    """Kept: they are the same in every sync of a run. Raises `LayoutError`."""
    whole = dict(shapes)
    held = Ranks.of_adapter(whole, world).adapters(whole)
    cuts: dict[str, list[Part]] = {}
    for part_name, part in {(name, part) for parts in held for name, part in parts.items()}:
        if not part.is_whole(whole[part_name]):
            cuts.setdefault(part_name, []).append(part)
    return _Ranks(cuts, [{n: n if part.is_whole(whole[n]) else _part_name(n, part) for n, part in parts.items()} for parts in held])


def _part_name(name: str, part: Part) -> str:
    return f"{name}[{part.dim}:{part.start}:{part.stop}]"


def save_peft(folder: Path, tensors: Mapping[str, Tensor], spec: AdapterSpec, base: str, metadata: Mapping[str, str]) -> None:
    """Write a PEFT adapter folder (`adapter_model.safetensors`, `adapter_config.json`); `metadata` goes into the safetensors header.

    The header also holds `digest`, one for all tensors, by which `load_peft` sees a file that changed since.
    """
    spec.check(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    save_file(on_cpu, folder / _TENSORS, {**metadata, "digest": _whole_digest(on_cpu)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({MODULE_PATHS[r].rsplit(".", 1)[-1] for r in spec.roles}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_peft(folder: Path, spec: AdapterSpec) -> dict[str, Tensor]:
    """Tensors of a PEFT adapter folder, checked against `spec` and, where its header has one, its digest.

    Raises `AdapterError` in one line that names the folder.
    """
    config = _peft_config(folder)
    if config["r"] != spec.rank:
        raise AdapterError(f"{folder}: the adapter has rank {config['r']}, not {spec.rank}")
    if config["lora_alpha"] != config["r"]:
        raise AdapterError(f"{folder}: lora_alpha {config['lora_alpha']} is not r {config['r']}; the scale must be folded into B")
    try:
        tensors = load_file(folder / _TENSORS)
        spec.check(tensors)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder / _TENSORS} cannot be read: {error}") from None
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from None
    written = peft_metadata(folder).get("digest")
    if written is not None and written != _whole_digest(tensors):
        raise AdapterError(f"{folder / _TENSORS} is not what was written: its digest differs from the one in its header")
    return tensors


def _whole_digest(tensors: Mapping[str, Tensor]) -> str:
    """`algorithm:hex` over the names and digests of all tensors."""
    parts = json.dumps(sorted(digests(tensors).items()))
    return f"{ALGORITHM}:{hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()}"


def peft_metadata(folder: Path) -> dict[str, str]:
    """What `save_peft` was given as metadata: the trainer writes `profile`, `adapter_version` and more. Raises `AdapterError`."""
    path = folder / _TENSORS
    if not path.is_file():
        raise AdapterError(f"no adapter at {folder}")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None


def _peft_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    if not (folder / _TENSORS).is_file():
        raise AdapterError(f"no adapter at {folder}")
    try:
        config = json.loads(path.read_text())
        return {key: config[key] for key in ("r", "lora_alpha")}
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise AdapterError(f"{path} is no PEFT adapter configuration") from None


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _name_problems(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in found]
    return missing + [f"{name} is unknown" for name in found if name not in expected]


def _summary(problems: list[str], shown: int = 3) -> str:
    rest = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + rest
