"""Checkpoints of a run: adapter masters, optimizer moments, schedule, random state and the adapter version. Never the base.

Masters and moments are written by torch's distributed checkpoint, each rank its own shards, so nothing is gathered and a run may be
resumed with another number of ranks. What a rank knows alone (random state) lies in a file for each rank. The adapter is also
exported as a PEFT folder, the same bits that the engine was sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from samebits.quant.adapter import save_peft

if TYPE_CHECKING:
    from .engine import SamebitsEngine

_META = "samebits_trainer.json"


class ResumeError(ValueError):
    """A checkpoint cannot be continued by this run."""


class AdapterCheckpointManager(BaseCheckpointManager):
    """verl's checkpoint manager for an engine that trains an adapter only."""

    def __init__(self, engine: SamebitsEngine) -> None:
        super().__init__(
            model=engine.module,
            optimizer=engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            processing_class=engine.model_config.get_processor(),
            checkpoint_config=engine.checkpoint_config,
        )
        self.engine = engine

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write everything below `local_path`; keep at most `max_ckpt_to_keep` checkpoints of this run. Called by all ranks."""
        folder = Path(local_path)
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.save(self._tensors(), checkpoint_id=str(folder / "state"))
        torch.save({"rng": self.get_rng_state()}, folder / f"rng_rank_{self.rank}.pt")
        tensors = dict(self.model.export_adapter())
        if self.rank == 0:
            meta = self._identity() | {"adapter_version": self.engine.adapter_version, "global_step": global_step}
            torch.save(self.lr_scheduler.state_dict(), folder / "lr_scheduler.pt")
            base = str(self.engine.model_config.path)
            save_peft(folder / "peft", tensors, self.model.spec, base, {k: str(v) for k, v in meta.items()})
            (folder / _META).write_text(json.dumps(meta, indent=2) + "\n")  # last: a folder without it is no checkpoint
            self.register_checkpoint(local_path, max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """Continue from `local_path`, bit for bit. Raises `ResumeError` when it is no checkpoint, or one of another run's kind."""
        if local_path is None:
            return
        folder = Path(local_path)
        if not (folder / _META).is_file():
            raise ResumeError(f"no complete checkpoint at {folder}")
        meta = json.loads((folder / _META).read_text())
        for key, want in self._identity().items():
            if meta.get(key) != want:
                raise ResumeError(f"checkpoint {folder} has {key} {meta.get(key)}, this run has {want}")
        self.engine.forget_export()
        state = self._tensors()
        dcp.load(state, checkpoint_id=str(folder / "state"))
        self._restore(state)
        self.lr_scheduler.load_state_dict(torch.load(folder / "lr_scheduler.pt", weights_only=True))
        # The schedule sets the next rate when it steps, after the optimizer: the rate of the next step is state of the optimizer.
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        rng = folder / f"rng_rank_{self.rank}.pt"
        if rng.is_file():  # a run with more ranks than before starts the new ones from their seed
            self.load_rng_state(torch.load(rng, weights_only=False)["rng"])
        self.engine.adapter_version = meta["adapter_version"]
        dist.barrier()

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        settings = self.model.settings
        return {
            "profile": self.model.profile.hash,
            "rank": settings.rank,
            "alpha": float(settings.alpha),
            "roles": [str(r) for r in settings.roles],
        }

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Masters and moments by parameter name. Moments that do not exist yet are zeros, as the optimizer would start them."""
        state: dict[str, dict[str, Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}, "step": {}}
        for name, parameter in self.model.adapter_parameters():
            moments = self.optimizer.state.get(parameter, {})
            state["master"][name] = parameter.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                state[key][name] = moments.get(key, torch.zeros_like(parameter.detach()))
            state["step"][name] = moments.get("step", torch.zeros(())).clone()
        return state

    def _restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        on_device = {p for group in self.optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]}
        # Masters were loaded in place. A parameter that never took a step has no optimizer state, as in the run that saved it.
        for name, parameter in self.model.adapter_parameters():
            if state["step"][name] == 0:
                self.optimizer.state.pop(parameter, None)
                continue
            # Where a fused kernel takes the step it reads the count there as well; elsewhere torch keeps it on the host.
            device = parameter.device if parameter in on_device else torch.device("cpu")
            moments = {key: state[key][name] for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": state["step"][name].to(device)} | moments
