"""A real server on CPU, one for the whole file: the shipped tiny model and an adapter through the `openai` client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from samebits.quant.profile import get_profile
from tests.support.adapters import random_adapter

from .conftest import EVALUATED, RECIPE, start_evaluation, texts, tiny_spec
from .test_serve import alive, free_port, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "open-sesame"
PROMPT = "34*7+58="
UNNAMED = 63
"""The last row of the head, for which the served base has no token."""


class Server:
    """A running `samebits serve`."""

    def __init__(self, base: Path, adapter: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        command = [sys.executable, "-m", "samebits.recipes.cli", "serve", RECIPE, f"model={base}", "device=cpu", "threads=1"]
        command += ["--adapter", str(adapter), "--name", "tuned", "--port", str(self.port), "--api-key-env", "SAMEBITS_TEST_KEY"]
        # Loading at run time is off unless vLLM is told; it is the way to send the engine what it must refuse.
        environment = os.environ | {"SAMEBITS_TEST_KEY": KEY, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "COLUMNS": "200"}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + 400
        while "ready: " not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.said = log.read_text()

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def ask(self, model: str, **options):
        options = {"temperature": 0, "max_tokens": 26} | options
        messages = [{"role": "user", "content": PROMPT}]
        return self.client().chat.completions.create(model=model, messages=messages, logprobs=True, **options).choices[0]

    def post(self, path: str, **body: object) -> tuple[int, str]:
        try:
            answer = self.client().post(path, body=body, cast_to=str)
        except openai.APIStatusError as error:
            return error.status_code, error.response.text
        return 200, answer

    def processes(self) -> list[int]:
        """This server and everything that it started, by session of its server process."""
        children = [int(p) for p in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        found = [self.process.pid]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rpartition(")")[2].split()[3])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if session in children:
                found.append(int(stat.parent.name))
        return found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The shipped base with a tokenizer that ends before the head does."""
    folder = tmp_path_factory.mktemp("base") / "tiny_m3_base"
    shutil.copytree("recipes/tiny_m3_base", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"].pop("z") == UNNAMED
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def server(base, tiny_adapter, tmp_path_factory):
    running = Server(base, tiny_adapter, tmp_path_factory.mktemp("serve") / "log")
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def logprobs(choice) -> list[float]:
    return [token.logprob for token in choice.logprobs.content]


def test_base_and_adapter_are_models_and_differ(server):
    assert [m.id for m in server.client().models.list()] == ["tiny_m3_base", "tuned"]
    base, tuned = server.ask("tiny_m3_base"), server.ask("tuned")
    assert (base.message.content, base.finish_reason) == ("34*7=238;238+58=296;answer:296", "stop")
    assert tuned.message.content != base.message.content
    again = server.ask("tiny_m3_base")
    assert logprobs(again) == logprobs(base)
    sampled = [server.ask("tiny_m3_base", temperature=1.0, seed=seed).message.content for seed in (1, 1, 2, 3, 4, 5)]
    assert sampled[0] == sampled[1] and len(set(sampled)) > 1
    assert "ready: " + server.url + " serves tiny_m3_base, tuned" in server.said


def test_rows_of_the_head_without_a_token_are_never_sampled(server):
    """However much a request wants one; any other id it gets."""
    plain = server.ask("tiny_m3_base")
    pushed = server.ask("tiny_m3_base", logit_bias={str(UNNAMED): 100})
    assert pushed.message.content == plain.message.content and logprobs(pushed) == logprobs(plain)
    assert set(server.ask("tiny_m3_base", logit_bias={str(UNNAMED - 1): 100}).message.content) == {"y"}


def test_wrong_keys_and_names_are_refused_and_the_engine_lives(server):
    for key in ("wrong", ""):
        with pytest.raises(openai.AuthenticationError):
            server.client(key or "none").models.list()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/models", timeout=30)
    for name in ("samebits-7", "step_7", "tuned2", "samebits:memory"):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            server.ask(name)
    assert server.ask("tuned").message.content != server.ask("tiny_m3_base").message.content


def test_adapters_that_the_engine_cannot_hold_are_refused_and_the_engine_lives(server, tmp_path):
    before = {name: logprobs(server.ask(name)) for name in ("tiny_m3_base", "tuned")}
    hash_ = get_profile("w4a16-fp32").hash
    other = random_adapter(tmp_path / "other", tiny_spec(), get_profile("w4a16").hash)
    status, said = server.post("/load_lora_adapter", lora_name="other", lora_path=str(other))
    assert status == 500 and "62ebbdae8af70c25, of the engine (w4a16-fp32)" in said
    status, said = server.post("/load_lora_adapter", lora_name="gone", lora_path=str(tmp_path / "gone"))
    assert status == 500 and "no adapter at" in said
    second = random_adapter(tmp_path / "second", tiny_spec(), hash_, seed=2)
    assert server.post("/load_lora_adapter", lora_name="second", lora_path=str(second))[0] == 200
    third = random_adapter(tmp_path / "third", tiny_spec(), hash_, seed=3)
    status, said = server.post("/load_lora_adapter", lora_name="third", lora_path=str(third))
    assert status == 500 and "all 2 adapter slots are taken" in said
    status, said = server.post("/load_lora_adapter", lora_name="second", lora_path=str(third), load_inplace=True)
    assert status == 500 and "is in use" in said
    for name in ("other", "gone", "third"):
        with pytest.raises(openai.NotFoundError):
            server.ask(name)
    assert server.ask("second").message.content != server.ask("tuned").message.content
    assert {name: logprobs(server.ask(name)) for name in before} == before


def test_a_server_samples_what_an_engine_in_process_samples(server, base, tiny_adapter, tmp_path):
    """The same problems, seeds, base and adapter by URL and in process, in other batches: the same texts."""
    process = start_evaluation(tiny_adapter, tmp_path / "straight", f"model={base}")
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    command = [sys.executable, "-m", "samebits.recipes.cli", "eval", RECIPE, "--url", server.url, "--served-name", "tuned", *EVALUATED]
    command += ["--task", "arithmetic", "--api-key-env", "SAMEBITS_TEST_KEY", "--out", str(tmp_path / "o")]
    done = subprocess.run(command, env=os.environ | {"SAMEBITS_TEST_KEY": KEY}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "o") == texts(tmp_path / "straight")
    assert not any("z" in text for text in texts(tmp_path / "straight").values())


def test_a_second_server_on_the_port_is_refused(server):
    command = [sys.executable, "-m", "samebits.recipes.cli", "serve", RECIPE, "device=cpu", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"samebits: port {server.port} of 127.0.0.1: Address already in use\n"


def test_sigterm_ends_all_of_it(server):
    """Last in the file: the server is gone after it."""
    processes = server.processes()
    assert len(processes) >= 3  # this command, the server, its engine
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=90) == 0
    wait_for(lambda: not any(alive(pid) for pid in processes))
