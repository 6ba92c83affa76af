"""The base classes of data loaders. They do not communicate with other ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any


class BaseDataLoader:
    """Yields the batches of _iterate, each processed by _process_batch. A subclass defines __len__ and _iterate."""

    def __len__(self) -> int:
        raise NotImplementedError()

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        raise NotImplementedError()

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        return batch


class _Epoch:
    """A thread that reads the batches of one epoch into a queue."""

    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self.queue: "queue.Queue[Any]" = queue.Queue(size)
        self.closed = threading.Event()
        self._batches = batches
        self.thread = threading.Thread(target=self._run, name="horovod.data", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        last: Any = _End(None)
        try:
            for batch in self._batches:
                self._put(batch)
                if self.closed.is_set():
                    break
        except BaseException as e:
            last = _End(e)
        self._put(last)

    def _put(self, item: Any) -> None:
        while not self.closed.is_set():
            try:
                return self.queue.put(item, timeout=0.1)
            except queue.Full:
                pass  # looks again whether the epoch was closed

    def close(self) -> None:
        self.closed.set()
        self.thread.join()


class _End:
    """Ends the batches of an epoch, with the error of the thread if it has failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Makes a data loader read its batches in a thread, up to async_loader_queue_size batches ahead. It comes before the
    class of the data loader in the list of base classes. With a size of 0 it reads without a thread.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self._epochs: list[_Epoch] = []
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the threads. Iterators over the batches end."""
        epochs, self._epochs = self._epochs, []
        for epoch in epochs:
            epoch.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        epoch = _Epoch(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._epochs.append(epoch)
        try:
            while not epoch.closed.is_set():
                try:
                    batch = epoch.queue.get(timeout=0.1)
                except queue.Empty:
                    continue  # looks again whether the epoch was closed
                if isinstance(batch, _End):
                    if batch.error is not None:
                        raise batch.error
                    return
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            epoch.close()
            if epoch in self._epochs:
                self._epochs.remove(epoch)
