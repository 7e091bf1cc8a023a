#!/usr/bin/env python3
"""A copy with a progress bar: that of tqdm if it is installed, otherwise one line.

    progress_bar.py SOURCE TARGET
"""

import sys

import blockhaul

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


def bar():
    """What is called with the progress of the copy."""
    if tqdm is None:

        def line(now):
            share = 100 * now.done // max(now.total, 1)
            print(f"\r{share:3} % of {now.total} bytes", end="", file=sys.stderr, flush=True)

        return line
    shown = tqdm(unit="B", unit_scale=True, unit_divisor=1024)

    def update(now):
        shown.total = now.total
        shown.update(now.done - shown.n)

    return update


if len(sys.argv) != 3:
    sys.exit("usage: progress_bar.py SOURCE TARGET")
copied = blockhaul.copy(sys.argv[1], sys.argv[2], progress=bar())
print(f"\n{copied.text}", file=sys.stderr)
