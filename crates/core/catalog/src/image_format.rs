//! The table of image formats that devices of ours read.

/// A format of disk images: its names, its first bytes, and the device that reads it.
#[derive(Debug, PartialEq, Eq)]
pub struct ImageFormat {
    /// The name in text for users.
    pub name: &'static str,
    /// Scheme of the device that reads an image, and the usual extension of its files.
    pub scheme: &'static str,
    /// QEMU's name.
    pub qemu_name: &'static str,
    /// Whose format it is.
    pub origin: &'static str,
    /// Offsets in bytes, and the bytes there: an image has one of these signatures.
    pub signatures: &'static [(usize, &'static [u8])],
    /// Offset in bytes of the size of the disk, a number of 64 bits with the greatest byte first, in the first bytes;
    /// `None` if it is elsewhere or of another form.
    pub size_at: Option<usize>,
    /// Whether the device writes images, too.
    pub can_write: bool,
    /// Whether an image may name further files.
    pub names_files: bool,
}

/// A disk in an archive with a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchivedDisk {
    /// Its number, from 1 on.
    pub number: u64,
    /// Name of its file in the archive.
    pub file: String,
    /// Name of the format of the file; `raw` if the file is the disk, byte for byte.
    pub format: &'static str,
    /// Size of the disk in bytes, if it is known.
    pub disk_size: Option<u64>,
    /// Length of the file in the archive in bytes.
    pub file_size: u64,
}

/// All image formats that devices of ours read. Sources of the signatures: QEMU's docs/interop/qcow2.txt
/// ("Header"); VMware's "Virtual Disk Format 5.0" (sparse extent header, descriptor); Microsoft's [MS-VHDX] 2.2.1 and
/// its VHD specification (a dynamic disk begins with a copy of its footer); VirtualBox's VDI header.
pub const IMAGE_FORMATS: &[ImageFormat] = &[
    ImageFormat {
        name: "qcow2",
        scheme: "qcow2",
        qemu_name: "qcow2",
        origin: "QEMU's",
        signatures: &[(0, b"QFI\xfb")],
        size_at: Some(24),
        can_write: true,
        names_files: true,
    },
    ImageFormat {
        name: "VMDK",
        scheme: "vmdk",
        qemu_name: "vmdk",
        origin: "VMware's",
        signatures: &[(0, b"KDMV"), (0, b"# Disk DescriptorFile")],
        size_at: None,
        can_write: false,
        names_files: true,
    },
    ImageFormat {
        name: "VHDX",
        scheme: "vhdx",
        qemu_name: "vhdx",
        origin: "Hyper-V's",
        signatures: &[(0, b"vhdxfile")],
        size_at: None,
        can_write: false,
        names_files: true,
    },
    ImageFormat {
        name: "VHD",
        scheme: "vhd",
        qemu_name: "vpc",
        origin: "Virtual PC's",
        signatures: &[(0, b"conectix")],
        size_at: Some(48),
        can_write: false,
        names_files: true,
    },
    ImageFormat {
        name: "VDI",
        scheme: "vdi",
        qemu_name: "vdi",
        origin: "VirtualBox's",
        signatures: &[(64, &[0x7f, 0x10, 0xda, 0xbe])],
        size_at: None,
        can_write: false,
        names_files: false,
    },
];

impl ImageFormat {
    /// Number of first bytes of a file that tell its format.
    pub const HEAD: usize = 512;

    /// The format of an image with these first bytes, up to [`ImageFormat::HEAD`]; `None` for a raw disk.
    pub fn of_head(head: &[u8]) -> Option<&'static ImageFormat> {
        let is_at = |&(at, bytes): &(usize, &[u8])| {
            head.get(at..).is_some_and(|there| there.starts_with(bytes))
        };
        IMAGE_FORMATS.iter().find(|format| format.signatures.iter().any(is_at))
    }

    /// The format that the device of this scheme reads.
    pub fn of_scheme(scheme: &str) -> Option<&'static ImageFormat> {
        IMAGE_FORMATS.iter().find(|format| format.scheme == scheme)
    }

    /// The names of all formats, for users: `a, b or c`.
    pub fn list(name: impl Fn(&ImageFormat) -> &'static str) -> String {
        let names: Vec<_> = IMAGE_FORMATS.iter().map(name).collect();
        match names.split_last() {
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        }
    }

    /// The size in bytes of the disk in an image with these first bytes, if they have it.
    pub fn size_in_head(&self, head: &[u8]) -> Option<u64> {
        let at = self.size_at?;
        let bytes = head.get(at..at.checked_add(8)?)?;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    }

    /// The format that QEMU calls so.
    pub fn of_qemu_name(name: &str) -> Option<&'static ImageFormat> {
        IMAGE_FORMATS.iter().find(|format| format.qemu_name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signature_is_in_the_head_and_tells_its_format() {
        for format in IMAGE_FORMATS {
            for (at, bytes) in format.signatures {
                assert!(at + bytes.len() <= ImageFormat::HEAD);
                let mut head = vec![0; *at];
                head.extend(*bytes);
                assert_eq!(ImageFormat::of_head(&head), Some(format));
                head.pop();
                assert_eq!(ImageFormat::of_head(&head), None, "{}", format.name);
            }
            assert_eq!(ImageFormat::of_scheme(format.scheme), Some(format));
            assert_eq!(ImageFormat::of_qemu_name(format.qemu_name), Some(format));
        }
    }
}
