"""Adapters on stock servers: correct ones agree, and each way of losing an adapter is found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from samebits.alignment_checks.oracle import Oracle
from samebits.alignment_checks.peft_adapter import PeftAdapter
from samebits.alignment_checks.report import Report
from samebits.alignment_checks.stock import Settings, StockCheck
from samebits.alignment_checks.stock_client import Client
from samebits.alignment_checks.stock_models import ALL_DENSE, ATTENTION, StockServer, build_adapter, build_base, build_expert_adapter
from samebits.recipes.verify_stock import verify_server
from tests.support.fake_openai import FakeServer, Fault

SMALL = dict(prompts=3, tokens=20, cached_tokens=44, generated=4)
cli = typer.Typer()
cli.command()(verify_server)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Bases and adapters by name."""
    folder = tmp_path_factory.mktemp("stock")
    dense, moe = build_base(folder / "dense", "qwen3"), build_base(folder / "moe", "qwen3-moe", num_experts=4)
    lora = dict(r=4, lora_alpha=8)
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "dense": dense,
        "other": build_base(folder / "other", "qwen3", seed=5),
        "moe": moe,
        "all": build_adapter(folder / "all", dense, target_modules=list(ALL_DENSE), **lora),
        "qv": build_adapter(folder / "qv", dense, target_modules=["q_proj", "v_proj"], **lora),
        "patterns": build_adapter(
            folder / "patterns",
            dense,
            target_modules=["q_proj", "o_proj"],
            rank_pattern={"o_proj": 2},
            alpha_pattern={"q_proj": 20},
            **lora,
        ),
        "small_patterns": build_adapter(
            folder / "small_patterns", dense, size=1e-3, target_modules=["q_proj", "o_proj"], alpha_pattern={"q_proj": 20}, **lora
        ),
        "rslora": build_adapter(folder / "rslora", dense, target_modules=["v_proj", "down_proj"], use_rslora=True, **lora),
        "head": build_adapter(folder / "head", dense, target_modules=["v_proj", "lm_head"], **lora),
        "small": build_adapter(folder / "small", dense, size=1e-4, target_modules=["q_proj", "v_proj"], **lora),
        "zero": build_adapter(folder / "zero", dense, size=0.0, target_modules=["q_proj", "v_proj"], **lora),
        "experts": build_expert_adapter(folder / "experts", moe, rank=4, alpha=8),
        "fused": build_adapter(folder / "fused", moe, target_modules=list(ATTENTION), target_parameters=fused, **lora),
    }


@pytest.fixture(scope="module")
def oracles(files) -> dict[str, Oracle]:
    return {name: Oracle(files[name]) for name in ("dense", "moe")}


def check(files, oracles, adapter: str = "qv", base: str = "dense", name: str | None = "it", **server) -> Report:
    """A report on a fake server that has `adapter` as `it`."""
    settings = Settings(**(SMALL | {"load": server.pop("load", True)}))
    timeout = server.pop("timeout", 30)
    served = server.pop("served", base)
    server.setdefault("adapters", {"it": files[adapter]})
    with FakeServer(files[served], **server) as fake:
        client = Client(fake.url, timeout=timeout)
        return StockCheck(client, oracles[base], PeftAdapter(files[adapter], oracles[base].config), name, settings).run()


def status(report: Report) -> dict[str, str]:
    return {r.name: r.status for r in report.results}


def words(report: Report) -> str:
    return "\n".join([f"{n}: {f.message}" for n, f in report.findings()] + [f"{r.name}: {r.error}" for r in report.results if r.error])


@pytest.mark.parametrize(
    "adapter, base",
    [("all", "dense"), ("patterns", "dense"), ("rslora", "dense"), ("head", "dense"), ("experts", "moe"), ("fused", "moe")],
)
def test_a_correct_server_agrees(files, oracles, adapter, base):
    report = check(files, oracles, adapter, base)
    assert report.exit_status == 0, words(report)
    assert {r.name.removeprefix("adapter.role.") for r in report.results if ".role." in r.name} == set(report.settings["roles"])
    by_name = {r.name: r for r in report.results}
    assert by_name["adapter.logprobs"].metrics["applied"] == pytest.approx(1, abs=0.02)
    assert by_name["adapter.logprobs"].compared >= 3 * 19
    if base == "moe":
        assert {"experts.gate_proj", "experts.up_proj", "experts.down_proj"} < set(report.settings["roles"])


@pytest.mark.parametrize("load", [True, False])
def test_a_server_that_loads_nothing_is_checked_by_leaving_roles_out(files, oracles, load):
    report = check(files, oracles, "all", load=load, loading=load)
    assert report.exit_status == 0, words(report)
    assert ("adapter.coverage" in report.planned) is not load
    assert ("adapter.role.q_proj" in report.planned) is load


def test_an_adapter_that_is_not_there_is_loaded_and_unloaded_again(files, oracles):
    with FakeServer(files["dense"]) as fake:
        adapter = PeftAdapter(files["qv"], oracles["dense"].config)
        report = StockCheck(Client(fake.url), oracles["dense"], adapter, None, Settings(**SMALL)).run()
        assert report.exit_status == 0, words(report)
        assert not fake.models


FAULTS = {
    "listed and ignored": ("qv", Fault(ignore_adapter=True), ["adapter.used", "adapter.logprobs"], "listed and not used"),
    "one projection ignored": (
        "all",
        Fault(ignore_modules=r"k_proj$"),
        ["adapter.logprobs", "adapter.role.k_proj"],
        "k_proj is not applied",
    ),
    "alpha doubled": ("qv", Fault(scale=2.0), ["adapter.logprobs", "adapter.role.q_proj"], "scaled 2 times"),
    "another adapter": ("qv", Fault(shuffle=True), ["adapter.logprobs", "adapter.role.q_proj"], "no single fault explains it"),
    "patterns ignored": ("patterns", Fault(plain_scale=True), ["adapter.logprobs", "adapter.role.q_proj"], "alpha_pattern, rank_pattern"),
    "patterns ignored, small": (
        "small_patterns",
        Fault(plain_scale=True),
        ["adapter.role.q_proj"],
        "q_proj alone: scaled by lora_alpha / r",
    ),
    "rsLoRA ignored": ("rslora", Fault(plain_scale=True), ["adapter.logprobs", "adapter.role.v_proj"], "rsLoRA is ignored"),
    "stale prefix cache": ("qv", Fault(stale_prefix=True), ["adapter.prefix_cache"], "the adapter is not applied"),
    "stale after a reload": ("qv", Fault(stale_name=True), ["adapter.reload"], "reloaded adapter"),
    "base polluted by a load": ("qv", Fault(pollute=True), ["server.isolation"], "differently than before"),
    "decoding without the adapter": ("qv", Fault(base_when_decoding=True), ["adapter.generation"], "generated tokens: the adapter is not"),
    "logprobs of the next token": ("qv", Fault(shift=1), ["server.base"], "logprobs are those of the token at +1"),
    "another temperature": ("qv", Fault(temperature=0.7), ["server.base"], "logprobs are at temperature 0.70"),
    "unknown names go to the base": ("qv", Fault(accept_unknown=True), ["server.unknown_name"], "wrong name go to the base"),
    "unloading does nothing": ("qv", Fault(ignore_unload=True), ["adapter.unload"], "answered as if it were there"),
    "not deterministic": ("qv", Fault(noise=0.02), ["server.repeat"], "repeating a request changes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_found_and_named(files, oracles, name):
    adapter, fault, checks, message = FAULTS[name]
    report = check(files, oracles, adapter, fault=fault)
    assert report.exit_status == 1, words(report)
    disagreeing = {n for n, s in status(report).items() if s == "disagree"}
    assert set(checks) <= disagreeing, words(report)
    assert message in words(report)
    if fault.ignore_modules == r"k_proj$":
        assert {n for n in disagreeing if ".role." in n} == {"adapter.role.k_proj"}


@pytest.mark.parametrize("ignored", [r"experts\.", r"experts\.\d+\.up_proj", r"experts\.2\."])
def test_experts_that_are_accepted_and_ignored(files, oracles, ignored):
    report = check(files, oracles, "experts", "moe", fault=Fault(ignore_modules=ignored))
    wrong = {n.removeprefix("adapter.role.") for n, s in status(report).items() if s == "disagree" and ".role." in n}
    every = {"experts.gate_proj", "experts.up_proj", "experts.down_proj"}
    assert report.exit_status == 1
    assert wrong == ({"experts.up_proj"} if "up" in ignored else every), words(report)


def test_a_projection_ignored_where_nothing_can_be_loaded(files, oracles):
    report = check(files, oracles, "all", loading=False, fault=Fault(ignore_modules=r"o_proj$"))
    assert report.exit_status == 1
    assert any(n == "adapter.coverage" and f.message.startswith("o_proj") for n, f in report.findings()), words(report)


UNCHECKED = {
    "server dies": (dict(fault=Fault(dies_after=8)), "it", "disconnected"),
    "server fails": (dict(fault=Fault(fails_after=8)), "it", "HTTP 500: EngineCore encountered an issue"),
    "server is slow": (dict(fault=Fault(slow_after=8), timeout=0.5), "it", "no answer within 0.5 s"),
    "another base": (dict(served="other"), "it", "it serves another base model"),
    "not listed": (dict(listed=False), "it", "adapter it is not listed; the server lists base"),
    "not listed anywhere": (dict(listed=False, loading=False), None, "no listed adapter comes from"),
    "a base by that name": ({}, "base", "listed as a base model"),
    "ids are not echoed": (dict(fault=Fault(hide_ids=True)), "it", "does not say that it used the token ids"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_could_not_be_checked_is_no_agreement(files, oracles, name):
    server, adapter_name, message = UNCHECKED[name]
    report = check(files, oracles, "qv", name=adapter_name, **server)
    assert report.exit_status == 2, words(report)
    assert message in words(report)


@pytest.mark.parametrize("adapter", ["small", "zero"])
def test_an_effect_too_small_to_tell_is_no_agreement(files, oracles, adapter):
    report = check(files, oracles, adapter)
    assert report.exit_status == 2
    assert "adapter effect too small to tell" in words(report)
    if adapter == "small":  # the roles alone are enlarged until they can be told
        assert status(report)["adapter.role.q_proj"] == "agree"


def run_cli(files, url: str, *more: str, base: str = "dense", adapter: Path | None = None) -> tuple[int, str, str]:
    arguments = ["--url", url, "--base", str(files[base]), "--adapter", str(adapter or files["qv"]), "--prompts", "3", "--tokens", "20"]
    result = CliRunner().invoke(cli, [*arguments, *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr.strip()


def test_command_agrees_and_writes_json(files, tmp_path):
    with FakeServer(files["dense"], {"it": files["qv"]}) as fake:
        code, out, err = run_cli(files, fake.url + "/v1", "--json", str(tmp_path / "report.json"))
    assert (code, err) == (0, "")
    assert "agrees: it is served as W + scale B A" in out  # found by its folder
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["verdict"] == "agree" and written["missing"] == []
    assert written["settings"]["name"] == "it" and written["versions"]["torch"] == torch.__version__


def test_command_disagrees_with_one_line(files):
    with FakeServer(files["dense"], {"it": files["qv"]}, Fault(scale=2.0)) as fake:
        code, _, err = run_cli(files, fake.url, "--name", "it")
    assert code == 1
    assert err == err.splitlines()[0] and "it: scaled 2 times" in err


def test_command_needs_the_key(files, monkeypatch):
    monkeypatch.setenv("RIGHT", "secret")
    monkeypatch.setenv("WRONG", "guess")
    with FakeServer(files["dense"], {"it": files["qv"]}, key="secret") as fake:
        assert run_cli(files, fake.url, "--api-key-env", "RIGHT")[0] == 0
        for more in ((), ("--api-key-env", "WRONG")):
            code, _, err = run_cli(files, fake.url, *more)
            assert code == 2 and "HTTP 401" in err and "--api-key-env" in err
        assert "the variable is not set" in run_cli(files, fake.url, "--api-key-env", "NEITHER")[2]


def spoiled(source: Path, target: Path, config: dict | None = None, rename: tuple[str, str] | None = None, drop: str | None = None) -> Path:
    shutil.copytree(source, target)
    written = json.loads((target / "adapter_config.json").read_text()) | (config or {})
    (target / "adapter_config.json").write_text(json.dumps(written))
    tensors = load_file(target / "adapter_model.safetensors")
    tensors = {n.replace(*rename) if rename else n: t for n, t in tensors.items() if drop is None or drop not in n}
    save_file(tensors, target / "adapter_model.safetensors")
    return target


BAD_ADAPTERS = {
    "unknown module": (dict(rename=("layers.1.self_attn.q_proj", "layers.1.self_attn.qq_proj")), "layers.1.self_attn.qq_proj is no weight"),
    "layer too many": (dict(rename=("layers.1.", "layers.7.")), "model.layers.7.self_attn.q_proj is no weight"),
    "half a pair": (dict(drop="layers.0.self_attn.v_proj.lora_A"), "has lora_B and not the other half"),
    "target without tensors": (dict(config={"target_modules": ["q_proj", "v_proj", "w1"]}), "target module 'w1'"),
    "rank of the file": (dict(config={"r": 8}), "has rank 4 in the file and 8"),
    "DoRA": (dict(config={"use_dora": True}), "DoRA"),
    "not LoRA": (dict(config={"peft_type": "IA3"}), "not the configuration of a PEFT LoRA adapter"),
    "alpha": (dict(config={"lora_alpha": None}), "lora_alpha is None"),
    "bias": (dict(config={"bias": "all"}), "bias is 'all'"),
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_command_refuses_an_adapter_that_it_cannot_describe(files, tmp_path, name):
    change, message = BAD_ADAPTERS[name]
    code, _, err = run_cli(files, "http://127.0.0.1:9", adapter=spoiled(files["qv"], tmp_path / "bad", **change))
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_command_refuses_bad_input_with_one_line(files, tmp_path):
    (tmp_path / "torn").mkdir()
    shutil.copy(files["qv"] / "adapter_config.json", tmp_path / "torn")
    (tmp_path / "torn" / "adapter_model.safetensors").write_bytes(b"torn")
    cases = [
        run_cli(files, "http://127.0.0.1:9"),
        run_cli(files, "no address"),
        run_cli(files, "http://127.0.0.1:9", adapter=tmp_path / "absent"),
        run_cli(files, "http://127.0.0.1:9", adapter=tmp_path / "torn"),
        run_cli(files, "http://127.0.0.1:9", base="qv"),
        run_cli(files, "http://127.0.0.1:9", base="moe", adapter=files["all"]),
        run_cli(files, "http://127.0.0.1:9", "--scratch", str(tmp_path / "absent")),
        run_cli(files, "http://127.0.0.1:9", "--device", "moon"),
    ]
    for code, _, err in cases:
        assert code == 2 and len(err.splitlines()) == 1 and err.startswith("samebits: "), err
    assert "Connection refused" in cases[0][2]
    assert "mlp.down_proj is no weight of the base (qwen3_moe)" in cases[5][2]


def test_a_copy_of_the_head_that_is_not_the_bases_is_refused(files, tmp_path):
    folder = spoiled(files["head"], tmp_path / "head")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.lm_head.base_layer.weight"
    assert name in tensors  # PEFT writes it
    tensors[name][3, 5] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    with FakeServer(files["dense"]) as fake:
        code, _, err = run_cli(files, fake.url, adapter=folder)
    assert code == 2 and "lm_head.base_layer.weight is not the base's" in err


REAL = {"given": "agree", "loaded": "agree", "zeroed": "disagree", "patterns": "disagree", "head": "disagree"}


@pytest.mark.slow
def test_vllm_serve(files, tmp_path):
    """The program itself, with no plugin and no patch: what it serves rightly agrees, wrong bytes and its own fault do not.

    vLLM 0.31 reads neither `alpha_pattern` nor `rank_pattern`. On CPU it adds an adapter's lm_head to requests without the adapter too:
    their slot is -1, which there is an index like any other. The head comes last, for unloading its name does not undo that.
    """
    zeroed = spoiled(files["all"], tmp_path / "zeroed")
    tensors = load_file(zeroed / "adapter_model.safetensors")
    save_file({n: t * 0 if "v_proj.lora_B" in n else t for n, t in tensors.items()}, zeroed / "adapter_model.safetensors")
    modules = ["--lora-modules", f"given={files['all']}", f"zeroed={zeroed}"]
    arguments = ["--enable-lora", "--max-lora-rank", "8", "--max-model-len", "512", "--enforce-eager", *modules]
    oracle = Oracle(files["dense"])
    cases = {"given": ("all", "given"), "loaded": ("rslora", None), "zeroed": ("all", "zeroed"), "patterns": ("patterns", None)}
    cases["head"] = ("head", None)
    with StockServer(files["dense"], tmp_path / "server.log", arguments) as server:
        code, _, err = run_cli(files, server.url, "--name", "absent", adapter=files["all"])
        reports = {}
        for case, (adapter, name) in cases.items():
            client = Client(server.url)
            reports[case] = StockCheck(
                client, oracle, PeftAdapter(files[adapter], oracle.config), name, Settings(prompts=4, tokens=32)
            ).run()
    assert {case: report.verdict for case, report in reports.items()} == REAL, {case: words(r) for case, r in reports.items()}
    assert "v_proj is not applied" in words(reports["zeroed"])
    assert "alpha_pattern, rank_pattern or rsLoRA is ignored" in words(reports["patterns"])
    assert "while lm_head was loaded, requests without the adapter are answered differently" in words(reports["head"])
    assert code == 2 and "adapter absent is not listed; the server lists" in err
    for name in ("server.base", "adapter.logprobs"):  # a real server rounds: the limit is measured and not trivial
        metrics = next(r for r in reports["given"].results if r.name == name).metrics
        assert 1e-4 < metrics["distance"] < metrics["limit"] < 0.2
