"""A server with vLLM's routes for completions and adapters over a transformers model, which can be told to misbehave.

Adapters are applied by PEFT itself where PEFT can read them, and otherwise (one pair for each expert) by the loop in `_add_experts`, so
the oracle under test meets an independent second opinion. Logits are rounded to bf16, as a server that computes in bf16 rounds.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@dataclass
class Fault:
    """What the server does wrong. Nothing by default."""

    ignore_adapter: bool = False
    ignore_modules: str = r"(?!)"
    """Modules of an adapter that are accepted and then ignored, a regular expression."""
    scale: float = 1.0
    plain_scale: bool = False
    """`lora_alpha / r` of the configuration for every module."""
    shuffle: bool = False
    """The weights of another adapter: every B with its rows in another order."""
    stale_prefix: bool = False
    """Generated tokens come from whatever first asked for the prompt."""
    stale_name: bool = False
    """A name that gets other weights keeps answering old prompts with the old ones."""
    pollute: bool = False
    """Once an adapter was loaded, requests for the base are answered with it."""
    shift: int = 0
    temperature: float = 1.0
    base_when_decoding: bool = False
    noise: float = 0.0
    accept_unknown: bool = False
    ignore_unload: bool = False
    hide_ids: bool = False
    dies_after: int = 10**9
    fails_after: int = 10**9
    slow_after: int = 10**9


@dataclass
class FakeServer:
    """The server, up within the block."""

    base: Path
    adapters: dict[str, Path] = field(default_factory=dict)
    fault: Fault = field(default_factory=Fault)
    key: str | None = None
    loading: bool = True
    listed: bool = True

    def __enter__(self) -> FakeServer:
        self.model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, attn_implementation="eager").eval()
        self.models: dict[str, torch.nn.Module] = {}
        self.last: str | None = None
        self.requests, self.cache, self.lock = 0, {}, threading.Lock()
        self.paths = dict(self.adapters)
        for name, folder in self.adapters.items():
            self.models[name] = self.adapted(folder)
        self.http = _Http(("127.0.0.1", 0), _handler(self))
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def adapted(self, folder: Path) -> torch.nn.Module:
        """The base with an adapter applied, faults and all."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        if any(re.search(r"experts\.\d+\.", name) for name in tensors):
            return self._add_experts(tensors, config)
        import peft

        model = peft.PeftModel.from_pretrained(copy.deepcopy(self.model), folder).eval()
        for name, module in model.named_modules():
            if not isinstance(module, peft.tuners.lora.LoraLayer):
                continue
            self._spoil(name, module.lora_B["default"].weight)
            if self.fault.plain_scale:
                module.scaling["default"] = config["lora_alpha"] / config["r"]
        return model

    def _add_experts(self, tensors: dict[str, torch.Tensor], config: dict) -> torch.nn.Module:
        model = copy.deepcopy(self.model)
        parameters = dict(model.named_parameters())
        for name in [n for n in tensors if ".lora_A." in n]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")].clone()
            self._spoil(module, b)
            change = config["lora_alpha"] / config["r"] * b @ tensors[name]
            match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module)
            if match is None:
                parameters[f"{module}.weight"].data += change
                continue
            owner, expert, part = match[1], int(match[2]), match[3]
            if part == "down":
                parameters[f"{owner}.down_proj"].data[expert] += change
            else:
                start = 0 if part == "gate" else change.shape[0]
                parameters[f"{owner}.gate_up_proj"].data[expert, start : start + change.shape[0]] += change
        return model

    def _spoil(self, module: str, b: torch.Tensor) -> None:
        if re.search(self.fault.ignore_modules, module):
            b.data.zero_()
        b.data.mul_(self.fault.scale)
        if self.fault.shuffle:
            b.data.copy_(b.data.flip(0))

    def load(self, body: dict) -> tuple[int, object]:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            return 400, {"error": {"message": "both names are needed"}}
        if not (Path(path) / "adapter_model.safetensors").is_file():
            return 404, {"error": {"message": f"no adapter found for {path}"}}
        if name in self.models and not body.get("load_inplace"):
            return 400, {"error": {"message": f"{name} is loaded already"}}
        self.models[name], self.paths[name], self.last = self.adapted(Path(path)), Path(path), name
        return 200, "Success"

    def unload(self, body: dict) -> tuple[int, object]:
        if body["lora_name"] not in self.models:
            return 404, {"error": {"message": "no such adapter"}}
        if not self.fault.ignore_unload:
            del self.models[body["lora_name"]]
        return 200, "Success"

    def list(self) -> dict:
        entries = [{"id": "base", "root": str(self.base), "parent": None, "max_model_len": 128}]
        if self.listed:
            entries += [{"id": n, "root": str(self.paths[n]), "parent": "base", "max_model_len": None} for n in self.models]
        return {"object": "list", "data": entries}

    @torch.no_grad()
    def logprobs(self, name: str, tokens: list[int], decoding: bool) -> torch.Tensor:
        model = self.models.get(name, self.model)
        if self.fault.ignore_adapter or (decoding and self.fault.base_when_decoding):
            model = self.model
        if name == "base" and self.fault.pollute and self.last in self.models:
            model = self.models[self.last]
        if decoding and (self.fault.stale_prefix or self.fault.stale_name):
            model = self.cache.setdefault((name if self.fault.stale_name else "", tuple(tokens[:40])), model)
        logits = model(torch.tensor([tokens])).logits[0].bfloat16().float()
        logits = logits + self.fault.noise * torch.randn(logits.shape)
        return torch.log_softmax(logits / self.fault.temperature, -1)

    def complete(self, body: dict) -> tuple[int, object]:
        name, prompt = body["model"], body["prompt"]
        if name != "base" and name not in self.models and not self.fault.accept_unknown:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        choice = {"index": 0, "text": "", "prompt_token_ids": None if self.fault.hide_ids else prompt, "prompt_logprobs": None}
        if body.get("prompt_logprobs") is not None:
            table = self.logprobs(name, prompt, decoding=False)
            rows = [table[min(max(p - 1 + self.fault.shift, 0), len(prompt) - 1)] for p in range(1, len(prompt))]
            entries = [_entry(row, token, body["prompt_logprobs"]) for row, token in zip(rows, prompt[1:], strict=True)]
            choice["prompt_logprobs"] = [None, *entries]
        if body.get("logprobs") is not None:
            tokens, tops = list(prompt), []
            generator = torch.Generator().manual_seed(body.get("seed", 0))
            for _ in range(body["max_tokens"]):
                row = self.logprobs(name, tokens, decoding=True)[-1]
                token = int(torch.multinomial(row.exp(), 1, generator=generator))
                tops.append({f"token_id:{t}": v["logprob"] for t, v in _entry(row, token, body["logprobs"]).items()})
                tokens.append(token)
            new = tokens[len(prompt) :]
            values = [top[f"token_id:{t}"] for top, t in zip(tops, new, strict=True)]
            choice |= {"token_ids": new, "logprobs": {"token_logprobs": values, "top_logprobs": tops}}
        return 200, {"choices": [choice]}


def _entry(row: torch.Tensor, token: int, top: int) -> dict[str, dict]:
    ids = dict.fromkeys([token, *row.topk(top).indices.tolist()])
    return {str(i): {"logprob": float(row[i]), "rank": 0} for i in ids}


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hung up is no news."""


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(lambda _: (200, server.list()) if self.path == "/v1/models" else (404, {"detail": "Not Found"}))

        def do_POST(self) -> None:
            routes = {"/v1/completions": server.complete}
            if server.loading:
                routes |= {"/v1/load_lora_adapter": server.load, "/v1/unload_lora_adapter": server.unload}
            self.answer(routes.get(self.path, lambda _: (404, {"detail": "Not Found"})))

        def answer(self, act) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            with server.lock:
                server.requests += 1
                if server.requests > server.fault.dies_after:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                    status, content = 401, {"error": "Unauthorized"}
                elif server.requests > server.fault.fails_after:
                    status, content = 500, {"error": {"message": "EngineCore encountered an issue"}}
                else:
                    status, content = act(body)
            if server.requests > server.fault.slow_after:
                time.sleep(3)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
