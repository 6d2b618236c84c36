"""Responses of an evaluation from an engine in this process: the recipe's base and numerics, with an adapter of a run or without.

Everything that can be wrong with the input (an adapter of another shape or numerics, prompts that do not fit) is found before the engine
is started. The adapter goes in by the way that the training job uses, and the engine's digests of what it then holds must be those of
the folder. Prompts are made by the model's chat template, as in training, and the same tokens are barred from sampling.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samebits.quant.adapter import AdapterError, AdapterSpec, Manifest, load_peft, peft_metadata
from samebits.quant.profile import ProfileMismatch, require_same

from .config import Recipe, RecipeError
from .engine_options import context_length, engine_options, environment
from .eval_log import Response, Sample
from .validate import validate

_EDGE = 1 << 20


class GenerationFailed(RuntimeError):
    """The engine or server stopped giving responses. The message is one line."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A PEFT folder that fits a recipe."""

    path: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """Of every tensor's digest."""
        content = json.dumps(self.manifest.digests, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def read_adapter(folder: Path, recipe: Recipe, spec: AdapterSpec, ranks: int = 1) -> AdapterFolder:
    """Check an adapter folder against a validated recipe, for an engine of `ranks`. Raises `RecipeError` when it does not fit."""
    runs = sorted((folder / "adapters").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    if runs and not (folder / "adapter_config.json").is_file():
        raise RecipeError(f"{folder} is a run: name one of its adapters, such as {runs[-1]}")
    try:
        meta = peft_metadata(folder)
        if "profile" not in meta:
            raise RecipeError(f"adapter {folder} does not say which numerics profile it was trained with")
        require_same(f"adapter {folder}", meta["profile"], f"the recipe ({recipe.profile.name})", recipe.profile.hash)
        tensors = load_peft(folder, spec)
        return AdapterFolder(folder, Manifest.of(tensors, int(meta.get("adapter_version", 0)), meta["profile"], world=ranks))
    except (AdapterError, ProfileMismatch) as error:
        raise RecipeError(f"adapter: {error}") from None


def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint's configuration and of name, size, first and last MiB of each weight file: cheap at any size."""
    h = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        h.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            h.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            h.update(file.read(_EDGE))
    return h.hexdigest()


class EngineGenerator:
    """Generates with vLLM in this process. Building it checks the input; the engine starts with the first responses asked for."""

    def __init__(
        self, recipe: Recipe, verl: DictConfig, adapter: Path | None, prompts: Sequence[str], temperature: float, max_tokens: int
    ) -> None:
        """`prompts`: what the user says, of every problem. Raises `RecipeError`."""
        spec = validate(recipe, verl)
        self.recipe, self.verl = recipe, verl
        self.temperature, self.max_tokens = temperature, max_tokens
        ranks = verl.actor_rollout_ref.rollout.tensor_model_parallel_size
        self.adapter = None if adapter is None else read_adapter(adapter, recipe, spec, ranks)
        self._template = OmegaConf.to_container(verl.data.get("apply_chat_template_kwargs") or OmegaConf.create(), resolve=True)
        self._tokenizer = _tokenizer(recipe.model_path)
        self._ids = {prompt: self._tokenize(prompt) for prompt in prompts}
        self.context = context_length(recipe, verl, max(map(len, self._ids.values())) + max_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the responses, by name."""
        ids = hashlib.blake2b(json.dumps(list(self._ids.values())).encode(), digest_size=16).hexdigest()
        return {
            "model": checkpoint_digest(self.recipe.model_path),
            "adapter": None if self.adapter is None else self.adapter.digest,
            "profile": self.recipe.profile.hash,
            "prompt tokens": ids,
            "server": None,
        }

    @property
    def label(self) -> str:
        """What is evaluated, as a part of a folder's name."""
        return "base" if self.adapter is None else self.adapter.path.resolve().name

    @property
    def title(self) -> str:
        """What is evaluated, in words."""
        if self.adapter is None:
            return f"{self.recipe.model_path.name}, no adapter"
        return f"{self.recipe.model_path.name} with {self.adapter.path.name} (version {self.adapter.manifest.version})"

    def generate(self, samples: Sequence[Sample]) -> Iterator[Response]:
        """Responses in the order in which they end. Raises `RecipeError` when the engine refuses its options, `GenerationFailed`."""
        try:
            yield from self._generate(samples)
        except (RecipeError, GenerationFailed):
            raise
        except Exception as error:  # whatever engine, kernels or torch raise
            if type(error).__name__ == "EngineRefused":
                raise RecipeError(str(error)) from None
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            raise GenerationFailed(f"the engine stopped: {type(error).__name__}: {text[:400]}") from error

    def _generate(self, samples: Sequence[Sample]) -> Iterator[Response]:
        llm = self._start()
        request = self._load_adapter(llm)
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        from samebits.rollout.whole import WHOLE

        waiting, running = iter(samples), {}
        room = 2 * self.verl.actor_rollout_ref.rollout.max_num_seqs  # as many as fill the engine, and the next ones
        engine = llm.llm_engine
        while True:
            while len(running) < room and (sample := next(waiting, None)) is not None:
                params = SamplingParams(
                    temperature=self.temperature,
                    max_tokens=self.max_tokens,
                    seed=sample.seed,
                    detokenize=False,
                    extra_args=WHOLE,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                name = f"{sample.number}/{sample.problem.id}"
                running[name] = sample
                engine.add_request(name, tokens_input(self._ids[sample.problem.prompt]), params, lora_request=request)
            if not running:
                return
            for output in engine.step():
                if output.finished:
                    yield self._response(running.pop(output.request_id), output.outputs[0])

    def _response(self, sample: Sample, output: Any) -> Response:
        if output.finish_reason not in ("stop", "length"):
            raise GenerationFailed(f"the engine ended sample {sample.number} of {sample.problem.id} with {output.finish_reason!r}")
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return Response(sample.problem.id, sample.number, sample.seed, text, len(output.token_ids), output.finish_reason)

    def _start(self) -> Any:
        """The engine, in this process."""
        os.environ |= environment(self.recipe) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        import torch
        from vllm import LLM

        if self.recipe.device == "cpu":
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        adapter, tokens = self.adapter is not None, len(self._tokenizer)
        options = engine_options(self.recipe, self.verl, context=self.context, adapter=adapter, tokens=tokens)
        return LLM(str(self.recipe.model_path), **options)

    def _load_adapter(self, llm: Any) -> Any:
        if self.adapter is None:
            return None
        from samebits.rollout.adapter import lora_request

        sent = self.adapter.manifest
        path = self.adapter.path / "adapter_model.safetensors"
        held = llm.collective_rpc("samebits_load_adapter", args=(str(path), sent.to_json()))
        for rank, answer in enumerate(held):
            sent.require(Manifest.from_json(answer), f"engine rank {rank}")
        if len(held) != sent.ranks:
            raise GenerationFailed(f"{len(held)} of {sent.ranks} engine ranks said what they hold of the adapter")
        return lora_request(sent.version)

    def _tokenize(self, prompt: str) -> list[int]:
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False, **self._template
        )


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
