//! Words of other programs for devices and layers that are written in another way here.

const RAW: &str = "a raw disk is its path, or file:PATH";

/// Each word, and what to do instead.
const WORDS: &[(&str, &str)] = &[
    ("block", RAW),
    ("bz2", "unpack it: bzip2 -dc FILE | blockhaul copy - TARGET"),
    ("bzip2", "unpack it: bzip2 -dc FILE | blockhaul copy - TARGET"),
    ("cpio", "of archives only tar is read, with the layer tar"),
    ("device", RAW),
    ("disk", RAW),
    ("encrypt", "the layer is luks"),
    ("host_device", RAW),
    ("iscsi", "QEMU reads that: write [ qemu-nbd -f raw iscsi://… ], as separate words"),
    ("loop", RAW),
    ("lz4", "unpack it: lz4 -dc FILE | blockhaul copy - TARGET"),
    ("nfs", "mount it, or write [ qemu-nbd -f raw nfs://… ], as separate words"),
    ("raw", RAW),
    ("rbd", "QEMU reads that: write [ qemu-nbd -f raw rbd:POOL/IMAGE ], as separate words"),
    ("smb", "mount it, and write its path"),
    ("throttle", "the layer is rate"),
    ("unix", "write nbd+unix:///?socket=PATH"),
    ("zip", "unpack it: unzip -p FILE | blockhaul copy - TARGET"),
    ("zst", "unpack it: zstd -dc FILE | blockhaul copy - TARGET"),
    ("zstd", "unpack it: zstd -dc FILE | blockhaul copy - TARGET"),
];

/// What to write instead of a word that is no scheme and no layer.
pub(crate) fn instead_of(word: &str) -> Option<&'static str> {
    WORDS.iter().find(|(name, _)| *name == word).map(|(_, instead)| *instead)
}
