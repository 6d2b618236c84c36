"""Build the tiny MiniMax-M3: train it from nothing in full precision on the arithmetic task, quantize it, and write it as a checkpoint.

The result has every part of MiniMax-M3 (dense first layer, then MSA and a mixture of experts with a shared one, sigmoid router with
a bias moved by the sign of the load, Gemma norms, per-head query and key norm, partial rotary embedding) in the formats of profile
`w4a16`, a character tokenizer and a chat template. What the corpus holds is exactly what `apply_chat_template` gives:
`<user>34*7+58=<assistant>34*7=238;238+58=296;answer:296<eos>`. It starts GRPO at about 36 % right answers (see `arithmetic`).

Left out: the indexer is not trained. Its top-k passes no gradient of the language-model loss, so its projections are the mean of the
attention heads that they stand for. Nothing of this size notices: up to 512 tokens every block is chosen.
Bit-for-bit repeatable by seed on one kind of CPU with one number of threads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from samebits.kernels.linear import values
from samebits.quant.checkpoint import Checkpoint, write_checkpoint
from samebits.quant.profile import get_profile

from .arithmetic import MAX_RESPONSE_TOKENS, Problem, draw, grade, problems
from .muon import Muon
from .tiny_model import EPS, Sizes, TinyModel, Weights, initialise

BASE = Path(__file__).parent / "tiny_m3_base"
"""The finished checkpoint that samebits ships."""
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ROLES = ("<user>", "<assistant>")
VOCABULARY = (*SPECIAL, *ROLES, "answer:", *"0123456789+-*/=;:.,?!()<>_'\"# \n", *"abcdefghijklmnopqrstuvwxyz")
PAD, BOS, EOS, UNK = range(4)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<user>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<assistant>{{ message.content }}<eos>"
    "{% else %}{{ raise_exception('tiny M3 knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
EVALUATED = 1024
"""Held-out prompts behind the accuracies of PROVENANCE.json."""


@dataclass(frozen=True, slots=True)
class Training:
    """How the full-precision model is trained: Muon for the matrices, AdamW for the rest; warm-up, then linear decay to 2 %."""

    steps: int = 1000
    batch: int = 64
    muon_lr: float = 0.02
    adamw_lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: int = 40
    clip: float = 1.0
    slip: float = 0.44
    """Probability that a result in the corpus has one digit off by one."""
    slip_from: float = 0.55
    """Fraction of the steps before the first slip: the arithmetic is learned sooner from a clean corpus."""
    bias_rate: float = 0.002
    """Step of the router's bias toward the mean load."""


def build(out: Path, seed: int = 0, steps: int | None = None, progress: bool = True, training: Training | None = None) -> dict[str, Any]:
    """Train, quantize and write the tiny M3 into `out`; returns what PROVENANCE.json says.

    `steps` overrides the number of training steps. Takes about ten minutes on two CPU cores.
    Raises `FileExistsError` when `out` holds anything.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    recipe = training or Training()
    if steps is not None:
        recipe = Training(**{**asdict(recipe), "steps": steps})
    sizes = Sizes(vocab=len(VOCABULARY))
    weights = train(sizes, recipe, seed, progress)
    write_checkpoint(out, export(weights, sizes), config(sizes), get_profile("w4a16"))
    write_tokenizer(out, sizes)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    quantized = dense_weights(out)
    provenance = {
        "command": f"samebits tiny-m3 OUT --seed {seed}",
        "seed": seed,
        "training": asdict(recipe),
        "threads": torch.get_num_threads(),
        "versions": {n: importlib.metadata.version(n) for n in ("samebits", "torch", "transformers", "tokenizers")},
        "held_out_prompts": EVALUATED,
        "accuracy": {
            "sampled_full_precision": accuracy(weights, sizes, temperature=1.0, seed=seed),
            "sampled": accuracy(quantized, sizes, temperature=1.0, seed=seed),
            "greedy": accuracy(quantized, sizes, temperature=0.0, seed=seed),
        },
        "model.safetensors": {
            "bytes": (out / "model.safetensors").stat().st_size,
            "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        },
    }
    (out / "PROVENANCE.json").write_text(json.dumps(provenance, indent=2) + "\n")
    return provenance


def train(sizes: Sizes, recipe: Training, seed: int, progress: bool) -> Weights:
    """Full-precision weights after training on the corpus."""
    rng, pool, tokenizer = random.Random(seed), problems("train"), character_tokenizer()
    model, weights = TinyModel(sizes), initialise(sizes, seed)
    trained = {n: w.requires_grad_(True) for n, w in weights.items() if not n.endswith("e_score_correction_bias")}
    optimizers = _optimizers(trained, recipe)
    rates = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    columns = (TextColumn("training tiny M3"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("", total=recipe.steps)
        for step in range(recipe.steps):
            for group, peak in rates:
                group["lr"] = peak * min(1.0, (step + 1) / recipe.warmup) * max(0.02, 1 - step / recipe.steps)
            slip = recipe.slip if step >= recipe.slip_from * recipe.steps else 0.0
            texts = [chat(p, p.steps_with_slips(slip, rng)) for p in rng.choices(pool, k=recipe.batch)]
            ids, targets = _batch(tokenizer, texts)
            loss = F.cross_entropy(model.forward(weights, ids).flatten(0, 1), targets.flatten(), ignore_index=PAD)
            for w in trained.values():
                w.grad = None
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), recipe.clip)
            for optimizer in optimizers:
                optimizer.step()
            for layer, count in model.counts.items():
                load = count.float()
                weights[f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"] += recipe.bias_rate * (load.mean() - load).sign()
            bar.update(task, advance=1, description=f"loss {loss.item():.3f}")
    return {n: w.detach() for n, w in weights.items()}


def _optimizers(trained: Weights, recipe: Training) -> list[torch.optim.Optimizer]:
    """Muon for the projections and experts; AdamW for embedding, head, router and norms, the norms without weight decay."""
    by_adamw = ("embed_tokens", "lm_head", "block_sparse_moe.gate", "norm")
    hidden = [w for n, w in trained.items() if not any(part in n for part in by_adamw)]
    others = [w for n, w in trained.items() if any(part in n for part in by_adamw)]
    groups = [
        {"params": [w for w in others if w.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [w for w in others if w.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.adamw_lr, betas=recipe.betas, eps=1e-9)
    return [Muon(hidden, recipe.muon_lr, weight_decay=recipe.weight_decay), adamw]


def chat(problem: Problem, response: str) -> str:
    """One example as text, as the chat template renders it."""
    return f"<user>{problem.prompt}<assistant>{response}<eos>"


def _batch(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Input ids and next-token targets [B, T], right-padded; targets before the response are `PAD`, which the loss leaves out."""
    rows = [e.ids for e in tokenizer.encode_batch(texts)]
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    prompt = rows[0].index(VOCABULARY.index("<assistant>")) + 1  # prompts are all of one length
    targets = ids[:, 1:].clone()
    targets[:, : prompt - 1] = PAD
    return ids[:, :-1], targets


def accuracy(weights: Weights, sizes: Sizes, temperature: float, seed: int = 0, count: int | None = None, batch: int = 256) -> float:
    """Fraction of `count` (default `EVALUATED`) held-out prompts answered right by one sample each, in fp32."""
    count = count or EVALUATED
    model, tokenizer, g = TinyModel(sizes), character_tokenizer(), torch.Generator().manual_seed(seed)
    chosen, right = draw("test", count), 0
    for start in range(0, count, batch):
        part = chosen[start : start + batch]
        prompts = torch.tensor([e.ids for e in tokenizer.encode_batch([f"<user>{p.prompt}<assistant>" for p in part])])
        out = model.sample(weights, prompts, MAX_RESPONSE_TOKENS, EOS, PAD, temperature, g)
        texts = tokenizer.decode_batch([[t for t in row if t != PAD] for row in out.tolist()], skip_special_tokens=False)
        # The end token must be there: a sample cut at the limit is wrong.
        right += sum(t.endswith("<eos>") and grade(t, p.answer) > 0 for t, p in zip(texts, part, strict=True))
    return right / count


def export(weights: Weights, sizes: Sizes) -> dict[str, Tensor]:
    """Checkpoint tensors of trained weights: experts one by one, and an indexer made from the attention heads."""
    tensors: dict[str, Tensor] = {}
    for name, w in weights.items():
        if ".experts.w" in name:
            prefix, leaf = name.rsplit(".", 1)
            tensors |= {f"{prefix}.{e}.{leaf}.weight": w[e].clone() for e in range(sizes.experts)}
        else:
            tensors[name] = w
    for layer, moe in enumerate(sizes.moe_layer_freq):
        if moe:
            a = f"model.layers.{layer}.self_attn."
            q = weights[a + "q_proj.weight"].unflatten(0, (sizes.kv_heads, -1, sizes.head_dim)).mean(1)
            tensors[a + "index_q_proj.weight"] = q.flatten(0, 1)
            tensors[a + "index_k_proj.weight"] = weights[a + "k_proj.weight"].unflatten(0, (-1, sizes.head_dim)).mean(0)
            tensors[a + "index_q_norm.weight"] = weights[a + "q_norm.weight"].clone()
            tensors[a + "index_k_norm.weight"] = weights[a + "k_norm.weight"].clone()
    return tensors


def dense_weights(folder: Path) -> Weights:
    """fp32 weights of a written tiny M3, rebuilt from its quantized bytes, for `TinyModel`. The indexer is left out."""
    checkpoint = Checkpoint(folder)
    weights: Weights = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for module in checkpoint.modules:
        w = values(checkpoint.weight(module))
        if ".experts." in module:
            prefix, expert, leaf = module.rsplit(".", 2)
            experts.setdefault(f"{prefix}.{leaf}", {})[int(expert)] = w
            continue
        if ".index_" not in module:
            weights[f"{module}.weight"] = w
        if module.endswith(".gate"):
            bias = module.removesuffix("gate") + "e_score_correction_bias"
            weights[bias] = checkpoint.tensor(bias)
    return weights | {name: torch.stack([stack[e] for e in range(len(stack))]) for name, stack in experts.items()}


def config(sizes: Sizes) -> dict[str, Any]:
    """config.json of the tiny M3, with every key that a MiniMax-M3 text model has."""
    freq = sizes.moe_layer_freq
    text = {
        "model_type": "minimax_m3_text",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "dense_intermediate_size": sizes.dense,
        "shared_intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_position,
        "rms_norm_eps": EPS,
        "rope_theta": sizes.rope_theta,
        "rotary_dim": sizes.rotary_dim,
        "partial_rotary_factor": sizes.rotary_dim / sizes.head_dim,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 7.0,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": sizes.routed_scaling,
        "num_mtp_modules": 0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "attention_output_gate": False,
        "moe_layer_freq": freq,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": sizes.head_dim,
            "sparse_num_index_heads": sizes.kv_heads,
            "sparse_topk_blocks": sizes.topk_blocks,
            "sparse_block_size": 128,
            "sparse_disable_index_value": freq,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": freq,
        },
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "vision_config": None,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def character_tokenizer() -> Tokenizer:
    """One token a character, `answer:` and the chat markers being one each.

    The chat markers are not special, so that a decoded response keeps a stray one and is graded wrong.
    """
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"answer:|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ROLES])
    return tokenizer


def write_tokenizer(folder: Path, sizes: Sizes) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    character_tokenizer().save(str(folder / "tokenizer.json"))
    meta = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": sizes.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(meta, indent=2) + "\n")
