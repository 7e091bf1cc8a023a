#!/usr/bin/env python3
"""A provider of blockhaul follow: disks of a server of blockhaul with a control socket.

    server.py SOCKET CONTROL REQUEST

SOCKET is the server's Unix socket, CONTROL its control socket, and REQUEST the request in JSON, which blockhaul follow
adds. Disks have the names of exports. Each round is a snapshot with the bitmap that began at the one before, and a
new bitmap begins. Names of both begin with "follow-".
"""

import json
import os
import subprocess
import sys
import uuid

VERSION = 1
PREFIX = "follow-"


def control(*words):
    """The reply to a command of blockhaul ctl."""
    command = ["blockhaul", "ctl", sys.argv[2], *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def exports():
    """The exports of the server, by their names."""
    return {export["name"]: export for export in json.loads(control("exports", "--json"))["exports"]}


def remove(disk, kept, found):
    """Removes snapshots and bitmaps of a disk, except for the epochs in kept."""
    begin = f"{disk}-{PREFIX}"
    for name in found:
        if name.startswith(begin) and name.removeprefix(f"{disk}-") not in kept:
            control("export-remove", name, "--force")
    for bitmap in found[disk]["bitmaps"]:
        if bitmap["name"].startswith(PREFIX) and bitmap["name"] not in kept:
            control("bitmap-remove", disk, bitmap["name"])


def offer(request, disk):
    """Makes the point in time of a disk."""
    name, since, resume = disk["name"], disk["since"], disk["resume"]
    found = exports()
    if name not in found:
        sys.exit(f"{sys.argv[2]}: there is no export {name}")
    remove(name, {since, resume}, found)
    bitmaps = {bitmap["name"] for bitmap in found[name]["bitmaps"]}
    if since not in bitmaps:
        since = None
    epoch = resume
    if resume is None or f"{name}-{resume}" not in found:
        epoch = f"{PREFIX}{request['round']}-{uuid.uuid4().hex[:8]}"
        begun = ["--bitmap", since] if since else []
        control("snapshot-add", name, f"{name}-{epoch}", *begun, "--start-bitmap", epoch)
    return {
        "version": VERSION,
        "round": request["round"],
        "disk": name,
        "size": found[name]["size"],
        "source": f"nbd+unix:///{name}-{epoch}?socket={os.path.abspath(sys.argv[1])}",
        "epoch": epoch,
        "since": since,
        "bitmap": f"qemu:dirty-bitmap:{since}" if since else None,
    }


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    request = json.loads(sys.argv[3])
    if request["version"] != VERSION:
        sys.exit(f"version {request['version']} of the protocol is not known")
    for disk in request["disks"]:
        if request["operation"] == "round":
            print(json.dumps(offer(request, disk)), flush=True)
        else:
            remove(disk["name"], set(), exports())
    end = {"version": VERSION, "round": request["round"], "end": request["operation"]}
    print(json.dumps(end))


if __name__ == "__main__":
    main()
