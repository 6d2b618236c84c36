"""What the engine takes out of a batch, and every batch that it must refuse before the first forward."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from samebits.trainer.batch import BatchError, pack, require_objective_fields, require_routes, without_row_objects
from samebits.trainer.m3_config import M3Dims
from tests.support import random_m3
from tests.support.training import batch, nested, random_batch

DIMS = M3Dims.from_config(random_m3.config())


def routes_for(data) -> list[torch.Tensor]:
    """Distinct, plausible routes of prompt + response - 1 rows: expert pair (l, l + 1 + position) in layer l, -1 in the dense layer."""
    rows = []
    for n in data["input_ids"].offsets().diff().tolist():
        position = torch.arange(n - 1)[:, None]
        layer = torch.arange(3)[None]
        r = torch.stack((layer + 0 * position, (layer + 1 + position % 6) % 8), dim=-1).to(torch.int16)
        r[:, 0] = -1
        rows.append(r)
    return rows


@pytest.fixture
def data():
    plain = random_batch(4, 96)
    return random_batch(4, 96, routes=routes_for(plain))


def test_pack_flattens_and_hides_the_row_that_verl_padded(data):
    packed = pack(data, replay=True)
    lengths = data["input_ids"].offsets().diff().tolist()
    assert packed.lengths == lengths and packed.blocks is None
    assert torch.equal(packed.labels[:-1], packed.tokens[1:]) and (packed.temperature == 1).all()
    for rows, given in zip(packed.routes.split(lengths), routes_for(data), strict=True):
        assert torch.equal(rows[:-1], given) and (rows[-1] == -1).all()
    assert pack(data, replay=False).routes is None


def test_pack_does_not_change_the_batch(data):
    before = data["routed_experts"].values().clone()
    pack(data, replay=True)
    assert torch.equal(data["routed_experts"].values(), before)


def test_temperature_of_each_sequence(data):
    data["temperature"] = torch.tensor([0.5, 1.0, 2.0, 4.0])
    lengths = data["input_ids"].offsets().diff()
    assert torch.equal(pack(data, False).temperature, torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat_interleave(lengths))


def test_temperature_zero_is_refused():
    with pytest.raises(BatchError, match="temperature must be positive"):
        pack(random_batch(2, 96, temperature=0.0), False)


def test_complete_batches_pass(data):
    require_objective_fields(data)
    # Every row but the last of each sequence, in two MoE layers.
    assert require_routes(data, DIMS) == 2 * sum(n - 1 for n in data["input_ids"].offsets().diff().tolist())


@pytest.mark.parametrize("key", ["rollout_log_probs", "old_log_probs", "advantages", "response_mask"])
def test_missing_field(data, key):
    del data[key]
    with pytest.raises(BatchError, match=f"the batch has no {key}"):
        require_objective_fields(data)


@pytest.mark.parametrize("extra", [1, -1])
def test_length_mismatch(data, extra):
    rows = list(data["rollout_log_probs"].unbind())
    rows[2] = torch.cat((rows[2], rows[2][:1])) if extra > 0 else rows[2][:-1]
    data["rollout_log_probs"] = nested(rows)
    with pytest.raises(BatchError, match="rollout_log_probs of sequence 2 has"):
        require_objective_fields(data)


def test_recomputed_old_logprobs_are_refused(data):
    data["old_log_probs"].values()[3] += 1e-6
    with pytest.raises(BatchError, match="bypass_mode"):
        require_objective_fields(data)


def test_nan_counts_only_where_a_token_counts():
    logprobs = [torch.tensor([-1.0, float("nan")]), torch.tensor([-1.0])]
    data = batch([[5], [6]], [[7, 8], [9]], logprobs, [torch.ones(2), torch.ones(1)])
    with pytest.raises(BatchError, match="NaN or infinity"):
        require_objective_fields(data)
    data["response_mask"].values()[1] = 0
    require_objective_fields(data)


def test_missing_routes(data):
    del data["routed_experts"]
    with pytest.raises(BatchError, match="the batch has no routed_experts"):
        require_routes(data, DIMS)


def test_routes_of_other_length_or_layers(data):
    rows = list(data["routed_experts"].unbind())
    data["routed_experts"] = nested([*rows[:-1], rows[-1][:-1]])
    with pytest.raises(BatchError, match="one row for each token"):
        require_routes(data, DIMS)
    data["routed_experts"] = nested([r[:, :2] for r in rows])
    with pytest.raises(BatchError, match=r"\(2, 2\) entries a token, not \(3, 2\)"):
        require_routes(data, DIMS)


@pytest.mark.parametrize("bad", [[0, 0], [3, 8], [-2, 1], [-1, 4]])
def test_implausible_rows(data, bad):
    data["routed_experts"].values()[2, 2] = torch.tensor(bad, dtype=torch.int16)
    with pytest.raises(BatchError, match="token 2, layer 2 name one expert twice|outside 0..7, or a row"):
        require_routes(data, DIMS)


def test_native_rows_are_allowed(data):
    before = require_routes(data, DIMS)
    data["routed_experts"].values()[1] = -1
    assert require_routes(data, DIMS) == before - 2


def test_columns_of_row_objects_are_dropped_and_the_rest_is_kept():
    batch = TensorDict(
        {
            "x": torch.arange(3),
            "uid": NonTensorStack("a", "b", "c"),
            "extra": NonTensorStack({"k": 1}, {"k": 2}, {}),
            "temperature": NonTensorData(0.5, batch_size=[3]),
        },
        batch_size=[3],
    )
    kept = without_row_objects(batch)
    assert set(kept.keys()) == {"x", "temperature"}
    assert kept["temperature"] == 0.5 and torch.equal(kept["x"], torch.arange(3))
