//! Files that hold a disk in a format of their own: a copy of their bytes is not a copy of the disk.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use blockhaul_catalog::Spec;

use crate::args;
use crate::exit::Failure;

/// A format, by bytes at a fixed offset.
#[derive(Debug, PartialEq, Eq)]
struct Format {
    /// The name, as users write it.
    name: &'static str,
    at: usize,
    magic: &'static [u8],
    shown_by: ShownBy,
}

/// What shows the disk in it.
#[derive(Debug, PartialEq, Eq)]
enum ShownBy {
    /// qemu-nbd, by this name of the format.
    #[cfg(not(feature = "formats"))]
    QemuNbd(&'static str),
    /// A device of ours.
    #[cfg(feature = "formats")]
    Device(&'static str),
    /// A device of ours that is only read.
    #[cfg(feature = "formats")]
    Reader(&'static str),
    /// A layer.
    Layer(&'static str),
    /// No command of ours; what to do first.
    Other(&'static str),
}

use ShownBy::{Layer, Other};

/// What shows the disk in an image of a format: our scheme, if this program has it, or QEMU's name.
#[cfg(feature = "formats")]
const fn reader(scheme: &'static str, _: &str) -> ShownBy {
    ShownBy::Reader(scheme)
}
#[cfg(not(feature = "formats"))]
const fn reader(_: &str, name: &'static str) -> ShownBy {
    ShownBy::QemuNbd(name)
}

/// What reads and writes qcow2 images.
#[cfg(feature = "formats")]
const QCOW2: ShownBy = ShownBy::Device("qcow2");
#[cfg(not(feature = "formats"))]
const QCOW2: ShownBy = ShownBy::QemuNbd("qcow2");

/// Bytes to read.
const HEAD: usize = 512;

/// Sources: QEMU's docs/interop/qcow2.txt ("Header"); VMware's "Virtual Disk Format 5.0" (sparse
/// extent header, descriptor); Microsoft's [MS-VHDX] 2.2.1 and its VHD specification (a dynamic disk
/// begins with a copy of its footer); VirtualBox's VDI header; the LUKS1 and LUKS2 specifications;
/// RFC 1952 2.3; the .xz file format 2.1.1.1.
const FORMATS: &[Format] = &[
    Format { name: "qcow2", at: 0, magic: b"QFI\xfb", shown_by: QCOW2 },
    Format { name: "VMDK", at: 0, magic: b"KDMV", shown_by: VMDK },
    Format { name: "VMDK", at: 0, magic: b"# Disk DescriptorFile", shown_by: VMDK },
    Format { name: "VHDX", at: 0, magic: b"vhdxfile", shown_by: VHDX },
    Format { name: "VHD", at: 0, magic: b"conectix", shown_by: VHD },
    Format { name: "VDI", at: 64, magic: &[0x7f, 0x10, 0xda, 0xbe], shown_by: VDI },
    Format { name: "LUKS1", at: 0, magic: b"LUKS\xba\xbe\0\x01", shown_by: Layer(LUKS) },
    Format { name: "LUKS2", at: 0, magic: b"LUKS\xba\xbe\0\x02", shown_by: Other(LUKS2) },
    Format { name: "gzip", at: 0, magic: &[0x1f, 0x8b, 8], shown_by: Layer("gz") },
    Format { name: "xz", at: 0, magic: &[0xfd, b'7', b'z', b'X', b'Z', 0], shown_by: Layer("xz") },
];

const VMDK: ShownBy = reader("vmdk", "vmdk");
const VHDX: ShownBy = reader("vhdx", "vhdx");
const VHD: ShownBy = reader("vhd", "vpc");
const VDI: ShownBy = reader("vdi", "vdi");
const LUKS: &str = "luks?passphrase=+FILE";
const LUKS2: &str = "open it with cryptsetup, and use its /dev/mapper device";

/// What a file is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Its bytes are copied.
    Source,
    /// It is overwritten with raw bytes.
    Target,
    /// Its bytes are served.
    Served,
}

/// A warning that the bytes of a file in a format are used as they are, with the command that uses
/// the disk in it; none if the description says otherwise (`file:PATH`, layers, another device).
pub fn warning(spec: &Spec, layered: bool, used: Use) -> Option<String> {
    let Spec::Path(path) = spec else { return None };
    let format = of(path).filter(|_| !layered)?;
    // A compressed file that is overwritten has no disk of its own to be mistaken for.
    if used == Use::Target && matches!(format.shown_by, Layer("gz" | "xz")) {
        return None;
    }
    Some(format.warning(path, used))
}

/// A warning that a new file gets raw bytes although its name says that it is an image, with the
/// command that makes one; none if the source may be such an image itself. `source`: what is copied.
#[cfg(feature = "formats")]
pub fn misnamed(source: Option<&Spec>, target: &Spec) -> Option<String> {
    let Spec::Path(path) = target else { return None };
    let extension = path.extension()?.to_str()?;
    let place = encoded(&path.display().to_string());
    let instead = match (extension, source) {
        ("qcow2", Some(_)) => format!("blockhaul copy SOURCE qcow2:{place}"),
        ("qcow2", None) => format!("blockhaul create qcow2:{place} SIZE"),
        ("vmdk", Some(_)) => format!("blockhaul copy as-vmdk:SOURCE {}", path.display()),
        _ => return None,
    };
    let may_be_image = match source {
        None => false,
        Some(Spec::Pipe) => true,
        // Its bytes are meant.
        Some(Spec::Scheme { scheme, .. }) if scheme == "file" => true,
        Some(Spec::Path(source)) => of(source).is_some_and(|format| format.named(extension)),
        // The disk in an image, whatever that is called.
        Some(Spec::Scheme { scheme, .. }) if scheme == extension || scheme == "image" => false,
        // An image that is made, or a file of this name, behind a server for instance.
        Some(other) => other.to_string().contains(extension),
    };
    let path = path.display();
    let text = || {
        format!(
            "{path} gets raw bytes, whatever its name; for a {extension} image: {instead}; file:{path} \
             avoids this warning"
        )
    };
    (!may_be_image).then(text)
}

/// Without the formats, other programs make images.
#[cfg(not(feature = "formats"))]
pub fn misnamed(_: Option<&Spec>, _: &Spec) -> Option<String> {
    None
}

/// The name of the format that the first bytes of a file have; none for a raw disk.
#[cfg(feature = "formats")]
pub fn name_of(path: &Path) -> Option<&'static str> {
    of(path).map(|format| format.name)
}

/// Whether two paths have the same extension: then an image is copied as it is on purpose.
pub fn same_extension(one: &Spec, other: &Spec) -> bool {
    let (Spec::Path(one), Spec::Path(other)) = (one, other) else { return false };
    one.extension().is_some() && one.extension() == other.extension()
}

/// The device that --format chooses for a description; the description itself without the option.
///
/// # Errors
/// If the description is not a path, or the format is not one that this program reads.
pub fn chosen(spec: Spec, wanted: &args::ImageFormat) -> Result<Spec, Failure> {
    let format = match (wanted.format, wanted.backing) {
        (Some(format), _) => format,
        (None, None) => return Ok(spec),
        (None, Some(_)) => return Err(Failure::usage("--backing: give --format, too")),
    };
    let Spec::Path(path) = &spec else {
        let text =
            format!("--format: {spec} is not a path: write qcow2:DEVICE, vmdk:DEVICE and so on");
        return Err(Failure::usage(text));
    };
    let scheme = match format {
        args::FormatArg::Auto => detected(path),
        args::FormatArg::Raw => None,
        args::FormatArg::Qcow2 => Some("qcow2"),
        args::FormatArg::Vmdk => Some("vmdk"),
        args::FormatArg::Vhdx => Some("vhdx"),
        args::FormatArg::Vhd => Some("vhd"),
        args::FormatArg::Vdi => Some("vdi"),
    };
    let Some(text) = path.to_str() else {
        return Err(Failure::usage("--format: the path is not UTF-8: use file:PATH"));
    };
    // A colon would make a relative path another device.
    let place = if text.starts_with('/') { "" } else { "./" };
    let text = encoded(&format!("{place}{text}"));
    let (scheme, rest) = match (scheme, wanted.backing) {
        (None, _) => (blockhaul_backends::PATH_SCHEME, text),
        // Images of this format name no files.
        (Some("vdi"), _) | (Some(_), None) => (scheme.unwrap_or_default(), text),
        (Some(scheme), Some(args::Backing::Allow)) => (scheme, text + "?names=allow"),
        (Some(scheme), Some(args::Backing::Refuse)) => (scheme, text + "?names=refuse"),
    };
    Ok(Spec::Scheme { scheme: scheme.to_string(), rest })
}

/// The scheme for a file by its first bytes, which is printed; none for a raw disk.
fn detected(path: &Path) -> Option<&'static str> {
    let found = of(path);
    let scheme = match found.map(|format| &format.shown_by) {
        #[cfg(feature = "formats")]
        Some(ShownBy::Device(scheme) | ShownBy::Reader(scheme)) => Some(*scheme),
        _ => None,
    };
    let what = match (found, scheme) {
        (Some(format), Some(_)) => format!("{} image", format.name),
        _ => "raw disk".to_string(),
    };
    crate::out::error(&format!("blockhaul: {} is used as a {what}\n", path.display()));
    scheme
}

fn of(path: &Path) -> Option<&'static Format> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = std::fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut head = Vec::new();
    File::open(path).ok()?.take(HEAD as u64).read_to_end(&mut head).ok()?;
    FORMATS
        .iter()
        .find(|format| head.get(format.at..).is_some_and(|bytes| bytes.starts_with(format.magic)))
}

impl Format {
    /// Whether files of this format usually have this extension.
    #[cfg(feature = "formats")]
    fn named(&self, extension: &str) -> bool {
        self.name.eq_ignore_ascii_case(extension)
    }

    fn warning(&self, path: &Path, used: Use) -> String {
        let name = self.name;
        let path = path.display();
        let done = match used {
            Use::Source => "and is copied as it is",
            Use::Target => "and is overwritten with raw bytes",
            Use::Served => "and its bytes are served as they are",
        };
        let instead = match (&self.shown_by, used) {
            #[cfg(feature = "formats")]
            (ShownBy::Device(scheme) | ShownBy::Reader(scheme), Use::Source) => {
                format!("blockhaul copy {scheme}:{} TARGET", encoded(&path.to_string()))
            }
            #[cfg(feature = "formats")]
            (ShownBy::Device(scheme), Use::Served) => {
                format!("blockhaul serve {scheme}:{}", encoded(&path.to_string()))
            }
            #[cfg(feature = "formats")]
            (ShownBy::Reader(scheme), Use::Served) => {
                format!("blockhaul serve -r {scheme}:{}", encoded(&path.to_string()))
            }
            #[cfg(feature = "formats")]
            (ShownBy::Device(scheme), Use::Target) => {
                format!("blockhaul copy SOURCE {scheme}:{}", encoded(&path.to_string()))
            }
            #[cfg(feature = "formats")]
            (ShownBy::Reader("vmdk"), Use::Target) => {
                format!("blockhaul copy as-vmdk:SOURCE {path}")
            }
            #[cfg(feature = "formats")]
            (ShownBy::Reader(scheme), Use::Target) => {
                let format = if *scheme == "vhd" { "vpc" } else { scheme };
                format!("blockhaul copy SOURCE [ qemu-nbd -f {format} {path} ]")
            }
            #[cfg(not(feature = "formats"))]
            (ShownBy::QemuNbd(format), Use::Source) => {
                format!("blockhaul copy [ qemu-nbd -r -f {format} {path} ] TARGET")
            }
            #[cfg(not(feature = "formats"))]
            (ShownBy::QemuNbd(format), Use::Target) => {
                format!("blockhaul copy SOURCE [ qemu-nbd -f {format} {path} ]")
            }
            #[cfg(not(feature = "formats"))]
            (ShownBy::QemuNbd(format), Use::Served) => {
                format!("blockhaul serve [ qemu-nbd -f {format} {path} ]")
            }
            (Layer(layer), Use::Source) => {
                format!("blockhaul copy --source-layer '{layer}' {path} TARGET")
            }
            (Layer(layer), Use::Target) => {
                format!("blockhaul copy --target-layer '{layer}' SOURCE {path}")
            }
            (Layer(layer), Use::Served) => format!("blockhaul serve --layer '{layer}' {path}"),
            (Other(first), _) => (*first).to_string(),
        };
        format!(
            "{path} is a {name} image {done}; for the disk in it: {instead}; file:{path} avoids this warning"
        )
    }
}

/// A path in the description of a device with options.
fn encoded(path: &str) -> String {
    path.replace('%', "%25").replace('?', "%3f")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn images_are_recognized_by_their_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        for format in FORMATS {
            let mut bytes = vec![0; format.at];
            bytes.extend_from_slice(format.magic);
            let path = folder.path().join("disk");
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(of(&path), Some(format));
            #[cfg(feature = "formats")]
            {
                let scheme = match format.shown_by {
                    ShownBy::Device(scheme) | ShownBy::Reader(scheme) => Some(scheme),
                    _ => None,
                };
                assert_eq!(blockhaul_formats::scheme_of(&bytes), scheme, "{}", format.name);
            }
            let spec = Spec::parse(path.as_os_str()).unwrap();
            for used in [Use::Source, Use::Served] {
                let text = warning(&spec, false, used).unwrap();
                assert!(text.contains(format.name), "{text}");
            }
            assert_eq!(warning(&spec, true, Use::Source), None, "a layer shows what is in it");
            let mut file = OsStr::new("file:").to_owned();
            file.push(&path);
            assert_eq!(warning(&Spec::parse(&file).unwrap(), false, Use::Source), None);
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert_eq!(of(&path), None, "{}", format.name);
        }
        assert_eq!(of(folder.path()), None);
    }

    #[cfg(feature = "formats")]
    #[test]
    fn raw_bytes_in_a_file_that_is_called_an_image_are_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let spec = |text: &str| Spec::parse(OsStr::new(text)).unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, b"QFI\xfb").unwrap();
        let target = spec("new.qcow2");
        for source in ["disk.raw", "memory:1M", "qcow2:vm.qcow2", "nbd://host/vm1"] {
            let text = misnamed(Some(&spec(source)), &target).unwrap();
            assert!(text.contains("blockhaul copy SOURCE qcow2:new.qcow2"), "{source}: {text}");
        }
        let image = image.to_str().unwrap();
        for source in [image, "file:disk.raw", "as-qcow2:disk.raw", "nbd://host/vm1.qcow2", "-"] {
            assert_eq!(misnamed(Some(&spec(source)), &target), None, "{source}");
        }
        for target in ["file:new.qcow2", "qcow2:new.qcow2", "new.raw", "new", "nbd://host/x.qcow2"]
        {
            assert_eq!(misnamed(Some(&spec("disk.raw")), &spec(target)), None, "{target}");
        }
        assert!(misnamed(Some(&spec("disk.raw")), &spec("a.vmdk")).unwrap().contains("as-vmdk:"));
        assert!(misnamed(None, &target).unwrap().contains("blockhaul create qcow2:new.qcow2 SIZE"));
    }

    #[test]
    fn the_warning_shows_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.qcow2");
        std::fs::write(&path, b"QFI\xfb").unwrap();
        let spec = Spec::parse(path.as_os_str()).unwrap();
        #[cfg(feature = "formats")]
        let wanted = format!("blockhaul copy SOURCE qcow2:{}", path.display());
        #[cfg(not(feature = "formats"))]
        let wanted = format!("blockhaul copy SOURCE [ qemu-nbd -f qcow2 {} ]", path.display());
        assert!(warning(&spec, false, Use::Target).unwrap().contains(&wanted));
        let other = |name: &str| Spec::parse(OsStr::new(name)).unwrap();
        assert!(same_extension(&spec, &other("/backup/vm.qcow2")));
        assert!(!same_extension(&spec, &other("/backup/vm.raw")));
        assert!(!same_extension(&spec, &other("null:")));
    }
}
