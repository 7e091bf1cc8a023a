"""Devices for asyncio."""

import asyncio
import errno
import os
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

import blockhaul
import blockhaul.aio

MIB = 1 << 20


class Async(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.server = blockhaul.serve("memory:8m", unix=self.folder / "s")
        self.addCleanup(self.server.stop)

    async def test_many_requests_are_in_flight(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            self.assertEqual(disk.size, 8 * MIB)

            async def exchange(number):
                data = number.to_bytes(4096, "little")
                await disk.pwrite(data, number * 4096)
                return await disk.pread(4096, number * 4096) == data

            self.assertTrue(all(await asyncio.gather(*map(exchange, range(1024)))))
            buffer = bytearray(4)
            self.assertEqual(await disk.pread_into(buffer, 5 * 4096), 4)
            self.assertEqual(buffer, b"\5\0\0\0")
            await disk.zero(4096, 5 * 4096)
            await disk.trim(4096, 6 * 4096)
            await disk.flush()
            self.assertEqual(await disk.pread(1, 5 * 4096), b"\0")
            runs = [run async for run in disk.extents()]
            self.assertEqual(sum(run.length for run in runs), 8 * MIB)

    async def test_more_than_the_socket_takes_is_sent(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            blocks = [bytes([number + 1]) * MIB for number in range(8)]

            async def exchange(number):
                await disk.pwrite(blocks[number % 8], number % 8 * MIB)
                return await disk.pread(MIB, number % 8 * MIB) == blocks[number % 8]

            self.assertTrue(all(await asyncio.gather(*map(exchange, range(64)))))
            # Longer than one request.
            self.assertEqual(await disk.pread(8 * MIB, 0), b"".join(blocks))
            self.assertEqual(await disk.pread(0, MIB), b"")
            self.assertEqual(await disk.pread_into(bytearray(), MIB), 0)
            await disk.pwrite(b"", MIB)
            self.assertEqual(await disk.pread(1, 7 * MIB), b"\x08")

    async def test_errors_reach_the_task(self):
        async with await blockhaul.aio.connect(self.server.uri, readonly=True) as disk:
            with self.assertRaises(blockhaul.Error):
                await disk.pwrite(b"x", 0)
            with self.assertRaises(blockhaul.Error):
                await disk.zero(4096, 8 * MIB)
        with self.assertRaises(blockhaul.Error):
            await blockhaul.aio.connect(self.server.uri + "-absent")

    async def test_a_cancelled_task_waits_no_more(self):
        layers = ["delay?read=1s"]
        async with await blockhaul.aio.open("pattern:1m", layers=layers) as disk:
            task = asyncio.create_task(disk.pread(8, 0))
            await asyncio.sleep(0.05)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual(await disk.pread(8, 8), (8).to_bytes(8, "big"))

    async def test_a_copy_leaves_the_loop_free(self):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        copied = await blockhaul.aio.copy("pattern:4m", self.folder / "copy", rate="8m")
        ticking.cancel()
        self.assertEqual(copied.size, 4 * MIB)
        self.assertGreater(ticks, 3)
        copying = asyncio.create_task(
            blockhaul.aio.copy("pattern:1g", self.folder / "slow", rate="1m")
        )
        await asyncio.sleep(0.3)
        copying.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await copying


class Held:
    """A device whose reads above 4096 wait until they are let go."""

    def __init__(self):
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)

    def get_size(self):
        return 8 * MIB

    def pread(self, buffer, offset, flags):
        if offset == 8192:
            raise OSError(errno.ENOSPC, "full")
        if offset > 8192:
            self.begun.release()
            self.go.wait(60)
        buffer[:] = bytes([offset >> 12 & 255]) * len(buffer)

    def pwrite(self, buffer, offset, flags):
        pass


class InFlight(unittest.IsolatedAsyncioTestCase):
    """What happens while the server has not answered yet."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.held = Held()
        self.server = blockhaul.serve(self.held, unix=self.folder / "s", threads=4)
        self.addCleanup(self.server.stop)
        self.addCleanup(self.held.go.set)

    async def begun(self, count):
        for _ in range(count):
            self.assertTrue(await asyncio.to_thread(self.held.begun.acquire, timeout=60))

    async def test_a_cancelled_read_leaves_the_others_alone(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            buffer = bytearray(4096)
            tasks = [
                asyncio.create_task(disk.pread(MIB, MIB)),
                asyncio.create_task(disk.pread_into(buffer, 5 << 12)),
                asyncio.create_task(disk.pread(4096, 7 << 12)),
            ]
            await self.begun(3)
            for task in tasks[:2]:
                task.cancel()
            self.assertEqual(await disk.pread(4096, 4096), b"\1" * 4096)
            self.held.go.set()
            for task in tasks[:2]:
                with self.assertRaises(asyncio.CancelledError):
                    await task
            self.assertEqual(await tasks[2], b"\7" * 4096)
            self.assertEqual(await disk.pread(4096, 0), b"\0" * 4096)
            self.assertEqual(buffer, bytes(4096))

    async def test_an_error_of_the_server_is_that_of_one_request(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            reads = [disk.pread(4096, at) for at in (0, 8192, 4096)]
            first, failed, last = await asyncio.gather(*reads, return_exceptions=True)
            self.assertIsInstance(failed, blockhaul.Error)
            self.assertEqual(failed.errno, errno.ENOSPC)
            self.assertEqual((first, last), (b"\0" * 4096, b"\1" * 4096))

    async def test_close_waits_for_what_is_in_flight(self):
        disk = await blockhaul.aio.connect(self.server.uri)
        task = asyncio.create_task(disk.pread(4096, 5 << 12))
        await self.begun(1)
        closing = asyncio.create_task(disk.close())
        while not disk.device.closed:
            await asyncio.sleep(0.01)
        self.held.go.set()
        self.assertEqual(await task, b"\5" * 4096)
        await closing
        with self.assertRaises(blockhaul.Error) as caught:
            await disk.pread(4096, 0)
        self.assertEqual(caught.exception.errno, errno.EBADF)

    async def test_a_thread_may_use_the_device_too(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            task = asyncio.create_task(disk.pread(4096, 5 << 12))
            await self.begun(1)
            read = asyncio.create_task(asyncio.to_thread(disk.device.pread, 4096, 4096))
            later = [asyncio.create_task(disk.pread(4096, 6 << 12)) for _ in range(8)]
            await asyncio.sleep(0.05)
            self.held.go.set()
            self.assertEqual(await task, b"\5" * 4096)
            self.assertEqual(await read, b"\1" * 4096)
            self.assertEqual(await asyncio.gather(*later), [b"\6" * 4096] * 8)

    async def test_what_the_server_does_not_offer_leaves_the_loop_free(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            task = asyncio.create_task(disk.pread(4096, 5 << 12))
            await self.begun(1)
            # The device has no zero: it is done by writing.
            zero = asyncio.create_task(disk.zero(4096, 0))
            self.assertEqual(await asyncio.wait_for(asyncio.sleep(0, "free"), 30), "free")
            self.assertFalse(zero.done())
            self.held.go.set()
            self.assertEqual(await task, b"\5" * 4096)
            await zero
            self.assertEqual(await disk.pread(4096, 4096), b"\1" * 4096)

    async def test_a_fork_leaves_the_connection_to_the_parent(self):
        async with await blockhaul.aio.connect(self.server.uri) as disk:
            await disk.pread(4096, 0)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    disk.device.pread(4096, 0)
                except blockhaul.Error as error:
                    status = 0 if error.errno == errno.EBADF else 2
                finally:
                    os._exit(status)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(await disk.pread(4096, 4096), b"\1" * 4096)

    async def test_a_silent_server_is_given_up(self):
        async with await blockhaul.aio.connect(self.server.uri, timeout=0.5) as disk:
            reads = [disk.pread(4096, at << 12) for at in (5, 6, 7)]
            failed = await asyncio.gather(*reads, return_exceptions=True)
            self.assertEqual([error.errno for error in failed], [errno.ETIMEDOUT] * 3)
            self.held.go.set()

    async def test_a_lost_connection_fails_every_request(self):
        socket = self.folder / "t"
        words = [blockhaul.program(), "serve", "-f", "--layer", "delay?read=60s", "memory:8m"]
        server = subprocess.Popen([*words, "-U", socket], stderr=subprocess.DEVNULL)
        try:
            for _ in range(600):
                if socket.exists():
                    break
                await asyncio.sleep(0.05)
            disk = await blockhaul.aio.connect(f"nbd+unix:///?socket={socket}")
            tasks = [asyncio.create_task(disk.pread(4096, at << 12)) for at in range(100)]
            await asyncio.sleep(0.1)
        finally:
            server.kill()
            server.wait()
        failed = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        self.assertEqual({error.errno for error in failed}, {errno.ECONNRESET})
        with self.assertRaises(blockhaul.Error):
            await disk.pread(4096, 0)
        await disk.close()

    async def test_a_device_that_nobody_closes_lets_the_loop_go_on(self):
        disk = await blockhaul.aio.connect(self.server.uri)
        await disk.pread(4096, 0)
        del disk
        self.assertEqual(await asyncio.wait_for(asyncio.sleep(0.05, "free"), 30), "free")


class Loops(unittest.TestCase):
    def test_each_loop_gets_its_own_results(self):
        async def read(disk):
            return await blockhaul.aio.Device(disk).pread(8, 16)

        with blockhaul.open("pattern:1m") as disk:
            for _ in range(3):
                self.assertEqual(asyncio.run(read(disk)), (16).to_bytes(8, "big"))

    def test_a_connection_outlives_its_loop(self):
        with tempfile.TemporaryDirectory() as folder:
            held = Held()
            with blockhaul.serve(held, unix=Path(folder, "s"), threads=4) as server:

                async def leave():
                    disk = await blockhaul.aio.connect(server.uri)
                    lost = asyncio.create_task(disk.pread(4096, 5 << 12))
                    await asyncio.to_thread(held.begun.acquire, timeout=60)
                    lost.cancel()
                    return disk

                async def read(disk):
                    return await disk.pread(4096, 4096)

                disk = asyncio.run(leave())
                threading.Timer(0.2, held.go.set).start()
                for _ in range(3):
                    self.assertEqual(asyncio.run(read(disk)), b"\1" * 4096)
                asyncio.run(disk.close())

    def test_loops_of_several_threads_share_a_connection(self):
        wrong = []

        async def first():
            disk = await blockhaul.aio.connect(server.uri)

            async def other():
                for at in range(0, MIB, 8):
                    if await disk.pread(8, at) != at.to_bytes(8, "big"):
                        wrong.append(at)
                        return
                    if at > 4096 and time.monotonic() > end:
                        return

            end = time.monotonic() + 1
            threads = [threading.Thread(target=asyncio.run, args=[other()]) for _ in range(3)]
            for thread in threads:
                thread.start()
            await other()
            for thread in threads:
                await asyncio.to_thread(thread.join, 60)
                self.assertFalse(thread.is_alive())
            await disk.close()

        with tempfile.TemporaryDirectory() as folder:
            with blockhaul.serve("pattern:1m", unix=Path(folder, "s")) as server:
                asyncio.run(first())
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
