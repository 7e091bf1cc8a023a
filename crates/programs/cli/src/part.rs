//! Copies of a part of a disk: a range, a bitmap, or the changes since a manifest.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Error, Facts};
use blockhaul_catalog::{Spec, Stack};
use blockhaul_engine::{Bitmap, CopyError, Manifest, Options, Progress};
use blockhaul_io::Pool;

use crate::exit::{self, Failure};
use crate::ranges::List;
use crate::{args, check};

/// The part of the source to copy, as typed.
pub struct Part {
    /// Only this: offset and length.
    range: Option<(u64, u64)>,
    /// Only what this list says.
    list: Option<List>,
    /// It need not be complete.
    partial: bool,
    /// Its ranges, once the size of the source is known: offsets and lengths, in order.
    ranges: Option<Arc<[(u64, u64)]>>,
    /// Only what this selects.
    bitmap: Option<Bitmap>,
    /// Only what differs from this manifest.
    since: Option<Manifest>,
}

impl Part {
    /// Parses and checks the options, before anything is opened.
    pub fn new(args: &args::CopyArgs, source: &Spec, target: &Spec) -> Result<Part, Failure> {
        let pipe = [source, target].contains(&&Spec::Pipe);
        let increment = args.bitmap.is_some() || args.since.is_some();
        if args.range.is_some() && *source == Spec::Pipe {
            let text = "--range: the source is a pipe: use a device";
            return Err(Failure::usage(text));
        }
        if increment && pipe {
            let option = if args.bitmap.is_some() { "--bitmap" } else { "--since" };
            let text = format!(
                "{option}: ranges cannot be left out in a pipe: use a device on both sides"
            );
            return Err(Failure::usage(text));
        }
        let lists = args.ranges.is_some() || args.ranges_command.is_some();
        if lists && pipe {
            let text = "--ranges: ranges cannot be left out in a pipe: use a device on both sides";
            return Err(Failure::usage(text));
        }
        if increment && args.destination_is_zero {
            let text = "--destination-is-zero: the target of an increment holds the earlier copy";
            return Err(Failure::usage(text));
        }
        if args.bitmap.as_deref() == Some(blockhaul_block::BASE_ALLOCATION) {
            let text =
                format!("--bitmap: {} is not a dirty bitmap", blockhaul_block::BASE_ALLOCATION);
            return Err(Failure::usage(text));
        }
        if args.digest.is_some() && (increment || args.range.is_some() || lists) {
            let text = "--digest covers a whole disk: use --verify, or --manifest";
            return Err(Failure::usage(text));
        }
        let bitmap = args.bitmap.as_ref().map(|context| Bitmap {
            context: context.clone(),
            mask: args.bitmap_flags.unwrap_or(u64::MAX),
        });
        let since = args.since.as_deref().map(read).transpose()?;
        let list = match (&args.ranges, &args.ranges_command) {
            (Some(path), _) => Some(List::read(path)?),
            (None, Some(script)) => Some(List::of_command(script)?),
            (None, None) => None,
        };
        let partial = args.ranges_partial;
        Ok(Part { range: args.range, list, partial, ranges: None, bitmap, since })
    }

    /// Whether it is an increment of a copy on the target.
    pub fn is_increment(&self) -> bool {
        self.bitmap.is_some() || self.since.is_some()
    }

    /// Whether a list says what is copied.
    pub fn has_list(&self) -> bool {
        self.list.is_some()
    }

    /// Whether the target keeps what is not copied.
    pub fn is_some(&self) -> bool {
        self.is_increment() || self.range.is_some() || self.list.is_some()
    }

    /// Checks that the list of ranges is one of a source of `size` bytes, and sets its ranges.
    ///
    /// # Errors
    /// Why it is not, with a remedy.
    pub fn fit(&mut self, size: u64, options: &mut Options) -> Result<(), String> {
        if let Some(list) = &self.list {
            self.ranges = Some(list.fit(size, self.partial)?.into());
            self.set(options);
        }
        Ok(())
    }

    /// The ranges, as far as they are known, and the bitmap, for the engine.
    pub fn set(&self, options: &mut Options) {
        let range = self.range.map(|range| Arc::from([range]));
        options.ranges = range.or_else(|| self.ranges.clone());
        options.bitmap = self.bitmap.clone();
    }

    /// The requested bitmap, if a source does not have it.
    pub fn missing(&self, source: &Facts) -> Option<&str> {
        let context = &self.bitmap.as_ref()?.context;
        source.context(context).is_none().then_some(context)
    }

    /// Where the last range ends, if there are some.
    pub fn end(&self) -> u64 {
        let ranges = self.ranges.as_deref().unwrap_or_default();
        let last = self.range.or(ranges.last().copied());
        last.map_or(0, |(at, len)| at.saturating_add(len))
    }

    /// Bytes that the target must have for a source of `size` bytes.
    pub fn target_size(&self, size: u64) -> u64 {
        self.range.map_or(size, |(at, len)| at.saturating_add(len))
    }

    /// Finds the changes since the manifest, if there is one: sets the options accordingly, and
    /// returns the source's current manifest.
    pub async fn changed(
        &self,
        source: &Stack,
        options: &mut Options,
        pool: &Pool,
        progress: &Arc<Progress>,
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

    /// Distinguishes this part from others of the same source, for the journal.
    pub fn identity(&self, now: Option<&Manifest>) -> String {
        match (&self.since, now) {
            (Some(kept), Some(now)) => {
                format!(" since {} up to {}", kept.digest(), now.digest())
            }
            _ => String::new(),
        }
    }
}

fn read(path: &Path) -> Result<Manifest, Failure> {
    let unusable = |why: String| {
        Failure::new(exit::OPEN, format!("--since: manifest {}: {why}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| unusable(check::unread(&error)))?;
    text.parse().map_err(|error: Error| unusable(error.text()))
}
