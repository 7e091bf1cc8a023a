//! What a list says about the disk that it is of.

/// Kinds of lists that say for which part of a disk they are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListKind {
    /// Answers of VMware's QueryChangedDiskAreas, each for `startOffset` to `startOffset + length`.
    VmwareAnswers,
    /// Messages of CSI's SnapshotMetadata service, of a volume of `volume_capacity_bytes`.
    CsiMessages,
    /// The map of a bitmap: clean ranges are listed, too.
    BitmapMap,
    /// The changed blocks of XAPI: a bit for each block.
    XapiBitmap,
}

/// The part of a disk for which a list is complete.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListCoverage {
    pub(super) kind: ListKind,
    /// Start and end of ranges.
    pub(super) ranges: Vec<(u64, u64)>,
}

/// What a parser finds, in any order: start and end of ranges.
pub(super) type Contents = (Vec<(u64, u64)>, Option<ListCoverage>);

impl ListKind {
    /// Why a list that reaches to `end` is not of a source of `size` bytes, which is smaller.
    pub(super) fn beyond(self, end: u64, size: u64) -> String {
        let it = match self {
            ListKind::CsiMessages => {
                return format!(
                    "the list is of a volume of {end} bytes (volume_capacity_bytes), but the source has \
                     {size} bytes: use the list of this volume"
                );
            }
            ListKind::XapiBitmap => {
                return format!(
                    "the bitmap is for a disk of about {end} bytes (one bit per 64 KiB), but the source has \
                     {size} bytes: use the bitmap of this disk"
                );
            }
            ListKind::VmwareAnswers => "startOffset and length of the last answer",
            ListKind::BitmapMap => "the ranges of the map",
        };
        format!("{it} end at {end}, but the source has {size} bytes: use the list of this disk")
    }

    /// Why a list is not enough that does not say what it covers.
    pub(super) fn silent(self) -> String {
        let text = match self {
            ListKind::VmwareAnswers => {
                "no answer of QueryChangedDiskAreas has startOffset and length, which say what it covers: save \
                 the whole answers"
            }
            ListKind::CsiMessages => {
                "the messages do not say the size of their volume (volume_capacity_bytes): save the whole \
                 messages"
            }
            // They always do.
            ListKind::BitmapMap | ListKind::XapiBitmap => {
                "it does not say what it covers: save all of it"
            }
        };
        text.to_string()
    }

    /// Why a list is not enough; `missing`: what is missing, from `at` on.
    pub(super) fn incomplete(self, size: u64, missing: &str, at: u64) -> String {
        match self {
            ListKind::VmwareAnswers => format!(
                "the answers of QueryChangedDiskAreas do not cover all of the source's {size} bytes: \
                 {missing}: query again with startOffset={at} and add the answer"
            ),
            ListKind::CsiMessages => format!(
                "the list is of a volume of {at} bytes (volume_capacity_bytes), but the source has {size} \
                 bytes: use the list of this volume"
            ),
            ListKind::BitmapMap => format!(
                "the map does not cover all of the source's {size} bytes: {missing}: save the \
                 whole map"
            ),
            ListKind::XapiBitmap => format!(
                "the bitmap is for a disk of about {at} bytes (one bit per 64 KiB), but the source has {size} \
                 bytes: save the whole bitmap"
            ),
        }
    }
}

/// Start and end of a range.
pub(super) fn range(at: u64, len: u64) -> Result<(u64, u64), String> {
    match at.checked_add(len).filter(|&end| i64::try_from(end).is_ok()) {
        None => Err(format!("{len} bytes at offset {at} end beyond 2^63 - 1")),
        Some(end) => Ok((at, end)),
    }
}
