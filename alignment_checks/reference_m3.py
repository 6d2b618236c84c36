"""MiniMax-M3's forward written a second time, as plainly as possible: one sequence, fp32, loops, no samebits kernels.

It reads a quantized checkpoint and optionally applies an adapter (bf16 tensors under wire names) as W + BA. Engine and training model
share their operations, so what both have wrong shows in neither; both are held against this, which shares nothing with them but the
checkpoint reader. It is slow: some tens of tokens a second on a tiny model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from samebits.quant import mxfp8, nvfp4
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.kv import round_trip


class ReferenceM3:
    """The text model of a checkpoint folder, with the adapter tensors `adapter` where given, and an NVFP4 cache where `packed_kv`."""

    def __init__(self, folder: Path, adapter: dict[str, Tensor] | None = None, packed_kv: bool = False, tokens: int | None = None) -> None:
        """`tokens`: rows of the head that are tokens; the others have no probability. None: all."""
        checkpoint = Checkpoint(folder)
        self.c = checkpoint.config["text_config"]
        self.w = {}
        for module in checkpoint.modules:
            stored = checkpoint.weight(module)
            if isinstance(stored, nvfp4.NVFP4Tensor):
                stored = nvfp4.dequantize(stored)
            elif isinstance(stored, mxfp8.MXFP8Tensor):
                stored = mxfp8.dequantize(stored)
            self.w[module] = stored.float()
        self.w["lm_head"] = self.w["lm_head"][:tokens]
        self.bias = {
            i: checkpoint.tensor(f"model.layers.{i}.block_sparse_moe.e_score_correction_bias").float()
            for i, moe in enumerate(self.c["moe_layer_freq"])
            if moe
        }
        self.packed_kv = packed_kv
        self.set_adapter(adapter or {})

    def set_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Compute with these adapter tensors, under wire names, from now on."""
        self.adapter = {k.removeprefix("base_model.model."): v.float() for k, v in adapter.items()}

    def linear(self, module: str, x: Tensor) -> Tensor:
        """x [T, K] times the module's weight, plus its adapter's delta."""
        y = x @ self.w[module].T
        a = self.adapter.get(f"{module}.lora_A.weight")
        if a is not None:
            y = y + (x @ a.T) @ self.adapter[f"{module}.lora_B.weight"].T
        return y

    def norm(self, module: str, x: Tensor) -> Tensor:
        """Gemma RMS norm over the last dimension."""
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * (1 + self.w[module])

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, D] at positions 0..T-1."""
        rotary = self.c["rotary_dim"]
        half = rotary // 2
        out = x.clone()
        for i in range(half):
            frequency = torch.tensor(self.c["rope_theta"], dtype=torch.float32) ** (-2.0 * i / rotary)
            angle = torch.arange(x.shape[0], dtype=torch.float32) * frequency
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            out[..., i] = x[..., i] * cos - x[..., i + half] * sin
            out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU-OAI of the two halves."""
        limit = self.c["swiglu_limit"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + torch.exp(-self.c["swiglu_alpha"] * gate)) * (up + self.c["swiglu_beta"])

    def mlp(self, prefix: str, names: tuple[str, str, str], x: Tensor) -> Tensor:
        """Gated network of one expert, of the shared expert or of a dense layer."""
        gate, up, down = (f"{prefix}.{n}" for n in names)
        return self.linear(down, self.swiglu(self.linear(gate, x), self.linear(up, x)))

    def blocks(self, index_q: Tensor, index_k: Tensor) -> Tensor:
        """bool [T, groups, blocks]: the blocks that each query chose."""
        s = self.c["sparse_attention_config"]
        size, topk = s["sparse_block_size"], s["sparse_topk_blocks"]
        length = index_k.shape[0]
        count = math.ceil(length / size)
        chosen = torch.zeros(length, index_q.shape[1], count, dtype=torch.bool)
        for g in range(index_q.shape[1]):
            scores = index_q[:, g] @ index_k.T
            for t in range(length):
                own = t // size
                best = [scores[t, b * size : min((b + 1) * size, t + 1)].max().item() for b in range(own)]
                order = sorted(range(own), key=lambda b: (-best[b], b))
                chosen[t, g, [own, *order[: topk - 1]]] = True
        return chosen

    def attention(self, i: int, x: Tensor) -> Tensor:
        """Attention of layer i: x [T, H] to [T, H]."""
        p = f"model.layers.{i}.self_attn."
        heads, groups, d = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        q = self.rotate(self.norm(p + "q_norm", self.linear(p + "q_proj", x).view(-1, heads, d)))
        k = self.rotate(self.norm(p + "k_norm", self.linear(p + "k_proj", x).view(-1, groups, d)))
        v = self.linear(p + "v_proj", x).view(-1, groups, d)
        if self.packed_kv:
            k, v = round_trip(k), round_trip(v)
        length = x.shape[0]
        allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(groups, -1, -1)
        if self.c["sparse_attention_config"]["sparse_attention_freq"][i]:
            iq = self.rotate(self.norm(p + "index_q_norm", self.linear(p + "index_q_proj", x).view(-1, groups, d)))
            ik = self.rotate(self.norm(p + "index_k_norm", self.linear(p + "index_k_proj", x).view(-1, 1, d)))
            if self.packed_kv:
                ik = round_trip(ik)
            chosen = self.blocks(iq, ik[:, 0])
            size = self.c["sparse_attention_config"]["sparse_block_size"]
            allowed = allowed & chosen.permute(1, 0, 2).repeat_interleave(size, dim=-1)[..., :length]
        out = torch.empty(length, heads, d)
        for h in range(heads):
            g = h // (heads // groups)
            scores = (q[:, h] @ k[:, g].T) / math.sqrt(d)
            out[:, h] = scores.masked_fill(~allowed[g], -math.inf).softmax(-1) @ v[:, g]
        return self.linear(p + "o_proj", out.flatten(1))

    def moe(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of layer i: x [T, H] to ([T, H], ids [T, k])."""
        p = f"model.layers.{i}.block_sparse_moe."
        scores = torch.sigmoid(x @ self.w[p + "gate"].T)
        routes = (scores + self.bias[i]).topk(self.c["num_experts_per_tok"], dim=-1).indices.sort(-1).values
        out = self.mlp(p + "shared_experts", ("gate_proj", "up_proj", "down_proj"), x)
        for t in range(x.shape[0]):
            weights = scores[t, routes[t]]
            weights = weights / weights.sum() * self.c["routed_scaling_factor"]
            for e, weight in zip(routes[t].tolist(), weights, strict=True):
                out[t] += weight * self.mlp(f"{p}experts.{e}", ("w1", "w3", "w2"), x[t : t + 1])[0]
        return out, routes

    def __call__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """(logits fp32 [T, vocabulary], routes int64 [T, layers, k], -1 in dense layers)."""
        x = self.w["model.embed_tokens"][ids]
        routes = torch.full((len(ids), self.c["num_hidden_layers"], self.c["num_experts_per_tok"]), -1)
        for i, moe in enumerate(self.c["moe_layer_freq"]):
            p = f"model.layers.{i}."
            x = x + self.attention(i, self.norm(p + "input_layernorm", x))
            h = self.norm(p + "post_attention_layernorm", x)
            if moe:
                y, routes[:, i] = self.moe(i, h)
            else:
                y = self.mlp(p + "mlp", ("gate_proj", "up_proj", "down_proj"), h)
            x = x + y
        return self.norm("model.norm", x) @ self.w["lm_head"].T, routes

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """fp32 [T - 1] log-probabilities of ids[1:]."""
        logits, _ = self(ids)
        return (logits / temperature).log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
