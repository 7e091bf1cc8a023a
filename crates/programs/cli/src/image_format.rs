//! Files that hold a disk in a format of their own: a copy of their bytes is not a copy of the disk.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use blockhaul_catalog::{DeviceSpec, ImageFormat};

use crate::args;
use crate::exit::CommandFailure;

/// A format whose bytes are not those of the disk in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContainerFormat {
    /// An image: a device of ours, if this program has it, or QEMU's, shows the disk.
    Image(&'static ImageFormat),
    /// A packed or encrypted disk: its name, and the layer that shows the disk.
    Layer(&'static str, &'static str),
    /// One that no command of ours shows: its name, and what to do first.
    Other(&'static str, &'static str),
}

/// Formats that are no images, by their first bytes. Sources: the LUKS1 and LUKS2 specifications; RFC 1952 2.3; the .xz
/// file format 2.1.1.1.
const OTHERS: &[(&[u8], ContainerFormat)] = &[
    (b"LUKS\xba\xbe\0\x01", ContainerFormat::Layer("LUKS1", "luks?passphrase=+FILE")),
    (
        b"LUKS\xba\xbe\0\x02",
        ContainerFormat::Other("LUKS2", "open it with cryptsetup, and use its /dev/mapper device"),
    ),
    (&[0x1f, 0x8b, 8], ContainerFormat::Layer("gzip", "gz")),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], ContainerFormat::Layer("xz", "xz")),
];

/// What a file is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUse {
    /// Its bytes are copied.
    Source,
    /// It is overwritten with raw bytes.
    Target,
    /// Its bytes are served.
    Served,
}

/// A warning that the bytes of a file in a format are used as they are, with the command that uses
/// the disk in it; none if the description says otherwise (`file:PATH`, layers, another device).
pub fn warning(spec: &DeviceSpec, layered: bool, used: FileUse) -> Option<String> {
    let DeviceSpec::Path(path) = spec else { return None };
    let format = of(path).filter(|_| !layered)?;
    // A compressed file that is overwritten has no disk of its own to be mistaken for.
    if used == FileUse::Target && matches!(format, ContainerFormat::Layer(_, "gz" | "xz")) {
        return None;
    }
    Some(format.warning(path, used))
}

/// A warning that a new file gets raw bytes although its name says that it is an image, with the
/// command that makes one; none if the source may be such an image itself. `source`: what is copied.
#[cfg(feature = "formats")]
pub fn misnamed(source: Option<&DeviceSpec>, target: &DeviceSpec) -> Option<String> {
    let DeviceSpec::Path(path) = target else { return None };
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
        Some(DeviceSpec::Pipe) => true,
        // Its bytes are meant.
        Some(DeviceSpec::Scheme { scheme, .. }) if scheme == "file" => true,
        Some(DeviceSpec::Path(source)) => {
            matches!(of(source), Some(ContainerFormat::Image(format)) if format.scheme == extension)
        }
        // The disk in an image, whatever that is called.
        Some(DeviceSpec::Scheme { scheme, .. }) if scheme == extension || scheme == "image" => {
            false
        }
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
pub fn misnamed(_: Option<&DeviceSpec>, _: &DeviceSpec) -> Option<String> {
    None
}

/// The name of the format that the first bytes of a file have; none for a raw disk.
#[cfg(feature = "formats")]
pub fn name_of(path: &Path) -> Option<&'static str> {
    of(path).map(ContainerFormat::name)
}

/// Whether two paths have the same extension: then an image is copied as it is on purpose.
pub fn same_extension(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let (DeviceSpec::Path(one), DeviceSpec::Path(other)) = (one, other) else { return false };
    one.extension().is_some() && one.extension() == other.extension()
}

/// The device that --format chooses for a description; the description itself without the option.
///
/// # Errors
/// If the description is not a path, or the format is not one that this program reads.
pub fn chosen(
    spec: DeviceSpec,
    wanted: &args::ImageFormatArgs,
) -> Result<DeviceSpec, CommandFailure> {
    let format = match (wanted.format, wanted.backing) {
        (Some(format), _) => format,
        (None, None) => return Ok(spec),
        (None, Some(_)) => return Err(CommandFailure::usage("--backing: give --format, too")),
    };
    let DeviceSpec::Path(path) = &spec else {
        let text =
            format!("--format: {spec} is not a path: write qcow2:DEVICE, vmdk:DEVICE and so on");
        return Err(CommandFailure::usage(text));
    };
    let image = match format {
        args::FormatArg::Auto => detected(path),
        args::FormatArg::Raw => None,
        args::FormatArg::Image(format) => Some(format),
    };
    let Some(text) = path.to_str() else {
        return Err(CommandFailure::usage("--format: the path is not UTF-8: use file:PATH"));
    };
    // A colon would make a relative path another device.
    let place = if text.starts_with('/') { "" } else { "./" };
    let text = encoded(&format!("{place}{text}"));
    let scheme = image.map_or(blockhaul_backends::PATH_SCHEME, |format| format.scheme);
    let names = match wanted.backing.filter(|_| image.is_some_and(|format| format.names_files)) {
        None => "",
        Some(args::BackingPolicy::Allow) => "?names=allow",
        Some(args::BackingPolicy::Refuse) => "?names=refuse",
    };
    let rest = text + names;
    Ok(DeviceSpec::Scheme { scheme: scheme.to_string(), rest })
}

/// The format of an image by the first bytes of its file, which is printed; none for a raw disk.
fn detected(path: &Path) -> Option<&'static ImageFormat> {
    let format = match of(path) {
        Some(ContainerFormat::Image(format)) if cfg!(feature = "formats") => Some(format),
        _ => None,
    };
    let content = format.map_or("raw disk".to_string(), |format| format!("{} image", format.name));
    crate::out::error(&format!("blockhaul: {} is used as a {content}\n", path.display()));
    format
}

fn of(path: &Path) -> Option<ContainerFormat> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = std::fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut head = Vec::new();
    File::open(path).ok()?.take(ImageFormat::HEAD as u64).read_to_end(&mut head).ok()?;
    let other = || OTHERS.iter().find(|other| head.starts_with(other.0)).map(|other| other.1);
    ImageFormat::of_head(&head).map(ContainerFormat::Image).or_else(other)
}

impl ContainerFormat {
    fn name(self) -> &'static str {
        match self {
            ContainerFormat::Image(format) => format.name,
            ContainerFormat::Layer(name, _) | ContainerFormat::Other(name, _) => name,
        }
    }

    fn warning(self, path: &Path, used: FileUse) -> String {
        let name = self.name();
        let done = match used {
            FileUse::Source => "and is copied as it is",
            FileUse::Target => "and is overwritten with raw bytes",
            FileUse::Served => "and its bytes are served as they are",
        };
        let instead = match self {
            ContainerFormat::Image(format) => image_command(format, path, used),
            ContainerFormat::Layer(_, layer) => layer_command(layer, path, used),
            ContainerFormat::Other(_, first) => first.to_string(),
        };
        let path = path.display();
        format!(
            "{path} is a {name} image {done}; for the disk in it: {instead}; file:{path} avoids this warning"
        )
    }
}

/// The command that uses the disk in an image.
fn image_command(format: &ImageFormat, path: &Path, used: FileUse) -> String {
    let has_device = cfg!(feature = "formats");
    let path = path.display().to_string();
    let device = format!("{}:{}", format.scheme, encoded(&path));
    let qemu = format.qemu_name;
    match used {
        FileUse::Source if has_device => format!("blockhaul copy {device} TARGET"),
        FileUse::Source => format!("blockhaul copy [ qemu-nbd -r -f {qemu} {path} ] TARGET"),
        FileUse::Served if has_device && format.can_write => format!("blockhaul serve {device}"),
        FileUse::Served if has_device => format!("blockhaul serve -r {device}"),
        FileUse::Served => format!("blockhaul serve [ qemu-nbd -f {qemu} {path} ]"),
        FileUse::Target if has_device && format.can_write => {
            format!("blockhaul copy SOURCE {device}")
        }
        FileUse::Target if has_device && format.scheme == "vmdk" => {
            format!("blockhaul copy as-vmdk:SOURCE {path}")
        }
        FileUse::Target => format!("blockhaul copy SOURCE [ qemu-nbd -f {qemu} {path} ]"),
    }
}

/// The command that uses the disk behind a layer.
fn layer_command(layer: &str, path: &Path, used: FileUse) -> String {
    let path = path.display();
    match used {
        FileUse::Source => format!("blockhaul copy --source-layer '{layer}' {path} TARGET"),
        FileUse::Target => format!("blockhaul copy --target-layer '{layer}' SOURCE {path}"),
        FileUse::Served => format!("blockhaul serve --layer '{layer}' {path}"),
    }
}

/// A path in the description of a device with options.
fn encoded(path: &str) -> String {
    path.replace('%', "%25").replace('?', "%3f")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use blockhaul_catalog::IMAGE_FORMATS;

    use super::*;

    #[test]
    fn formats_are_recognized_by_their_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let image = |format: &'static ImageFormat| {
            let signature = |&(at, bytes): &(usize, &[u8])| [&vec![0; at][..], bytes].concat();
            let heads = format.signatures.iter().map(signature);
            heads.map(|head| (head, ContainerFormat::Image(format))).collect::<Vec<_>>()
        };
        let others = OTHERS.iter().map(|other| (other.0.to_vec(), other.1));
        for (bytes, format) in IMAGE_FORMATS.iter().flat_map(image).chain(others) {
            let path = folder.path().join("disk");
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(of(&path), Some(format));
            let spec = DeviceSpec::parse(path.as_os_str()).unwrap();
            for used in [FileUse::Source, FileUse::Served] {
                let text = warning(&spec, false, used).unwrap();
                assert!(text.contains(format.name()), "{text}");
            }
            assert_eq!(warning(&spec, true, FileUse::Source), None, "a layer shows what is in it");
            let mut file = OsStr::new("file:").to_owned();
            file.push(&path);
            assert_eq!(warning(&DeviceSpec::parse(&file).unwrap(), false, FileUse::Source), None);
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert_eq!(of(&path), None, "{}", format.name());
        }
        assert_eq!(of(folder.path()), None);
    }

    #[cfg(feature = "formats")]
    #[test]
    fn raw_bytes_in_a_file_that_is_called_an_image_are_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let spec = |text: &str| DeviceSpec::parse(OsStr::new(text)).unwrap();
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
        let spec = DeviceSpec::parse(path.as_os_str()).unwrap();
        #[cfg(feature = "formats")]
        let wanted = format!("blockhaul copy SOURCE qcow2:{}", path.display());
        #[cfg(not(feature = "formats"))]
        let wanted = format!("blockhaul copy SOURCE [ qemu-nbd -f qcow2 {} ]", path.display());
        assert!(warning(&spec, false, FileUse::Target).unwrap().contains(&wanted));
        let other = |name: &str| DeviceSpec::parse(OsStr::new(name)).unwrap();
        assert!(same_extension(&spec, &other("/backup/vm.qcow2")));
        assert!(!same_extension(&spec, &other("/backup/vm.raw")));
        assert!(!same_extension(&spec, &other("null:")));
    }
}
