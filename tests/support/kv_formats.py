"""How far an NVFP4 cache moves logprobs: an engine with NVFP4 pages generates, one with bf16 pages scores the same tokens.

    python -m tests.support.kv_formats tiny|mid|mini|FOLDER [--device cpu] [--tokens 24] [--json FILE]

`tiny` is the shipped model and FOLDER a mini MiniMax-M3 of `samebits mini-m3`, asked held-out problems of their tasks. `mid` and `mini`
have random weights and are asked random tokens: heads, blocks and top-k of MiniMax-M3, and all sizes of the mini model. Random experts and
routers make much of any rounding (an independent fp32 forward says the same), so only a trained model tells what a cache costs. Each engine
is a process of its own, adapter and all. On a CPU it is wired as on a GPU, with the torch references of the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

MID = dict(vocab=512, hidden=512, heads=16, kv_heads=4, layers=4, experts=16, top_k=4, intermediate=256, dense=512, blocks=16)
CACHES = ("nvfp4", "bfloat16")
"""The first generates."""
RANK, PROBLEMS = 32, 32
SHORT, LONG = (3, 127, 129, 300), (3, 127, 128, 129, 300, 700, 2047, 2049, 2600)


def mini() -> dict[str, int]:
    """Sizes of the mini MiniMax-M3, as `random_m3` takes them."""
    from samebits.recipes.mini_model import MINI

    return {name: getattr(MINI, name) for name in MID if name != "blocks"} | {"blocks": MINI.topk_blocks}


def folder_of(model: str, scratch: Path) -> Path:
    """The checkpoint; random ones are written below `scratch`."""
    from tests.support import random_m3

    if model in ("mid", "mini"):
        return random_m3.build(scratch / model, **(MID if model == "mid" else mini()))
    return Path("recipes/tiny_m3_base") if model == "tiny" else Path(model)


def prompts_of(model: str, folder: Path, lengths: tuple[int, ...]) -> list[list[int]]:
    """Token ids: held-out problems as a job asks them of a trained model, random ones of `lengths` otherwise."""
    if model not in ("mid", "mini"):
        from transformers import AutoTokenizer

        from samebits.recipes import arithmetic, mini_math

        tokenizer, task = AutoTokenizer.from_pretrained(folder), arithmetic.TASK if model == "tiny" else mini_math.TASK
        asked = [[{"role": "user", "content": problem.prompt}] for problem in task.draw("test", PROBLEMS, 0)]
        return [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=True, return_dict=False) for one in asked]
    config = json.loads((folder / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    return [torch.randint(3, vocabulary, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def adapter_of(folder: Path, scale: float) -> dict[str, torch.Tensor]:
    """Random values on every role, `scale` times normal ones."""
    from samebits.quant.adapter import AdapterSpec, ModelShape
    from samebits.quant.roles import LORA_ROLES

    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    g = torch.Generator().manual_seed(7)
    shapes = AdapterSpec(shape, RANK, LORA_ROLES).shapes()
    return {name: (torch.randn(*shape, generator=g) * scale).to(torch.bfloat16) for name, shape in shapes.items()}


def _engine(folder: Path, cache: str, device: str, context: int):
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    from tests.rollout.conftest import LARGE, UNTUNED, Engine, usual_options

    where = {"gpu_memory_utilization": 0.1} if device == "cuda" else {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    llm = LLM(
        str(folder),
        max_model_len=context,
        kv_cache_dtype="nvfp4" if cache == "nvfp4" else "auto",
        kernel_config=UNTUNED,
        **LARGE,
        **usual_options("w4a16", RANK),
        **where,
    )
    return Engine(llm, cache, "w4a16")


def child(task: dict[str, Any]) -> None:
    """One engine: sample where no tokens are given, and score; writes (ids, logprobs of response tokens, greedy ids)."""
    from tests.support.gpu_wiring import as_on_a_gpu

    folder, scratch = Path(task["folder"]), Path(task["out"]).parent
    wiring = as_on_a_gpu()
    if task["device"] == "cpu":
        wiring.__enter__()  # to the end of the process
    engine = _engine(folder, task["cache"], task["device"], task["context"])
    assert engine.rpc("samebits_profile") == engine.profile, "another cache than the one that was asked for"
    engine.load(adapter_of(folder, task["scale"]), 7, scratch)
    prompts = task["prompts"]
    greedy = [out.ids for out in engine.run(prompts, 7, tokens=task["tokens"], temperature=0, prompt_logprobs=None)]
    responses = task["responses"] or [out.ids for out in engine.run(prompts, 7, tokens=task["tokens"], prompt_logprobs=None, seed=0)]
    engine.llm.reset_prefix_cache()
    scored = engine.run([p + r for p, r in zip(prompts, responses, strict=True)], 7)
    logprobs = [out.prompt_logprobs[len(p) - 1 :].tolist() for p, out in zip(prompts, scored, strict=True)]
    Path(task["out"]).write_text(json.dumps({"responses": responses, "logprobs": logprobs, "greedy": greedy}))


def compare(model: str, device: str, tokens: int, scratch: Path) -> dict[str, Any]:
    """Differences of logprobs of the sampled tokens, nvfp4 minus bf16 pages. Raises `RuntimeError` with what a failed engine said."""
    folder = folder_of(model, scratch)
    prompts = prompts_of(model, folder, LONG if device == "cuda" else SHORT)
    context = -(-(max(map(len, prompts)) + tokens + 1) // 128) * 128
    told: dict[str, Any] = {}
    scale = 0.05 if model in ("mid", "mini") else 0.01  # of a trained model little is changed
    for cache in CACHES:
        out = scratch / f"{cache}.json"
        task = {
            "folder": str(folder),
            "cache": cache,
            "device": device,
            "context": context,
            "out": str(out),
            "tokens": tokens,
            "scale": scale,
        }
        task |= {"prompts": prompts, "responses": told["nvfp4"]["responses"] if told else None}
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.kv_formats", "--child"]
        done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the engine with {cache} pages failed:\n{(done.stdout + done.stderr)[-3000:]}")
        told[cache] = json.loads(out.read_text())
    a, b = (torch.tensor([x for row in told[cache]["logprobs"] for x in row], dtype=torch.float64) for cache in CACHES)
    difference = a - b
    same = [sum(x == y for x, y in zip(*rows, strict=True)) for rows in zip(*(told[cache]["greedy"] for cache in CACHES), strict=True)]
    return {
        "model": model,
        "device": device,
        "sequences": len(prompts),
        "longest": max(map(len, prompts)) + tokens,
        "tokens": len(difference),
        "mean_abs": difference.abs().mean().item(),
        "max_abs": difference.abs().max().item(),
        "kl": (difference.exp() - difference - 1).mean().item(),
        "mean_logprob": {cache: x.mean().item() for cache, x in zip(CACHES, (a, b), strict=True)},
        "greedy_tokens_equal": sum(same) / (tokens * len(prompts)),
    }


def line(found: dict[str, Any]) -> str:
    """For a terminal."""
    means = ", ".join(f"{cache} {value:.4f}" for cache, value in found["mean_logprob"].items())
    return (
        f"{found['model']} on {found['device']}: {found['sequences']} sequences of up to {found['longest']} tokens, "
        f"{found['tokens']} sampled from NVFP4 pages; against bf16 pages logprobs differ by {found['mean_abs']:.3g} on average and "
        f"{found['max_abs']:.3g} at most, KL {found['kl']:.3g}, mean logprob {means}; "
        f"{found['greedy_tokens_equal']:.1%} of greedy tokens are the same"
    )


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    made = argparse.ArgumentParser()
    made.add_argument("model", nargs="*")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--tokens", type=int, default=24)
    made.add_argument("--json", type=Path)
    made.add_argument("--child", action="store_true")
    return made


def main() -> None:
    """See the module."""
    options = parser().parse_args()
    if options.child:
        child(json.loads(sys.stdin.read()))
        return
    found = []
    for model in options.model or ["tiny", "mid"]:
        with tempfile.TemporaryDirectory() as scratch:
            found.append(compare(model, options.device, options.tokens, Path(scratch)))
        print(line(found[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
