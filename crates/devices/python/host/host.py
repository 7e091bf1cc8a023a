"""Runs a plugin in Python for blockhaul, which starts this file and is the other end of its sockets.

One socket brings requests, many in a batch; each worker of the program has a socket for replies. The
payloads are in memory that both processes map. See `wire.rs` of the crate for the messages.

Requests run on the thread that reads them while callbacks are fast: handing one to another thread
costs more than such a callback. If callbacks wait (for a disk or the network), requests go to a pool
of threads. A thread watches the reading one: a callback that takes long costs others 2 ms, and then
another thread takes over the socket. Coroutines run on an event loop instead, all on one thread.
"""

import asyncio
import builtins
import errno
import gc
import inspect
import json
import mmap
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections import deque

import nbdkit

REQUEST = struct.Struct("<BBHIQQQQII")
REPLY = struct.Struct("<QIHHII")
EXTENT = struct.Struct("<QQQ")

READ, WRITE, FLUSH, TRIM, ZERO, CACHE, EXTENTS = range(1, 8)
START, ENTER, LIST, OPEN, CLOSE, LEAVE, CANCEL, END = range(16, 24)
NAMES = {READ: "pread", WRITE: "pwrite", FLUSH: "flush", TRIM: "trim", ZERO: "zero", CACHE: "cache"}
NAMES[EXTENTS] = "extents"

ANSWER, LOG_DEBUG, SHUTDOWN, DISCONNECT, FREED = range(5)
# Flag of an answer: the plugin still uses the buffer.
KEPT = 1

# Most bytes taken from the socket at a time.
RECEIVE = 256 << 10
# Most replies sent at a time.
BATCH = 32
# Longest text of an error in bytes.
TEXT_MAX = 32 << 10
# Most extents in an answer.
EXTENTS_MAX = 64 << 10

# Callbacks that take longer wait for something, and other threads can run meanwhile (nanoseconds).
SLOW = 40_000
# One that takes this long is slow at once (nanoseconds).
VERY_SLOW = 2_000_000
# So many slow ones in a row are no accident.
SLOW_RUN = 4
# After so many fast ones in a row, slow ones are a new case.
FAST_RUN = 64
# Seconds on the pool until callbacks are measured again; doubles while they are still slow.
POOL_TIME, POOL_TIME_MAX = 0.05, 1.0
# Interval of the watching thread in seconds, and its number of idle intervals until it waits.
TICK, TICKS = 0.002, 50
# Seconds for callbacks to end when the program ends.
PATIENCE = 5.0
# Seconds until a process ends that the program has left, whatever its callbacks do.
GUARD = 30.0

CALL = nbdkit._CALL


class Wrong(Exception):
    """A mistake of the plugin that is no exception of its own: only the text is shown."""


class Handle:
    __slots__ = ("value", "connection", "strand", "tasks")

    def __init__(self, value, connection):
        self.value, self.connection = value, connection
        self.strand, self.tasks = Strand(), {}


class Strand:
    """The requests of a handle whose plugin takes one at a time for each handle."""

    __slots__ = ("jobs", "lock", "queued")

    def __init__(self):
        self.jobs, self.lock, self.queued = deque(), threading.Lock(), False


class Plugin:
    """A script and its callbacks. The names of the methods are those of the callbacks."""

    def __init__(self, path):
        self.path = path
        self.shown = os.path.basename(path)
        self.names = {}
        self.api = 1
        self.memory = None
        self.canary = os.urandom(16)
        self.kept = deque()

    def load(self):
        with open(self.path, "rb") as file:
            source = file.read()
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        module.__builtins__ = builtins
        sys.modules["__main__"] = module
        sys.argv = [self.path]
        sys.path[0] = os.path.dirname(os.path.abspath(self.path))
        self.names = module.__dict__
        exec(compile(source, self.path, "exec"), self.names)
        missing = [name for name in ("open", "get_size", "pread") if not self.has(name)]
        if missing:
            raise Wrong(f"the script has no function {' and no '.join(missing)}")
        self.api = self.names.get("API_VERSION", 1)
        if self.api not in (1, 2):
            raise Wrong(f"API_VERSION is {self.api!r}; known are 1 and 2")

    def has(self, name):
        return callable(self.names.get(name))

    def is_async(self):
        return any(inspect.iscoroutinefunction(self.names.get(name)) for name in CALLBACKS)

    async def call(self, name, *args):
        result = self.names[name](*args)
        if inspect.isawaitable(result):
            result = await result
        return result

    async def ask(self, name, otherwise, handle):
        """A truth value; only True is true, as in nbdkit."""
        if self.has(name):
            return (await self.call(name, handle)) is True
        return otherwise

    async def number(self, name, otherwise, most, *args):
        if not self.has(name):
            return otherwise
        value = await self.call(name, *args)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise Wrong(f"{name} returned {value!r} instead of a number from 0 to {most}")
        return int(value)

    async def text(self, name, otherwise, *args):
        if not self.has(name):
            return otherwise
        value = await self.call(name, *args)
        if not isinstance(value, str):
            raise Wrong(f"{name} returned {value!r} instead of a string")
        return value

    async def facts(self, handle, readonly):
        """What the program asks once for each handle, in nbdkit's order."""
        has, value = self.has, handle.value
        size = await self.call("get_size", value)
        if not isinstance(size, int) or not 0 <= size < 1 << 63:
            raise Wrong(f"get_size returned {size!r} instead of a number of bytes")
        write = await self.ask("can_write", has("pwrite"), value) and not readonly
        flush = await self.ask("can_flush", has("flush"), value)
        zero = await self.ask("can_zero", has("zero"), value)
        return {
            "size": int(size),
            "description": await self.text("export_description", "", value),
            "block": await self.block_size(value),
            "write": write,
            "flush": flush,
            "zero": zero,
            "fast_zero": await self.ask("can_fast_zero", not zero, value),
            "trim": await self.ask("can_trim", has("trim"), value),
            "fua": await self.number("can_fua", 1 if flush else 0, 2, value),
            "cache": await self.number("can_cache", 2 if has("cache") else 0, 2, value),
            "extents": await self.ask("can_extents", has("extents"), value),
            "rotational": await self.ask("is_rotational", False, value),
            "multi_conn": await self.ask("can_multi_conn", False, value),
        }

    async def block_size(self, value):
        if not self.has("block_size"):
            return None
        sizes = await self.call("block_size", value)
        fine = isinstance(sizes, (tuple, list)) and len(sizes) == 3
        if not fine or not all(isinstance(n, int) and 0 <= n < 1 << 32 for n in sizes):
            raise Wrong(f"block_size returned {sizes!r} instead of three sizes in bytes")
        return [int(n) for n in sizes]

    async def exports(self, readonly, tls):
        """The list of exports, as pairs of name and description."""
        if not self.has("list_exports"):
            return [[await self.default(readonly, tls), ""]]
        found = []
        for entry in await self.call("list_exports", readonly, tls):
            pair = (entry, "") if isinstance(entry, str) else entry
            fine = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not fine or not all(isinstance(text, str) for text in pair):
                raise Wrong(f"list_exports returned {entry!r} instead of a name or a pair of strings")
            found.append(list(pair))
        return found

    async def default(self, readonly, tls):
        return await self.text("default_export", "", readonly, tls)

    # The data callbacks: a buffer is prepared, then `finish…` checks and takes it back.

    def lend(self, at, count, op):
        """Memory for a read or a write. Each request has its own buffer object, whose references show
        whether the plugin keeps a slice; what stands at the end of a read shows a short fill."""
        base = memoryview(self.memory)
        view = base[at : at + count]
        if op == WRITE:
            view = view.toreadonly()
        elif count >= 16:
            view[count - 16 :] = self.canary
        return base, view

    def filled(self, view, result):
        count = len(view)
        if self.api == 1:
            data = memoryview(result).cast("B")
            if len(data) < count:
                raise Wrong(f"pread returned {len(data)} bytes instead of {count}")
            view[:] = data[:count]
        elif count >= 16 and view[count - 16 :] == self.canary:
            raise Wrong(f"pread did not fill its buffer of {count} bytes")

    def give_back(self, lent, at):
        """Ends the plugin's use of a buffer. Returns KEPT if it still refers to it."""
        if is_free(*lent):
            return 0
        self.kept.append((at, lent))
        return KEPT

    def released(self):
        """The memory of kept buffers that are not used any more."""
        for _ in range(len(self.kept)):
            at, lent = self.kept.popleft()
            if is_free(*lent):
                yield at
            else:
                self.kept.append((at, lent))

    def arguments(self, op, handle, flags, at, count):
        """The arguments of a callback without a buffer."""
        value = handle.value
        if self.api == 1:
            if op == FLUSH:
                return (value,)
            if op == TRIM:
                return (value, count, at)
            if op == ZERO:
                return (value, count, at, flags & nbdkit.FLAG_MAY_TRIM != 0)
        return (value, flags) if op == FLUSH else (value, count, at, flags)

    def found(self, op, result, call):
        """What a callback without a buffer returned, as the payload of the answer."""
        if op == EXTENTS:
            return pack_extents(result)
        if op == ZERO and call[1] in (errno.EOPNOTSUPP, errno.ENOTSUP):
            # As nbdkit: this number counts without an exception, too.
            raise Wrong("zero is not supported here")
        return b""


CALLBACKS = """open close get_size block_size is_rotational can_multi_conn can_write can_flush can_trim
can_zero can_fast_zero can_fua can_cache can_extents export_description preconnect list_exports
default_export pread pwrite flush trim zero cache extents get_ready after_fork""".split()


def is_free(base, view):
    """Releases a view. False: something else refers to the same memory."""
    try:
        view.release()
    except BufferError:
        return False
    for owner in gc.get_referents(base):
        # The references of `base`, `view`, `owner`, the list and the call.
        return sys.getrefcount(owner) <= OWNERS
    return True


def count_owners():
    """References to the owner of a view's memory that nobody else uses."""
    base = memoryview(bytearray(2))
    view = base[0:1]
    view.release()
    for owner in gc.get_referents(base):
        return sys.getrefcount(owner)
    return 0


OWNERS = count_owners()


def pack_extents(result):
    packed = []
    for extent in result:
        if not isinstance(extent, tuple) or len(extent) != 3:
            raise Wrong(f"extents returned {extent!r} instead of (offset, length, type)")
        try:
            packed.append(EXTENT.pack(*extent))
        except struct.error:
            raise Wrong(f"extents returned {extent!r}: not three numbers from 0 on") from None
        if len(packed) == EXTENTS_MAX:
            break
    if not packed:
        raise Wrong("extents returned an empty list")
    return b"".join(packed)


def describe(error):
    """The last line of an exception, and its traceback without the frames of this file."""
    if isinstance(error, Wrong):
        return str(error), str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    full = "".join(traceback.format_exception(type(error), error, frames)).strip()
    return line, full


def mark_kept(reply):
    """The same answer, which says that the plugin still uses the buffer."""
    link, message = reply
    cookie, status, kind, flags, size, _ = REPLY.unpack_from(message)
    return link, REPLY.pack(cookie, status, kind, flags | KEPT, size, 0) + message[REPLY.size :]


def finish(coroutine):
    """The result of a coroutine that does not wait for anything."""
    try:
        coroutine.send(None)
        coroutine.throw(Wrong("the callback waits, but none is declared with async def"))
    except StopIteration as stop:
        return stop.value


def new_loop():
    try:
        import uvloop

        loop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if hasattr(asyncio, "eager_task_factory"):
        loop.set_task_factory(asyncio.eager_task_factory)
    return loop


class Host:
    def __init__(self, requests, memory, links):
        self.requests = requests
        self.links = [(link, threading.Lock()) for link in links]
        self.memory = mmap.mmap(memory, os.fstat(memory).st_size)
        self.plugin = None
        self.model, self.threads = nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS, 1
        self.stdio_safe = True
        self.handles, self.connections = {}, {}
        self.rest, self.done = b"", deque()
        self.loop, self.flushing = None, False
        self.forked = False
        # The thread that reads: its number, whether it is in callbacks, and in which one.
        self.role, self.epoch, self.running, self.turn = threading.Lock(), 0, False, 0
        self.todo, self.alarm, self.asleep = deque(), threading.Event(), False
        self.pool_until, self.pool_time, self.slow_run, self.fast_run = 0.0, POOL_TIME, 0, 0
        # The pool.
        self.queue, self.count = queue.SimpleQueue(), threading.Lock()
        self.active, self.workers = 0, 0
        # An entry for each thread that runs requests as it reads them; appending needs no lock.
        self.readers = []
        # No more requests come; those that have come are run before the end.
        self.ending = False
        # Tasks other than those of handles.
        self.tasks = set()
        os.register_at_fork(after_in_child=self.is_fork)

    # Messages to the program.

    def send(self, link, message):
        socket, lock = self.links[link]
        try:
            with lock:
                socket.sendall(message)
        except OSError:
            # The program is gone, or this is a fork: the reading thread notices.
            self.leave_fork()

    def flush(self):
        """Sends the replies that are ready."""
        by_link = {}
        while True:
            try:
                link, message = self.done.popleft()
            except IndexError:
                break
            by_link.setdefault(link, []).append(message)
        for link, messages in by_link.items():
            self.send(link, b"".join(messages))

    def tell(self, kind, number=0, status=0, text=b""):
        self.send(0, REPLY.pack(number, status, kind, 0, len(text), 0) + text)

    def debug(self, text):
        self.tell(LOG_DEBUG, text=text.encode(errors="replace")[:TEXT_MAX])

    def shutdown(self):
        self.tell(SHUTDOWN)

    def disconnect(self, connection, force):
        self.tell(DISCONNECT, connection["number"], int(force))

    def failed(self, job, call, name, error):
        number = call[1]
        if isinstance(error, asyncio.CancelledError):
            number = number or errno.ESHUTDOWN
        if not 0 < number < 4096:
            number = errno.EIO
        line, full = describe(error)
        where = f"{self.plugin.shown}: {name}: "
        if isinstance(error, Wrong) and job[0] == START:
            where = f"{self.plugin.shown}: "
        text = f"{where}{line}\0{where}{full}".encode(errors="replace")[:TEXT_MAX]
        return job[2], REPLY.pack(job[4], number, ANSWER, 0, len(text), 0) + text

    # Requests for data.

    def run(self, job):
        """Carries out a request; returns the link and the answer."""
        op, flags, link, number, cookie, at, count, memory, _, payload = job
        if op >= START:
            return finish(self.control(job))
        plugin, handle = self.plugin, self.handles[number]
        call = [handle.connection, 0]
        CALL.set(call)
        lent, kept, result = None, 0, b""
        try:
            if op == READ:
                lent = plugin.lend(memory, count, op)
                view = lent[1]
                if plugin.api == 1:
                    plugin.filled(view, plugin.names["pread"](handle.value, count, at))
                else:
                    plugin.names["pread"](handle.value, view, at, flags)
                    plugin.filled(view, None)
            elif op == WRITE:
                lent = plugin.lend(memory, count, op)
                view = lent[1]
                if plugin.api == 1:
                    plugin.names["pwrite"](handle.value, bytearray(view), at)
                else:
                    plugin.names["pwrite"](handle.value, view, at, flags)
            else:
                value = plugin.names[NAMES[op]](*plugin.arguments(op, handle, flags, at, count))
                result = plugin.found(op, value, call)
        except BaseException as error:
            reply = self.failed(job, call, NAMES[op], error)
            if lent is not None and plugin.give_back(lent, memory):
                reply = mark_kept(reply)
            return reply
        if lent is not None:
            kept = plugin.give_back(lent, memory)
        return link, REPLY.pack(cookie, 0, ANSWER, kept, len(result), 0) + result

    async def run_async(self, job):
        """The same where callbacks may be coroutines."""
        op, flags, link, number, cookie, at, count, memory, _, payload = job
        if op >= START:
            return await self.control(job)
        plugin, handle = self.plugin, self.handles[number]
        call = [handle.connection, 0]
        CALL.set(call)
        lent, kept, result = None, 0, b""
        try:
            if op == READ:
                lent = plugin.lend(memory, count, op)
                view = lent[1]
                if plugin.api == 1:
                    plugin.filled(view, await plugin.call("pread", handle.value, count, at))
                else:
                    await plugin.call("pread", handle.value, view, at, flags)
                    plugin.filled(view, None)
            elif op == WRITE:
                lent = plugin.lend(memory, count, op)
                view = lent[1]
                if plugin.api == 1:
                    await plugin.call("pwrite", handle.value, bytearray(view), at)
                else:
                    await plugin.call("pwrite", handle.value, view, at, flags)
            else:
                value = await plugin.call(NAMES[op], *plugin.arguments(op, handle, flags, at, count))
                result = plugin.found(op, value, call)
        except BaseException as error:
            reply = self.failed(job, call, NAMES[op], error)
            if lent is not None and plugin.give_back(lent, memory):
                reply = mark_kept(reply)
            return reply
        if lent is not None:
            kept = plugin.give_back(lent, memory)
        return link, REPLY.pack(cookie, 0, ANSWER, kept, len(result), 0) + result

    # Everything else.

    async def control(self, job):
        op, _, link, number, cookie, at, *_ = job
        payload = json.loads(job[9]) if job[9] else {}
        work = CONTROL[op]
        # The third: the name of the callback, for messages.
        call = [self.connections.get(at), 0, work.__name__]
        CALL.set(call)
        try:
            result = await work(self, number, at, payload, call)
        except BaseException as error:
            return self.failed(job, call, call[2], error)
        text = json.dumps(result).encode() if result is not None else b""
        return link, REPLY.pack(cookie, 0, ANSWER, 0, len(text), 0) + text

    async def configure(self, number, at, start, call):
        plugin = self.plugin
        call[2] = "config"
        for key, value in start["config"]:
            if not plugin.has("config"):
                raise Wrong(f"the script takes no parameters, but {key}= is given")
            await plugin.call("config", key, value)
        if start["dump"]:
            return await self.dump(plugin)
        for name in ("config_complete", "thread_model", "get_ready", "after_fork"):
            call[2] = name
            if name == "thread_model":
                self.model = await plugin.number(name, self.model, 3)
            elif plugin.has(name):
                await plugin.call(name)
        self.threads = start["threads"] if self.model == nbdkit.THREAD_MODEL_PARALLEL else 1
        if self.model == nbdkit.THREAD_MODEL_SERIALIZE_REQUESTS:
            self.threads = start["threads"]
        return {"model": self.model, "api": plugin.api, "async": self.loop is not None}

    async def dump(self, plugin):
        import contextlib
        import io

        text = io.StringIO()
        if plugin.has("dump_plugin"):
            with contextlib.redirect_stdout(text):
                await plugin.call("dump_plugin")
        model = await plugin.number("thread_model", self.model, 3)
        version = ".".join(str(part) for part in sys.version_info[:3])
        return {"model": model, "api": plugin.api, "text": text.getvalue(), "python": version}

    async def preconnect(self, number, at, visit, call):
        connection = dict(visit, number=at)
        call[0] = self.connections[at] = connection
        if self.plugin.has("preconnect"):
            try:
                await self.plugin.call("preconnect", connection["readonly"])
            except BaseException:
                del self.connections[at]
                raise

    async def list_exports(self, number, at, visit, call):
        call[0].update(visit)
        return await self.plugin.exports(call[0]["readonly"], visit["tls"])

    async def open(self, number, at, visit, call):
        plugin, connection = self.plugin, dict(call[0], **visit)
        call[0] = connection
        readonly = connection["readonly"]
        call[2] = "default_export"
        if not connection["export"] and plugin.has("default_export"):
            connection["export"] = await plugin.default(readonly, connection["tls"])
        call[2] = "open"
        value = await plugin.call("open", readonly)
        handle = Handle(value, connection)
        try:
            call[2] = "facts"
            facts = await plugin.facts(handle, readonly)
        except BaseException:
            await self.closed(handle)
            raise
        self.handles[number] = handle
        return dict(facts, export=connection["export"])

    async def close(self, number, at, visit, call):
        handle = self.handles.pop(number)
        call[0] = handle.connection
        await self.closed(handle)

    async def closed(self, handle):
        if self.plugin.has("close"):
            await self.plugin.call("close", handle.value)

    async def leave(self, number, at, visit, call):
        self.connections.pop(at, None)

    def cancel(self, number, cookie):
        """Cancels the coroutines of a handle: one, or all."""
        handle = self.handles.get(number)
        tasks = list(handle.tasks.items()) if handle else []
        for task, of in tasks:
            if cookie in (0, of):
                task.cancel()

    # The reading thread.

    def parse(self, data):
        """The complete requests in what was received."""
        if not data:
            self.ending = True
        data, start, jobs = self.rest + data if self.rest else data, 0, []
        while len(data) - start >= REQUEST.size:
            job = REQUEST.unpack_from(data, start)
            stop = start + REQUEST.size + job[8]
            if stop > len(data):
                break
            if job[8]:
                job = job[:9] + (data[start + REQUEST.size : stop],)
            start = stop
            if job[0] == END:
                self.ending = True
            elif job[0] == CANCEL:
                self.cancel(job[3], job[5])
            else:
                jobs.append(job if job[8] else job[:9] + (None,))
        self.rest = data[start:]
        if self.plugin.kept:
            self.free_kept()
        return jobs

    def free_kept(self):
        for at in list(self.plugin.released()):
            self.tell(FREED, at)

    def read(self, epoch):
        """Reads requests until another thread does."""
        parallel = self.model == nbdkit.THREAD_MODEL_PARALLEL and self.threads > 1
        strands = self.model == nbdkit.THREAD_MODEL_SERIALIZE_REQUESTS
        while True:
            try:
                jobs = self.parse(self.requests.recv(RECEIVE))
            except OSError:
                self.leave_fork()
                self.end()
            if strands or (parallel and time.monotonic() < self.pool_until):
                for job in jobs:
                    self.dispatch(job, strands)
            elif not self.run_here(jobs, epoch, parallel):
                return self.work()
            if self.ending:
                self.end()

    def run_here(self, jobs, epoch, parallel):
        """Runs requests on this thread. False: another one reads now."""
        self.readers.append(None)
        try:
            return self.run_all(jobs, epoch, parallel)
        finally:
            self.readers.pop()

    def run_all(self, jobs, epoch, parallel):
        self.todo.extend(jobs)
        self.running = True
        if self.asleep:
            self.alarm.set()
        clock = time.perf_counter_ns
        while True:
            try:
                job = self.todo.popleft()
            except IndexError:
                break
            self.turn += 1
            began = clock()
            self.done.append(self.run(job))
            took = clock() - began
            if self.epoch != epoch:
                self.flush()
                return False
            if parallel and self.is_slow(took):
                self.flush()
                self.dispatch_all()
                break
            if took > SLOW or len(self.done) >= BATCH:
                self.flush()
        self.flush()
        with self.role:
            if self.epoch != epoch:
                return False
            self.running = False
        return True

    def is_slow(self, took):
        """Whether callbacks take so long now that a pool of threads pays."""
        if took <= SLOW:
            self.slow_run = 0
            self.fast_run += 1
            if self.fast_run == FAST_RUN:
                self.pool_time = POOL_TIME
            return False
        self.slow_run += 1
        if self.slow_run < SLOW_RUN and took < VERY_SLOW:
            return False
        self.to_pool()
        return True

    def to_pool(self):
        self.slow_run = self.fast_run = 0
        self.pool_until = time.monotonic() + self.pool_time
        self.pool_time = min(self.pool_time * 2, POOL_TIME_MAX)

    # The thread that watches it.

    def watch(self):
        seen, idle = 0, 0
        while True:
            time.sleep(TICK)
            if not self.running:
                idle += 1
                if idle > TICKS:
                    self.wait_for_alarm()
                    idle = 0
            elif self.turn != seen:
                seen, idle = self.turn, 0
            else:
                self.flush()
                if self.threads > 1 and self.take_over(seen):
                    return

    def wait_for_alarm(self):
        self.asleep = True
        if not self.running:
            self.alarm.wait()
        self.asleep = False
        self.alarm.clear()

    def take_over(self, turn):
        """Reads in place of a thread whose callback takes long. False: it has returned."""
        with self.role:
            if not self.running or self.turn != turn:
                return False
            self.epoch += 1
            epoch, self.running = self.epoch, False
        self.to_pool()
        self.start_thread(self.watch)
        self.dispatch_all()
        self.read(epoch)
        return True

    def guard(self):
        """Ends the process when the program is gone and a callback does not return."""
        polls = select.poll()
        polls.register(self.requests, select.POLLRDHUP)
        polls.poll()
        time.sleep(GUARD)
        os._exit(1)

    # The pool.

    def dispatch_all(self):
        while True:
            try:
                self.dispatch(self.todo.popleft(), False)
            except IndexError:
                return

    def dispatch(self, job, strands):
        if strands and job[3] in self.handles:
            strand = self.handles[job[3]].strand
            with strand.lock:
                strand.jobs.append(job)
                if strand.queued:
                    return
                strand.queued = True
            job = strand
        with self.count:
            self.active += 1
            more = self.active > self.workers and self.workers < self.threads
            if more:
                self.workers += 1
        self.queue.put(job)
        if more:
            self.start_thread(self.work_on)

    def work(self):
        """Joins the pool, unless it is full."""
        with self.count:
            full = self.workers >= self.threads
            if not full:
                self.workers += 1
        if not full:
            self.work_on()
        elif threading.current_thread() is threading.main_thread():
            # The process lives as long as its main thread.
            threading.Event().wait()

    def work_on(self):
        while True:
            job = self.queue.get()
            if type(job) is Strand:
                self.work_off(job)
            else:
                self.send(*self.run(job))
            with self.count:
                self.active -= 1

    def work_off(self, strand):
        while True:
            with strand.lock:
                if not strand.jobs:
                    strand.queued = False
                    return
                job = strand.jobs.popleft()
            self.send(*self.run(job))

    def start_thread(self, target):
        threading.Thread(target=target, daemon=True).start()

    # The event loop.

    def readable(self):
        try:
            jobs = self.parse(self.requests.recv(RECEIVE, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except OSError:
            self.leave_fork()
            self.end()
        for job in jobs:
            task = self.loop.create_task(self.answer(job))
            handle = self.handles.get(job[3])
            if handle is not None and job[0] < START:
                handle.tasks[task] = job[4]
                task.add_done_callback(lambda task, job=job, handle=handle: self.over(task, job, handle))
            else:
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        if self.ending:
            self.loop.remove_reader(self.requests)
            self.last = self.loop.create_task(self.end_after_tasks())

    async def end_after_tasks(self):
        tasks = self.tasks.union(*(handle.tasks for handle in self.handles.values()))
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        self.flush()
        self.end()

    def over(self, task, job, handle):
        handle.tasks.pop(task)
        if task.cancelled():
            # Before its first step.
            self.send(*self.failed(job, [None, 0], NAMES[job[0]], asyncio.CancelledError()))

    async def answer(self, job):
        self.done.append(await self.run_async(job))
        if not self.flushing:
            self.flushing = True
            self.loop.call_soon(self.flush_soon)

    def flush_soon(self):
        self.flushing = False
        self.flush()

    # Begin and end.

    def serve(self):
        job = self.first()
        self.begin(job, json.loads(job[9]))
        self.stdio_safe = False
        self.start_thread(self.guard)
        sys.stdout.flush()
        os.dup2(2, 1)
        if self.loop is not None:
            self.loop.add_reader(self.requests, self.readable)
            self.loop.run_forever()
        self.start_thread(self.watch)
        self.read(0)

    def first(self):
        """The first request: to load the plugin."""
        while True:
            data = self.requests.recv(RECEIVE)
            if not data:
                os._exit(0)
            self.rest += data
            if len(self.rest) < REQUEST.size:
                continue
            job = REQUEST.unpack_from(self.rest)
            stop = REQUEST.size + job[8]
            if len(self.rest) >= stop:
                job = job[:9] + (self.rest[REQUEST.size : stop],)
                self.rest = self.rest[stop:]
                return job

    def begin(self, job, start):
        self.plugin = Plugin(start["script"])
        self.plugin.memory = self.memory
        self.stdio_safe = start["stdio"]
        call = [None, 0]
        CALL.set(call)
        try:
            self.plugin.load()
        except BaseException as error:
            self.send(*self.failed(job, call, "load", error))
            os._exit(1)
        if self.plugin.is_async():
            self.loop = new_loop()
            self.send(*self.loop.run_until_complete(self.control(job)))
        else:
            self.send(*finish(self.control(job)))

    def is_fork(self):
        """In a fork of the plugin: the sockets are its parent's."""
        self.forked = True
        self.requests.close()
        for link, _ in self.links:
            link.close()

    def leave_fork(self):
        if self.forked:
            print(f"{self.plugin.shown}: a forked process returned from a callback, and ends", file=sys.stderr)
            os._exit(1)

    def end(self):
        until = time.monotonic() + PATIENCE
        while (self.active or self.readers) and time.monotonic() < until:
            time.sleep(TICK)
        for name in ("cleanup", "unload"):
            try:
                if name == "cleanup" and self.plugin.has(name):
                    self.plugin.names[name]()
            except BaseException as error:
                print(f"{self.plugin.shown}: {name}: {describe(error)[1]}", file=sys.stderr)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)


CONTROL = {
    START: Host.configure,
    ENTER: Host.preconnect,
    LIST: Host.list_exports,
    OPEN: Host.open,
    CLOSE: Host.close,
    LEAVE: Host.leave,
}


def main(requests, memory, links):
    # The program decides when to end, also where signals go to a whole group of processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    host = Host(requests, memory, links)
    nbdkit._host = host
    host.serve()
