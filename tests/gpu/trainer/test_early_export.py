"""An early export on a GPU: behind what is queued before it, before what is queued after it drains, on a stream of its own."""

import pytest
import torch

from samebits.trainer.early_export import EarlyExport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_the_export_is_of_what_was_queued_before_it():
    device = torch.device("cuda", torch.cuda.current_device())
    masters = [torch.zeros(1 << 20, device=device) for _ in range(8)]
    big = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        for _ in range(20):
            torch.mm(big, big)  # work that the masters' change waits behind
        for number, master in enumerate(masters):
            master.add_(number + 1)
        want = [master[0].clone() for master in masters]
        export = EarlyExport(1, ((str(i), master.bfloat16()) for i, master in enumerate(masters)), masters, device)
        drained = {name: t.clone() for name, t in export.drain()}
        for master in masters:  # after the drain: the export must not see it
            master.mul_(2.0)
        for i, value in enumerate(want):
            assert torch.equal(drained[str(i)], value.bfloat16().expand(1 << 20)), i


def test_masters_that_leave_the_device_meanwhile_are_read_to_the_end():
    device = torch.device("cuda", torch.cuda.current_device())
    big = torch.randn(8192, 8192, device=device)

    def tensors(master):
        for _ in range(20):
            torch.mm(big, big)  # on the export's stream: the master is read long after it was let go
        yield "a", master.bfloat16()

    master = torch.full((1 << 24,), 3.0, device=device)
    export = EarlyExport(1, tensors(master), [master], device)
    del master
    others = [torch.zeros(1 << 24, device=device) for _ in range(4)]  # what would get the memory
    assert all((t == 3).all() for _, t in export.drain()) and len(others) == 4
