"""What this version of samebits cannot run, although the recipe is sound: said before anything starts, and by `--check` as well.

A recipe may describe machines, a model or numerics that trainer and engine are not able to compute yet. `samebits train` refuses such
a recipe with the first of these lines; `samebits train --check` checks all the rest and lists them.
"""

from __future__ import annotations

from omegaconf import DictConfig

from samebits.quant.profile import Format, NumericsProfile

from .config import Recipe
from .layout import ROLLOUT, Spread
from .plan_tables import BITS, FAMILY, Gpu, Model

ENGINE_BITS = 32
"""Bits in which the engine keeps a weight of the base where it computes in fp32: it rebuilds the values when it loads them."""
COMPUTED = ("bfloat16", "float32")
"""Activation formats that trainer and engine compute with."""


def missing(recipe: Recipe, verl: DictConfig, model: Model, layout: Spread, gpu: Gpu | None) -> list[str]:
    """One line for each thing that keeps the recipe from running, most fundamental first; empty when it can run."""
    rollout = verl.actor_rollout_ref.rollout
    found = []
    if model.family != FAMILY:
        found.append(
            f"architecture {recipe.architecture} is of the {model.family} family: quantize, trainer and engine implement {FAMILY} only"
        )
    profile: NumericsProfile = recipe.profile
    if profile.activations not in COMPUTED:
        found.append(
            f"numerics.profile={profile.name} computes with {profile.activations} activations, which trainer and engine do not yet: "
            "use w4a16"
        )
    if layout.engine_gpus > layout.tensor_ranks:
        found.append(
            f"{ROLLOUT}.data_parallel_size={rollout.data_parallel_size}: the engine does not spread a replica by it; "
            "use tensor_model_parallel_size, or replicas of one GPU that hold the whole base"
        )
    held = held_weights(model, layout.expert_ranks, layout.tensor_ranks)
    if not keeps_packed(profile) and gpu is not None and held > gpu.memory_gb * 1e9 * recipe.cluster.usable_share:
        packed = packed_weights(model, layout.expert_ranks, layout.tensor_ranks)
        found.append(
            f"the engine keeps the base in {ENGINE_BITS} bits: {held / 1e9:,.0f} GB on each GPU instead of {packed / 1e9:,.0f} GB packed, "
            f"of {gpu.memory_gb:.1f} GB"
        )
    return found


def keeps_packed(profile: NumericsProfile) -> bool:
    """Whether the engine multiplies packed weights: with activations of 16 bits and fewer, which are a GPU's."""
    return profile.activations != Format.FP32


def held_weights(model: Model, expert_ranks: int = 1, tensor_ranks: int = 1) -> float:
    """Bytes of a base that is not kept packed, on each engine GPU: every matrix in `ENGINE_BITS`, the embedding in 16 bits."""
    split = model.projection_parameters - _indexer(model) + model.vocabulary * model.hidden
    parameters = model.expert_parameters / expert_ranks + split / tensor_ranks + _indexer(model) + _router(model)
    return parameters * ENGINE_BITS / 8 + model.vocabulary * model.hidden * 2 / tensor_ranks


def packed_weights(model: Model, expert_ranks: int = 1, tensor_ranks: int = 1) -> float:
    """Bytes of a packed base on each engine GPU: experts are split over `expert_ranks`, all else but indexer and router over the others."""
    whole = _indexer(model) * BITS["mxfp8"] / 8 + _router(model) * 4 if tensor_ranks > 1 else 0.0
    return model.expert_bytes("nvfp4") / expert_ranks + (model.other_bytes("nvfp4") - whole) / tensor_ranks + whole


def _indexer(model: Model) -> int:
    """Parameters of the indexers: index queries and one index key."""
    return model.moe_layers * (model.sparse.index_heads + 1) * model.sparse.index_dim * model.hidden if model.sparse else 0


def _router(model: Model) -> int:
    return model.moe_layers * model.experts * model.hidden
