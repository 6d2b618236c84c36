"""The training loop: verl's synchronous PPO trainer with samebits' checks and run directory hung into its hooks.

verl runs the steps; this class adds what must hold around them. After each sync every replica is asked what it holds, and the step
is not finished before the answers agree. Each step becomes one line of `metrics.jsonl`. A broken agreement raises, which ends the job.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from ray.exceptions import RayTaskError
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from samebits.alignment_checks.in_run import AgreementLost, History, check_bases, check_batch, require_agreement
from samebits.alignment_checks.limits import Limits
from samebits.alignment_checks.report import recorded
from samebits.alignment_checks.weights import WeightMismatch, base_digests, verify_sync, verify_unchanged_base
from samebits.kernels.jagged import jagged
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import require_same
from samebits.trainer.m3_config import M3Dims
from samebits.trainer.parity import ParityLost
from samebits.trainer.shipment import Shipment, text_column
from samebits.trainer.verl_patches import keep_samples_in

from .config import TRACES, Recipe
from .data import RECORD
from .parity import parting_operation
from .phases import step_phases, sync_metrics
from .run_dir import MetricsLog, read_metrics, warn
from .samples import SampleStore
from .tracking import open_trackers

# Names in metrics.jsonl of what verl's actor update reports.
_ACTOR_KEYS = (
    "mismatch/kl",
    "mismatch/max_abs",
    "tis/mean",
    "tis/max_raw",
    "tis/clipped_fraction",
    "replay/layers",
    "replay/rows",
    "replay/agreement",
)
_OPTIONAL_KEYS = {"grad_norm": "train/grad_norm", "lr": "train/lr", "objective/loss": "train/loss", "entropy": "train/entropy"}


_SCORED = ("input_ids", "loss_mask", "prompts", "responses", "response_mask", "routed_experts", "block_choices")
"""What the trainer reads of a batch that it scores: the fields that are sent to its ranks."""
_LEARNED = (*_SCORED, "uid", "rollout_log_probs", "old_log_probs", "advantages")
"""The same of one that it learns from."""


class SamebitsTrainer(PPOTrainerSync):
    """verl's synchronous trainer for one recipe."""

    def __init__(self, config: DictConfig, recipe: Recipe) -> None:
        super().__init__(config)
        self.samples = SampleStore()
        keep_samples_in(self.samples)
        self.recipe = recipe
        self.log = MetricsLog(recipe.folder / "metrics.jsonl")
        self.replay_buffer.poll_interval = 0.02  # samples are complete when a step asks for them
        self.history = History(recipe.folder)
        self._base: dict[str, str] = {}
        self._full_check_due = True
        self._step_metrics: dict[str, Any] = {}
        self._save_due = False

    def on_init_end(self) -> None:
        """First sync, then the preflight: nothing is sampled before every replica proved what it holds."""
        self.log.truncate_after(self.global_steps)
        self.history.truncate_after(self.global_steps)
        self.log.trackers = open_trackers(
            self.recipe, self.config.trainer.project_name, read_metrics(self.log.path), lambda text: warn(self.recipe.folder, text)
        )
        super().on_init_end()
        servers = self.llm_server_manager.server_handles
        for i, hashes in enumerate(ray.get([s.profile_hashes.remote() for s in servers])):
            for rank, found in enumerate(hashes):
                require_same(f"engine replica {i} rank {rank}", found, "the trainer", self.recipe.profile.hash)
        if self.recipe.checks.base_weights:
            ranks = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
            self._base = base_digests(Checkpoint(self.recipe.model_path), ranks)
            verify_unchanged_base(self.recipe.folder / "base.json", self._base.whole, fresh=self.global_steps == 0)
            self._require("preflight", [self._check_bases()])
        self._verify_sync()

    def on_step_end(self) -> None:
        """Sync the new adapter and verify it on every replica."""
        super().on_step_end()
        self._verify_sync()

    def _check_bases(self):
        return check_bases(self._base, ray.get([s.base_digests.remote() for s in self.llm_server_manager.server_handles]))

    def _require(self, occasion: str, results: list) -> None:
        """Into the history, then hold the results against the job's right to go on."""
        self.history.write(self.global_steps, occasion, results)
        require_agreement(self.global_steps, results)

    def _compute_old_log_prob(self, batch, metrics):
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.recipe.ablation.recompute_old_logprobs:
            self._recompute_old_logprobs(batch)
        every = self.recipe.checks.every
        if self._full_check_due or (every and self.global_steps % every == 0):
            started = time.perf_counter()
            self._full_check(batch)
            self._full_check_due = False
            self._step_metrics["time/check"] = time.perf_counter() - started
        return batch

    def _compute_advantage(self, batch, metrics):
        """As verl's, which pads every row to the longest: a group is compared by one number a sample, and each token gets its sample's."""
        columns = self.samples.columns(batch.keys, batch.partition_id, ("uid", "rm_scores", "response_mask"))
        uids, mask = np.array(columns["uid"], dtype=object), columns["response_mask"]
        scores = _row_sums(columns["rm_scores"])[:, None]
        normed = self.config.algorithm.norm_adv_by_std_in_grpo
        advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), uids, norm_adv_by_std_in_grpo=normed)
        lengths = mask.offsets().diff()
        of_tokens = advantages[:, 0].repeat_interleave(lengths) * mask.values()
        self.samples.kv_batch_put(batch.keys, batch.partition_id, {"advantages": jagged(of_tokens, lengths)})
        return batch

    def _score(self, batch) -> None:
        """One forward of the trainer over the batch: `log_probs` of each row, among its fields."""
        sent = self._shipment(batch, _SCORED)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        sent.extra_info |= {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        scored = self.actor_rollout_wg.compute_log_prob(sent)
        self.samples.kv_batch_put(batch.keys, batch.partition_id, TensorDict({"log_probs": scored["log_probs"]}, batch_size=[len(batch)]))

    def _shipment(self, batch, fields: tuple[str, ...]) -> Shipment:
        """Those of `fields` that the batch has, on their way to the ranks."""
        columns = self.samples.columns(batch.keys, batch.partition_id, fields)
        return Shipment({name: text_column(c) if isinstance(c, list) else c for name, c in columns.items()}, batch.extra_info)

    def _recompute_old_logprobs(self, batch) -> None:
        """The ablation: what the objective weighs against are the trainer's own logprobs, computed before the step."""
        started = time.perf_counter()
        self._score(batch)
        data = self.samples.kv_batch_get(batch.keys, batch.partition_id, ["log_probs", "response_mask"])
        data["old_log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])
        self.samples.kv_batch_put(batch.keys, batch.partition_id, data.select("old_log_probs"))
        self._step_metrics["time/old_logprobs"] = time.perf_counter() - started

    def _full_check(self, batch) -> None:
        """The trainer scores the batch before it learns from it: its logprobs and the routes against the engine's, and the base again."""
        fields = ["prompts", "responses", "rollout_log_probs", "response_mask", "log_probs"]
        replays = self.config.actor_rollout_ref.rollout.enable_rollout_routing_replay
        self._score(batch)
        wanted = [*fields, "routed_experts"] if replays else fields
        data = self.samples.kv_batch_get(batch.keys, batch.partition_id, wanted)
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        rows = {name: data[name].unbind() for name in wanted}
        prompts, responses = ([len(rows[name][i]) for i in real] for name in ("prompts", "responses"))
        # Position t of the trainer's row scores token t + 1.
        trainer = [rows["log_probs"][i][p - 1 : p - 1 + r].float() for i, p, r in zip(real, prompts, responses, strict=True)]
        routes = None
        if replays:
            routes = [rows["routed_experts"][i][: p + r - 1].numpy() for i, p, r in zip(real, prompts, responses, strict=True)]
        limits = Limits.of(self.recipe.profile, self.recipe.checks.kl_warn, self.recipe.checks.max_kl)
        if self.recipe.numerics.parity == "bitwise":
            limits = replace(limits, max_abs=0.0, mean=0.0)
        engine = [rows["rollout_log_probs"][i].float() for i in real]
        results = check_batch(trainer, engine, routes, prompts, responses, self._dims, limits)
        if self.recipe.checks.base_weights:
            results.append(self._check_bases())
        self._require("full", results)

    @functools.cached_property
    def _dims(self) -> M3Dims:
        return M3Dims.from_config(Checkpoint(self.recipe.model_path).config)

    def _verify_sync(self) -> None:
        started = time.perf_counter()
        reports = ray.get([s.sync_report.remote() for s in self.llm_server_manager.server_handles])
        with recorded("weights.held") as result:
            try:
                verdict = verify_sync(reports, self.global_steps, self.recipe.profile.hash)
            except WeightMismatch as error:
                result.require(False, str(error))
            else:
                result.compared = verdict.tensors * verdict.ranks
                result.metrics = {key: getattr(verdict, key) for key in ("tensors", "bytes", "replicas", "ranks")}
        self.history.write(self.global_steps, "sync", [result])
        traced = self.recipe.tracing
        if traced.first <= self.global_steps < traced.first + traced.steps:
            self._record_engines(reports)
        if result.findings:
            raise WeightMismatch(result.findings[0].message)
        self._step_metrics |= {
            "sync/tensors": verdict.tensors,
            "sync/bytes": verdict.bytes,
            "sync/seconds": verdict.seconds,
            "sync/verified": True,
            "sync/replicas": verdict.replicas,
            "sync/ranks": verdict.ranks,
            "adapter/version": verdict.version,
            "adapter/digest": verdict.digest,
            **sync_metrics(reports),
            "time/sync_check": time.perf_counter() - started,
        }

    def _record_engines(self, reports: list) -> None:
        """What each engine rank holds, beside the recordings of the trainer's ranks."""
        held = ray.get([s.held_bytes.remote() for s in self.llm_server_manager.server_handles])
        engines = [
            {"replica": i, "held": ranks, "memory": report["memory"].get("engine", {}) if report else {}}
            for i, (ranks, report) in enumerate(zip(held, reports, strict=True))
        ]
        folder = self.recipe.folder / TRACES
        folder.mkdir(exist_ok=True)
        (folder / f"engines_{self.global_steps}.json").write_text(json.dumps(engines) + "\n")

    def prepare_step(self) -> dict:
        """Generate and grade this step's samples."""
        started = time.perf_counter()
        found = super().prepare_step()
        loop = self.agent_loop_manager
        self._step_metrics |= {"time/rollout": time.perf_counter() - started, **loop.digests}
        self._step_metrics |= {f"time/{name}": seconds for name, seconds in loop.seconds.items()}
        self._step_metrics |= {f"tokens/{name}": count for name, count in loop.tokens.items()}
        self._step_metrics["response/truncated_fraction"] = loop.truncated_fraction
        return found

    def _fetch_one_gen_batch(self):
        batch = super()._fetch_one_gen_batch()
        # verl draws random ids; ids made of step and place make a resumed run identical to an uninterrupted one.
        ids = [f"{self.global_steps:06d}-{i:05d}" for i in range(len(batch))]
        batch["uid"] = _object_stack(ids)
        return batch

    def _balance_batch(self, batch, metrics, *args, **kwargs):
        """As verl; a single rank has nothing to balance, and verl's partitioning of one part takes longer than a small step's loss."""
        if self.actor_rollout_wg.world_size > 1:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        return upsample_batch_to_divisible_size(batch, self._get_required_batch_multiple(1), self.tokenizer.eos_token_id)

    def _val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs) -> dict[str, float]:
        correct = [acc > 0 for acc in reward_extra_infos_dict["acc"]]  # not the reward: a penalty for length makes no answer wrong
        found = super()._val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs)
        return found | {"accuracy/heldout": float(np.mean(correct)), "accuracy/samples": len(correct)}

    def _validate(self) -> dict[str, float]:
        started = time.perf_counter()
        found = super()._validate()
        self._step_metrics |= {
            "accuracy/heldout": found["accuracy/heldout"],
            "accuracy/samples": found["accuracy/samples"],
            "time/evaluation": time.perf_counter() - started,
        }
        if "time/rollout" not in self._step_metrics:
            # Before the first step of this start: line 0 of a fresh run. A resumed run has this evaluation's step already.
            line = {"step": self.global_steps, **self._take_step_metrics()}
            if self.log.last_step < 0:
                self.log.write(line)
        return found

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        if self.config.trainer.logger:
            super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        else:
            metrics |= self._means(batch)
        line = {"step": global_steps, "reward/mean": float(metrics["critic/score/mean"])}
        line |= {key: float(metrics[f"actor/{key}"]) for key in _ACTOR_KEYS if f"actor/{key}" in metrics}
        line |= {ours: float(metrics[f"actor/{key}"]) for key, ours in _OPTIONAL_KEYS.items() if f"actor/{key}" in metrics}
        line |= {
            "response/tokens_mean": float(metrics["response_length/mean"]),
            "time/train": float(timing_raw["update_actor"]),
            "time/sync": float(timing_raw["update_weights"]),
            "time/step": float(timing_raw["step"]),
            **step_phases(metrics, timing_raw),
        }
        line |= self._take_step_metrics()
        self.log.write(line)
        if not line["mismatch/kl"] <= self.recipe.checks.max_kl:
            raise AgreementLost(
                f"step {global_steps}: mismatch/kl {line['mismatch/kl']:.3e} passes the recipe's limit {self.recipe.checks.max_kl:.3e}"
            )
        if self.recipe.numerics.parity == "bitwise" and line["mismatch/max_abs"] != 0:
            raise AgreementLost(f"step {global_steps}: mismatch/max_abs {line['mismatch/max_abs']:.3e} breaks numerics.parity=bitwise")
        if self._save_due:
            self._save_due = False
            self._save_now()

    def _means(self, batch) -> dict[str, float]:
        """What a line wants of verl's metrics, which nobody else reads unless a recipe names loggers of verl's; without padding samples."""
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        columns = self.samples.columns(keys, batch.partition_id, ("rm_scores", "responses"))
        lengths = columns["responses"].offsets().diff().float()
        return {"critic/score/mean": _row_sums(columns["rm_scores"]).mean().item(), "response_length/mean": lengths.mean().item()}

    def _update_actor(self, batch, metrics):
        try:
            super()._update_actor(self._shipment(batch, _LEARNED), metrics)
            return batch
        except RayTaskError as error:
            if not isinstance(error.cause, ParityLost):
                raise
            where = parting_operation(self.llm_server_manager.server_handles[0], self.recipe.folder)
            raise AgreementLost(f"{error.cause}; {where}") from None

    def _take_step_metrics(self) -> dict[str, Any]:
        taken, self._step_metrics = self._step_metrics, {}
        return taken

    def _save_checkpoint(self) -> None:
        """verl asks for it before the step's sync: it waits until the step is verified and its line is written.

        So there is no checkpoint of a step that failed a check, and none whose line a kill has lost.
        """
        self._save_due = True

    def _save_now(self) -> None:
        super()._save_checkpoint()
        step = self.global_steps
        shutil.copyfile(self.recipe.folder / "data" / RECORD, Path(self.config.trainer.default_local_dir) / f"global_step_{step}" / RECORD)
        source = Path(self.config.trainer.default_local_dir) / f"global_step_{step}" / "actor" / "peft"
        target = self.recipe.folder / "adapters" / f"step_{step}"
        if not source.is_dir():
            raise WeightMismatch(f"checkpoint of step {step} holds no adapter at {source}")
        staging = target.with_name(f".{target.name}")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(source, staging)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staging, target)


def _row_sums(column: torch.Tensor) -> torch.Tensor:
    """Sum of each row of a jagged tensor [B, *], exact where a row has one number that is not zero."""
    rows = torch.arange(len(column)).repeat_interleave(column.offsets().diff())
    return torch.zeros(len(column), dtype=column.dtype).index_add_(0, rows, column.values())


def _object_stack(items: list[str]):
    return NonTensorStack(*(NonTensorData(item) for item in items))
