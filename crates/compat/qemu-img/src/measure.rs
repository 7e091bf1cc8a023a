//! `qemu-img measure`.

use blockhaul_catalog::Intent;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::measure::measure;

use crate::convert::snapshot_option;
use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::image::size;
use crate::json::JsonValue;
use crate::new_image::check_cluster;
use crate::tool::QemuImg;

/// The options of a new image on which its length depends.
struct MeasureOptions {
    is_raw: bool,
    /// Bytes of a cluster.
    cluster: u64,
    /// Whether the version of the format has bitmaps.
    has_bitmaps: bool,
}

impl MeasureOptions {
    fn parse(line: &QemuImgCommand) -> Result<MeasureOptions> {
        let target = line.value("target-format").unwrap_or("raw");
        if !["raw", "qcow2"].contains(&target) {
            return Err(failure(format!("measure: format {target} is not supported")));
        }
        let is_raw = target == "raw";
        let mut options = MeasureOptions { is_raw, cluster: 64 << 10, has_bitmaps: true };
        for (name, value) in line.creation()? {
            match name.as_str() {
                "cluster_size" if !is_raw => options.cluster = cluster_size(&value)?,
                "compat" if !is_raw => options.has_bitmaps = is_version_3(&value)?,
                _ => return Err(failure(format!("measure: option {name} is not supported"))),
            }
        }
        Ok(options)
    }
}

impl QemuImg {
    /// Runs `measure`.
    pub(crate) fn measure(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let is_json = line.is_json()?;
        let options = MeasureOptions::parse(line)?;
        let (source, bitmaps) = self.measured_disk(line, &options)?;
        let (required, full) = self.image_lengths(&source, options.is_raw, options.cluster)?;
        let text = if is_json {
            let mut all = Vec::new();
            all.extend(bitmaps.map(|size| ("bitmaps", JsonValue::Number(size))));
            all.push(("required", JsonValue::Number(required)));
            all.push(("fully-allocated", JsonValue::Number(full)));
            JsonValue::Object(all).json() + "\n"
        } else {
            let more = bitmaps.map(|size| format!("bitmaps size: {size}\n")).unwrap_or_default();
            format!("required size: {required}\nfully allocated size: {full}\n{more}")
        };
        self.print(&text)
    }

    /// The description of the disk that is measured, and the space in bytes that its bitmaps need.
    fn measured_disk(
        &self,
        line: &QemuImgCommand,
        options: &MeasureOptions,
    ) -> Result<(String, Option<u64>)> {
        match (line.value("size"), line.operands.is_empty()) {
            (Some(_), false) => Err(failure("--size N cannot be used together with a filename")),
            (None, true) => Err(failure("Either --size N or one filename must be specified")),
            (Some(given), true) => Ok((format!("zero:{}", size(given)?), None)),
            (None, false) => {
                let image = line.image(0, "format")?;
                let is_qcow2 = !options.is_raw && self.image_format(&image)? == QemuFormat::Qcow2;
                let bitmaps = if is_qcow2 && options.has_bitmaps {
                    self.bitmaps_size(&image, options.cluster)?
                } else {
                    None
                };
                Ok((self.read_disk(&image, |format| snapshot_option(line, format))?, bitmaps))
            }
        }
    }

    /// The length in bytes of an image of a disk: with the data of now, and with data in all clusters.
    fn image_lengths(&self, disk: &str, is_raw: bool, cluster: u64) -> Result<(u64, u64)> {
        let found = self.with_device(disk, Intent::READ, async move |device| {
            if is_raw {
                let size = device.facts().size;
                return Ok((size, size));
            }
            measure(&device, cluster).await.map(|found| (found.required, found.full))
        })?;
        found.map_err(|error| QemuImgError::opening("source", disk, &error))
    }

    /// The space in bytes that the bitmaps of an image need in a new one; none for version 2, which has
    /// none.
    fn bitmaps_size(&self, image: &QemuImage, cluster: u64) -> Result<Option<u64>> {
        let found = self.description(image)?;
        if found.version < 3 {
            return Ok(None);
        }
        let mut clusters: u64 = 0;
        let mut directory: u64 = 0;
        for one in found.bitmaps.iter().filter(|one| !one.in_use) {
            let bytes = found.size.div_ceil(one.granularity.max(1)).div_ceil(8);
            let data = bytes.div_ceil(cluster);
            clusters = clusters.saturating_add(data).saturating_add((data * 8).div_ceil(cluster));
            directory += (24 + one.name.len() as u64).next_multiple_of(8);
        }
        let clusters = clusters.saturating_add(directory.div_ceil(cluster));
        Ok(Some(clusters.saturating_mul(cluster)))
    }
}

fn cluster_size(text: &str) -> Result<u64> {
    let cluster = size(text)?;
    check_cluster(cluster)?;
    Ok(cluster)
}

fn is_version_3(text: &str) -> Result<bool> {
    match text {
        "1.1" | "v3" => Ok(true),
        "0.10" | "v2" => Ok(false),
        _ => Err(failure(format!("Parameter 'version' does not accept value '{text}'"))),
    }
}
