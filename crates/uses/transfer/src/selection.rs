//! Copies of a part of a disk: a range, a bitmap, or the changes since a manifest.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Error, Facts};
use blockhaul_catalog::Stack;
use blockhaul_engine::{BitmapSelection, CopyError, CopyProgress, EngineOptions, Manifest};
use blockhaul_io::{Pool, plain};

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::options::TransferOptions;
use crate::ranges::RangeList;

/// The part of the source to copy.
#[derive(Debug)]
pub(crate) struct CopySelection {
    /// Only this: offset and length.
    range: Option<(u64, u64)>,
    /// Only what this list says, until the size of the source is known.
    list: Option<RangeList>,
    has_list: bool,
    /// It need not be complete.
    partial: bool,
    /// The target is meant to have nothing else.
    alone: bool,
    /// Its ranges, once the size of the source is known: offsets and lengths, in order.
    ranges: Option<Arc<[(u64, u64)]>>,
    /// Only what this selects.
    bitmap: Option<BitmapSelection>,
    /// Only what differs from this manifest.
    since: Option<Manifest>,
}

impl CopySelection {
    /// Reads the manifest and the list of these options, which do not conflict, before anything is
    /// opened.
    pub(crate) fn read(options: &TransferOptions) -> Result<CopySelection> {
        let bitmap = options.bitmap.as_ref().map(|context| BitmapSelection {
            context: context.clone(),
            mask: options.bitmap_flags.unwrap_or(u64::MAX),
        });
        let since = options.since.as_deref().map(read).transpose()?;
        let list = match (&options.ranges, &options.ranges_command) {
            (Some(path), _) => Some(RangeList::read(path)?),
            (None, Some(script)) => Some(RangeList::of_command(script)?),
            (None, None) => None,
        };
        let partial = options.ranges_partial;
        let alone = options.ranges_alone;
        Ok(CopySelection {
            range: options.range,
            has_list: list.is_some(),
            list,
            partial,
            alone,
            ranges: None,
            bitmap,
            since,
        })
    }

    /// Whether it is an increment of a copy on the target.
    pub(crate) fn is_increment(&self) -> bool {
        self.bitmap.is_some() || self.since.is_some()
    }

    /// Whether the source is read before it is known what is copied.
    pub(crate) fn reads_all(&self) -> bool {
        self.since.is_some()
    }

    /// Whether a list says what is copied onto an earlier copy.
    pub(crate) fn has_list_over_copy(&self) -> bool {
        self.has_list && !self.alone
    }

    /// Whether the target keeps what is not copied.
    pub(crate) fn is_some(&self) -> bool {
        self.is_increment() || self.range.is_some() || self.has_list
    }

    /// Checks that the list of ranges is one of a source of `size` bytes, and sets its ranges.
    ///
    /// # Errors
    /// Why it is not, with a remedy.
    pub(crate) fn fit(&mut self, size: u64, options: &mut EngineOptions) -> Result<(), String> {
        if let Some(list) = self.list.take() {
            self.ranges = Some(list.fit(size, self.partial)?.into());
            self.set(options);
        }
        Ok(())
    }

    /// The ranges, as far as they are known, and the bitmap, for the engine.
    pub(crate) fn set(&self, options: &mut EngineOptions) {
        let range = self.range.map(|range| Arc::from([range]));
        options.ranges = range.or_else(|| self.ranges.clone());
        options.bitmap = self.bitmap.clone();
    }

    /// The requested bitmap, if a source does not have it.
    pub(crate) fn missing(&self, source: &Facts) -> Option<&str> {
        let context = &self.bitmap.as_ref()?.context;
        source.context(context).is_none().then_some(context)
    }

    /// Where the last range ends, if there are some.
    pub(crate) fn end(&self) -> u64 {
        let ranges = self.ranges.as_deref().unwrap_or_default();
        let last = self.range.or(ranges.last().copied());
        last.map_or(0, |(at, len)| at.saturating_add(len))
    }

    /// Bytes that the target must have for a source of `size` bytes.
    pub(crate) fn target_size(&self, size: u64) -> u64 {
        self.range.map_or(size, |(at, len)| at.saturating_add(len))
    }

    /// Finds the changes since the manifest, if there is one: sets the options accordingly, and
    /// returns the source's current manifest.
    pub(crate) async fn changed(
        &self,
        source: &Stack,
        options: &mut EngineOptions,
        pool: &Pool,
        progress: &Arc<CopyProgress>,
    ) -> Result<Option<Manifest>, CopyError> {
        let Some(kept) = &self.since else { return Ok(None) };
        let now = blockhaul_engine::manifest(source, Some(kept), options, pool, progress).await?;
        let (at, len) = now.range();
        let end = at + len;
        let changed = kept.differences(&now).into_iter().filter_map(|(start, len)| {
            // Units at the ends of a range are partly in it.
            let (start, stop) = (start.max(at), (start + len).min(end));
            (start < stop).then(|| (start, stop - start))
        });
        options.ranges = Some(changed.collect());
        Ok(Some(now))
    }

    /// Distinguishes this selection from others of the same source, for the journal.
    pub(crate) fn identity(&self, now: Option<&Manifest>) -> String {
        match (&self.since, now) {
            (Some(kept), Some(now)) => {
                format!(" since {} up to {}", kept.digest(), now.digest())
            }
            _ => String::new(),
        }
    }
}

fn read(path: &Path) -> Result<Manifest> {
    let unusable = |why: String| {
        let text = format!("--since: manifest {}: {why}", path.display());
        TransferError::new(TransferErrorKind::Open, TransferStep::Selection, text)
    };
    let text = std::fs::read_to_string(path).map_err(|error| unusable(unread_manifest(&error)))?;
    text.parse().map_err(|error: Error| unusable(error.text()))
}

/// The reason why a manifest cannot be read, with a remedy. Other files may not be text.
pub fn unread_manifest(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!("{}: give a file that --manifest wrote", plain(error))
        }
        std::io::ErrorKind::InvalidData => {
            "it is not a manifest: give a file that --manifest wrote".into()
        }
        _ => plain(error),
    }
}
