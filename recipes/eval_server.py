"""Responses of an evaluation from an OpenAI-compatible server: chat completions by URL.

The `openai` client tries a request again after 408, 409, 429, any 5xx, a lost connection or a timeout, with growing pauses or the one
that the server asks for (`Retry-After`); what fails for good ends the evaluation, after the responses that are under way were kept.
Sampling is stated in full (temperature, top_p 1, length, seed): what a server would add on its own is not the model's distribution.
Reasoning that a server splits off is put back before the response, between the marks that the grader knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from .config import RecipeError
from .eval_engine import GenerationFailed
from .eval_log import Response, Sample

CONCURRENCY = 64
RETRIES = 8
TIMEOUT_S = 1800.0
"""Seconds for one response: 32k tokens at 18 a second."""


class ServerGenerator:
    """Generates with a server. Building it asks the server for its models, so that a wrong address, key or name is found first."""

    def __init__(
        self,
        url: str,
        name: str | None,
        key: str | None,
        temperature: float,
        max_tokens: int,
        *,
        concurrency: int = CONCURRENCY,
        retries: int = RETRIES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`url`: with or without `/v1`. `name`: the model's name at the server; None where it serves one only. Raises `RecipeError`."""
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.temperature, self.max_tokens = temperature, max_tokens
        self._key, self._concurrency, self._retries, self._timeout = key, concurrency, retries, timeout_s
        self.name = self._choose(name)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the responses, by name."""
        return {"model": self.name, "adapter": None, "profile": None, "prompt tokens": None, "server": self.url}

    @property
    def label(self) -> str:
        """What is evaluated, as a part of a folder's name."""
        return self.name.replace("/", "_")

    @property
    def title(self) -> str:
        """What is evaluated, in words."""
        return f"{self.name} at {self.url}"

    def generate(self, samples: Sequence[Sample]) -> Iterator[Response]:
        """Responses in the order in which they end. Raises `GenerationFailed`."""
        with asyncio.Runner() as runner:
            client = self._client(self._retries)
            waiting, running, failure = iter(samples), set(), None
            while True:
                while failure is None and len(running) < self._concurrency and (sample := next(waiting, None)) is not None:
                    running.add(runner.get_loop().create_task(self._one(client, sample)))
                if not running:
                    break
                done, running = runner.run(_first(running))
                for task in done:
                    if task.exception() is None:
                        yield task.result()
                    else:
                        failure = failure or task.exception()
            runner.run(client.close())
        if failure is not None:
            raise failure

    async def _one(self, client: Any, sample: Sample) -> Response:
        where = f"sample {sample.number} of {sample.problem.id}"
        from openai import APIError

        try:
            answer = await client.chat.completions.create(
                model=self.name,
                messages=[{"role": "user", "content": sample.problem.prompt}],
                temperature=self.temperature,
                top_p=1.0,
                max_tokens=self.max_tokens,
                seed=sample.seed,
            )
        except APIError as error:
            raise GenerationFailed(f"{self.url} gave no response to {where}: {_reason(error)}") from None
        return self._response(answer, sample, where)

    def _response(self, answer: Any, sample: Sample, where: str) -> Response:
        choice = answer.choices[0] if getattr(answer, "choices", None) else None
        if choice is None or choice.finish_reason not in ("stop", "length") or choice.message is None:
            ended = "nothing" if choice is None else f"finish reason {choice.finish_reason!r}"
            raise GenerationFailed(f"{self.url} answered {where} with {ended}")
        extra = choice.message.model_extra or {}
        reasoning = extra.get("reasoning_content") or extra.get("reasoning")
        text = choice.message.content or ""
        if reasoning:
            ends = "</think>" if choice.message.content is not None else ""  # cut within the reasoning: it never closes
            text = f"<think>{reasoning}{ends}{text}"
        tokens = None if answer.usage is None else answer.usage.completion_tokens
        return Response(sample.problem.id, sample.number, sample.seed, text, tokens, choice.finish_reason)

    def _client(self, retries: int, timeout_s: float | None = None) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url, api_key=self._key or "none", max_retries=retries, timeout=timeout_s or self._timeout)

    def _choose(self, name: str | None) -> str:
        from openai import APIError

        async def ask() -> list[str]:
            async with self._client(2, 30.0) as client:
                return [model.id async for model in client.models.list()]

        try:
            served = asyncio.run(ask())
        except APIError as error:
            raise RecipeError(f"{self.url}: {_reason(error)}") from None
        except ValueError as error:  # an address that is none
            raise RecipeError(f"{self.url}: {error}") from None
        if name is None and len(served) == 1:
            return served[0]
        if name is None or name not in served:
            asked = "--served-name is needed" if name is None else f"no model {name!r}"
            raise RecipeError(f"{self.url}: {asked}; it serves {', '.join(served) or 'nothing'}")
        return name


async def _first(tasks: set[asyncio.Task]) -> tuple[set[asyncio.Task], set[asyncio.Task]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _reason(error: Exception) -> str:
    """What went wrong, with what the connection said where that is more than nothing."""
    said = [" ".join(str(one).split()) for one in (error, error.__cause__) if one is not None]
    return " ".join(text for text in dict.fromkeys(said) if text)[:400] or type(error).__name__
