"""An export that is begun right after the optimizer's step: the same tensors, sooner, and never those of other masters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits.quant.adapter import AdapterSpec, ModelShape, target_roles
from samebits.trainer import early_export
from samebits.trainer.early_export import EarlyExport, worthwhile
from tests.support import random_m3
from tests.support.training import engine, loss_function, random_batch, start_group

VOCAB = 96
RULE = "samebits.trainer.engine.worthwhile"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    start_group()


@pytest.fixture
def early(monkeypatch):
    """Engines export early on a CPU, too."""
    monkeypatch.setattr(RULE, lambda spec, device: True)


def train(built, seed: int = 0):
    with built.train_mode():
        built.train_batch(random_batch(4, VOCAB, seed=seed), loss_function=loss_function())
        built.lr_scheduler_step()


def adapter(built) -> dict[str, torch.Tensor]:
    return dict(built.get_per_tensor_param()[0])


def zero_masters(built) -> None:
    with torch.no_grad():
        for _, parameter in built.module.adapter_parameters():
            parameter.zero_()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_tensors_are_made_at_once_and_handed_over_once_in_order():
    made = []

    def tensors():
        for name in "cab":
            made.append(name)
            yield name, torch.full((2,), float(ord(name)))

    export = EarlyExport(3, tensors(), [], CPU)
    assert made == list("cab") and export.version == 3
    assert [(name, t.tolist()) for name, t in export.drain()] == [(name, [float(ord(name))] * 2) for name in "cab"]
    assert list(export.drain()) == []


def test_only_adapters_that_a_gpu_has_room_for_are_exported_early(monkeypatch):
    spec = AdapterSpec(ModelShape.from_config(random_m3.config()), 8, target_roles("all"))
    size = 2 * sum(torch.Size(shape).numel() for shape in spec.shapes().values())
    for memory, want in ((early_export.SHARE * size, True), (early_export.SHARE * size - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, memory=memory: SimpleNamespace(total_memory=memory))
        assert worthwhile(spec, torch.device("cuda")) is want
    assert not worthwhile(spec, CPU)


def test_the_early_export_is_the_late_one(m3, early, monkeypatch):
    built = engine(m3)
    monkeypatch.setattr(RULE, lambda spec, device: False)
    late = engine(m3)
    for seed in range(2):
        train(built, seed)
        train(late, seed)
    zero_masters(built)  # too late for what is exported already
    sent = adapter(built)
    assert any(t.any() for name, t in sent.items() if "lora_B" in name) and equal(sent, adapter(late))
    assert not any(t.any() for t in adapter(built).values()), "the second time the masters are asked"


def test_a_loaded_checkpoint_is_what_is_exported_after_it(m3, early, tmp_path):
    saved, built = engine(m3), engine(m3)
    train(saved, seed=1)
    saved.save_checkpoint(str(tmp_path / "ck"), global_step=1)
    train(built, seed=2)
    built.load_checkpoint(str(tmp_path / "ck"))
    assert built.adapter_version == 1 and equal(adapter(built), adapter(saved))


def test_a_step_that_was_not_taken_exports_nothing(m3, early):
    built = engine(m3)
    data = random_batch(3, VOCAB)
    data["advantages"].values()[0] = float("inf")
    with built.train_mode(), pytest.raises(RuntimeError, match="no step was taken"):
        built.train_batch(data, loss_function=loss_function())
    zero_masters(built)
    assert not any(t.any() for t in adapter(built).values())
