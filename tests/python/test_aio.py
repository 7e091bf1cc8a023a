"""Devices for asyncio."""

import asyncio
import tempfile
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


class Loops(unittest.TestCase):
    def test_each_loop_gets_its_own_results(self):
        async def read(disk):
            return await blockhaul.aio.Device(disk).pread(8, 16)

        with blockhaul.open("pattern:1m") as disk:
            for _ in range(3):
                self.assertEqual(asyncio.run(read(disk)), (16).to_bytes(8, "big"))


if __name__ == "__main__":
    unittest.main()
