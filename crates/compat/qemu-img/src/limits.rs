//! The block limits of images that `qemu-img info --limits` shows.

use blockhaul_block::BlockSizes;
use blockhaul_command_lines::qemu_image::QemuFormat;
use blockhaul_formats::qcow2::describe::Qcow2Description;

use crate::json::JsonValue;

/// The unit in bytes in which QEMU accesses files past the page cache, and disks whose format it has guessed.
const SECTOR: u64 = 512;
/// Bytes of a page of memory.
const PAGE: u64 = 4096;
/// Parts of a request.
const PARTS: u64 = 1024;
/// Longest request of QEMU's client of NBD, in bytes.
const REQUEST: u64 = 32 << 20;
/// Parts of a cluster of an image with extended L2 entries.
const SUBCLUSTERS: u64 = 32;

/// An image, as far as its limits depend on it.
pub(crate) struct LimitedImage<'a> {
    pub(crate) format: QemuFormat,
    /// Whether the first bytes have told its format.
    pub(crate) is_guessed: bool,
    pub(crate) qcow2: Option<&'a Qcow2Description>,
    /// Whether the page cache is bypassed.
    pub(crate) direct: bool,
    /// The block sizes of the server that has it.
    pub(crate) export: Option<BlockSizes>,
}

impl LimitedImage<'_> {
    /// The limits of the disk in the image.
    pub(crate) fn of_disk(&self) -> JsonValue {
        let cluster = self.qcow2.map(|qcow2| qcow2.cluster);
        let parts = |qcow2: &Qcow2Description| if qcow2.subclusters { SUBCLUSTERS } else { 1 };
        let zeroes = self.qcow2.map(|qcow2| qcow2.cluster / parts(qcow2));
        let alignment = match (self.format, self.is_guessed) {
            (QemuFormat::Raw, true) => SECTOR,
            _ => 1,
        };
        self.limits(alignment, zeroes, cluster)
    }

    /// The limits of the file, or of the export.
    pub(crate) fn of_holder(&self) -> JsonValue {
        let alignment = match self.export {
            Some(sizes) => sizes.minimum.into(),
            None if self.direct => SECTOR,
            None => 1,
        };
        self.limits(alignment, None, None)
    }

    /// The limits, in QEMU's order.
    fn limits(&self, alignment: u64, zeroes: Option<u64>, discard: Option<u64>) -> JsonValue {
        let memory = if self.direct || self.export.is_some() { SECTOR } else { 1 };
        let preferred = self.export.map(|sizes| u64::from(sizes.preferred));
        let longest = self.export.map(|sizes| u64::from(sizes.maximum).min(REQUEST));
        let all = [
            ("write-zeroes-alignment", zeroes),
            ("request-alignment", Some(alignment)),
            ("opt-transfer", preferred),
            ("min-mem-alignment", Some(memory)),
            ("max-transfer", longest),
            ("discard-alignment", discard),
            ("opt-mem-alignment", Some(PAGE)),
            ("max-iov", Some(PARTS)),
        ];
        let known =
            all.into_iter().filter_map(|(name, value)| Some((name, JsonValue::Number(value?))));
        JsonValue::Object(known.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(value: &JsonValue) -> String {
        value.lines(0).replace('\n', "; ")
    }

    /// The output of qemu-img 11.1.3.
    #[test]
    fn limits_are_those_of_qemu() {
        let file = LimitedImage {
            format: QemuFormat::Raw,
            is_guessed: true,
            qcow2: None,
            direct: false,
            export: None,
        };
        let rest = "min mem alignment: 1; opt mem alignment: 4096; max iov: 1024; ";
        assert_eq!(lines(&file.of_disk()), format!("request alignment: 512; {rest}"));
        assert_eq!(lines(&file.of_holder()), format!("request alignment: 1; {rest}"));
        let direct = LimitedImage { is_guessed: false, direct: true, ..file };
        let rest = rest.replace("alignment: 1;", "alignment: 512;");
        assert_eq!(lines(&direct.of_disk()), format!("request alignment: 1; {rest}"));
        assert_eq!(lines(&direct.of_holder()), format!("request alignment: 512; {rest}"));
        let sizes = BlockSizes { minimum: 1, preferred: 4096, maximum: 64 << 20 };
        let export = LimitedImage { export: Some(sizes), direct: false, ..direct };
        assert_eq!(
            lines(&export.of_holder()),
            "request alignment: 1; opt transfer: 4096; min mem alignment: 512; max transfer: 33554432; \
             opt mem alignment: 4096; max iov: 1024; "
        );
    }
}
