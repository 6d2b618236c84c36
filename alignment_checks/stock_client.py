"""The public API of an OpenAI-compatible vLLM server: token ids in, token ids and logprobs out.

Prompts go as ids and come back as ids, and the two are compared: text is never encoded again. Every request has a time limit. A server
that cannot be reached stays unreachable: later requests fail at once with the same line instead of waiting again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


class ServerError(RuntimeError):
    """The server did not give an answer that can be used. One line."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
        """HTTP status of the answer, None where there was none or where a 200 could not be used."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of /v1/models."""

    name: str
    root: str | None
    parent: str | None
    """Name of the base model, for an adapter."""
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Logprobs by position: what the server says about token `position` of prompt + generated tokens, by token id."""

    tokens: tuple[int, ...]
    """Prompt and generated tokens."""
    prompt_length: int
    logprobs: tuple[tuple[int, int, float], ...]
    """(position, token id, logprob) in nats, positions counted from 0, the first token has none."""


class Client:
    """One server."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0, top: int = 5):
        """`url` with or without `/v1`. `timeout` is in seconds, for each request; `top` is the number of likeliest tokens asked for."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.top = top
        self._dead: str | None = None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{url}: {error}") from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[Listed]:
        """What /v1/models lists. Raises `ServerError`."""
        answer = self._json(self._request("GET", "/v1/models"), "/v1/models")
        try:
            return [Listed(m["id"], m.get("root"), m.get("parent"), m.get("max_model_len")) for m in answer["data"]]
        except (KeyError, TypeError):
            raise ServerError(f"{self.url}/v1/models: the answer is not a list of models") from None

    def version(self) -> str | None:
        """The server's own version where it tells one."""
        response = self._request("GET", "/version")
        try:
            return str(response.json()["version"]) if response.status_code == 200 else None
        except (ValueError, KeyError, TypeError):
            return None

    def score(self, model: str, tokens: Sequence[int]) -> Answer:
        """Logprobs of a prompt, computed from scratch: vLLM reads no prefix cache for these."""
        choice = self._complete(model, tokens, max_tokens=1, prompt_logprobs=self.top)
        found = choice.get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(tokens):
            raise ServerError(f"{self.url}: {model}: no prompt_logprobs for {len(tokens)} tokens; this server does not give them")
        points: list[tuple[int, int, float]] = []
        for position, entry in enumerate(found):
            if position == 0:
                continue
            if not isinstance(entry, dict) or str(tokens[position]) not in entry:
                raise ServerError(f"{self.url}: {model}: prompt_logprobs lack token {tokens[position]} at position {position}")
            points += [(position, int(token), float(value["logprob"])) for token, value in entry.items()]
        return Answer(tuple(tokens), len(tokens), tuple(points))

    def generate(self, model: str, tokens: Sequence[int], count: int, seed: int = 0) -> Answer:
        """`count` sampled tokens with their logprobs, through the prefix cache and the decoding path."""
        choice = self._complete(model, tokens, max_tokens=count, logprobs=self.top, seed=seed, ignore_eos=True)
        new, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
        if not new or not values or not tops or not len(new) == len(values) == len(tops):
            raise ServerError(f"{self.url}: {model}: generated tokens came without their ids or logprobs")
        points: dict[tuple[int, int], float] = {}
        for i, (token, value, others) in enumerate(zip(new, values, tops, strict=True)):
            position = len(tokens) + i
            for name, other in (others or {}).items():
                if not name.startswith("token_id:"):
                    raise ServerError(f"{self.url}: {model}: tokens are named {name!r} and not by id")
                points[position, int(name.removeprefix("token_id:"))] = float(other)
            points[position, int(token)] = float(value)
        return Answer((*tokens, *new), len(tokens), tuple((p, t, v) for (p, t), v in points.items()))

    def load(self, name: str, path: str, fused_experts: bool = False, in_place: bool = False) -> None:
        """Load an adapter at run time. Raises `ServerError`; a server that does not allow it answers 404 without a reason of its own."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": in_place, "is_3d_lora_weight": fused_experts}
        response = self._request("POST", "/v1/load_lora_adapter", body)
        if response.status_code != 200:
            raise ServerError(f"{self.url}: loading adapter {name} from {path}: {_reason(response)}", response.status_code)

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises `ServerError`."""
        response = self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if response.status_code != 200:
            raise ServerError(f"{self.url}: unloading adapter {name}: {_reason(response)}", response.status_code)

    def allows_loading(self) -> bool:
        """Whether the route for loading adapters is there. Asked with an empty body, which loads nothing."""
        return self._request("POST", "/v1/load_lora_adapter", {}).status_code not in (401, 403, 404, 405, 501)

    def _complete(self, model: str, tokens: Sequence[int], **settings: Any) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": list(tokens),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = self._json(self._request("POST", "/v1/completions", body | settings), model)
        try:
            choice = answer["choices"][0]
            echoed = choice.get("prompt_token_ids")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServerError(f"{self.url}: {model}: the answer is no completion") from None
        if echoed != list(tokens):
            raise ServerError(f"{self.url}: {model}: the server does not say that it used the token ids that were sent")
        return choice

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        if self._dead is not None:
            raise ServerError(self._dead)
        try:
            return self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            self._dead = f"{self.url}{path}: no answer within {self._timeout:g} s"
        except httpx.HTTPError as error:
            self._dead = f"{self.url}{path}: {str(error) or type(error).__name__}"
        except httpx.InvalidURL as error:
            self._dead = f"{self.url}: {error}"
        raise ServerError(self._dead)

    def _json(self, response: httpx.Response, what: str) -> dict[str, Any]:
        if response.status_code != 200:
            raise ServerError(f"{self.url}: {what}: {_reason(response)}", response.status_code)
        try:
            answer = response.json()
        except ValueError:
            raise ServerError(f"{self.url}: {what}: the answer is not JSON") from None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}: {what}: the answer is not a JSON object")
        return answer


def _reason(response: httpx.Response) -> str:
    """The status and the server's own words, in one line."""
    try:
        content = response.json()
        error = content.get("error", content)
        words = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        words = response.text
    line = " ".join(str(words or "").split())[:300]
    hint = "; give the key with --api-key-env" if response.status_code == 401 else ""
    return f"HTTP {response.status_code}{f': {line}' if line else ''}{hint}"
