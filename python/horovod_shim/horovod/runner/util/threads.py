"""The functions of horovod.runner.util.threads."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any], args: tuple = (), name: str | None = None, daemon: bool = True, silent: bool = False
) -> threading.Thread:
    """Calls target(*args) in a new thread and returns the thread. If silent is true, exceptions are dropped."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}")

    def run() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that waits until event is set and then calls func(*args), and returns the thread. If stop is set
    before that, it does not call func.
    """

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls fn in threads with each of the argument lists, and returns a map from index to result. If
    block_until_all_done is false, it returns None at once. Raises RuntimeError if a call has raised an exception.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(max_concurrent_executions, len(args_list))))
    calls = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    for call in calls:
        if call.exception() is not None:
            raise RuntimeError(f"a call of {fn} in a thread has failed") from call.exception()
    return {i: call.result() for i, call in enumerate(calls)}
