"""Disks over NBD and in files: a client, devices, copies and a server.

Sizes, offsets and lengths are in bytes, times in seconds. A failed request, connection or device raises
``Error``, an ``OSError`` whose ``errno`` is an error number. All calls release the interpreter's lock while
they wait, and may be made from any thread.

    import blockhaul

    with blockhaul.connect("nbd://localhost/disk") as disk:
        print(disk.size, disk.pread(512, 0))

``blockhaul.aio`` has the same for asyncio, and ``blockhaul.nbd`` the interface of libnbd's module.
"""

import atexit as _atexit
import os as _os
import shutil as _shutil
import sysconfig as _sysconfig

from . import _blockhaul
from ._blockhaul import Copied, CopyError, Error, __version__
from ._copy import Progress, copy
from ._device import Device, Export, Extent, connect, extents, list_exports, open
from ._device import close_all as _close_all
from ._device import forget_all as _forget_devices
from ._serve import Object, Server, serve
from ._serve import forget_all as _forget_servers
from ._serve import stop_all as _stop_all

__all__ = [
    "Copied",
    "CopyError",
    "Device",
    "Error",
    "Export",
    "Extent",
    "Object",
    "Progress",
    "Server",
    "__version__",
    "connect",
    "copy",
    "extents",
    "list_exports",
    "open",
    "program",
    "serve",
]


def program() -> str | None:
    """The file of the command ``blockhaul``: the one that was installed with this package, or else one on
    PATH; ``None`` if there is none."""
    own = _os.path.join(_sysconfig.get_path("scripts"), "blockhaul")
    return own if _os.access(own, _os.X_OK) else _shutil.which("blockhaul")


def _after_fork() -> None:
    """In the child: what is open belongs to the parent."""
    _blockhaul.after_fork()
    _forget_devices()
    _forget_servers()


_os.register_at_fork(after_in_child=_after_fork)
# The last one is called first.
_atexit.register(_blockhaul.shut_down)
_atexit.register(_close_all)
_atexit.register(_stop_all)
_found = program()
if _found is not None:
    _blockhaul.set_program(_found)
del _found
