//! `qemu-img info`.

use std::os::unix::fs::MetadataExt as _;

use blockhaul_block::{BlockSizes, Error};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_command_lines::qemu_image::{self, ImageLocation, QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::describe::{
    BitmapDescription, Qcow2Description, SnapshotDescription, describe,
};
use blockhaul_transfer::one_line;

use crate::error::{QemuImgStatus, Result, failure};
use crate::image::{beside, not_opened};
use crate::json::JsonValue;
use crate::limits::LimitedImage;
use crate::probe::format_of_device;
use crate::tool::QemuImg;

/// Most images of a chain.
const CHAIN_MAX: usize = 200;

/// An image, and the facts that `info` shows.
struct ImageDescription {
    image: QemuImage,
    format: QemuFormat,
    /// Size of the disk, and length of the file, in bytes.
    size: u64,
    len: u64,
    qcow2: Option<Qcow2Description>,
    /// The image above names a protocol in place of a format: nothing is over the file.
    is_protocol: bool,
    /// The block sizes of the server that has it, if it is an export.
    export: Option<BlockSizes>,
    /// The limits of the disk, and those of its file, if they are to be shown.
    limits: Option<[JsonValue; 2]>,
}

impl QemuImg {
    /// Runs `info`.
    pub(crate) fn info(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let is_json = line.is_json()?;
        let direct = is_direct(line)?;
        let mut all = self.backing_chain(line.image(0, "format")?, line.has("backing-chain"))?;
        if line.has("limits") {
            all.iter_mut().try_for_each(|one| one.find_limits(direct))?;
        }
        let text = if is_json {
            let mut values: Vec<JsonValue> = all.iter().map(ImageDescription::value).collect();
            let value = match (line.has("backing-chain"), values.pop()) {
                (false, Some(only)) => only,
                (_, last) => {
                    values.extend(last);
                    JsonValue::List(values)
                }
            };
            value.json() + "\n"
        } else {
            all.iter().map(ImageDescription::text).collect::<Vec<_>>().join("\n")
        };
        self.print(&text)
    }

    /// Size of the disk in an image, in bytes.
    pub(crate) fn described_size(&self, image: &QemuImage) -> Result<u64> {
        Ok(self.describe_image(image.clone())?.size)
    }

    /// The backing file that must grow before a commit, and the size in bytes that it needs; none also if
    /// its own backing file would show in the new part.
    pub(crate) fn backing_to_grow(
        &self,
        image: &QemuImage,
    ) -> Result<Option<(QemuImage, QemuFormat, u64)>> {
        let all = self.backing_chain(image.clone(), true)?;
        let [top, below, rest @ ..] = &all[..] else { return Ok(None) };
        let hides = rest.first().is_none_or(|lower| lower.size <= below.size);
        let grows = top.size > below.size && hides;
        Ok(grows.then(|| (below.image.clone(), below.format, top.size)))
    }

    /// The images of a chain above the image `name`, the top first, and that image with its format.
    pub(crate) fn images_down_to(
        &self,
        top: &QemuImage,
        name: &str,
    ) -> Result<(Vec<QemuImage>, QemuImage, QemuFormat)> {
        let wanted = QemuImage::named(name, None)?;
        let beside_top = QemuImage::named(&beside(top, name), None)?;
        let mut all = self.backing_chain(top.clone(), true)?;
        let is_wanted = |found: &ImageDescription| {
            let same = |other: &QemuImage| {
                let real =
                    |image: &QemuImage| image.path().and_then(|path| path.canonicalize().ok());
                real(&found.image).is_some() && real(&found.image) == real(other)
            };
            same(&wanted) || same(&beside_top)
        };
        let place = all.iter().position(is_wanted).filter(|&place| place > 0);
        let Some(place) = place else {
            let top = &top.shown;
            return Err(failure(format!("Did not find '{name}' in the backing chain of '{top}'")));
        };
        let base = all.remove(place);
        all.truncate(place);
        Ok((all.into_iter().map(|found| found.image).collect(), base.image, base.format))
    }

    /// The internal snapshots of an image.
    pub(crate) fn snapshots(&self, image: QemuImage) -> Result<Vec<SnapshotDescription>> {
        Ok(self.describe_image(image)?.qcow2.map(|found| found.snapshots).unwrap_or_default())
    }

    /// The facts in the header and tables of a qcow2 image.
    pub(crate) fn description(&self, image: &QemuImage) -> Result<Qcow2Description> {
        let text = || format!("Could not open '{}': it is no qcow2 image", image.shown);
        self.describe_image(image.clone())?.qcow2.ok_or_else(|| failure(text()))
    }

    /// The bitmaps of an image.
    pub(crate) fn bitmaps(&self, image: &QemuImage) -> Result<Vec<BitmapDescription>> {
        Ok(self.describe_image(image.clone())?.qcow2.map(|found| found.bitmaps).unwrap_or_default())
    }

    /// The image, and those below it if they are wanted.
    fn backing_chain(&self, first: QemuImage, wanted: bool) -> Result<Vec<ImageDescription>> {
        let mut all: Vec<ImageDescription> = Vec::new();
        let mut next = Some((first, false));
        while let Some((image, is_protocol)) = next.take() {
            let is_loop = |found: &ImageDescription| found.image.place == image.place;
            if all.len() == CHAIN_MAX || all.iter().any(is_loop) {
                let text = format!("Backing file '{}' creates an infinite loop.", image.shown);
                return Err(failure(text));
            }
            let mut found = self.describe_image(image)?;
            found.is_protocol = is_protocol;
            if let Some(below) = found.below().filter(|_| wanted) {
                let format = found.qcow2.as_ref().and_then(|qcow2| qcow2.backing_format.as_deref());
                let is_protocol = format.is_some_and(qemu_image::is_protocol);
                next = Some((QemuImage::of_backing(&below, format)?, is_protocol));
            }
            all.push(found);
        }
        Ok(all)
    }

    fn describe_image(&self, image: QemuImage) -> Result<ImageDescription> {
        let known = match image.unknown_export() {
            Some(_) if image.context.is_none() => None,
            _ => Some(self.image_format(&image)?),
        };
        let holder = DeviceSpec::parse(image.holder().as_ref())?;
        let described = image.clone();
        let result = self.on_worker(move |registry| async move {
            let mut open = Vec::new();
            let result = async {
                let stack = registry.open(&holder, Vec::new(), Intent::READ).await?;
                open.push(stack.clone());
                let facts = stack.device().facts();
                let (len, sizes) = (facts.size, facts.block);
                let format = match known {
                    Some(format) => format,
                    // Over the connection that is there: a server may have room for one client.
                    None => format_of_device(stack.device()).await?,
                };
                match format {
                    QemuFormat::Qcow2 => {
                        let qcow2 = describe(stack.device()).await?;
                        Ok((format, qcow2.size, len, Some(qcow2), sizes))
                    }
                    QemuFormat::Raw => Ok((format, len, len, None, sizes)),
                    _ => {
                        let disk = DeviceSpec::parse(described.disk(format, &[]).as_ref())?;
                        let size = size(&registry, &disk, &mut open).await?;
                        Ok::<_, Error>((format, size, len, None, sizes))
                    }
                }
            };
            (result.await, open)
        })?;
        let (result, open) = result;
        // Not on a worker: this waits for servers to end.
        drop(open);
        let (format, size, len, qcow2, sizes) =
            result.map_err(|error| not_opened(&image, &error))?;
        let len = match &image.place {
            ImageLocation::Path(path) => {
                std::fs::metadata(path).map_or(len, |data| data.len().max(len))
            }
            ImageLocation::Uri(_) => len,
        };
        // QEMU counts in sectors.
        let [size, len] =
            [size, len].map(|bytes| bytes.checked_next_multiple_of(512).unwrap_or(bytes));
        let export = matches!(image.place, ImageLocation::Uri(_)).then_some(sizes);
        let is_protocol = false;
        Ok(ImageDescription { image, format, size, len, qcow2, is_protocol, export, limits: None })
    }
}

async fn size(
    registry: &Registry,
    disk: &DeviceSpec,
    open: &mut Vec<blockhaul_catalog::Stack>,
) -> Result<u64, Error> {
    let stack = registry.open(disk, Vec::new(), Intent::READ).await?;
    let size = stack.device().facts().size;
    open.push(stack);
    Ok(size)
}

/// Whether the page cache is bypassed in the cache mode of the command line.
fn is_direct(line: &QemuImgCommand) -> Result<bool> {
    match line.value("cache") {
        None | Some("writeback" | "writethrough" | "unsafe") => Ok(false),
        Some("none" | "off" | "directsync") => Ok(true),
        Some(other) => Err(failure(format!("Invalid cache option: {other}"))),
    }
}

impl ImageDescription {
    /// Finds the limits of the disk and of its file.
    fn find_limits(&mut self, direct: bool) -> Result<()> {
        let is_known = matches!(self.format, QemuFormat::Raw | QemuFormat::Qcow2);
        if !is_known || self.protocol() == "host_device" {
            let text = "info: --limits is not supported for block devices, and for formats other than raw and qcow2";
            return Err(failure(text));
        }
        let image = LimitedImage {
            format: self.format,
            is_guessed: self.image.format.is_none(),
            qcow2: self.qcow2.as_ref(),
            direct,
            export: self.export,
        };
        self.limits = Some([image.of_disk(), image.of_holder()]);
        Ok(())
    }

    /// The name of the backing file, from the directory of this program.
    fn below(&self) -> Option<String> {
        let name = self.qcow2.as_ref()?.backing.as_deref()?;
        Some(beside(&self.image, name))
    }

    fn actual(&self) -> Option<u64> {
        let data = std::fs::metadata(self.image.path()?).ok()?;
        Some(data.blocks().saturating_mul(512))
    }

    fn protocol(&self) -> &'static str {
        use std::os::unix::fs::FileTypeExt as _;
        match &self.image.place {
            ImageLocation::Uri(_) => "nbd",
            ImageLocation::Path(path) => match std::fs::metadata(path) {
                Ok(data) if data.file_type().is_block_device() => "host_device",
                _ => "file",
            },
        }
    }

    fn name(&self) -> String {
        let QemuImage { place, shown, .. } = &self.image;
        match place {
            ImageLocation::Path(path) => path.display().to_string(),
            ImageLocation::Uri(uri) if shown.starts_with("json:") => uri.clone(),
            ImageLocation::Uri(_) => shown.clone(),
        }
    }

    /// The facts of the file alone.
    fn file_value(&self) -> JsonValue {
        let mut file: Vec<_> = self.limits_member(1).into_iter().collect();
        file.extend([
            ("children", JsonValue::List(Vec::new())),
            ("virtual-size", JsonValue::Number(self.len)),
            ("filename", JsonValue::Text(self.name())),
            ("format", JsonValue::Text(self.protocol().to_string())),
        ]);
        file.extend(self.actual_member());
        if self.protocol() != "nbd" {
            let specific = vec![
                ("type", JsonValue::Text(self.protocol().to_string())),
                ("data", JsonValue::Object(Vec::new())),
            ];
            file.push(("format-specific", JsonValue::Object(specific)));
            file.push(("dirty-flag", JsonValue::Flag(false)));
        }
        JsonValue::Object(file)
    }

    fn actual_member(&self) -> Option<(&'static str, JsonValue)> {
        Some(("actual-size", JsonValue::Number(self.actual()?)))
    }

    /// The limits of the disk (0) or of its file (1).
    fn limits_member(&self, number: usize) -> Option<(&'static str, JsonValue)> {
        Some(("limits", self.limits.as_ref()?[number].clone()))
    }

    fn value(&self) -> JsonValue {
        if self.is_protocol {
            return self.file_value();
        }
        let child =
            vec![("name", JsonValue::Text("file".to_string())), ("info", self.file_value())];
        let mut all: Vec<_> = self.limits_member(0).into_iter().collect();
        all.push(("children", JsonValue::List(vec![JsonValue::Object(child)])));
        let qcow2 = self.qcow2.as_ref();
        if let Some(qcow2) = qcow2 {
            let backing = qcow2.backing.as_ref().and(qcow2.backing_format.as_ref());
            all.extend(
                backing.map(|name| ("backing-filename-format", JsonValue::Text(name.clone()))),
            );
            if !qcow2.snapshots.is_empty() {
                all.push((
                    "snapshots",
                    JsonValue::List(qcow2.snapshots.iter().map(moment).collect()),
                ));
            }
        }
        all.push(("virtual-size", JsonValue::Number(self.size)));
        all.push(("filename", JsonValue::Text(self.name())));
        all.extend(qcow2.map(|qcow2| ("cluster-size", JsonValue::Number(qcow2.cluster))));
        all.push(("format", JsonValue::Text(self.format.name().to_string())));
        all.extend(self.actual_member());
        if let Some(qcow2) = qcow2 {
            let specific =
                vec![("type", JsonValue::Text("qcow2".to_string())), ("data", specific(qcow2))];
            all.push(("format-specific", JsonValue::Object(specific)));
            all.extend(self.below().map(|name| ("full-backing-filename", JsonValue::Text(name))));
            let name = qcow2.backing.clone();
            all.extend(name.map(|name| ("backing-filename", JsonValue::Text(name))));
        }
        // An export does not tell; a raw disk is what it is in.
        if self.protocol() != "nbd" || self.format != QemuFormat::Raw {
            all.push(("dirty-flag", JsonValue::Flag(qcow2.is_some_and(|qcow2| qcow2.dirty))));
        }
        JsonValue::Object(all)
    }

    fn text(&self) -> String {
        let name = one_line(&self.name());
        let disk = self.actual().map_or_else(|| "unavailable".to_string(), human);
        let mut text = format!(
            "image: {name}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {disk}\n",
            if self.is_protocol { self.protocol() } else { self.format.name() },
            human(self.size),
            self.size,
        );
        let limits = |number: usize, depth: usize| {
            let all = self.limits.as_ref().map(|both| both[number].lines(depth + 1));
            let blank = "    ".repeat(depth);
            all.map(|all| format!("{blank}Block limits:\n{all}")).unwrap_or_default()
        };
        if self.is_protocol {
            return text + &limits(1, 0);
        }
        if let Some(qcow2) = &self.qcow2 {
            text += &format!("cluster_size: {}\n", qcow2.cluster);
            if qcow2.dirty {
                text += "cleanly shut down: no\n";
            }
            if let (Some(name), Some(full)) = (&qcow2.backing, self.below()) {
                text += &format!("backing file: {}", one_line(name));
                if *name != full {
                    text += &format!(" (actual path: {})", one_line(&full));
                }
                text.push('\n');
                if let Some(format) = &qcow2.backing_format {
                    text += &format!("backing file format: {}\n", one_line(format));
                }
            }
            text += &limits(0, 0);
            if !qcow2.snapshots.is_empty() {
                text += &table(&qcow2.snapshots);
            }
            text += "Format specific information:\n";
            text += &specific(qcow2).lines(1);
        } else {
            text += &limits(0, 0);
        }
        text += &format!(
            "Child node '/file':\n    filename: {name}\n    protocol type: {}\n    file length: {} ({} bytes)\n    \
             disk size: {disk}\n",
            self.protocol(),
            human(self.len),
            self.len
        );
        text += &limits(1, 1);
        text
    }
}

/// The facts that only qcow2 images have.
fn specific(qcow2: &Qcow2Description) -> JsonValue {
    let text = |text: &str| JsonValue::Text(text.to_string());
    if qcow2.version < 3 {
        return JsonValue::Object(vec![
            ("compat", text("0.10")),
            ("compression-type", text(qcow2.compression)),
            ("refcount-bits", JsonValue::Number(qcow2.refcount_bits.into())),
        ]);
    }
    let mut all = vec![
        ("compat", text("1.1")),
        ("compression-type", text(qcow2.compression)),
        ("lazy-refcounts", JsonValue::Flag(qcow2.lazy_refcounts)),
    ];
    if !qcow2.bitmaps.is_empty() {
        all.push(("bitmaps", JsonValue::List(qcow2.bitmaps.iter().map(bitmap).collect())));
    }
    all.push(("refcount-bits", JsonValue::Number(qcow2.refcount_bits.into())));
    if qcow2.external_data {
        all.extend(qcow2.data_file.as_deref().map(|name| ("data-file", text(name))));
        all.push(("data-file-raw", JsonValue::Flag(qcow2.data_file_raw)));
    }
    all.push(("corrupt", JsonValue::Flag(qcow2.corrupt)));
    all.push(("extended-l2", JsonValue::Flag(qcow2.subclusters)));
    JsonValue::Object(all)
}

fn bitmap(one: &BitmapDescription) -> JsonValue {
    let flags = [(one.in_use, "in-use"), (one.enabled, "auto")];
    let flags = flags.into_iter().filter(|flag| flag.0);
    JsonValue::Object(vec![
        ("flags", JsonValue::List(flags.map(|flag| JsonValue::Text(flag.1.to_string())).collect())),
        ("name", JsonValue::Text(one.name.clone())),
        ("granularity", JsonValue::Number(one.granularity)),
    ])
}

const NANOSECONDS: u64 = 1_000_000_000;

fn moment(one: &SnapshotDescription) -> JsonValue {
    let facts = one.facts;
    let mut all = Vec::new();
    all.extend(facts.instructions.map(|count| ("icount", JsonValue::Number(count))));
    all.push(("vm-clock-nsec", JsonValue::Number(facts.clock % NANOSECONDS)));
    all.push(("name", JsonValue::Text(one.name.clone())));
    all.push(("date-sec", JsonValue::Number(facts.date.0.into())));
    all.push(("date-nsec", JsonValue::Number(facts.date.1.into())));
    all.push(("vm-clock-sec", JsonValue::Number(facts.clock / NANOSECONDS)));
    all.push(("id", JsonValue::Text(one.id.clone())));
    all.push(("vm-state-size", JsonValue::Number(facts.vm_state)));
    JsonValue::Object(all)
}

/// The table of snapshots.
pub(crate) fn table(all: &[SnapshotDescription]) -> String {
    let row = |id: &str, tag: &str, size: &str, date: &str, clock: &str, count: &str| {
        format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {count:>10}\n")
    };
    let mut text = "Snapshot list:\n".to_string();
    text += &row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT");
    for one in all {
        let facts = one.facts;
        let date = jiff::Timestamp::from_second(facts.date.0.into()).map_or_else(
            |_| String::new(),
            |at| {
                let zoned = at.to_zoned(jiff::tz::TimeZone::system());
                zoned.strftime("%Y-%m-%d %H:%M:%S").to_string()
            },
        );
        let seconds = facts.clock / NANOSECONDS;
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            facts.clock / 1_000_000 % 1000
        );
        let count = facts.instructions.map(|count| count.to_string()).unwrap_or_default();
        let (id, name) = (one_line(&one.id), one_line(&one.name));
        text += &row(&id, &name, &human(facts.vm_state), &date, &clock, &count);
    }
    text
}

/// A number of bytes with three significant digits.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = match value {
        ..0.9995 => 3,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    let mut digits = format!("{value:.decimals$}");
    if digits.contains('.') {
        digits = digits.trim_end_matches('0').trim_end_matches('.').to_string();
    }
    format!("{digits} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (2560, "2.5 KiB"),
            (1_265_664, "1.21 MiB"),
            (417_792, "408 KiB"),
            (10 << 20, "10 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
