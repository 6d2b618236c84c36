"""Which runs are the same experiment with another seed, and what several such experiments differ in: found from their configurations.

Runs are pooled when all that could touch a number is equal but the seed: every key of recipe and verl that is not a place or a name,
the versions, the digests of the base, the fingerprints of data that do not follow from the seed. The mean over such runs has a Student
t interval (two-sided, 95 %): with three seeds the percentiles of a bootstrap would be far too narrow, and a normal interval too. It holds
as far as means of seeds are normal, takes in whatever varies from seed to seed, and is cut where the quantity cannot be.

Runs that differ in more stand beside each other, named by the keys in which they differ. What follows from another key is no
difference of its own (`FOLLOWS`). A run without a record of its settings, and one whose seed another run of the group has, is never pooled.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from samebits.alignment_checks.page import flat

if TYPE_CHECKING:
    from .run_report import Run

CONFIDENCE = 0.95
TAIL = 20
"""Steps over which a last value is averaged."""
_LARGEST_LOG = math.log(1e300)
LABEL = 44
"""Characters of a group's name in a legend."""
FOLLOWS = (
    "verl.actor_rollout_ref.model.path", "verl.actor_rollout_ref.model.lora_rank", "verl.actor_rollout_ref.model.lora_alpha",
    "verl.actor_rollout_ref.model.target_modules", "verl.actor_rollout_ref.model.override_config.samebits_",
    "verl.actor_rollout_ref.actor.fsdp_config.router_replay", "verl.actor_rollout_ref.actor.policy_loss.rollout_correction",
    "verl.actor_rollout_ref.rollout.dtype", "verl.actor_rollout_ref.rollout.n_gpus_per_node",
    "verl.actor_rollout_ref.rollout.prompt_length", "verl.actor_rollout_ref.rollout.response_length",
    "verl.actor_rollout_ref.rollout.enable_sleep_mode",
    "verl.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.samebits",
    "verl.reward.custom_reward_function", "verl.trainer.device",
)  # fmt: skip
"""Keys, or beginnings of keys, that `config` sets from others."""
_SEED = (
    "recipe.seed", "verl.data.seed", "verl.actor_rollout_ref.rollout.seed", "verl.actor_rollout_ref.actor.fsdp_config.seed",
)  # fmt: skip
# Names, places, and what is only done with the numbers.
_ELSEWHERE = (
    "recipe.name", "recipe.run_dir", "recipe.tracking", "recipe.cluster", "verl.trainer.experiment_name", "verl.trainer.project_name",
    "verl.trainer.default_local_dir", "verl.trainer.logger", "verl.trainer.save_freq", "verl.trainer.max_actor_ckpt_to_keep",
    "verl.reward.custom_reward_function.path", "verl.actor_rollout_ref.model.path",
    "verl.actor_rollout_ref.model.override_config.samebits_parity",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over runs; `low` and `high` are None where there is one run only."""

    mean: float
    low: float | None
    high: float | None
    count: int


def interval(values: Sequence[float], least: float | None = None, most: float | None = None) -> Interval:
    """Mean of `values`, one a run, with its Student t interval, cut at `least` and `most`. Raises `ValueError` on none."""
    if not values:
        raise ValueError("no runs to take a mean of")
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    low = mean - half if least is None else max(least, mean - half)
    high = mean + half if most is None else min(most, mean + half)
    return Interval(mean, low, high, len(values))


def geometric(values: Sequence[float]) -> Interval:
    """Geometric mean of positive `values`, with the interval of their logarithms. Raises `ValueError` on other values."""
    logs = interval([math.log(v) for v in values])
    if logs.low is None:
        return Interval(values[0], None, None, logs.count)
    # Logarithms of values that have nothing to do with each other may span more than a float: infinity is the truth then.
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high) if logs.high < _LARGEST_LOG else math.inf, logs.count)


def settings_of(recipe: Mapping[str, Any], verl: Mapping[str, Any]) -> dict[str, str]:
    """Every key of a run's configuration that could touch a number, the seed's left out, with its value as text."""
    everything = flat({"recipe": recipe, "verl": verl})
    return {key: value for key, value in sorted(everything.items()) if not _among(key, (*_SEED, *_ELSEWHERE))}


def _among(key: str, named: Iterable[str]) -> bool:
    return any(key == name or key.startswith(name if name.endswith("_") else f"{name}.") for name in named)


@dataclass(slots=True)
class Group:
    """Runs that differ in their seed only, or one run by itself."""

    runs: list[Run]
    label: str = ""
    differs: dict[str, str] = field(default_factory=dict)
    """Keys in which the groups differ, shortened, and what they are here."""

    @property
    def seeds(self) -> list[int | None]:
        """Seeds of the runs, in their order."""
        return [run.seed for run in self.runs]

    @property
    def steps(self) -> int:
        """Steps that every run of the group has."""
        return min(run.steps[-1]["step"] for run in self.runs)

    def over_runs(self, of: Callable[[Run], float | None], least: float | None = None, most: float | None = None) -> Interval | None:
        """Mean of what `of` says of each run; None where it says nothing of one."""
        values = [of(run) for run in self.runs]
        return None if any(v is None for v in values) else interval(values, least, most)

    def largest(self, key: str) -> float | None:
        """Largest value of `key` in any step of any run."""
        values = [line[key] for run in self.runs for line in run.steps if line.get(key) is not None]
        return max(values, key=lambda v: math.inf if math.isnan(v) else v) if values else None

    def curve(self, key: str, least: float | None = None, most: float | None = None, log: bool = False) -> dict[int, Interval]:
        """Step to mean, over the steps at which every run has `key`: a mean over other runs at other steps would jump.

        `log`: the geometric mean, with the interval of the logarithms, of values that are all positive.
        """
        found = [{line["step"]: line[key] for line in run.lines if line.get(key) is not None} for run in self.runs]
        common = sorted(set.intersection(*(set(values) for values in found)))
        over = geometric if log else partial(interval, least=least, most=most)
        return {step: over([values[step] for values in found]) for step in common}


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups in the order of their first runs, and why runs stand alone that look as if they belonged together."""

    groups: list[Group]
    notes: list[str]

    @property
    def pooled(self) -> bool:
        """Whether there is a mean over runs."""
        return any(len(group.runs) > 1 for group in self.groups)


def grouped(runs: Sequence[Run], names: Sequence[str]) -> Grouping:
    """Pool what differs in the seed only. `names`: what each run is called where it stands alone."""
    called = {id(run): name for run, name in zip(runs, names, strict=True)}
    found: dict[tuple, list[Run]] = {}
    for place, run in enumerate(runs):
        alike = ("alone", place) if run.settings is None else tuple(sorted((run.settings | run.inputs).items()))
        found.setdefault(alike, []).append(run)
    notes: list[str] = []
    unrecorded = [called[id(run)] for run in runs if run.settings is None]
    if unrecorded and len(runs) > 1:
        notes.append(f"not pooled, since no settings are recorded with it: {', '.join(unrecorded)}")
    parts = [part for alike in found.values() for part in _by_versions(alike, called, notes)]
    groups = [group for part in parts for group in _without_twins(part, called, notes)]
    groups.sort(key=lambda group: next(i for i, run in enumerate(runs) if run is group.runs[0]))
    _name(groups, called)
    return Grouping(groups, notes)


def _by_versions(runs: list[Run], called: Mapping[int, str], notes: list[str]) -> list[Group]:
    """Runs of equal settings, apart where their versions are known to differ. They are recorded at the end of a run."""
    known = {tuple(sorted(run.versions.items())) for run in runs if run.versions}
    unknown = [run for run in runs if not run.versions]
    if len(known) < 2:
        if unknown and len(runs) > 1:
            of = ", ".join(called[id(run)] for run in unknown)
            notes.append(f"versions are recorded at the end of a run and not compared yet for {of}")
        return [Group(runs)]
    apart = [Group([run for run in runs if tuple(sorted(run.versions.items())) == versions]) for versions in sorted(known)]
    return apart + [Group([run]) for run in unknown]


def _without_twins(group: Group, called: Mapping[int, str], notes: list[str]) -> list[Group]:
    """The group; where two of its runs have one seed, each of its runs alone: they are not independent."""
    seeds = group.seeds
    if len(seeds) < 2:
        return [group]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1}, key=str)
    if not twice:
        return [group]
    notes.append(f"not pooled, since seed {twice[0]} comes twice: {', '.join(called[id(run)] for run in group.runs)}")
    return [Group([run]) for run in group.runs]


def _name(groups: Sequence[Group], called: Mapping[int, str]) -> None:
    """Give each group what it differs in, and a label: what it changes in the first group, which has its own name."""
    recorded = [group for group in groups if group.runs[0].settings is not None]
    identities = [_identity(group) for group in recorded]
    keys = sorted({key for one in identities for key in one if any(other.get(key) != one[key] for other in identities)})
    if not all(run.versions for group in recorded for run in group.runs):
        keys = [key for key in keys if not key.startswith("versions.")]
    keys = [key for key in keys if not _among(key, FOLLOWS)] or keys
    short = _shortened(keys)
    for group, one in zip(recorded, identities, strict=True):
        group.differs = {short[key]: one.get(key, "absent") for key in keys}
        changed = [f"{short[key]}={one.get(key, 'absent')}" for key in keys if one.get(key) != identities[0].get(key)]
        group.label = ", ".join(changed)
    for group in groups:
        # Where nothing but the seed could tell runs apart, or nothing is known of them, their names do.
        if not group.label:
            own = {called[id(run)] for run in group.runs}
            group.label = group.runs[0].recipe_name or ", ".join(sorted(own)) if len(group.runs) > 1 else next(iter(own))
        if len(group.runs) > 1:
            group.label = f"{_clipped(group.label, LABEL - 10)} ({len(group.runs)} seeds)"
        else:
            group.label = _clipped(group.label, LABEL)
    labels = [group.label for group in groups]
    for place, group in enumerate(groups):
        if labels.count(group.label) > 1:
            group.label = f"{place + 1}: {labels[place]}"


def _identity(group: Group) -> dict[str, str]:
    """All that is equal in the runs of a group."""
    run = next((run for run in group.runs if run.versions), group.runs[0])
    return (run.settings or {}) | run.inputs | {f"versions.{package}": version for package, version in run.versions.items()}


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _shortened(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that tell them apart."""
    out = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            end = parts[-count:]
            if sum(other.split(".")[-count:] == end for other in keys) == 1:
                break
        out[key] = ".".join(end)
    return out


@dataclass(frozen=True, slots=True)
class Figures:
    """What one group came to. Shares lie within 0 and 1; times are seconds."""

    label: str
    seeds: list[int | None]
    runs: list[str]
    differs: dict[str, str]
    steps: int
    reward_start: Interval | None
    reward_end: Interval | None
    """Mean of the last steps (`TAIL`) that every run has."""
    accuracy_start: Interval | None
    """Held-out accuracy at the first evaluation that every run has."""
    accuracy_end: Interval | None
    accuracy_gain: Interval | None
    """End less start, run by run."""
    mismatch_kl_max: float | None
    """Over all steps of all runs."""
    mismatch_max_abs_max: float | None
    tis_clipped_fraction_max: float | None
    tis_clipped_fraction: Interval | None
    """Mean over the steps of a run."""
    sync_verified: int
    sync_steps: int
    seconds_per_step: Interval | None


def figures(group: Group, names: Sequence[str]) -> Figures:
    """The figures of a group whose runs are called `names`."""
    accuracy = group.curve("accuracy/heldout", 0.0, 1.0)
    first, last = (min(accuracy), max(accuracy)) if accuracy else (None, None)

    def gain(run: Run) -> float:
        at = {line["step"]: line["accuracy/heldout"] for line in run.lines if "accuracy/heldout" in line}
        return at[last] - at[first]

    def end(key: str) -> Callable[[Run], float | None]:
        return lambda run: _mean(line.get(key) for line in run.steps if group.steps - TAIL < line["step"] <= group.steps)

    def mean(key: str) -> Callable[[Run], float | None]:
        return lambda run: _mean(line.get(key) for line in run.steps)

    return Figures(
        label=group.label,
        seeds=group.seeds,
        runs=list(names),
        differs=group.differs,
        steps=group.steps,
        reward_start=group.over_runs(lambda run: run.steps[0].get("reward/mean")),
        reward_end=group.over_runs(end("reward/mean")),
        accuracy_start=accuracy.get(first),
        accuracy_end=accuracy.get(last),
        accuracy_gain=group.over_runs(gain, -1.0, 1.0) if first != last else None,
        mismatch_kl_max=group.largest("mismatch/kl"),
        mismatch_max_abs_max=group.largest("mismatch/max_abs"),
        tis_clipped_fraction_max=group.largest("tis/clipped_fraction"),
        tis_clipped_fraction=group.over_runs(mean("tis/clipped_fraction"), 0.0, 1.0),
        sync_verified=sum(bool(line.get("sync/verified")) for run in group.runs for line in run.steps),
        sync_steps=sum(len(run.steps) for run in group.runs),
        seconds_per_step=group.over_runs(mean("time/step"), 0.0),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return statistics.fmean(there) if there else None


def to_json(found: Sequence[Figures]) -> list[dict[str, Any]]:
    """Figures as plain data."""
    return json.loads(json.dumps([asdict(one) for one in found]))
