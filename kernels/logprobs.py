"""Log-probabilities of given tokens from fp32 logits: the last operation that trainer and engine share.

On CUDA it is one kernel (`triton_logprob`), whose value of a row depends on that row alone. torch's `log_softmax` is another order of the
same sum, and the sampler of vLLM's V2 runner, which CUDA uses, has a third one in a kernel of its own: equal bits on both sides need both
to call this function. `token_logprob_rows(logits, ids)` is what that runner's `compute_token_logprobs` computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path


def token_logprob_rows(
    logits: Tensor, ids: Tensor, temperature: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `ids` and, where asked for, the entropy of each row.

    Args:
        logits: fp32 [T, V]; -inf for tokens that cannot come. ids: int64 [T, n].
        temperature: fp32 [T], positive; None leaves the logits as they are.
    Returns:
        fp32 [T, n] and fp32 [T] or None. Gradients go to `logits`.
    """
    if logits.dtype is torch.float32 and fast_path(logits):
        from .triton_logprob import TokenLogprobs

        return TokenLogprobs.apply(logits, ids, temperature, entropy)
    logprobs = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    picked = logprobs.gather(-1, ids)
    if not entropy:
        return picked, None
    # A probability of 0 has logprob -inf at worst; its contribution to the entropy is 0, not NaN.
    return picked, -(logprobs.exp() * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
