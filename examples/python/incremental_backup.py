#!/usr/bin/env python3
"""A full copy of a disk, then what a dirty bitmap marks as changed since then.

    incremental_backup.py nbd://host/disk disk.raw [--bitmap qemu:dirty-bitmap:NAME]

With --bitmap, disk.raw must hold the copy that was made when the bitmap began.
"""

import argparse

import blockhaul

STEP = 4 << 20


def changed(source, bitmap):
    """The ranges that the bitmap marks, in parts."""
    for run in source.extents(context=bitmap):
        if run.flags:
            for at in range(run.offset, run.offset + run.length, STEP):
                yield at, min(STEP, run.offset + run.length - at)


parser = argparse.ArgumentParser()
parser.add_argument("uri")
parser.add_argument("file")
parser.add_argument("--bitmap")
args = parser.parse_args()
if args.bitmap is None:
    print(blockhaul.copy(args.uri, args.file, flush=True).text)
else:
    with (
        blockhaul.connect(args.uri, readonly=True, contexts=[args.bitmap]) as source,
        blockhaul.open(args.file, "r+") as target,
    ):
        total = 0
        for at, length in changed(source, args.bitmap):
            target.pwrite(source.pread(length, at), at)
            total += length
        target.flush()
    print(f"{total} bytes have changed")
