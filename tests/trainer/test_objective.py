"""The loss and its metrics, by vectors with known answers."""

from __future__ import annotations

import math

import pytest
import torch

from samebits.trainer.objective import tis_loss


def loss_of(logprobs, rollout, advantages, mask=None, total=None, **kwargs):
    lp = torch.tensor(logprobs, dtype=torch.float32).requires_grad_()
    mask = torch.ones_like(lp, dtype=torch.bool) if mask is None else torch.tensor(mask)
    total = int(mask.sum()) if total is None else total
    loss, metrics = tis_loss(lp, torch.tensor(rollout), torch.tensor(advantages), mask, total, **kwargs)
    loss.backward()
    return loss.item(), lp.grad, {k: m.value for k, m in metrics.items()}


def test_weights_of_known_log_ratios():
    d = [0.1, -1.5, 0.8, -10.0, 0.3]
    want = [1.105, 0.223, 2.0, 4.5e-5, 1.350]
    _, grad, metrics = loss_of(d, [0.0] * 5, [1.0] * 5)
    # The gradient of token t is -A_t w_t / N: it shows the weights.
    torch.testing.assert_close(-grad * 5, torch.tensor(want), rtol=1e-3, atol=1e-6)
    assert metrics["tis/mean"] == pytest.approx(sum(want) / 5, rel=1e-3)
    assert metrics["tis/max_raw"] == pytest.approx(math.exp(0.8), rel=1e-5), "reported before the cap"
    assert metrics["tis/clipped_fraction"] == pytest.approx(0.2)
    assert metrics["mismatch/max_abs"] == pytest.approx(10.0)
    assert metrics["mismatch/kl"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 5, rel=1e-5)


def test_direction_is_train_minus_rollout():
    _, grad, metrics = loss_of([-1.0], [-2.0], [1.0])
    assert -grad.item() == pytest.approx(2.0) and metrics["tis/max_raw"] == pytest.approx(math.e, rel=1e-5)
    _, grad, _ = loss_of([-2.0], [-1.0], [1.0])
    assert -grad.item() == pytest.approx(0.3679, abs=1e-4)


def test_loss_value_and_no_gradient_through_the_weight():
    loss, grad, _ = loss_of([-1.0, -0.5], [-1.2, -0.5], [2.0, -1.0])
    w = math.exp(0.2)
    assert loss == pytest.approx(-(2.0 * w * -1.0 + -1.0 * -0.5) / 2)
    torch.testing.assert_close(grad, torch.tensor([-2.0 * w / 2, 0.5]))


def test_token_mean_over_unequal_micro_batches():
    one = tis_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([True]), 10)[0]
    nine = tis_loss(torch.zeros(9), torch.zeros(9), torch.ones(9), torch.ones(9, dtype=torch.bool), 10)[0]
    assert (one + nine).item() == pytest.approx(0.1)


def test_split_and_ranks_do_not_matter():
    g = torch.Generator().manual_seed(0)
    lp, rollout = -torch.rand(12, generator=g), -torch.rand(12, generator=g)
    adv, mask = torch.randn(12, generator=g), torch.rand(12, generator=g) > 0.3
    total = int(mask.sum())
    whole, metrics = tis_loss(lp, rollout, adv, mask, total)
    # Two ranks with two micro-batches each: the mean over ranks of the sums.
    spans = [[slice(0, 1), slice(1, 4)], [slice(4, 10), slice(10, 12)]]
    parts = [[tis_loss(lp[s], rollout[s], adv[s], mask[s], total, ranks=2) for s in rank] for rank in spans]
    assert sum(p[0].item() for rank in parts for p in rank) / 2 == pytest.approx(whole.item(), rel=1e-5)
    for name, part in metrics.items():
        shares = [p[1][name].value for rank in parts for p in rank]
        merged = max(shares) if part.how == "max" else sum(shares) / 2
        assert merged == pytest.approx(part.value, rel=1e-5), name


def test_the_loss_that_is_reported_has_the_same_bits_for_any_cut():
    g = torch.Generator().manual_seed(1)
    lp, rollout = -8 * torch.rand(30011, generator=g), -8 * torch.rand(30011, generator=g)
    adv, mask = torch.randn(30011, generator=g), torch.rand(30011, generator=g) > 0.3
    total, found, plain = int(mask.sum()), set(), set()
    for cut in (30011, 9001, 1024, 77):
        for ranks in (1, 2, 4):
            cuts = (slice(i, i + cut) for i in range(0, 30011, cut))
            parts = [tis_loss(lp[s], rollout[s], adv[s], mask[s], total, ranks=ranks) for s in cuts]
            found.add(torch.tensor(sum(metrics["objective/loss"].value for _, metrics in parts) / ranks, dtype=torch.float32).item())
            plain.add((sum(loss for loss, _ in parts) / ranks).item())
    assert len(found) == 1 and len(plain) > 1
    assert found.pop() == pytest.approx(plain.pop(), rel=1e-4)


def test_masked_slots_may_hold_anything():
    clean, grad, metrics = loss_of([-1.0, -2.0], [-1.5, -1.0], [1.0, 2.0])
    bad, bad_grad, bad_metrics = loss_of(
        [-1.0, math.nan, -2.0, -math.inf],
        [-1.5, -math.inf, -1.0, math.nan],
        [1.0, math.nan, 2.0, math.inf],
        [True, False, True, False],
    )
    assert bad == clean and bad_metrics == metrics
    assert torch.equal(bad_grad, torch.tensor([grad[0], 0.0, grad[1], 0.0]))


def test_extreme_ratios_stay_finite():
    loss, grad, metrics = loss_of([0.0, -1e4, 0.0], [-1e4, 0.0, 300 * math.log(0.7)], [1.0, -1.0, 1.0])
    assert math.isfinite(loss) and torch.isfinite(grad).all() and all(map(math.isfinite, metrics.values()))
    assert metrics["mismatch/max_abs"] == 1e4 and metrics["tis/max_raw"] == pytest.approx(math.exp(20), rel=1e-5)


def test_nothing_to_train_on_is_zero():
    loss, grad, metrics = loss_of([-1.0, -1.0], [-1.0, -2.0], [1.0, 1.0], [False, False])
    assert loss == 0 and (grad == 0).all() and set(metrics.values()) == {0.0}


def test_cap_is_a_parameter():
    _, grad, metrics = loss_of([0.0], [-2.0], [1.0], cap=5.0)
    assert -grad.item() == pytest.approx(5.0) and metrics["tis/clipped_fraction"] == 1.0


def test_shapes_are_never_broadcast():
    square = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"one shape, not .*advantages \(3,\)"):
        tis_loss(square, square, torch.zeros(3), square.bool(), 9)


def test_kl_of_last_bit_differences_is_not_negative():
    rollout = -torch.rand(4, 64, generator=torch.Generator().manual_seed(3))
    trainer = rollout + torch.tensor([1e-7, -1e-7]).repeat(32)
    _, metrics = tis_loss(trainer, rollout, torch.ones_like(rollout), torch.ones_like(rollout), 256.0)
    assert 0.0 <= metrics["mismatch/kl"].value < 1e-12


def test_without_weights_the_loss_is_the_plain_policy_gradient():
    loss, grad, metrics = loss_of([-1.0, -0.5], [-3.0, -0.5], [2.0, -1.0], cap=None)
    assert loss == pytest.approx(-(2.0 * -1.0 + -1.0 * -0.5) / 2)
    torch.testing.assert_close(grad, torch.tensor([-1.0, 0.5]))
    assert metrics["tis/mean"] == 1 and metrics["tis/clipped_fraction"] == 0
    assert metrics["tis/max_raw"] == pytest.approx(math.exp(2.0), rel=1e-5) and metrics["mismatch/max_abs"] == pytest.approx(2.0)


def test_weights_against_other_old_logprobs_leave_the_mismatch_as_it_is():
    _, grad, metrics = loss_of([-1.0, -0.5], [-3.0, -0.5], [1.0, 1.0], old_logprobs=torch.tensor([-1.2, -0.9]))
    torch.testing.assert_close(-grad * 2, torch.tensor([0.2, 0.4]).exp())
    assert metrics["mismatch/max_abs"] == pytest.approx(2.0) and metrics["tis/max_raw"] == pytest.approx(math.exp(0.4), rel=1e-5)


def test_old_logprobs_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="old_logprobs"):
        loss_of([-1.0, -0.5], [-3.0, -0.5], [1.0, 1.0], old_logprobs=torch.tensor([-1.2]))
