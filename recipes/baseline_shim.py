"""The only code of this project in the processes of the baseline: what stock verl needs to run at all, and where its peak memory starts.

verl imports it in each of its processes, by `VERL_USE_EXTERNAL_MODULES`; anywhere else importing it changes nothing. It imports nothing
that verl would not import by itself: each deviation waits until the module that it is about is loaded. The deviations are part of the
result, in these words.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

DEVIATIONS = {
    "vllm.model_executor.models.utils": "WeightsMapper.get_unstacked_mapper is an alias of get_rename_mapper, its name since vLLM 0.31; "
    "without it verl 0.9.1 stops at the first adapter",
    "verl.workers.engine_workers": "peak memory starts anew with each training phase, so that verl's own figure is that of the phase",
}
"""What differs from stock, by the module that it is in."""
ON_CPU = "verl runs on samebits' CPU platform, and its FSDP engine is registered for it; for trying out only"
"""What `baseline_cpu` adds."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls an action with a module right after that was imported."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.actions = actions

    def find_spec(self, fullname, path=None, target=None):
        """The module's own spec, whose loader calls the action as well; None for every other module."""
        action = self.actions.get(fullname)
        spec = None if action is None else importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec


def install(actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each action as soon as its module is imported; at once where it is already."""
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    sys.meta_path.insert(0, AfterImport(actions))


def alias_mapper(module: ModuleType) -> None:
    """The name under which verl asks vLLM for an adapter's names."""
    mapper = module.WeightsMapper
    if not hasattr(mapper, "get_unstacked_mapper"):
        mapper.get_unstacked_mapper = mapper.get_rename_mapper


def peak_of_training(module: ModuleType) -> None:
    """Forget the peaks of loading, syncing and earlier steps when the actor's update begins."""
    worker = module.TrainingWorker
    train = worker.train_mini_batch

    @functools.wraps(train)
    def measured(self, *args, **kwargs):
        module.get_torch_device().reset_peak_memory_stats()
        return train(self, *args, **kwargs)

    worker.train_mini_batch = measured


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install(dict(zip(DEVIATIONS, (alias_mapper, peak_of_training), strict=True)))
