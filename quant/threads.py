"""Work on many tensors of the host at once, a core each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Given, Made = TypeVar("Given"), TypeVar("Made")


def side_by_side(work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    """`work` of each item, in order, by as many threads as torch has; each computes alone, where torch would cut every small operation.

    numpy and torch let go of the interpreter while they compute. The first exception of `work` is raised; what was not begun then is not.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, items)
        return
    # A thread takes the number of its own from the process when it first computes.
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
