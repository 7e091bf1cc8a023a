#!/usr/bin/env python3
"""A provider of blockhaul follow: disks of QEMU or qemu-storage-daemon, over QMP.

    qemu.py QMP NBD SCRATCH REQUEST
    qemu.py QMP stop

QMP is the socket of a monitor that no other program uses, NBD the Unix socket of the NBD server, which is started if
there is none, and SCRATCH a directory for what the machine overwrites meanwhile. Disks have the names of block nodes.
REQUEST is the request in JSON, which blockhaul follow adds. The second form pauses the machine.

Each round is an overlay that keeps what the machine overwrites, and a copy of the bitmap that began at the round
before. All of these have names that begin with "follow-".
"""

import json
import os
import socket
import subprocess
import sys
import time
import uuid

VERSION = 1
PREFIX = "follow-"


class Monitor:
    """A connection to a monitor."""

    def __init__(self, path):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self.stream = connection.makefile("rw")
        self.stream.readline()
        self.run("qmp_capabilities")

    def run(self, command, **arguments):
        """The result of a command."""
        reply = self.reply(command, arguments)
        if "error" in reply:
            sys.exit(f"{command}: {reply['error']['desc']}")
        return reply["return"]

    def reply(self, command, arguments):
        """The reply to a command, behind events."""
        print(json.dumps({"execute": command, "arguments": arguments}), file=self.stream, flush=True)
        while True:
            line = self.stream.readline()
            if not line:
                sys.exit(f"{command}: the monitor has closed the connection")
            reply = json.loads(line)
            if "event" not in reply:
                return reply


def until_gone(list_names, name):
    """Waits until a list lacks a name."""
    while name in list_names():
        time.sleep(0.05)


class Provider:
    def __init__(self, monitor, nbd, scratch):
        self.monitor = monitor
        self.nbd = os.path.abspath(nbd)
        self.scratch = os.path.abspath(scratch)

    def nodes(self):
        found = self.monitor.run("query-named-block-nodes", flat=True)
        return {node["node-name"]: node for node in found}

    def bitmaps(self, disk):
        return [bitmap["name"] for bitmap in self.nodes()[disk].get("dirty-bitmaps", [])]

    def exports(self):
        return [export["id"] for export in self.monitor.run("query-block-exports")]

    def jobs(self):
        return [job["id"] for job in self.monitor.run("query-jobs")]

    def remove(self, disks, kept):
        """Removes what earlier rounds have made, except for the epochs in kept."""

        def is_old(name):
            return name.startswith(PREFIX) and name.rsplit(".", 1)[0] not in kept

        for name in filter(is_old, self.exports()):
            self.monitor.run("block-export-del", id=name, mode="hard")
            until_gone(self.exports, name)
        for name in filter(is_old, self.jobs()):
            self.monitor.run("job-cancel", id=name)
            until_gone(self.jobs, name)
        for name in filter(is_old, self.nodes()):
            self.monitor.run("blockdev-del", **{"node-name": name})
        for name in filter(is_old, os.listdir(self.scratch)):
            os.remove(os.path.join(self.scratch, name))
        for disk in disks:
            for name in filter(is_old, self.bitmaps(disk)):
                self.monitor.run("block-dirty-bitmap-remove", node=disk, name=name)

    def begin(self, disks, since):
        """Makes a point in time of all disks: its epoch."""
        epoch = PREFIX + uuid.uuid4().hex[:8]
        nodes = self.nodes()
        actions = []
        for index, disk in enumerate(disks):
            name = f"{epoch}.{index}"
            path = os.path.join(self.scratch, name)
            size = str(nodes[disk]["image"]["virtual-size"])
            create = ["qemu-img", "create", "-q", "-f", "qcow2", path, size]
            subprocess.run(create, check=True)
            file = {"driver": "file", "filename": path}
            overlay = {"driver": "qcow2", "node-name": name, "file": file, "backing": disk}
            self.monitor.run("blockdev-add", **overlay)
            backup = {"job-id": name, "device": disk, "target": name, "sync": "none"}
            actions.append({"type": "blockdev-backup", "data": backup})
            if since[disk]:
                frozen = {"node": disk, "name": name, "disabled": True}
                merged = {"node": disk, "target": name, "bitmaps": [since[disk]]}
                actions.append({"type": "block-dirty-bitmap-add", "data": frozen})
                actions.append({"type": "block-dirty-bitmap-merge", "data": merged})
            begun = {"node": disk, "name": epoch}
            actions.append({"type": "block-dirty-bitmap-add", "data": begun})
        self.monitor.run("transaction", actions=actions)
        for index, disk in enumerate(disks):
            name = f"{epoch}.{index}"
            bitmaps = [{"node": disk, "name": name}] if since[disk] else []
            export = {"type": "nbd", "id": name, "name": name, "node-name": name, "bitmaps": bitmaps}
            self.monitor.run("block-export-add", **export)
        return epoch

    def round(self, request):
        """An offer for each disk."""
        disks = [disk["name"] for disk in request["disks"]]
        nodes = self.nodes()
        for disk in disks:
            if disk not in nodes:
                sys.exit(f"there is no block node {disk}")
        kept = {disk[key] for disk in request["disks"] for key in ("since", "resume")}
        self.remove(disks, kept)
        since = {
            disk["name"]: disk["since"] if disk["since"] in self.bitmaps(disk["name"]) else None
            for disk in request["disks"]
        }
        resumed = {disk["resume"] for disk in request["disks"]}
        epoch = resumed.pop() if len(resumed) == 1 else None
        exports = self.exports()
        if epoch is None or any(f"{epoch}.{index}" not in exports for index in range(len(disks))):
            address = {"type": "unix", "data": {"path": self.nbd}}
            # One that is there already must listen on this socket.
            self.monitor.reply("nbd-server-start", {"addr": address})
            epoch = self.begin(disks, since)
        for index, disk in enumerate(disks):
            name = f"{epoch}.{index}"
            yield {
                "version": VERSION,
                "round": request["round"],
                "disk": disk,
                "size": nodes[disk]["image"]["virtual-size"],
                "source": f"nbd+unix:///{name}?socket={self.nbd}",
                "epoch": epoch,
                "since": since[disk],
                "bitmap": f"qemu:dirty-bitmap:{name}" if since[disk] else None,
            }


def main():
    if len(sys.argv) == 3 and sys.argv[2] == "stop":
        Monitor(sys.argv[1]).run("stop")
        return
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    request = json.loads(sys.argv[4])
    if request["version"] != VERSION:
        sys.exit(f"version {request['version']} of the protocol is not known")
    provider = Provider(Monitor(sys.argv[1]), sys.argv[2], sys.argv[3])
    if request["operation"] == "round":
        for offer in provider.round(request):
            print(json.dumps(offer), flush=True)
    else:
        provider.remove([disk["name"] for disk in request["disks"]], set())
    end = {"version": VERSION, "round": request["round"], "end": request["operation"]}
    print(json.dumps(end))


if __name__ == "__main__":
    main()
