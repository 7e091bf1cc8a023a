//! Files that hold a disk in a format of their own: a copy of their bytes is not a copy of the disk.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{DeviceSpec, IMAGE_FORMATS, ImageFormat, NamePolicy};

use crate::description::without_passwords;

/// A format of a file whose bytes are not those of the disk in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// An image: a device of ours, if this program has it, or QEMU's, shows the disk.
    Image(&'static ImageFormat),
    /// A tar archive with a virtual machine: the device `ova:` shows its disks.
    Ova,
    /// A packed or encrypted disk, or an archive: its name, and the layer that shows the disk.
    Layer(&'static str, &'static str),
    /// One that no device shows: its name, and what to do first.
    Other(&'static str, &'static str),
}

/// Formats that are no images, by their first bytes. Sources: the LUKS1 and LUKS2 specifications; RFC 1952 2.3; the .xz
/// file format 2.1.1.1.
const OTHERS: &[(&[u8], FileFormat)] = &[
    (b"LUKS\xba\xbe\0\x01", FileFormat::Layer("LUKS1 image", "luks?passphrase=+FILE")),
    (
        b"LUKS\xba\xbe\0\x02",
        FileFormat::Other("LUKS2 image", "open it with cryptsetup, and use its /dev/mapper device"),
    ),
    (&[0x1f, 0x8b, 8], FileFormat::Layer("gzip file", "gz")),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], FileFormat::Layer("xz file", "xz")),
];

/// The layer that shows a member of a tar archive.
const MEMBER: &str = "tar?tar-entry=NAME";
/// The scheme of the disks of another machine.
const SSH: &str = "ssh";
/// The scheme of the disks in an OVA.
const OVA: &str = "ova";

/// The use of a file that is given by its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUse {
    /// Its bytes are copied.
    Source,
    /// It is overwritten with raw bytes.
    Target,
    /// Its bytes are served.
    Served,
    /// Its bytes are read, and a command prints what they are.
    Read,
}

/// A format that a user chooses for a file that is given by its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatChoice {
    /// The format that the first bytes show: an image, or else a raw disk.
    Auto,
    /// The disk, byte for byte.
    Raw,
    /// An image.
    Image(&'static ImageFormat),
}

/// The device that a [`FormatChoice`] makes of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenDevice {
    /// The device.
    pub spec: DeviceSpec,
    /// The format that [`FormatChoice::Auto`] has found, with its noun and article, for users; `None` for other choices.
    pub found: Option<String>,
}

/// A warning that the bytes of a file in a format are used as they are, with the command that uses
/// the disk in it; none if the description says otherwise (`file:PATH`, layers, another device).
pub fn format_warning(spec: &DeviceSpec, layered: bool, used: FileUse) -> Option<String> {
    let DeviceSpec::Path(path) = spec else {
        return ssh_warning(spec).filter(|_| !layered && used == FileUse::Source);
    };
    let format = FileFormat::of(path).filter(|_| !layered)?;
    // A compressed file or an archive that is overwritten has no disk of its own to be mistaken for.
    let is_packed = format == FileFormat::Ova
        || matches!(format, FileFormat::Layer(_, layer) if !layer.starts_with("luks"));
    if used == FileUse::Target && is_packed {
        return None;
    }
    Some(format.warning(path, used))
}

/// A warning that the bytes of an image of another machine are copied, which its name says: nobody reads the file
/// before the copy.
fn ssh_warning(spec: &DeviceSpec) -> Option<String> {
    let DeviceSpec::Scheme { scheme, rest } = spec else { return None };
    let (_, extension) = rest.rsplit_once('.').filter(|_| scheme == SSH)?;
    let format = IMAGE_FORMATS.iter().find(|format| format.scheme == extension)?;
    let (name, device) = (FileFormat::Image(format).noun_with_article(), format.scheme);
    // Messages are logged: no password of the URI.
    let shown = spec.to_string();
    let shown = without_passwords(&shown);
    Some(format!(
        "{shown} is {name} by its name, and is copied as it is; for the disk in it: blockhaul copy \
         {device}:{shown} TARGET"
    ))
}

/// A warning that a new file gets raw bytes although its name says that it is an image, with the
/// command that makes one; none if the source may be such an image itself. `source`: what is copied.
pub fn name_warning(source: Option<&DeviceSpec>, target: &DeviceSpec) -> Option<String> {
    // Without the formats, other programs make images.
    let DeviceSpec::Path(path) = target else { return None };
    let extension = path.extension()?.to_str()?;
    let place = encoded(&path.display().to_string());
    let instead = match (extension, source) {
        _ if cfg!(not(feature = "formats")) => return None,
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
            matches!(FileFormat::of(source), Some(FileFormat::Image(format)) if format.scheme == extension)
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

/// Whether two paths have the same extension: then an image is used as it is on purpose.
pub fn same_extension(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let extension = |spec: &DeviceSpec| match spec {
        DeviceSpec::Path(path) => path.extension().map(std::ffi::OsStr::to_os_string),
        DeviceSpec::Scheme { scheme, rest } if scheme == SSH => {
            Path::new(rest).extension().map(std::ffi::OsStr::to_os_string)
        }
        _ => None,
    };
    extension(one).is_some_and(|one| extension(other) == Some(one))
}

/// The device for the disk in a file. `names`: whether files that an image names are opened; `None`: the program
/// decides.
///
/// # Errors
/// [`Kind::Usage`] if the path is not UTF-8.
pub fn chosen_device(
    path: &Path,
    choice: FormatChoice,
    names: Option<NamePolicy>,
) -> Result<ChosenDevice> {
    let text = path.to_str();
    let text =
        text.ok_or_else(|| Error::new(Kind::Usage, "the path is not UTF-8: use file:PATH"))?;
    let format = match choice {
        FormatChoice::Auto => FileFormat::of(path).filter(|format| format.has_device()),
        FormatChoice::Raw => None,
        FormatChoice::Image(format) => Some(FileFormat::Image(format)),
    };
    let found = (choice == FormatChoice::Auto)
        .then(|| format.map_or("a raw disk".to_string(), FileFormat::noun_with_article));
    let (scheme, names_files) = match format {
        Some(FileFormat::Image(format)) => (format.scheme, format.names_files),
        Some(FileFormat::Ova) => (OVA, false),
        _ => (blockhaul_backends::PATH_SCHEME, false),
    };
    let names = match names.filter(|_| names_files) {
        None => "",
        Some(NamePolicy::Allow) => "?names=allow",
        Some(NamePolicy::Refuse) => "?names=refuse",
    };
    // A colon would make a relative path another device.
    let place = if text.starts_with('/') { "" } else { "./" };
    let rest = encoded(&format!("{place}{text}")) + names;
    Ok(ChosenDevice { spec: DeviceSpec::Scheme { scheme: scheme.to_string(), rest }, found })
}

impl FileFormat {
    /// The format of a regular file or block device, by its first bytes; `None` for a raw disk, and for files that
    /// cannot be read.
    pub fn of(path: &Path) -> Option<FileFormat> {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = std::fs::metadata(path).ok()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return None;
        }
        let mut head = Vec::new();
        File::open(path).ok()?.take(ImageFormat::HEAD as u64).read_to_end(&mut head).ok()?;
        let other = || OTHERS.iter().find(|other| head.starts_with(other.0)).map(|other| other.1);
        let image = ImageFormat::of_head(&head).map(FileFormat::Image);
        image.or_else(other).or_else(|| FileFormat::archive(path, &head))
    }

    /// The format of a tar archive that begins with these bytes.
    fn archive(path: &Path, head: &[u8]) -> Option<FileFormat> {
        let member = blockhaul_layers::first_tar_member(head)?;
        let is_ova =
            path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("ova"))
                || member.to_ascii_lowercase().ends_with(b".ovf");
        Some(if is_ova { FileFormat::Ova } else { FileFormat::Layer("tar archive", MEMBER) })
    }

    /// The format of a regular file that can be read, with its noun and article, if it is not an image of this scheme.
    pub fn other_than(path: &Path, scheme: &str) -> Option<String> {
        if !path.is_file() || File::open(path).is_err() {
            return None;
        }
        match FileFormat::of(path) {
            Some(FileFormat::Image(format)) if format.scheme == scheme => None,
            Some(format) => Some(format.noun_with_article()),
            None => Some("a raw disk".into()),
        }
    }

    /// The name of the format, for users.
    pub fn name(self) -> &'static str {
        match self {
            FileFormat::Image(format) => format.name,
            FileFormat::Ova => "OVA",
            FileFormat::Layer(noun, _) | FileFormat::Other(noun, _) => {
                noun.split(' ').next().unwrap_or(noun)
            }
        }
    }

    /// The description of the device that shows the disk in the file; `None` if there is none in this program.
    pub fn device(self, path: &Path) -> Option<String> {
        let place = encoded(&path.display().to_string());
        match self {
            FileFormat::Image(format) if self.has_device() => {
                Some(format!("{}:{place}", format.scheme))
            }
            FileFormat::Ova if self.has_device() => Some(format!("{OVA}:{place}")),
            _ => None,
        }
    }

    /// A device, a server or what to do first, for the disk in the file, in a command that reads it.
    pub fn hint(self, path: &Path) -> String {
        let shown = path.display();
        match self {
            FileFormat::Image(format) => self
                .device(path)
                .unwrap_or_else(|| format!("[ qemu-nbd -r -f {} {shown} ]", format.qemu_name)),
            FileFormat::Ova => self
                .device(path)
                .unwrap_or_else(|| format!("[ blockhaul serve -r --layer '{MEMBER}' {shown} ]")),
            FileFormat::Layer(_, layer) => {
                format!("[ blockhaul serve -r --layer '{layer}' {shown} ]")
            }
            FileFormat::Other(_, first) => first.to_string(),
        }
    }

    fn has_device(self) -> bool {
        cfg!(feature = "formats") && matches!(self, FileFormat::Image(_) | FileFormat::Ova)
    }

    fn noun_with_article(self) -> String {
        let noun = self.noun();
        let article = if noun.starts_with(['O', 'x']) { "an" } else { "a" };
        format!("{article} {noun}")
    }

    /// The name with its noun, without an article.
    fn noun(self) -> String {
        match self {
            FileFormat::Image(format) => format!("{} image", format.name),
            FileFormat::Ova => "OVA".into(),
            FileFormat::Layer(noun, _) | FileFormat::Other(noun, _) => noun.into(),
        }
    }

    fn warning(self, path: &Path, used: FileUse) -> String {
        let noun = self.noun_with_article();
        let done = match used {
            FileUse::Source => "and is copied as it is",
            FileUse::Target => "and is overwritten with raw bytes",
            FileUse::Served => "and its bytes are served as they are",
            FileUse::Read => "and its bytes are read as they are",
        };
        let instead = match self {
            FileFormat::Other(_, first) => first.to_string(),
            _ if used == FileUse::Read => self.hint(path),
            _ => self.command(path, used),
        };
        let path = path.display();
        format!(
            "{path} is {noun} {done}; for the disk in it: {instead}; file:{path} avoids this warning"
        )
    }

    /// The command that uses the disk in a file.
    fn command(self, path: &Path, used: FileUse) -> String {
        let hint = self.hint(path);
        let shown = path.display();
        match (self, used) {
            (FileFormat::Layer(_, layer), FileUse::Source) => {
                format!("blockhaul copy --source-layer '{layer}' {shown} TARGET")
            }
            (FileFormat::Layer(_, layer), FileUse::Target) => {
                format!("blockhaul copy --target-layer '{layer}' SOURCE {shown}")
            }
            (FileFormat::Layer(_, layer), FileUse::Served) => {
                format!("blockhaul serve --layer '{layer}' {shown}")
            }
            (FileFormat::Image(format), FileUse::Served | FileUse::Target) => {
                image_command(format, self.has_device(), &hint, path, used)
            }
            (_, FileUse::Served) => format!("blockhaul serve -r {hint}"),
            (_, FileUse::Source | FileUse::Target | FileUse::Read) => {
                format!("blockhaul copy {hint} TARGET")
            }
        }
    }
}

/// The command that serves or writes the disk in an image.
fn image_command(
    format: &ImageFormat,
    has_device: bool,
    device: &str,
    path: &Path,
    used: FileUse,
) -> String {
    let path = path.display();
    let qemu = format.qemu_name;
    let can_write = has_device && format.can_write;
    match used {
        FileUse::Target if can_write => format!("blockhaul copy SOURCE {device}"),
        FileUse::Target if has_device && format.scheme == "vmdk" => {
            format!("blockhaul copy as-vmdk:SOURCE {path}")
        }
        FileUse::Target => format!("blockhaul copy SOURCE [ qemu-nbd -f {qemu} {path} ]"),
        _ if can_write => format!("blockhaul serve {device}"),
        _ if has_device => format!("blockhaul serve -r {device}"),
        _ => format!("blockhaul serve [ qemu-nbd -f {qemu} {path} ]"),
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
    fn an_image_of_another_machine_is_known_by_its_name() {
        let warning = |text: &str| {
            let spec = DeviceSpec::parse(text.as_ref()).unwrap();
            format_warning(&spec, false, FileUse::Source)
        };
        let said = warning("ssh://host/vm.qcow2").unwrap();
        assert!(said.contains("blockhaul copy qcow2:ssh://host/vm.qcow2 TARGET"), "{said}");
        assert_eq!(warning("ssh://host/vm.raw").or(warning("qcow2:ssh://host/vm.qcow2")), None);
    }

    #[test]
    fn formats_are_recognized_by_their_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let image = |format: &'static ImageFormat| {
            let signature = |&(at, bytes): &(usize, &[u8])| [&vec![0; at][..], bytes].concat();
            let heads = format.signatures.iter().map(signature);
            heads.map(|head| (head, FileFormat::Image(format))).collect::<Vec<_>>()
        };
        let others = OTHERS.iter().map(|other| (other.0.to_vec(), other.1));
        for (bytes, format) in IMAGE_FORMATS.iter().flat_map(image).chain(others) {
            let path = folder.path().join("disk");
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(FileFormat::of(&path), Some(format));
            let spec = DeviceSpec::parse(path.as_os_str()).unwrap();
            for used in [FileUse::Source, FileUse::Served] {
                let text = format_warning(&spec, false, used).unwrap();
                assert!(text.contains(format.name()), "{text}");
            }
            assert_eq!(
                format_warning(&spec, true, FileUse::Source),
                None,
                "a layer shows what is in it"
            );
            let mut file = OsStr::new("file:").to_owned();
            file.push(&path);
            assert_eq!(
                format_warning(&DeviceSpec::parse(&file).unwrap(), false, FileUse::Source),
                None
            );
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert_eq!(FileFormat::of(&path), None, "{}", format.name());
        }
        assert_eq!(FileFormat::of(folder.path()), None);
    }

    #[test]
    fn archives_are_an_ova_by_their_name_or_their_first_member() {
        let folder = tempfile::tempdir().unwrap();
        let found = |archive: &str, member: &str| {
            let mut head = vec![0; 512];
            head[..member.len()].copy_from_slice(member.as_bytes());
            head[124..135].copy_from_slice(b"00000000000");
            head[156] = b'0';
            head[257..263].copy_from_slice(b"ustar\0");
            head[148..156].fill(b' ');
            let sum: u32 = head.iter().map(|&byte| u32::from(byte)).sum();
            head[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            let path = folder.path().join(archive);
            std::fs::write(&path, &head).unwrap();
            let found = FileFormat::of(&path);
            std::fs::write(&path, &head[..511]).unwrap();
            assert_eq!(FileFormat::of(&path), None);
            found
        };
        assert_eq!(found("vm.ova", "disk"), Some(FileFormat::Ova));
        assert_eq!(found("vm.tar", "vm.ovf"), Some(FileFormat::Ova));
        assert_eq!(found("a.tar", "disk"), Some(FileFormat::Layer("tar archive", MEMBER)));
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
            let text = name_warning(Some(&spec(source)), &target).unwrap();
            assert!(text.contains("blockhaul copy SOURCE qcow2:new.qcow2"), "{source}: {text}");
        }
        let image = image.to_str().unwrap();
        for source in [image, "file:disk.raw", "as-qcow2:disk.raw", "nbd://host/vm1.qcow2", "-"] {
            assert_eq!(name_warning(Some(&spec(source)), &target), None, "{source}");
        }
        for target in ["file:new.qcow2", "qcow2:new.qcow2", "new.raw", "new", "nbd://host/x.qcow2"]
        {
            assert_eq!(name_warning(Some(&spec("disk.raw")), &spec(target)), None, "{target}");
        }
        assert!(
            name_warning(Some(&spec("disk.raw")), &spec("a.vmdk")).unwrap().contains("as-vmdk:")
        );
        assert!(
            name_warning(None, &target).unwrap().contains("blockhaul create qcow2:new.qcow2 SIZE")
        );
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
        assert!(format_warning(&spec, false, FileUse::Target).unwrap().contains(&wanted));
        let other = |name: &str| DeviceSpec::parse(OsStr::new(name)).unwrap();
        assert!(same_extension(&spec, &other("/backup/vm.qcow2")));
        assert!(!same_extension(&spec, &other("/backup/vm.raw")));
        assert!(!same_extension(&spec, &other("null:")));
    }
}
