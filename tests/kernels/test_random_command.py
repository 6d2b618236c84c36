"""The commands that compare random cases: what differs is exit status 1, a machine without a GPU one line and 2."""

import pytest
import torch

from tests.support import random_attention, random_command, random_experts


@pytest.mark.parametrize("module", [random_attention, random_experts])
def test_no_gpu_is_one_line(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("samebits: ") and said.endswith(" needs a CUDA GPU\n") and said.count("\n") == 1


def test_arguments_arrive_and_a_difference_is_status_1(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []
    for equal in (True, False):
        status = random_command.main(
            "some", lambda *given, equal=equal: asked.append(given) or equal, ["--seed", "5", "--cases", "9", "--set", "2"]
        )
        assert status == (0 if equal else 1)
    assert asked == [(5, 9, 2)] * 2
