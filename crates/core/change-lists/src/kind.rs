//! Kinds of lists, and what each of them says about its disk.

use crate::error::ChangeListError;

/// Kinds of lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListKind {
    /// Answers of VMware's QueryChangedDiskAreas, each for `startOffset` to `startOffset + length`.
    VmwareAnswers,
    /// Messages of CSI's SnapshotMetadata service, of a volume of `volume_capacity_bytes`.
    CsiMessages,
    /// Pages of ListChangedBlocks or ListSnapshotBlocks of EBS: the last one has no `NextToken`.
    EbsPages,
    /// The map of a bitmap: clean ranges are listed, too.
    BitmapMap,
    /// The changed blocks of XAPI: a bit for each block.
    XapiBitmap,
    /// The XML of thin_delta.
    ThinDelta,
    /// The XML of thin_dump, of one device.
    ThinDump,
    /// The table of `rbd diff`.
    RbdDiff,
    /// Objects with an offset and a length.
    Objects,
    /// Lines with an offset and a length.
    Lines,
}

impl ListKind {
    /// Why a list that covers a disk up to `end` is not of a source of `size` bytes, which is smaller.
    pub(crate) fn beyond(self, end: u64, size: u64) -> ChangeListError {
        let what = match self {
            ListKind::CsiMessages => return of_volume(end, size),
            ListKind::EbsPages => return of_ebs_volume(end, size),
            ListKind::XapiBitmap => {
                return ChangeListError::other_disk(format!(
                    "the bitmap is for a disk of about {end} bytes (one bit per 64 KiB), but the source has \
                     {size} bytes: use the bitmap of this disk"
                ));
            }
            ListKind::VmwareAnswers => "startOffset and length of the last answer",
            _ => "the ranges of the map",
        };
        ChangeListError::other_disk(format!(
            "{what} end at {end}, but the source has {size} bytes: use the list of this disk"
        ))
    }

    /// Why a list is not enough that does not say what it covers.
    pub(crate) fn silent(self) -> ChangeListError {
        ChangeListError::incomplete(
            match self {
                ListKind::VmwareAnswers => {
                    "no answer of QueryChangedDiskAreas has startOffset and length, which say what it covers: \
                     save the whole answers"
                }
                ListKind::CsiMessages => {
                    "the messages do not say the size of their volume (volume_capacity_bytes): save the whole \
                     messages"
                }
                ListKind::EbsPages => {
                    "the pages do not say the size of their volume (VolumeSize): save the whole pages"
                }
                _ => "the list does not say what it covers: save all of it",
            }
            .to_string(),
        )
    }

    /// Why a list is not enough; `missing`: the missing part, from `at` on.
    pub(crate) fn incomplete(self, size: u64, missing: &str, at: u64) -> ChangeListError {
        ChangeListError::incomplete(match self {
            ListKind::VmwareAnswers => format!(
                "the answers of QueryChangedDiskAreas do not cover all of the source's {size} bytes: \
                 {missing}: query again with startOffset={at} and add the answer"
            ),
            ListKind::CsiMessages => of_volume(at, size).to_string(),
            ListKind::EbsPages => of_ebs_volume(at, size).to_string(),
            ListKind::XapiBitmap => format!(
                "the bitmap is for a disk of about {at} bytes (one bit per 64 KiB), but the source has {size} \
                 bytes: save the whole bitmap"
            ),
            _ => format!(
                "the map does not cover all of the source's {size} bytes: {missing}: save the whole map"
            ),
        })
    }

    /// Why a list is not enough that says itself that more follows.
    pub(crate) fn unfinished(self) -> ChangeListError {
        ChangeListError::incomplete(
            "the last page has a NextToken: more pages follow it: list again with this token \
             (--next-token) and add the pages, up to one without NextToken"
                .into(),
        )
    }
}

fn of_volume(end: u64, size: u64) -> ChangeListError {
    ChangeListError::other_disk(format!(
        "the list is of a volume of {end} bytes (volume_capacity_bytes), but the source has {size} bytes: use \
         the list of this volume"
    ))
}

fn of_ebs_volume(end: u64, size: u64) -> ChangeListError {
    ChangeListError::other_disk(format!(
        "the list is of a volume of {end} bytes (VolumeSize), but the source has {size} bytes: use the list of \
         this volume"
    ))
}
