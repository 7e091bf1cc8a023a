//! The options of new images.

use blockhaul_command_lines::qemu_image::{QemuFormat, encoded};
use blockhaul_command_lines::qemu_img::QemuImgCommand;

use crate::error::{Result, failure};
use crate::image::size;
use crate::preallocation::Preallocation;

/// The options of a new image.
#[derive(Debug)]
pub(crate) struct NewImage {
    pub(crate) size: Option<u64>,
    pub(crate) cluster: u64,
    pub(crate) subclusters: bool,
    /// Name and format of the backing file.
    pub(crate) backing: Option<(String, Option<String>)>,
    pub(crate) data_file: Option<String>,
    /// `subformat`, for VMDK.
    pub(crate) subformat: Option<String>,
    /// The compression type that was asked for.
    pub(crate) compression: Option<String>,
    pub(crate) preallocation: Preallocation,
    /// `compat`, and the version of the format.
    pub(crate) compat: Option<String>,
    version: u32,
    pub(crate) refcount_bits: u64,
    pub(crate) lazy_refcounts: bool,
    pub(crate) data_file_raw: bool,
    /// Options that were given, and are printed only then.
    pub(crate) shown_preallocation: Option<String>,
}

/// Refuses a cluster size in bytes that no qcow2 image has.
pub(crate) fn check_cluster(cluster: u64) -> Result<()> {
    if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
        return Err(failure("Cluster size must be a power of two between 512 and 2048k"));
    }
    Ok(())
}

/// Whether the value of a flag is on.
pub(crate) fn is_on(value: &str) -> bool {
    !["off", "no", "false", "n"].contains(&value)
}

impl NewImage {
    /// Understands the options of the new image `name` in `format`.
    pub(crate) fn parse(line: &QemuImgCommand, format: QemuFormat, name: &str) -> Result<NewImage> {
        let mut new = NewImage {
            size: None,
            cluster: 64 << 10,
            subclusters: false,
            backing: None,
            data_file: None,
            subformat: None,
            compression: None,
            preallocation: Preallocation::Off,
            compat: None,
            version: 3,
            refcount_bits: 16,
            lazy_refcounts: false,
            data_file_raw: false,
            shown_preallocation: None,
        };
        let mut backing = line.value("backing").map(str::to_string);
        let mut backing_format = line.value("backing-format").map(str::to_string);
        let is_qcow2 = format == QemuFormat::Qcow2;
        for (key, value) in line.creation()? {
            match key.as_str() {
                "size" => new.size = Some(size(&value)?),
                "preallocation" if is_qcow2 || format == QemuFormat::Raw => {
                    new.shown_preallocation = Some(value);
                }
                // Of the file, which needs none here.
                "extent_size_hint" | "nocow" => {}
                "subformat" if format.is_vmdk() => new.subformat = Some(value),
                "cluster_size" if is_qcow2 => new.cluster = size(&value)?,
                "extended_l2" if is_qcow2 => new.subclusters = is_on(&value),
                "backing_file" if is_qcow2 => backing = Some(value),
                "backing_fmt" if is_qcow2 => backing_format = Some(value),
                "data_file" if is_qcow2 => new.data_file = Some(value),
                "compression_type" if is_qcow2 => new.compression = Some(value),
                "compat" if is_qcow2 => new.compat = Some(value),
                "refcount_bits" if is_qcow2 => {
                    let text = "Parameter 'refcount_bits' expects a number";
                    new.refcount_bits =
                        value.parse().map_err(|_| failure(format!("{name}: {text}")))?;
                }
                "lazy_refcounts" if is_qcow2 => new.lazy_refcounts = is_on(&value),
                "data_file_raw" if is_qcow2 => new.data_file_raw = is_on(&value),
                _ => return Err(failure(format!("{name}: Invalid parameter '{key}'"))),
            }
        }
        new.backing = backing.filter(|name| !name.is_empty()).map(|name| (name, backing_format));
        if new.backing.is_some() && !is_qcow2 {
            let text =
                format!("{name}: Backing file not supported for file format '{}'", format.name());
            return Err(failure(text));
        }
        Ok(new)
    }

    /// Makes the checks that the original makes after it has printed the options.
    pub(crate) fn check(&mut self, name: &str, format: QemuFormat) -> Result<()> {
        let wrong = |text: &str| Err(failure(format!("{name}: {text}")));
        if let Some(mode) = &self.shown_preallocation {
            let mode = Preallocation::parse(mode);
            self.preallocation = mode.map_err(|why| failure(format!("{name}: {why}")))?;
        }
        if format != QemuFormat::Qcow2 {
            return match self.preallocation {
                Preallocation::Metadata => wrong("Unsupported preallocation mode 'metadata'"),
                _ => Ok(()),
            };
        }
        self.version = match self.compat.as_deref() {
            None | Some("1.1" | "v3") => 3,
            Some("0.10" | "v2") => 2,
            Some(other) => {
                return wrong(&format!("Parameter 'version' does not accept value '{other}'"));
            }
        };
        check_cluster(self.cluster).map_err(|why| failure(format!("{name}: {why}")))?;
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return wrong("Refcount width must be a power of two and may not exceed 64 bits");
        }
        let level = "compatibility level 1.1 and above (use version=v3 or greater)";
        let new = [
            (self.lazy_refcounts, format!("Lazy refcounts only supported with {level}")),
            (
                self.refcount_bits != 16,
                "Different refcount widths than 16 bits require compatibility level 1.1 or above (use \
                 version=v3 or greater)"
                    .to_string(),
            ),
            (self.data_file.is_some(), format!("External data files are only supported with {level}")),
            (self.subclusters, format!("Extended L2 entries are only supported with {level}")),
        ];
        if let Some((_, text)) = new.into_iter().find(|one| one.0 && self.version < 3) {
            return wrong(&text);
        }
        if self.data_file_raw && self.data_file.is_none() {
            return wrong("data-file-raw requires data-file");
        }
        match self.compression.as_deref() {
            None | Some("zlib") => Ok(()),
            Some("zstd") if self.version >= 3 => Ok(()),
            Some("zstd") => {
                wrong(&format!("Non-zlib compression type is only supported with {level}"))
            }
            Some(other) => {
                let text = "Parameter 'compression-type' does not accept value";
                wrong(&format!("{text} '{other}'"))
            }
        }
    }

    /// Whether no option needs a feature of the format that compressed images here do not have.
    pub(crate) fn is_plain(&self) -> bool {
        let old = self.version == 3 && self.refcount_bits == 16 && !self.lazy_refcounts;
        old && !self.subclusters && self.data_file.is_none()
    }

    /// Whether space is to be allocated that has no data.
    pub(crate) fn is_preallocated(&self) -> bool {
        self.preallocation != Preallocation::Off
    }

    /// The options of our device.
    pub(crate) fn device_options(&self) -> Vec<String> {
        let mut all = vec![format!("cluster={}", self.cluster)];
        if self.version < 3 {
            all.push("version=2".to_string());
        }
        if self.compression.as_deref() == Some("zstd") {
            all.push("compression=zstd".to_string());
        }
        if self.refcount_bits != 16 {
            all.push(format!("refcount-bits={}", self.refcount_bits));
        }
        for (name, on) in
            [("lazy-refcounts", self.lazy_refcounts), ("data-file-raw", self.data_file_raw)]
        {
            all.extend(on.then(|| format!("{name}=on")));
        }
        if self.subclusters {
            all.push("subclusters=on".to_string());
        }
        if let Some(file) = &self.data_file {
            all.push(format!("data-file={}", encoded(file)));
        }
        all
    }
}
