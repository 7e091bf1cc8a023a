# What the commands in lines.txt find, in a new directory.
set -e
truncate -s 1M disk.raw
blockhaul copy --no-progress sample:1M data.raw
cp data.raw other.raw
printf x | dd of=other.raw bs=1 seek=500000 conv=notrunc status=none
touch empty.raw
mkdir folder
echo 'not a journal' > text
ln -s loop loop

blockhaul create qcow2:image.qcow2 1M
blockhaul create qcow2:middle.qcow2 1M
blockhaul create 'qcow2:top.qcow2?backing=qcow2:middle.qcow2' 1M
cp image.qcow2 cut.qcow2
truncate -s 70000 cut.qcow2
cp image.qcow2 version.qcow2
printf '\11' | dd of=version.qcow2 bs=1 seek=7 conv=notrunc status=none
cp image.qcow2 table.qcow2
printf '\377' | dd of=table.qcow2 bs=1 seek=43 conv=notrunc status=none
cp image.qcow2 corrupt.qcow2
printf '\2' | dd of=corrupt.qcow2 bs=1 seek=79 conv=notrunc status=none

blockhaul tls init --host localhost pki > made
blockhaul tls init --host localhost other-pki > made
mkdir anonymous
cp pki/ca-cert.pem anonymous
blockhaul tls init --psk alice keys.psk > made
blockhaul tls init --psk alice other.psk > made
echo bad > bad.psk
chmod 600 bad.psk

script() {
    { echo '#!/bin/sh'; echo 'case $1 in'; cat; echo '*) exit 2 ;;'; echo 'esac'; } > "$1"
    chmod +x "$1"
}
script disk.sh <<'E'
get_size) echo 4k ;;
can_write) exit 0 ;;
pread) echo 'EIO the script cannot read' >&2; exit 1 ;;
pwrite) echo 'EIO the script cannot write' >&2; exit 1 ;;
E
script full.sh <<'E'
get_size) echo 4k ;;
can_write) exit 0 ;;
pread) echo 'ENOSPC the script has no space' >&2; exit 1 ;;
pwrite) echo 'ENOSPC the script has no space' >&2; exit 1 ;;
E
script slow.sh <<'E'
get_size) echo 4k ;;
pread) sleep 9 ;;
E
script size.sh <<'E'
get_size) echo 1X ;;
E
script refused.sh <<'E'
open) echo 'EPERM nobody may open it' >&2; exit 1 ;;
get_size) echo 4k ;;
E
script readonly.sh <<'E'
open) echo 'EROFS it is read-only' >&2; exit 1 ;;
get_size) echo 4k ;;
E
script memory.sh <<'E'
open) echo 'ENOMEM it needs more memory' >&2; exit 1 ;;
get_size) echo 4k ;;
E
script late.sh <<'E'
open) echo 'ETIMEDOUT it took too long' >&2; exit 1 ;;
get_size) echo 4k ;;
E
script silent.sh <<'E'
get_size) exit 1 ;;
E
cp disk.sh plain.sh
chmod -x plain.sh

echo 'def open(readonly): return 1
def get_size(h): return 4096
def pread(h, buf, offset, flags): raise RuntimeError("the plugin cannot read")
API_VERSION = 2' > disk.py
echo 'raise RuntimeError("the plugin cannot be loaded")' > load.py
echo 'def open(readonly): raise RuntimeError("the plugin cannot open")
def get_size(h): return 1
def pread(h, buf, offset, flags): pass
API_VERSION = 2' > open.py
echo 'def open(readonly): return 1
def get_size(h): return "1M"
def pread(h, buf, offset, flags): pass
API_VERSION = 2' > size.py
echo 'import os
def open(readonly): os._exit(3)
def get_size(h): return 1
def pread(h, buf, offset, flags): pass
API_VERSION = 2' > ended.py

printf '[[disk]]\nsource = "disk.raw"\nsorce = "x"\n' > key.toml
printf '[[disk]]\nname = "one"\nsource = "nowhere.raw"\ntarget = "null:"\n' > absent.toml
printf 'offset,length\n0\n' > bad.ranges
blockhaul copy --no-progress --manifest=data.manifest data.raw null:
