//! Facts of the file that holds a disk: its format and sizes.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use blockhaul_catalog::{DeviceSpec, ImageFormat, Intent, NamePolicy, Registry};
use blockhaul_transfer::{FileFormat, path_of};

use crate::sizes::with_unit;

/// The format of a file whose bytes are the disk.
const RAW: &str = "raw";

/// The facts of a file of this machine that is used by its path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileFacts {
    /// Name of its format.
    pub format: String,
    /// Size in bytes of the disk in it, if that is known.
    pub disk_size: Option<u64>,
    /// Length of the file in bytes.
    pub file_size: u64,
    /// A device that shows the disk in a file that is used byte for byte; `None` for a raw disk.
    pub hint: Option<String>,
}

impl FileFacts {
    /// The facts of the file that a description names; `None` if it names none.
    pub(crate) async fn find(registry: &Registry, spec: &DeviceSpec) -> Option<FileFacts> {
        let path = path_of(spec)?;
        let file_size = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?.len();
        let Some(format) = FileFormat::of(&path) else {
            let format = RAW.to_string();
            return Some(FileFacts { format, disk_size: Some(file_size), file_size, hint: None });
        };
        let hint = matches!(spec, DeviceSpec::Path(_)).then(|| format.hint(&path));
        let disk_size = disk_size(registry, format, &path).await;
        Some(FileFacts { format: format.name().to_string(), disk_size, file_size, hint })
    }

    /// The lines of the report.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("\tformat: {}\n", self.format);
        if let Some(bytes) = self.disk_size {
            text += &format!("\tdisk-size: {}\n", with_unit(bytes));
        }
        text += &format!("\tfile-size: {}\n", with_unit(self.file_size));
        if let Some(hint) = &self.hint {
            let hint = blockhaul_transfer::one_line(hint);
            text += &format!(
                "\thint: the facts below are those of the file; for the disk in it: {hint}\n"
            );
        }
        text
    }
}

/// The size of the disk in an image: that in the first bytes of the file, or that of the device.
async fn disk_size(registry: &Registry, format: FileFormat, path: &Path) -> Option<u64> {
    let FileFormat::Image(image) = format else { return None };
    let mut head = Vec::new();
    File::open(path).ok()?.take(ImageFormat::HEAD as u64).read_to_end(&mut head).ok()?;
    if let Some(size) = image.size_in_head(&head) {
        return Some(size);
    }
    let spec = DeviceSpec::parse(format.device(path)?.as_ref()).ok()?;
    let registry = Registry { names: NamePolicy::Refuse, ..registry.clone() };
    let stack = registry.open(&spec, Vec::new(), Intent::READ).await.ok()?;
    Some(stack.device().facts().size)
}
