"""Data loaders whose batches a thread prepares in advance."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

_LOOK_S = 0.1  # between two looks whether the loader was closed
_END = object()


class BaseDataLoader:
    """The base of data loaders: a subclass has `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of an epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch that the loop gets; a subclass may change it."""
        return batch


class AsyncDataLoaderMixin:
    """Prepare batches in a thread: the first base of a loader, before a subclass of BaseDataLoader.

    Args:
        async_loader_queue_size: the number of batches that are prepared in advance; 0: none, without a thread.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of an epoch; an error of the thread is raised here."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()  # of an epoch that was left before its end
        self._closed = threading.Event()
        batches: queue.Queue[Any] = queue.Queue(self.async_loader_queue_size)
        self._thread = threading.Thread(target=self._fill, args=(batches, self._closed), daemon=True)
        self._thread.start()
        while True:
            batch, error = batches.get()
            if error is not None:
                raise error
            if batch is _END:
                return
            yield self._process_batch(batch)  # type: ignore[attr-defined]

    def _fill(self, batches: queue.Queue[Any], closed: threading.Event) -> None:
        try:
            for batch in self._iterate():  # type: ignore[attr-defined]
                if not _put(batches, (batch, None), closed):
                    return
            _put(batches, (_END, None), closed)
        except Exception as error:
            _put(batches, (None, error), closed)


def _put(batches: queue.Queue[Any], item: Any, closed: threading.Event) -> bool:
    """Return True once the item is in the queue, False if the loader was closed before."""
    while not closed.is_set():
        try:
            batches.put(item, timeout=_LOOK_S)
            return True
        except queue.Full:
            continue
    return False
