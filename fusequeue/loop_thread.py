"""Blocking methods from asynchronous ones: an event loop in a daemon thread.

Not anyio's portal: its thread is no daemon, so a client that is not closed would keep its script from exiting.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import wraps
from queue import SimpleQueue
from types import GenericAlias
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args

from fusequeue.arguments import callback
from fusequeue.errors import InvalidArgument

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")
CLOSE_TIMEOUT_S = 2.0
"""For connections to close, in a script that exits too."""


class LoopThread:
    """An event loop in a thread, until `close`, the end of this object, or the end of the script."""

    def __init__(self, aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop = asyncio.new_event_loop()
        self.iterators: set[AsyncGenerator[Any]] = set()  # that are not closed
        work = (self.loop, self.iterators, aclose)
        self._thread = threading.Thread(target=_run, args=work, name="fusequeue", daemon=True)
        self._thread.start()
        self._starting = threading.RLock()  # what starts before the loop stops, ends with it
        self.close = weakref.finalize(self, _stop, self.loop, self._thread, self._starting)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; raises `RuntimeError` in the thread of the loop, which could not wait for it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("code that the client runs in its own thread cannot call the client")
        with self._starting:
            if self.close.alive and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        reason = "was opened in another process; open one in each" if self.close.alive else "is closed"
        raise RuntimeError(f"the client {reason}")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; an interrupt, such as Ctrl-C, cancels it."""
        future = self.start(coroutine)
        try:
            return self._result(future)
        except BaseException:
            future.cancel()
            raise

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the client is closed") from None

    def call_with_progress(
        self, run: Callable[[Any], Coroutine[Any, Any, T]], on_progress: Callable[[Any], object]
    ) -> T:
        """Run a coroutine function that has a callback; the callback is called in this thread."""
        values: SimpleQueue[tuple[Any, asyncio.Future[None]] | None] = SimpleQueue()

        async def pass_on(value: object) -> None:
            handled = self.loop.create_future()
            values.put((value, handled))
            await handled

        future = self.start(run(pass_on))
        future.add_done_callback(lambda _: values.put(None))
        try:
            while (item := values.get()) is not None:
                on_progress(item[0])
                self.loop.call_soon_threadsafe(_resolve, item[1])
            return self._result(future)
        except BaseException:
            future.cancel()
            raise


def _resolve(handled: asyncio.Future[None]) -> None:
    if not handled.done():  # the coroutine may have been canceled meanwhile
        handled.set_result(None)


def _run(
    loop: asyncio.AbstractEventLoop,
    iterators: set[AsyncGenerator[Any]],
    aclose: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(_end(tasks, iterators, aclose), CLOSE_TIMEOUT_S))
    loop.close()


async def _end(
    tasks: set[asyncio.Task[Any]],
    iterators: set[AsyncGenerator[Any]],
    aclose: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    for iterator in [*iterators]:  # before what they iterate over
        await iterator.aclose()
    await aclose()
    await asyncio.get_running_loop().shutdown_asyncgens()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, starting: threading.RLock) -> None:
    with starting:
        loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:  # which can collect the last reference to the client
        thread.join(CLOSE_TIMEOUT_S + 1)


class Blocking(Generic[A_co]):
    """Base of the blocking twins of asynchronous classes: the object, and the thread of its loop."""

    def __init__(self, asynchronous: A_co, thread: LoopThread) -> None:
        self._asynchronous = asynchronous
        self._thread = thread


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return the blocking twin of an asynchronous method."""

    @wraps(method)
    def call(twin: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        on_progress: Any = kwargs.get("on_progress")
        callback("on_progress", on_progress)
        if inspect.iscoroutinefunction(on_progress):
            raise InvalidArgument("on_progress: a coroutine function is for AsyncClient; use a function")
        if on_progress is None:
            return twin._thread.call(method(twin._asynchronous, *args, **kwargs))

        def run(pass_on: object) -> Coroutine[Any, Any, T]:
            kwargs["on_progress"] = pass_on
            return method(twin._asynchronous, *args, **kwargs)

        return twin._thread.call_with_progress(run, on_progress)

    return call


def iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[T]],
) -> Callable[Concatenate[Blocking[A], P], Generator[T]]:
    """Return the blocking twin of a method that yields."""

    @wraps(method)
    def call(twin: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        items, end = method(twin._asynchronous, *args, **kwargs), object()
        twin._thread.iterators.add(items)

        async def next_item() -> T | object:
            return await anext(items, end)

        try:
            while (item := twin._thread.call(next_item())) is not end:
                yield item  # type: ignore[misc]  # anything but the sentinel is a T
        finally:
            twin._thread.iterators.discard(items)
            with suppress(RuntimeError):  # the client is closed, and with it the iterator
                twin._thread.start(items.aclose())

    call.__signature__ = blocking_signature(method)  # type: ignore[attr-defined]
    return call


def blocking_signature(method: Callable[..., AsyncGenerator[T]]) -> inspect.Signature:
    """Return the signature of a method that yields as its blocking twin has it, for `help`."""
    signature = inspect.signature(method)
    yielded = signature.return_annotation  # a text in modules that postpone annotations
    if isinstance(yielded, str):
        return signature.replace(return_annotation=yielded.replace("AsyncGenerator", "Generator"))
    return signature.replace(return_annotation=GenericAlias(Generator, get_args(yielded)))
