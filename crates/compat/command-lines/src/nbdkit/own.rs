//! The plugins that are devices of this program: their version, and their parameters, as `--help` shows
//! them.

/// The emulated version of nbdkit, which scripts compare.
pub const VERSION: &str = "1.48.1";

/// A plugin for which this program has a device.
pub struct OwnPlugin {
    /// Its name.
    pub name: &'static str,
    /// The plugin itself is preferred where it is installed.
    pub is_substitute: bool,
    /// Its parameters, one per line.
    pub help: &'static str,
}

const fn own(name: &'static str, help: &'static str) -> OwnPlugin {
    OwnPlugin { name, is_substitute: false, help }
}

const fn substitute(name: &'static str, help: &'static str) -> OwnPlugin {
    OwnPlugin { name, is_substitute: true, help }
}

const SIZE: &str = "[size=]<SIZE>           size of the disk";
const SCRIPT: &str = "[script=]<SCRIPT>       the script, and its own parameters";

const OWN: &[OwnPlugin] = &[
    substitute(
        "data",
        "[data=]<DATA>           the disk in a part of the format of nbdkit-data-plugin(1)
raw=<TEXT>              the disk as it is
base64=<TEXT>           the disk in base64
size=<SIZE>             size of the disk",
    ),
    substitute("eval", "<METHOD>=<SCRIPT>       a script for each method"),
    own(
        "file",
        "[file=]<FILE>           file or block device to serve
dir=<DIRECTORY>         directory whose files are exports
fd=<N>                  file or block device that is open as this descriptor
dirfd=<N>               directory that is open as this descriptor
reduce-memory-pressure=<BOOL>
                        accepted; the kernel decides what it caches
cache=default|none      the same by its older name
fadvise=normal|random|sequential
                        accepted; the kernel decides how it reads ahead",
    ),
    own("full", SIZE),
    own("info", "[mode=]<MODE>           information about the client or the server to serve"),
    own(
        "memory",
        "[size=]<SIZE>           size of the disk
allocator=malloc|sparse|zstd
                        how nbdkit's own plugin keeps the data",
    ),
    substitute(
        "nbd",
        "[uri=]<URI>             the server
socket=<PATH>           the server's Unix socket
hostname=<HOST>, port=<PORT>
                        the server's address
export=<NAME>           the export",
    ),
    own("null", SIZE),
    own(
        "ones",
        "[size=]<SIZE>           size of the disk
byte=<BYTE>             another byte, of nbdkit's own plugin",
    ),
    own(
        "partitioning",
        "[file=]<FILE>           a partition, may be repeated
alignment=<SIZE>        alignment of the partitions after it
mbr-id=<ID>             type of the partitions after it in a master boot record
type-guid=<GUID>        type of the partitions after it in a GUID partition table
partition-type=mbr|gpt  kind of the partition table",
    ),
    own("pattern", SIZE),
    substitute("python", SCRIPT),
    substitute(
        "random",
        "[size=]<SIZE>           size of the disk
seed=<SEED>             seed of its contents",
    ),
    substitute("sh", SCRIPT),
    own(
        "sparse-random",
        "[size=]<SIZE>           size of the disk
seed=<SEED>             seed of its contents
percent=<N>             share of data
runlength=<SIZE>        average length of data
random-content=<BOOL>   blocks of random bytes",
    ),
    own("split", "[file=]<FILE>           a part of the disk, may be repeated"),
    substitute("zero", ""),
];

/// Our device for a plugin of this name.
pub fn own_plugin(name: &str) -> Option<&'static OwnPlugin> {
    OWN.iter().find(|own| own.name == name)
}
