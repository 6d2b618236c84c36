"""How far trainer and engine may differ before it is a disagreement.

Two kinds. What a recipe tolerates is the KL of the two samplers' distributions: `kl_warn` is worth looking at, `kl_fail` ends a run (the
reference run lived between 0.024 and 0.040; TIS corrects up to about there). What the formats explain is much tighter: both sides
compute the same products, so the rest is summation order. With fp32 activations that is 1e-5 nats on a tiny model, and less with an NVFP4
cache, whose profile sums in fp64 so that no rounding of K or V turns out otherwise on one side (`kernels.sums`). With bf16 activations a
token's route can flip at a near tie and move one logprob by tenths.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.quant.profile import Format, NumericsProfile


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of the checks."""

    kl_warn: float = 5e-3
    kl_fail: float = 0.03
    max_abs: float = 2e-3
    """Largest difference of one logprob, nats."""
    mean: float = 2e-4
    """Largest mean difference, signed, over a probe: a shift is a fault where noise is not."""
    agreement: float = 0.995
    """Smallest share of (token, layer) at which the trainer alone takes the engine's experts."""
    relative: float = 2e-4
    """Largest difference of an operation's output, relative to its root mean square, that its formats explain."""
    effect: float = 1e-3
    """Smallest change of some logprob, nats, that shows that an adapter is used."""
    effect_error: float = 0.02
    """Largest distance from W + BA, relative to the adapter's effect, root mean square over tokens."""
    gradient: float = 1e-3
    """Largest difference of a gradient between two ways to cut a batch, relative to its norm; also of the loss."""

    @classmethod
    def of(cls, profile: NumericsProfile, kl_warn: float = 5e-3, kl_fail: float = 0.03) -> Limits:
        """Limits for a numerics profile, with a recipe's own KL thresholds."""
        if profile.activations == Format.FP32:
            return cls(kl_warn, kl_fail)
        bf16 = {"max_abs": 1.0, "mean": 0.02, "agreement": 0.9, "relative": 0.05, "effect": 0.02, "effect_error": 0.7, "gradient": 0.1}
        return cls(kl_warn, kl_fail, **bf16)
