"""Which ranks hold which experts of a layer, and how their parameters are held.

FSDP2 gathers a layer whole before each of its forwards. Routed experts are nearly all of a layer, so where each rank keeps its share of
them for good and tokens travel instead (`kernels.expert_parallel`), neither their bytes travel nor does any rank hold a whole layer.

The ranks are those over which FSDP2 shards, the last dimension of its mesh; on a mesh of two dimensions each row of ranks has all
experts once. What a rank holds is the local part of a DTensor on that mesh, `Shard(0)` over the experts, as FSDP2 would have sharded it.
FSDP2 is told to ignore these parameters; whatever works on its shards (norms, clipping, optimizer, checkpoints, export, off-loading) works
on these too, and a checkpoint has the same shards with and without.

FSDP2 averages gradients over all ranks, since verl multiplies each rank's loss by their number. Here the gradient of an expert is already
the sum over the tokens of the ranks that exchange tokens, so it is divided by the number of all ranks (`share`), and where each row of
ranks has the experts, it is one summand of the gradient (`Partial`) until `reduce` adds the rows up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from samebits.kernels.expert_routes import owned


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The experts of a layer spread over the last dimension of a mesh."""

    mesh: DeviceMesh
    experts: int
    """Of a layer, on all ranks together."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, experts: int) -> ExpertRanks | None:
        """None where there is one rank to spread over. Raises `ValueError` where the experts do not divide over the ranks."""
        if mesh is None or mesh.size(mesh.ndim - 1) == 1:
            return None
        if experts % mesh.size(mesh.ndim - 1):
            raise ValueError(f"{experts} experts do not divide over {mesh.size(mesh.ndim - 1)} ranks")
        return cls(mesh, experts)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange tokens."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def mine(self) -> range:
        """Experts of this rank."""
        last = self.mesh.ndim - 1
        return range(*owned(self.experts, self.mesh.size(last), self.mesh.get_local_rank(last)))

    @property
    def share(self) -> float:
        """What a rank's gradient is multiplied by."""
        return 1 / self.mesh.size()

    def parameter(self, local: Tensor, requires_grad: bool) -> nn.Parameter:
        """This rank's experts [E / ranks, ...], brought to the mesh's device, as a parameter [E, ...] of all ranks."""
        kind = self.mesh.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return nn.Parameter(DTensor.from_local(local.to(device), self.mesh, placements, run_check=False), requires_grad=requires_grad)

    def local(self, parameter: Tensor) -> Tensor:
        """What this rank holds of a parameter. Its gradient comes back as this rank's summand."""
        summands: list[Placement] = [Partial()] * (self.mesh.ndim - 1)
        return parameter.to_local(grad_placements=[*summands, Shard(0)])


def reduce(parameter: nn.Parameter) -> None:
    """Add up a gradient that has come as summands; leave any other as it is. Every rank must ask."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
