"""Responses taken out of a packed output by index have the bits and the gradients of verl's loop over sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import samebits.trainer.plugin  # noqa: F401  before verl looks for its platform
from samebits.kernels.jagged import jagged, padded_responses, take_responses
from tests.support.training import nested

from verl.utils import tensordict_utils  # isort: skip
from verl.workers.utils import losses  # isort: skip

ORIGINAL = losses.no_padding_2_padding.__wrapped__


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(torch.int32)


def a_batch(lengths: list[tuple[int, int]]) -> TensorDict:
    prompts, responses = (jagged(torch.zeros(sum(n), dtype=torch.int64), torch.tensor(n)) for n in zip(*lengths, strict=True))
    return TensorDict({"prompts": prompts, "responses": responses}, batch_size=len(lengths))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=2, max_size=6), st.booleans(), st.integers(0, 99))
def test_bits_and_gradients_are_those_of_verl_s_loop(lengths, as_nested, seed):
    g = torch.Generator().manual_seed(seed)
    data, total = a_batch(lengths), sum(map(sum, lengths))
    values = torch.randn(total, generator=g)
    values[torch.rand(total, generator=g) < 0.2] = -0.0
    found = []
    for take in (losses.no_padding_2_padding, ORIGINAL):
        leaf = values.clone().requires_grad_()
        given = torch.nested.nested_tensor_from_jagged(leaf, data["prompts"].offsets() + data["responses"].offsets()) if as_nested else leaf
        out = take(given, data)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
        weight[weight.abs() < 0.3] = -0.0
        (out * weight).sum().backward()
        found.append((out, leaf.grad))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.equal(bits(ours), bits(theirs)) and torch.equal(bits(our_gradient), bits(their_gradient))


def test_a_sequence_alone():
    """verl adds nothing to the one gradient there; zeros may have another sign."""
    values, data = torch.randn(5, requires_grad=True), a_batch([(2, 3)])
    losses.no_padding_2_padding(values, data).square().sum().backward()
    mine, values.grad = values.grad, None
    ORIGINAL(values, data).square().sum().backward()
    assert torch.equal(mine, values.grad)


def test_a_batch_of_verl_s_other_kinds_is_left_to_verl():
    data = a_batch([(1, 2), (2, 1)])
    tensordict_utils.assign_non_tensor(data, max_response_len=4)
    assert losses.no_padding_2_padding(torch.arange(6.0), data).shape == (2, 4)
    wide = losses.no_padding_2_padding(torch.ones(6, 3), a_batch([(1, 2), (2, 1)]))
    assert wide.shape == (2, 2, 3)


def test_the_device_is_not_waited_for():
    """On fake tensors nothing can be read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        prompts, responses = (mode.from_tensor(torch.tensor(offsets)) for offsets in ([0, 2, 5], [0, 3, 4]))
        values = mode.from_tensor(torch.randn(9)).requires_grad_()
        out = take_responses(values, prompts, responses, 4, 3)
        out.sum().backward()
        assert out.shape == (2, 3) and values.grad.shape == (9,)


def test_what_does_not_fit_is_refused():
    data = a_batch([(1, 2), (2, 1)])
    with pytest.raises(ValueError, match="7 values are not those of 3 prompt and 3 response tokens"):
        padded_responses(torch.ones(7), data["prompts"], data["responses"])
    with pytest.raises(ValueError, match="6 values are not those of 3 prompt"):
        padded_responses(torch.ones(6), data["prompts"], nested([torch.ones(3)]))
    with pytest.raises(ValueError, match="a sequence has no prompt"):
        padded_responses(torch.ones(6), nested([torch.ones(0), torch.ones(3)]), data["responses"])
