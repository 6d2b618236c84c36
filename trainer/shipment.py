"""A batch on its way from the training loop to the ranks of the trainer: whole columns, through Ray's object store.

verl would let each rank fetch its rows from a queue that holds every value of every sample by itself. A few arrays a column take a
hundredth of the time. Columns leave as numpy arrays, which Ray writes into its store without pickling them, and arrive as the TensorDict
that verl's workers take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from samebits.kernels.jagged import is_plain, jagged


class Shipment:
    """Columns of equally many rows, and what belongs to all rows; once unpickled it is a TensorDict."""

    def __init__(self, columns: Mapping[str, Tensor], extra_info: Mapping[str, Any]) -> None:
        """`columns`: jagged [B, *, ...] or dense [B, ...], on the host. Raises `TypeError` on another, `ValueError` on unequal lengths."""
        for name, column in columns.items():
            if not isinstance(column, Tensor) or not (is_plain(column) if column.is_nested else column.device.type == "cpu"):
                raise TypeError(f"column {name} is neither a dense nor a jagged tensor on the host")
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of a batch have unequal lengths: {lengths}")
        self.columns, self.extra_info = dict(columns), dict(extra_info)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def chunk(self, chunks: int) -> list[Shipment]:
        """Equal parts in order, one for each data-parallel rank; nothing is copied. Raises `ValueError` where the rows do not divide."""
        if len(self) % chunks:
            raise ValueError(f"{len(self)} samples do not divide over {chunks} ranks")
        size = len(self) // chunks
        bounds = [(i * size, (i + 1) * size) for i in range(chunks)]
        return [Shipment({n: _between(c, *part) for n, c in self.columns.items()}, self.extra_info) for part in bounds]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, ({name: _arrays(column) for name, column in self.columns.items()}, self.extra_info, len(self))


def text_column(rows: Sequence[str]) -> Tensor:
    """Strings as a jagged uint8 tensor [B, *] of their UTF-8 bytes."""
    encoded = [row.encode() for row in rows]
    return jagged(torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8), torch.tensor([len(row) for row in encoded]))


def text_row(column: Tensor, row: int) -> str:
    """The string in one row of a `text_column`."""
    return bytes(column.unbind()[row].tolist()).decode()


def _between(column: Tensor, start: int, end: int) -> Tensor:
    if not column.is_nested:
        return column[start:end]
    offsets = column.offsets()[start : end + 1]
    return jagged(column.values()[int(offsets[0]) : int(offsets[-1])], offsets.diff())


def _arrays(column: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    if not column.is_nested:
        return column.numpy(), None
    return column.values().numpy(), column.offsets().diff().numpy()


def _arrive(columns: dict[str, tuple[np.ndarray, np.ndarray | None]], extra_info: dict[str, Any], rows: int) -> TensorDict:
    # Copied: what Ray hands out is memory that other processes see and nobody may write to.
    batch = TensorDict({}, batch_size=[rows])
    for name, (values, lengths) in columns.items():
        own = torch.from_numpy(values.copy())
        batch[name] = own if lengths is None else jagged(own, torch.from_numpy(lengths.copy()))
    for key, value in extra_info.items():
        tu.assign_non_tensor_data(batch, key, value)
    return batch
