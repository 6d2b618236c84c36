"""Does a stock server use the adapter that it lists? Checked through its public API alone, without our trainer or engine.

Adapters are lost in ways that raise nothing: listed and never used, applied in part, loaded under a name that no request uses, scaled
wrongly, answered from a cache of the weights before. So what is demanded here is an effect, and the effect is computed: the server's
logprobs, without and with the adapter, against the logprobs of W and of W + scale B A in fp32 (`oracle`). How close is close enough is
measured (`stock_measure` states the rule), and where adapter and rounding are too close to tell apart the check says so and fails.

Where the server can load adapters at run time, each role (q_proj, ..., experts.down_proj) is loaded alone: the same file with every
other B zero, the remaining ones multiplied by a power of two that makes the effect visible. Where it cannot, each role is left out of the
oracle instead, and the server must be on the side of the whole adapter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .oracle import Oracle
from .peft_adapter import PeftAdapter
from .report import CheckResult, Report
from .stock_client import Answer, Client, ServerError
from .stock_measure import (
    BASE_MULTIPLE,
    EFFECT_MULTIPLE,
    NOISE_MULTIPLE,
    RESOLUTION,
    CannotTellError,
    Expected,
    Noise,
    compare,
    decide_applied,
    enlargement,
    explain,
    hold,
    merge,
    rms,
    said,
    same_points,
)
from .stock_probe import NotCheckedError, Settings, plots, random_prompts

Known = TypeVar("Known")
FIXED = ("server.models", "server.base", "server.repeat", "adapter.listed", "adapter.used", "adapter.logprobs", "adapter.generation")
LOADED = ("adapter.prefix_cache", "adapter.reload", "adapter.unload")
LAST = ("server.unknown_name", "server.isolation")


@dataclass(slots=True)
class StockCheck:
    """The checks of one adapter on one server, in the order in which they are made."""

    client: Client
    oracle: Oracle
    adapter: PeftAdapter
    name: str | None = None
    """Name under which the server has the adapter; None to find it by its folder, or to load it."""
    settings: Settings = field(default_factory=Settings)
    base_name: str = ""
    noise: Noise | None = None
    longest: int = 0
    listed: bool = False
    before: list[list[Answer]] = field(default_factory=list)
    """Answers to the base probe, asked three times before anything else."""
    reference: Expected | None = None
    """The oracle at the points of the first of them."""
    with_adapter: list[Answer] = field(default_factory=list)
    during: dict[str, list[Answer]] = field(default_factory=dict)
    """Answers to the base probe while an adapter was loaded, by what it was."""
    loaded: set[str] = field(default_factory=set)
    may_load: bool = False
    """Whether adapters can and may be loaded."""
    repeat: float = 0.0
    """Largest change of a logprob from asking again."""
    folder: Path = Path()
    report: Report | None = None

    def run(self) -> Report:
        """Make all checks. Never raises for what the server does: a check that could not be made is an error in the report."""
        self.may_load, why = self._may_load()
        roles = [f"adapter.role.{role}" for role in self.adapter.roles]
        planned = [*FIXED, *((*LOADED, *roles) if self.may_load else ("adapter.prefix_cache", "adapter.coverage")), *LAST]
        self.report = report = Report(subject=self.client.url, planned=planned, settings=self._describe(why))
        with self._scratch() as self.folder, self._clean_up():
            report.run("server.models", self.check_models)
            report.run("server.base", self.check_base)
            report.run("server.repeat", self.check_repeat)
            report.run("adapter.listed", self.check_listed)
            report.run("adapter.used", self.check_used)
            report.run("adapter.logprobs", self.check_logprobs)
            report.run("adapter.generation", self.check_generation)
            report.run("adapter.prefix_cache", self.check_prefix_cache)
            if self.may_load:
                for role in self.adapter.roles:
                    report.run(f"adapter.role.{role}", functools.partial(self.check_role, role))
                report.run("adapter.reload", self.check_reload)
                report.run("adapter.unload", self.check_unload)
            else:
                report.run("adapter.coverage", self.check_coverage)
            report.run("server.unknown_name", self.check_unknown_name)
            report.run("server.isolation", self.check_isolation)
        report.settings |= {"name": self.name, "noise": self.noise.base if self.noise else None}
        report.versions = self._versions()
        return report

    def check_models(self, result: CheckResult) -> None:
        """The base is listed. Finds the adapter's name where it was not given; loads nothing yet."""
        models = self.client.models()
        bases = [m for m in models if m.parent is None]
        if not bases:
            raise ServerError(f"{self.client.url}/v1/models lists no base model")
        if self.name is None:
            here = str(self.adapter.folder.resolve())
            self.name = next((m.name for m in models if m.parent is not None and m.root and _resolved(m.root) == here), None)
        entry = next((m for m in models if m.name == self.name), None)
        parent = None if entry is None else entry.parent
        self.base_name = parent if parent in {m.name for m in models} else bases[0].name
        limits = [m.max_tokens for m in models if m.max_tokens] or [int(self.oracle.config["max_position_embeddings"])]
        self.longest = min(limits)
        result.compared += 1

    def check_listed(self, result: CheckResult) -> None:
        """The adapter is listed, as one. Loads it where no name was given and none was found: the base has been measured by then."""
        if self.name is None:
            if not self.may_load:
                raise NotCheckedError(f"no listed adapter comes from {self.adapter.folder} and this server loads none; give --name")
            self.name = self._load(self.adapter.folder, "whole")
        models = {m.name: m for m in self.client.models()}
        if self.name not in models:
            raise NotCheckedError(f"adapter {self.name} is not listed; the server lists {', '.join(models)}")
        if models[self.name].parent is None:
            raise NotCheckedError(f"{self.name} is listed as a base model and not as an adapter")
        self.listed = True
        result.compared += 1

    def check_base(self, result: CheckResult) -> None:
        """Without the adapter the server computes the base checkpoint, to within rounding. Measures the noise."""
        self._require(self.base_name, "the models were not listed")
        answers = [self.client.score(self.base_name, tokens) for tokens in self._prompts(self.settings.tokens)]
        expected = Expected(self.oracle, answers)
        difference = said(answers) - expected.base
        distance, rounding = expected.size(difference), expected.size(expected.base_rounding)
        limit = BASE_MULTIPLE * max(rounding, RESOLUTION)
        result.metrics |= {"distance": distance, "rounding": rounding, "limit": limit}
        result.compared += len(difference)
        if distance <= limit:
            self.before, self.reference = [answers], expected
            self.noise = Noise(distance, rms(difference), rounding)
            return
        parts = {"it": self.adapter.deltas} | {f"its {role}": self.adapter.of_role(role) for role in self.adapter.roles}
        for words, deltas in parts.items():
            if expected.size(said(answers) - expected.values(deltas)) <= limit:
                message = f"requests without the adapter are answered with {words}"
                result.require(False, message, expected.place(difference), distance, limit)
                return
        why = explain(expected, [], limit)
        if why.startswith("logprobs are"):
            result.require(False, f"without the adapter, {why}", expected.place(difference), distance, limit)
            return
        raise NotCheckedError(
            f"without the adapter the server is {distance:.2g} nats from {self.oracle.folder}, "
            f"where rounding explains {limit:.2g}: it serves another base model"
        )

    def check_repeat(self, result: CheckResult) -> None:
        """The same request gives the same logprobs, to within the noise. Measures what repeating changes."""
        noise = self._require(self.noise, "the base did not agree")
        prompts = self._prompts(self.settings.tokens)
        self.before += [[self.client.score(self.base_name, tokens) for tokens in prompts] for _ in range(2)]
        changes = [same_points(self.before[0], later) for later in self.before[1:]]
        result.metrics["largest"] = self.repeat = max(float(c.abs().max()) for c in changes)
        worst = max(rms(c) for c in changes)
        result.require(
            worst <= max(noise.base, RESOLUTION), "repeating a request changes its logprobs by more than rounding", measured=worst
        )

    def check_used(self, result: CheckResult) -> None:
        """Requests under the adapter's name are answered with something else than the base."""
        noise = self._require(self.noise, "the base did not agree")
        self._require(self.listed, "the adapter is not listed")
        self.with_adapter = [self.client.score(self.name, tokens) for tokens in self._prompts(self.settings.tokens)]
        self.during[f"{self.name}"] = [self.client.score(self.base_name, tokens) for tokens in self._prompts(self.settings.tokens)]
        change = rms(same_points(self.before[0], self.with_adapter))
        floor = max(rms(same_points(self.before[0], later)) for later in self.before)
        expected = Expected(self.oracle, self.with_adapter)
        effect = rms(expected.values(self.adapter.deltas) - expected.base)
        result.metrics |= {"change": change, "floor": floor, "effect": effect}
        if effect < max(RESOLUTION, 0.1 * noise.base):
            raise CannotTellError(f"adapter effect too small to tell: {effect:.2g} nats against noise of {noise.base:.2g}")
        result.require(
            change > max(floor, RESOLUTION) and change > 0.1 * effect,
            f"{self.name} is listed and not used: its answers are the base's",
            measured=change,
            limit=0.1 * effect,
        )

    def check_logprobs(self, result: CheckResult) -> None:
        """With the adapter the server computes W + scale B A."""
        noise = self._require(self.noise, "the base did not agree")
        self._require(self.with_adapter, "the adapter gave no answer")
        expected = Expected(self.oracle, self.with_adapter)
        exact = expected.values(self.adapter.deltas)
        self.report.plots |= plots(self.with_adapter, exact)
        compare(result, expected, self.adapter.deltas, noise, self.name, exact)

    def check_generation(self, result: CheckResult) -> None:
        """Logprobs of generated tokens, from the decoding path, are those of W + scale B A too."""
        noise = self._require(self.noise, "the base did not agree")
        self._require(self.listed, "the adapter is not listed")
        prompts = self._prompts(self.settings.tokens, offset=100)
        answers = [self.client.generate(self.name, tokens, self.settings.generated) for tokens in prompts]
        compare(result, Expected(self.oracle, answers), self.adapter.deltas, noise, f"{self.name}, generated tokens")

    def check_prefix_cache(self, result: CheckResult) -> None:
        """One prompt without, with, with, and without the adapter: no answer comes from what the other left in the prefix cache."""
        noise = self._require(self.noise, "the base did not agree")
        self._require(self.listed, "the adapter is not listed")
        prompts = self._prompts(self._cached_tokens(), offset=200, count=3)
        turns = {"first without": (self.base_name, False), "with": (self.name, True), "again with": (self.name, True)}
        turns["again without"] = (self.base_name, False)
        for words, (name, adapted) in turns.items():
            answers = [self.client.generate(name, tokens, self.settings.generated) for tokens in prompts]
            hold(result, Expected(self.oracle, answers), self.adapter.deltas, adapted, noise, f"{words} the adapter, the same prompt")

    def check_role(self, role: str, result: CheckResult) -> None:
        """One role alone has the effect that it should."""
        noise = self._require(self.noise, "the base did not agree")
        deltas = self.adapter.of_role(role)
        factor = enlargement(self.reference, deltas, noise, role)
        result.metrics["enlarged"] = factor
        with self._served_alone([role], role, factor) as name:
            answers = [self.client.score(name, tokens) for tokens in self._prompts(self.settings.tokens)]
        compare(result, Expected(self.oracle, answers), [d.scaled(factor) for d in deltas], noise, f"{role} alone")

    def check_reload(self, result: CheckResult) -> None:
        """A name that gets other weights answers with them, also for a prompt whose prefix is cached."""
        noise = self._require(self.noise, "the base did not agree")
        factor = enlargement(self.reference, self.adapter.deltas, noise, "the adapter")
        prompts = self._prompts(self._cached_tokens(), offset=300, count=3)
        with self._served_alone(self.adapter.roles, "reload", -factor) as name:
            for words, sign in (("negated", -1.0), ("reloaded", 1.0)):
                if sign > 0:
                    whole = self.folder / "reload-whole"
                    self.adapter.write_alone(whole, self.adapter.roles, factor)
                    self.client.load(name, str(whole), self.adapter.fused_experts, in_place=True)
                answers = [self.client.generate(name, tokens, self.settings.generated) for tokens in prompts]
                part = CheckResult(result.name)
                compare(
                    part, Expected(self.oracle, answers), [d.scaled(sign * factor) for d in self.adapter.deltas], noise, f"{words} adapter"
                )
                merge(result, part, words)

    def check_unload(self, result: CheckResult) -> None:
        """After unloading a name it is an unknown one."""
        self._require(self.noise, "the base did not agree")
        with self._served_alone(self.adapter.roles, "unload", 1.0) as name:
            self.client.score(name, self._prompts(self.settings.tokens)[0])
        self._must_refuse(result, name, "an unloaded adapter")
        listed = [m.name for m in self.client.models()]
        result.require(name not in listed, f"{name} is listed after it was unloaded")

    def check_coverage(self, result: CheckResult) -> None:
        """Where nothing may be loaded: the server is closer to the whole adapter than to the adapter without any one role."""
        self._require(self.with_adapter, "the adapter gave no answer")
        expected = Expected(self.oracle, self.with_adapter)
        whole = expected.values(self.adapter.deltas)
        unknown = []
        for role in self.adapter.roles:
            rest = expected.values(self.adapter.without_role(role))
            size = rms(whole - rest)
            share, error = expected.applied(said(self.with_adapter) - rest, whole - rest)
            result.metrics |= {f"{role}.effect": size, f"{role}.applied": share}
            try:
                decide_applied(result, share, error, role)
            except CannotTellError as unclear:
                unknown.append(str(unclear))
        if unknown:
            raise CannotTellError(unknown[0])

    def check_unknown_name(self, result: CheckResult) -> None:
        """A name that no adapter has is refused, and not answered by the base."""
        self._must_refuse(result, f"samebits-no-such-adapter-{secrets.token_hex(4)}", "an adapter that was never loaded")

    def check_isolation(self, result: CheckResult) -> None:
        """With adapters loaded and after everything, the base answers as before, to the last bit or to what repeating a request changes."""
        self._require(len(self.before) > 1, "the base did not agree")
        later = {f"while {words} was loaded": answers for words, answers in self.during.items()}
        later["after all"] = [self.client.score(self.base_name, tokens) for tokens in self._prompts(self.settings.tokens)]
        limit = 3 * self.repeat
        result.metrics |= {"limit": limit, "largest": 0.0}
        for words, answers in later.items():
            change = same_points(self.before[0], answers)
            largest = float(change.abs().max())
            result.metrics["largest"] = max(result.metrics["largest"], largest)
            message = f"{words}, requests without the adapter are answered differently than before adapters were used"
            result.require(largest <= limit, message, measured=largest, limit=limit)

    def _must_refuse(self, result: CheckResult, name: str, what: str) -> None:
        try:
            self.client.score(name, self._prompts(self.settings.tokens)[0])
        except ServerError as error:
            if error.status is None or error.status >= 500:
                raise
            result.require(error.status in (400, 404, 422), f"{what} is answered with HTTP {error.status}", measured=float(error.status))
            return
        result.require(False, f"{what} is answered as if it were there: requests under a wrong name go to the base unnoticed")

    def _may_load(self) -> tuple[bool, str]:
        if not self.settings.load:
            return False, "not allowed by --no-load"
        try:
            allowed = self.client.allows_loading()
        except ServerError as error:
            return False, str(error)
        return allowed, "yes" if allowed else "the server has no /v1/load_lora_adapter (VLLM_ALLOW_RUNTIME_LORA_UPDATING)"

    def _load(self, folder: Path, words: str) -> str:
        name = f"samebits-{words}-{secrets.token_hex(4)}"
        self.client.load(name, str(folder.resolve()), self.adapter.fused_experts)
        self.loaded.add(name)
        return name

    @contextlib.contextmanager
    def _served_alone(self, roles: Sequence[str], words: str, factor: float) -> Iterator[str]:
        folder = self.folder / words
        self.adapter.write_alone(folder, roles, factor)
        name = self._load(folder, words)
        yield name
        self.during[words] = [self.client.score(self.base_name, tokens) for tokens in self._prompts(self.settings.tokens)]
        self.client.unload(name)
        self.loaded.discard(name)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="samebits-verify-", dir=self.settings.scratch) as folder:
            Path(folder).chmod(0o755)  # the server may run as another user
            yield Path(folder)

    @contextlib.contextmanager
    def _clean_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            for name in self.loaded:
                with contextlib.suppress(ServerError):  # what the server did wrong is in the report already
                    self.client.unload(name)

    def _prompts(self, length: int, offset: int = 0, count: int | None = None) -> list[list[int]]:
        shape = (count or self.settings.prompts, min(length, self.longest - 1))
        return random_prompts(self.oracle.vocab, shape, self.settings.seed + offset)

    def _cached_tokens(self) -> int:
        return min(self.settings.cached_tokens, self.longest - self.settings.generated - 1)

    def _require(self, value: Known | None, why: str) -> Known:
        if not value:
            raise NotCheckedError(why)
        return value

    def _describe(self, loading: str) -> dict[str, object]:
        return {
            "base": str(self.oracle.folder),
            "adapter": str(self.adapter.folder),
            "roles": self.adapter.roles,
            "runtime_loading": loading,
            "prompts": self.settings.prompts,
            "tokens": self.settings.tokens,
            "noise_multiple": NOISE_MULTIPLE,
            "effect_multiple": EFFECT_MULTIPLE,
            "base_multiple": BASE_MULTIPLE,
        }

    def _versions(self) -> dict[str, str]:
        found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        with contextlib.suppress(ServerError):
            server = self.client.version()
            if server is not None:
                found["server"] = server
        return found


def _resolved(path: str) -> str:
    return str(Path(path).resolve())
