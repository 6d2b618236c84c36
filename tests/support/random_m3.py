"""A random tiny MiniMax-M3 checkpoint, quantized, with every M3 feature and distinct sizes per dimension."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from samebits.quant.checkpoint import write_checkpoint
from samebits.quant.profile import get_profile

SIZES = dict(vocab=96, hidden=64, heads=4, kv_heads=2, head_dim=128, layers=3, experts=8, top_k=2, intermediate=96, dense=160, blocks=4)


def config(**overrides) -> dict:
    s = SIZES | overrides
    freq = [0] + [1] * (s["layers"] - 1)
    text = {
        "model_type": "minimax_m3_text",
        "vocab_size": s["vocab"],
        "hidden_size": s["hidden"],
        "intermediate_size": s["intermediate"],
        "dense_intermediate_size": s["dense"],
        "shared_intermediate_size": s["intermediate"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": s["head_dim"] // 2,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 7.0,
        "num_local_experts": s["experts"],
        "num_experts_per_tok": s["top_k"],
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "num_mtp_modules": 0,
        "moe_layer_freq": freq,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": s["head_dim"],
            "sparse_num_index_heads": s["kv_heads"],
            "sparse_topk_blocks": s["blocks"],
            "sparse_block_size": 128,
            "sparse_disable_index_value": freq,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": freq,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "vision_config": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def tensors(seed: int = 0, **overrides) -> dict[str, torch.Tensor]:
    s = SIZES | overrides
    g = torch.Generator().manual_seed(seed)

    def w(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale / shape[-1] ** 0.5).to(torch.bfloat16)

    def norm(n: int) -> torch.Tensor:
        return (torch.randn(n, generator=g) * 0.1).to(torch.bfloat16)

    h, d = s["hidden"], s["head_dim"]
    t = {
        "model.embed_tokens.weight": w(s["vocab"], h, scale=4.0),
        "model.norm.weight": norm(h),
        "lm_head.weight": w(s["vocab"], h, scale=2.0),
    }
    for layer in range(s["layers"]):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        t |= {p + "input_layernorm.weight": norm(h), p + "post_attention_layernorm.weight": norm(h)}
        t |= {a + "q_proj.weight": w(s["heads"] * d, h), a + "o_proj.weight": w(h, s["heads"] * d)}
        t |= {a + "k_proj.weight": w(s["kv_heads"] * d, h), a + "v_proj.weight": w(s["kv_heads"] * d, h)}
        t |= {a + "q_norm.weight": norm(d), a + "k_norm.weight": norm(d)}
        if layer == 0:
            m = p + "mlp."
            t |= {m + "gate_proj.weight": w(s["dense"], h), m + "up_proj.weight": w(s["dense"], h)}
            t |= {m + "down_proj.weight": w(h, s["dense"])}
            continue
        t |= {a + "index_q_proj.weight": w(s["kv_heads"] * d, h), a + "index_k_proj.weight": w(d, h)}
        t |= {a + "index_q_norm.weight": norm(d), a + "index_k_norm.weight": norm(d)}
        m = p + "block_sparse_moe."
        t |= {m + "gate.weight": w(s["experts"], h).float(), m + "e_score_correction_bias": norm(s["experts"]).float()}
        for e in range(s["experts"]):
            x = f"{m}experts.{e}."
            i = s["intermediate"]
            # Up is five times gate, so that a global scale taken from one side only shows.
            t |= {x + "w1.weight": w(i, h), x + "w3.weight": w(i, h, scale=5.0), x + "w2.weight": w(h, i)}
        x = m + "shared_experts."
        t |= {x + "gate_proj.weight": w(s["intermediate"], h), x + "up_proj.weight": w(s["intermediate"], h)}
        t |= {x + "down_proj.weight": w(h, s["intermediate"])}
    return t


def build(folder: Path, seed: int = 0, **overrides) -> Path:
    """Write the checkpoint with a byte-per-id tokenizer; returns `folder`."""
    write_checkpoint(folder, tensors(seed, **overrides), config(**overrides), get_profile("w4a16"))
    write_tokenizer(folder, (SIZES | overrides)["vocab"])
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer whose token `t7` has id 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tok = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok.save(str(folder / "tokenizer.json"))
    meta = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t1",
        "eos_token": "t2",
        "pad_token": "t0",
        "unk_token": "t0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(meta))
