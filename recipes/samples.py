"""The samples of a step, held in the training loop's own process as whole columns.

verl keeps samples in a service of several processes, in which each value of each sample is a message of its own; its trainer, replay buffer
and agent loops talk to it. Here all of them live in one process: the loop makes a batch, weighs it and sends the ranks what they learn
from. So this answers the calls that verl makes of that service, with its own types, and hands a column on as it was put. A column is taken
apart only where other rows of it are asked for than were put together, as when groups were left out or ranks are balanced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from samebits.kernels.jagged import is_plain, jagged, jagged_join, jagged_rows

Column = Tensor | list
"""Jagged [B, *, ...], dense [B], or a list of B Python objects."""


@dataclass(slots=True)
class _Sample:
    tags: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[Column, int]] = field(default_factory=dict)
    """Field to the column that it was put with, and the row in it."""


class SampleStore:
    """Samples by partition and key, with tags and fields, in the order in which they were first put.

    A field that no key has is left out of an answer, as verl expects of its optional ones. Raises `ValueError` on unknown keys and on a
    field that only some of the keys have.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Sample]] = {}

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | TensorDict | None = None,
        tags: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Add to the samples `keys`, which are made where there are none, the columns of `fields` and one dict of `tags` each."""
        if fields is None and tags is None:
            raise ValueError("neither fields nor tags were given")
        columns = {name: _column(name, column) for name, column in (() if fields is None else fields.items())}
        for what, given in (*columns.items(), *([] if tags is None else [("tags", tags)])):
            if len(given) != len(keys):
                raise ValueError(f"{len(given)} rows of {what} for {len(keys)} keys")
        partition = self._partitions.setdefault(partition_id, {})
        samples = [partition.setdefault(key, _Sample()) for key in keys]
        if tags is not None:
            for sample, tag in zip(samples, tags, strict=True):
                sample.tags.update(tag)
        for name, column in columns.items():
            for row, sample in enumerate(samples):
                sample.places[name] = (column, row)

    def kv_batch_get(self, keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None) -> TensorDict:
        """Fields of samples, all of them by default, in the order of `keys`."""
        keys = [keys] if isinstance(keys, str) else keys
        fields = [select_fields] if isinstance(select_fields, str) else select_fields
        found = self.columns(keys, partition_id, fields)
        boxed = {name: NonTensorStack(*column) if isinstance(column, list) else column for name, column in found.items()}
        return TensorDict(boxed, batch_size=[len(keys)])

    def columns(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None) -> dict[str, Column]:
        """The same without verl's boxes around Python objects. Tensors may be those that were put: not to be written to."""
        samples = self._find(keys, partition_id)
        found = {}
        for name in samples[0].places if fields is None else fields:
            places = [sample.places[name] for sample in samples if name in sample.places]
            if not places:
                continue
            if len(places) != len(samples):
                raise ValueError(f"only {len(places)} of {len(samples)} samples have the field {name}")
            found[name] = _gather(name, places)
        return found

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition to key to tags."""
        chosen = self._partitions if partition_id is None else {partition_id: self._partitions.get(partition_id, {})}
        return {name: {key: dict(sample.tags) for key, sample in partition.items()} for name, partition in chosen.items()}

    def kv_clear(self, keys: Sequence[str] | str, partition_id: str) -> None:
        """Forget samples; a column goes with the last of them."""
        keys = [keys] if isinstance(keys, str) else keys
        self._find(keys, partition_id)
        for key in keys:
            del self._partitions[partition_id][key]

    def _find(self, keys: Sequence[str], partition_id: str) -> list[_Sample]:
        partition = self._partitions.get(partition_id, {})
        missing = [key for key in keys if key not in partition]
        if missing or not keys:
            raise ValueError(f"partition {partition_id!r} has no sample {missing[0]!r}" if missing else "no keys were given")
        return [partition[key] for key in keys]


def _column(name: str, column: Any) -> Column:
    """As it is held: rows of one length are jagged all the same, so that a field's kind does not depend on what was sampled."""
    if isinstance(column, NonTensorData):
        return [column.data] * len(column)
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if isinstance(column, list):
        return column
    if column.is_nested:
        if not is_plain(column):
            raise ValueError(f"field {name} is a nested tensor of another kind than jagged on the host")
        return column
    if column.dim() < 2:
        return column
    return jagged(column.reshape(-1, *column.shape[2:]), torch.full((len(column),), column.shape[1]))


def _gather(name: str, places: list[tuple[Column, int]]) -> Column:
    columns = list({id(column): column for column, _ in places}.values())
    kinds = {(isinstance(c, Tensor), isinstance(c, Tensor) and c.is_nested) for c in columns}
    if len(kinds) > 1:
        raise ValueError(f"field {name} was put as columns of different kinds")
    if isinstance(columns[0], list):
        return [column[row] for column, row in places]
    starts, start = {}, 0
    for column in columns:
        starts[id(column)] = start
        start += len(column)
    rows = torch.tensor([starts[id(column)] + row for column, row in places])
    nested = columns[0].is_nested
    whole = jagged_join(columns) if nested else torch.cat(columns)
    if torch.equal(rows, torch.arange(start)):
        return whole
    return jagged_rows(whole, rows) if nested else whole[rows]
