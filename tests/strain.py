#!/usr/bin/env python3
"""Runs a command while threads of it, and of all that it starts, are held back at random.

    tests/strain.py --runs 5 -- target/debug/deps/load-0123456789abcdef -q
    tests/strain.py --seed 7 --hold 2 -- cargo test -p blockhaul-server --test all load
    tests/strain.py --pause -- target/debug/deps/load-0123456789abcdef -q

A machine with much to do stops any thread at any place for a while. Tests that take for granted that
another thread or program has gone on pass on a quiet machine and fail there, some day. This makes it
happen: held threads get the scheduler's idle class, beside loops that use up both processors, for 0.02
seconds to --hold. With --pause, all processes stop at once while time goes on, as in a virtual machine
that is paused; this needs root and control groups of version 2. Exit status 1 if a run failed; the seed,
which is printed, holds back as much again, though not in the same places.
"""

import argparse
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
# How often threads are chosen, in seconds.
STEP = 0.01


def parse():
    about, details = __doc__.split("\n\n", 1)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=details, formatter_class=form)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--runs", type=int, default=1, help="how often the command is run (%(default)s)")
    parser.add_argument("--hold", type=float, default=0.8, help="longest hold, in seconds (%(default)s)")
    parser.add_argument("--share", type=float, default=0.16,
                        help="of the free threads, at each hundredth of a second (%(default)s)")
    parser.add_argument("--pause", action="store_true",
                        help="stop all processes at once, about once a second, instead of single threads")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.hold < 0.02 or not 0 <= arguments.share <= 1:
        parser.error("--runs is at least 1, --hold at least 0.02, --share between 0 and 1")
    if not shutil.which(arguments.command[0]):
        parser.error(f"there is no program {arguments.command[0]}")
    if arguments.pause and not cgroups():
        parser.error("--pause: no control groups of version 2 are mounted")
    return arguments


def busy_loop():
    """A process that uses up a processor, until this one ends."""
    pid = os.fork()
    if pid:
        return pid
    os.nice(10)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        pass


def threads(root):
    """Threads of a process and of all that descend from it."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found, processes = [], [root]
    while processes:
        process = processes.pop()
        processes += children.get(process, [])
        try:
            found += map(int, os.listdir(f"/proc/{process}/task"))
        except OSError:
            pass
    return found


def schedule(thread, policy):
    try:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    except OSError:
        # It has ended.
        pass


def cgroups():
    """Where control groups of version 2 are mounted."""
    with open("/proc/self/mounts") as mounts:
        for mount in map(str.split, mounts):
            if mount[2] == "cgroup2":
                return mount[1]
    return None


def run_with_pauses(arguments, chance):
    """Runs the command once in a control group that is frozen for moments; its exit status."""
    group = os.path.join(cgroups(), f"strain.{os.getpid()}")
    os.mkdir(group)

    def write(name, text):
        with open(os.path.join(group, name), "w") as file:
            file.write(text)

    try:
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group]
        child = subprocess.Popen(enter + arguments.command, start_new_session=True)
        while child.poll() is None:
            time.sleep(chance.uniform(0.2, 1))
            write("cgroup.freeze", "1")
            time.sleep(chance.uniform(0, arguments.hold))
            write("cgroup.freeze", "0")
        return child.returncode
    finally:
        write("cgroup.kill", "1")
        while True:
            try:
                os.rmdir(group)
                break
            except OSError:
                # Killed processes are still ending.
                time.sleep(STEP)


def run(arguments, chance):
    """Runs the command once; its exit status."""
    child = subprocess.Popen(arguments.command, start_new_session=True)
    held = {}
    while child.poll() is None:
        now = time.monotonic()
        for thread in [thread for thread, until in held.items() if until <= now]:
            schedule(thread, os.SCHED_OTHER)
            del held[thread]
        for thread in threads(child.pid):
            if thread not in held and chance.random() < arguments.share:
                schedule(thread, os.SCHED_IDLE)
                held[thread] = now + chance.uniform(0.02, arguments.hold)
        time.sleep(STEP)
    return child.returncode


def main():
    arguments = parse()
    chance = random.Random(arguments.seed)
    print(f"strain: seed {arguments.seed}", flush=True)
    loops = [busy_loop() for _ in range(0 if arguments.pause else os.cpu_count() or 1)]
    failed = 0
    try:
        for number in range(1, arguments.runs + 1):
            status = run_with_pauses(arguments, chance) if arguments.pause else run(arguments, chance)
            if status:
                failed += 1
                print(f"strain: run {number} ended with status {status}", flush=True)
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(f"strain: {failed} of {arguments.runs} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
