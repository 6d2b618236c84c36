"""Small models and adapters with random weights, as stock tools write them, and a stock `vllm serve` over them.

The base is saved by transformers, the adapter by PEFT (an adapter on single experts is written with the names that vLLM reads, because
PEFT cannot address one expert of transformers' fused ones). The server is `vllm serve` of the running Python's environment in a process
of its own, with no plugin loaded. Used by the tests and by `stock_demo`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

ALL_DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ALL_DENSE[:4]
SIZES = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    initializer_range=0.12,
)
MOE_SIZES = dict(SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)


class ServerStartError(RuntimeError):
    """The server did not come up. One line, with the last line that says why."""


def build_base(folder: Path, kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a checkpoint with random weights. `kind` is `qwen3` or `qwen3-moe`; `changes` go to its configuration."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3Config(**(SIZES | changes)) if kind == "qwen3" else Qwen3MoeConfig(**(MOE_SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=config.initializer_range)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size)
    return folder


def build_adapter(folder: Path, base: Path, seed: int = 1, size: float = 0.1, **settings: Any) -> Path:
    """Write an adapter with PEFT over `base`. `settings` are those of `peft.LoraConfig`; A is drawn by PEFT, B normal with std `size`."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=size)
    wrapped.save_pretrained(folder)
    return folder


def build_expert_adapter(folder: Path, base: Path, seed: int = 1, size: float = 0.1, rank: int = 8, alpha: int = 16) -> Path:
    """Write an adapter on attention and on every single expert, one pair for each expert and projection, as vLLM reads them."""
    config = json.loads((base / "config.json").read_text())
    build_adapter(folder, base, seed, size, r=rank, lora_alpha=alpha, target_modules=list(ATTENTION))
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        for expert in range(config.get("num_experts") or config["num_local_experts"]):
            for name, out, into in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, into, generator=generator) / into**0.5
                tensors[f"{module}.lora_B.weight"] = size * torch.randn(out, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "adapter_config.json").read_text())
    written["target_modules"] = list(ALL_DENSE)
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=1) + "\n")
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


class StockServer:
    """`vllm serve` in a process of its own, up within the block."""

    def __init__(
        self, base: Path, log: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, seconds: float = 300
    ):
        self.base, self.log, self.seconds = base, log, seconds
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = list(arguments)
        self._environment = dict(os.environ) | server_environment() | dict(environment or {})
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> StockServer:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.base)]  # what the program `vllm` runs
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        names = vllm_under_its_name(self.log.parent)
        if names is not None:
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(names), self._environment.get("PYTHONPATH")]))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command + self._arguments, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and what it started: they are a process group of their own."""
        process = self._process
        if process is None:
            return
        for signum, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
            try:
                os.killpg(process.pid, signum)
                process.wait(timeout=patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine that outlived its server

    def _wait(self) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerStartError(f"vllm serve ended with status {self._process.returncode}: {self.last_error()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise ServerStartError(f"vllm serve was not up after {self.seconds:.0f} s: {self.last_error()}")

    def last_error(self) -> str:
        """The last line of the server's output that names an error."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\b(?!EngineDeadError)\w+(Error|Exception): ", line)]
        return (errors or lines or ["no output"])[-1].strip()[-400:]


def server_environment() -> dict[str, str]:
    """What a stock server is started with: no plugins, no usage report, adapters loadable at run time; on CPU vLLM's CPU settings."""
    shared = {"VLLM_PLUGINS": "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.is_available():
        return shared
    return shared | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def vllm_under_its_name(folder: Path) -> Path | None:
    """A folder for PYTHONPATH that names an installed vllm-cpu also as vllm; None where vllm goes by its own name.

    `vllm serve` asks for the version of a distribution called vllm and ends when there is none, which is so with the CPU build under
    the name vllm-cpu. The folder holds that one name with the suffix by which vLLM knows its CPU build, and no code.
    """
    try:
        # Not `version`, which the verl plugin lets answer for vllm-cpu in this process; the server is another one.
        importlib.metadata.distribution("vllm")
        return None
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
    metadata = folder / "vllm_name" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return metadata.parent.parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
