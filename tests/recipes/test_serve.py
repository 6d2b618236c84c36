"""`samebits serve`: the printed commands, what is refused before a server starts, and how a server ends."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samebits.quant.profile import get_profile
from samebits.recipes import server_process
from samebits.recipes.cli import app
from samebits.recipes.serving import hardware_list
from tests.support.adapters import random_adapter

from .conftest import RECIPE, tiny_spec

M31 = """--tensor-parallel-size 4 --reasoning-parser minimax_m3 --block-size 128 --kv-cache-dtype nvfp4
--disable-hybrid-kv-cache-manager""".split()


def run(*arguments: object):
    return CliRunner().invoke(app, ["serve", RECIPE, *map(str, arguments)], env={"COLUMNS": "200"})


def error_of(result) -> str:
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("samebits: ") and result.exit_code == 2 and "Traceback" not in result.output
    return line


def printed(*arguments: object) -> tuple[str, dict[str, str], list[str]]:
    """Comments, environment and words of a printed command, as a shell reads them."""
    result = run("--print", *arguments)
    assert result.exit_code == 0, result.output
    comments = "\n".join(line for line in result.stdout.splitlines() if line.startswith("#"))
    words = shlex.split(result.stdout.replace("\\\n", " "), comments=True)
    count = next(i for i, word in enumerate(words) if "=" not in word)
    return comments, dict(word.split("=", 1) for word in words[:count]), words[count:]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_command_of_the_recipe_on_cpu(tiny_adapter):
    comments, environment, words = printed("device=cpu", "threads=3", "--adapter", tiny_adapter, "--port", 8123, "--api-key-env", "KEY")
    assert "run by us" in comments and "not run by us" not in comments
    assert environment["OMP_NUM_THREADS"] == "3" and environment["VLLM_API_KEY"] == "$KEY"
    assert words[:4] == ["python", "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    assert '"profile": "w4a16-fp32"' in value(words, "--additional-config") and value(words, "--dtype") == "float32"
    assert value(words, "--host") == "127.0.0.1" and value(words, "--port") == "8123"
    assert value(words, "--served-model-name") == "tiny_m3_base"
    assert value(words, "--lora-modules") == f'{{"name": "tiny_m3_grpo-step_7", "path": "{tiny_adapter}"}}'
    assert "--enable-lora" in words and value(words, "--max-lora-rank") == "32" and "--no-enable-chunked-prefill" in words


def test_command_for_a_gpu_that_is_not_here():
    comments, environment, words = printed("--hardware", "h200")
    assert "not run by us as a server" in comments and "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert words[:2] == ["vllm", "serve"] and value(words, "--dtype") == "bfloat16" and "--enable-lora" not in words
    assert '"profile": "w4a16"' in value(words, "--additional-config")


@pytest.mark.parametrize("name", ["gb300-tp4", "b300-tp4", "mi355x-tp4"])
def test_commands_of_the_published_model(name):
    comments, environment, words = printed("device=cpu", "--hardware", name)
    assert "not run by us" in comments and "has not:" in comments and environment == {"VLLM_PLUGINS": ""}
    assert words[:3] == ["vllm", "serve", "MiniMaxAI/MiniMax-M3.1-Flash"]
    assert " ".join(M31[:8]) in " ".join(words) and M31[-1] in words
    amd = name.startswith("mi")
    assert ('"indexer_decode_cp": true' in value(words, "--attention-config")) == amd
    assert ("--quantization-config.moe" in words) == amd
    speculative = value(words, "--speculative-config")
    assert f'"num_speculative_tokens": {3 if amd else 7}' in speculative
    assert f'"attention_backend": "{"TRITON_ATTN" if amd else "FLASHINFER_TS"}"' in speculative
    result = run("device=cpu", "--hardware", name)
    assert "samebits starts no server there" in error_of(result)


def test_what_the_installed_vllm_is_said_to_lack_it_lacks():
    """The lists of serving.yaml are about the vLLM that is installed: they change with it."""
    from pydantic import ValidationError
    from vllm.config.attention import AttentionConfig
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS as drafters
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert len({line for hardware in hardware_list().values() for line in hardware.lacks}) == 6
    assert "FLASHINFER_TS" not in AttentionBackendEnum.__members__
    with pytest.raises(ValidationError, match="indexer_decode_cp"):
        AttentionConfig(indexer_decode_cp=True)
    assert any("DSpark" in name for name in drafters) and not any("DSpark" in n and "MiniMax" in n for n in drafters)
    # Read and not imported: the model's package wants torchvision.
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "models" / "minimax_m3"
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    assert sum("class MiniMaxM3SparseForCausalLM(" in text for text in sources.values()) == 2
    assert not any("SupportsLoRA" in text for text in sources.values())
    (where,) = [text[text.index('"nvfp4"') :] for text in sources.values() if "nvfp4" in text]  # all that is said of NVFP4
    assert where.count("nvfp4") == 1 and where.splitlines()[1].strip() == "raise NotImplementedError("


@pytest.mark.parametrize("arguments", [("device=cpu",), ("--hardware", "h200")])
def test_vllm_reads_the_command_as_it_was_meant(arguments, tiny_adapter):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    extra = ["--adapter", tiny_adapter] if arguments == ("device=cpu",) else []
    _, _, words = printed(*arguments, *extra)
    options = words[4 if words[0] == "python" else 3 :]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    engine = AsyncEngineArgs.from_cli_args(parsed)
    assert engine.additional_config["samebits"] == {
        "profile": "w4a16-fp32" if extra else "w4a16",
        "kv_cache": "auto",
        "targets": "all",
        "rank": 32,
        "split_indexer": True,
        "tokens": 64,
    }
    assert engine.max_model_len == 256 and engine.logprobs_mode == "processed_logprobs" and engine.enforce_eager
    assert bool(engine.enable_lora) == bool(extra) and engine.override_generation_config == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert parsed.api_key is None and parsed.host == "127.0.0.1"
    assert [(m.name, m.path) for m in parsed.lora_modules or []] == ([("tiny_m3_grpo-step_7", str(tiny_adapter))] if extra else [])


def test_bad_input_is_one_line_and_starts_nothing(tiny_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "run", lambda *_: pytest.fail("a server was started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1: Address already in use" in error_of(run("device=cpu", "--port", port))
    assert "unknown hardware 'x'; known: auto, cpu, h200" in error_of(run("device=cpu", "--hardware", "x"))
    assert "needs device=cuda, the recipe has device=cpu" in error_of(run("device=cpu", "--hardware", "h200"))
    assert "--name names an adapter" in error_of(run("device=cpu", "--name", "x"))
    assert "tiny_m3_base is the name of the base" in error_of(run("device=cpu", "--adapter", tiny_adapter, "--name", "tiny_m3_base"))
    assert "has no SAMEBITS_TEST_ABSENT" in error_of(run("device=cpu", "--api-key-env", "SAMEBITS_TEST_ABSENT"))
    assert "takes no adapter" in error_of(run("device=cpu", "--hardware", "gb300-tp4", "--print", "--adapter", tiny_adapter))
    assert "no address" in error_of(run("device=cpu", "--host", "no.such.host.invalid"))
    assert "no adapter at" in error_of(run("device=cpu", "--adapter", tmp_path))
    gpu = random_adapter(tmp_path / "gpu", tiny_spec(), get_profile("w4a16").hash)
    assert "gpu is 62ebbdae8af70c25, of the recipe (w4a16-fp32)" in error_of(run("device=cpu", "--adapter", gpu))
    assert "lora_A.weight is unknown" in error_of(run("device=cpu", "lora.targets=attention", "--adapter", tiny_adapter))
    assert "the adapter has rank 32, not 8" in error_of(run("device=cpu", "lora.rank=8", "--adapter", tiny_adapter))
    weights = tiny_adapter / "adapter_model.safetensors"
    broken = random_adapter(tmp_path / "broken", tiny_spec(), get_profile("w4a16-fp32").hash) / "adapter_model.safetensors"
    broken.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be read" in error_of(run("device=cpu", "--adapter", broken.parent))


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""
POLITE = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("ended", file=open(sys.argv[1], "w"), flush=True), sys.exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
SUPERVISOR = """
import sys
from samebits.recipes.server_process import run
run([sys.executable, "-c", *sys.argv[2:]], {}, sys.argv[1], lambda: print("ready", flush=True), False)
print("stopped", flush=True)
"""


def supervisor(url: str, *child: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SUPERVISOR, url, *child], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_told_to_stop_and_stops(tmp_path, number):
    port = free_port()
    process = supervisor(f"http://127.0.0.1:{port}/", POLITE, str(tmp_path / "ended"), str(port))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 0
    assert process.stdout.read() == "stopped\n" and (tmp_path / "ended").read_text() == "ended\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_does_not_stop_is_killed_with_its_children(tmp_path, number):
    process = supervisor("http://127.0.0.1:1/", STUBBORN, str(tmp_path / "pid"))
    child = int(wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()))
    server = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    assert alive(child) and alive(server)
    process.send_signal(number)
    process.wait(timeout=60)
    if number == signal.SIGKILL:  # the kernel ends the server; its engine ends by the samebits plugin, which is not in this child
        wait_for(lambda: not alive(server))
        os.kill(child, signal.SIGKILL)
        return
    assert process.returncode == 0
    wait_for(lambda: not alive(server) and not alive(child))


def test_a_server_that_ends_by_itself_says_why():
    code = 'import sys; print("ValueError: Engine core initialization failed."); print("INFO x RuntimeError: no room"); sys.exit(3)'
    with pytest.raises(server_process.ServerFailed, match=r"status 3: RuntimeError: no room$"):
        server_process.run([sys.executable, "-c", code], {}, "http://127.0.0.1:1/", lambda: None, False)
