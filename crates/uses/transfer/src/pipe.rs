//! Copies from standard input and to standard output.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::pin::pin;

use blockhaul_block::{FileId, Kind};
use blockhaul_catalog::{Intent, Stack, TargetMaking};
use blockhaul_engine::{CopySummary, Side};
use blockhaul_io::{Interest, Pool, plain};

use crate::context::{CopyContext, LOOK, TargetContents, TargetDevice, len_of, stopped};
use crate::description::{file_of, path_of};
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::report::CopyReport;
use crate::standard_stream::{has_no_data, is_heard, is_put_in_place, is_stream};

/// Maximum bytes that a file accepts through a pipe of unknown length. With direct I/O it is made
/// that large and truncated at the end; these are tried in order: the limit of large file systems,
/// and of ext4 with blocks of 4096.
const PIPE_SIZES: [u64; 2] = [1 << 60, (16 << 40) - 4096];

/// Standard input.
pub(crate) fn open_input() -> Result<OwnedFd> {
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    let input = input.map_err(|error| cannot_open(TransferStep::OpenSource, not_open(&error)))?;
    if is_put_in_place(&input) {
        let text = "cannot read standard input: it is closed, or /dev/null";
        return Err(cannot_open(TransferStep::OpenSource, text.into()));
    }
    Ok(input)
}

/// Standard output.
pub(crate) fn open_output() -> Result<OwnedFd> {
    let output = std::io::stdout().as_fd().try_clone_to_owned();
    let output = output.map_err(|error| cannot_open(TransferStep::OpenTarget, not_open(&error)))?;
    if !is_heard(&output) {
        let text = "cannot write to standard output: it is closed, or /dev/null: the copy would be lost; \
                    to read only, copy to null:";
        return Err(cannot_open(TransferStep::OpenTarget, text.into()));
    }
    Ok(output)
}

fn not_open(error: &std::io::Error) -> String {
    format!("the standard stream is not open: {}", plain(error))
}

fn cannot_open(step: TransferStep, text: String) -> TransferError {
    TransferError::new(TransferErrorKind::Open, step, text)
}

impl CopyContext {
    pub(crate) async fn write_pipe(
        &self,
        source: &Stack,
        output: OwnedFd,
        pool: &Pool,
    ) -> Result<CopyReport> {
        let progress = self.control.progress();
        let copied =
            blockhaul_engine::copy_to_pipe(source, output, &self.engine, pool, progress).await;
        match copied {
            // The summary's warnings were logged.
            Ok(summary) => Ok(CopyReport::complete(&self.source, summary.to_string(), summary)),
            Err(error) if error.kind() == Kind::Disconnected && error.error.request().is_none() => {
                Ok(CopyReport::reader_gone())
            }
            Err(error) => Err(TransferError::engine(TransferStep::Copy, error)),
        }
    }

    pub(crate) async fn read_pipe(
        &mut self,
        input: OwnedFd,
        target: TargetDevice,
        pool: &Pool,
    ) -> Result<CopyReport> {
        let grown =
            path_of(&self.target).filter(|path| !self.target_stays() && is_file_or_absent(path));
        self.refuse_empty_pipe(&input).await?;
        let files: Vec<FileId> =
            blockhaul_backends::identity_of(input.as_fd()).into_iter().collect();
        // An object is made as long as the data.
        let is_made = matches!(target, TargetDevice::Described)
            && self.registry.target_making(&self.target) == TargetMaking::Always;
        let target = if grown.is_some() || is_made {
            let target = self.open_growing(&files).await?;
            if is_made {
                self.keep_open(&target);
            }
            target
        } else {
            let (target, state) = self.open_target(target, Intent::TARGET).await?;
            self.check_apart(&files, &target.device().facts().files)?;
            self.touch(state).await?;
            target
        };
        let facts = target.device().facts();
        self.engine.flush |= facts.flush_publishes || facts.loses_unflushed;
        self.control.set_replaced(facts.flush_publishes);
        let copied = self.copy_from_pipe(input, &target, pool).await;
        drop(target);
        if let Some(path) = grown {
            cut(&path, self.control.progress().snapshot().done())?;
        }
        let summary = copied?;
        Ok(CopyReport::complete(&self.source, summary.to_string(), summary))
    }

    async fn copy_from_pipe(
        &self,
        input: OwnedFd,
        target: &Stack,
        pool: &Pool,
    ) -> Result<CopySummary> {
        let progress = self.control.progress();
        let copied =
            blockhaul_engine::copy_from_pipe(input, target, &self.engine, pool, progress).await;
        copied.map_err(|error| TransferError::engine(TransferStep::Copy, error))
    }

    /// Refuses to empty a file, or to make a version as the one before, because standard input has no data, for example because the program
    /// before the pipe failed.
    async fn refuse_empty_pipe(&self, input: &OwnedFd) -> Result<()> {
        let lost = file_of(&self.target).and_then(|path| len_of(&path));
        if lost.is_none() && !self.makes_version() {
            return Ok(());
        }
        if is_stream(input) {
            let mut ready = pin!(blockhaul_io::ready(input, Interest::Readable));
            // An error is reported when it is read.
            while blockhaul_io::timeout(LOOK, ready.as_mut()).await.is_err() {
                if self.control.progress().is_cancelled() {
                    let text = "stopped before the pipe had data";
                    return Err(stopped(TransferStep::OpenSource, text));
                }
            }
        }
        if !has_no_data(input) {
            return Ok(());
        }
        let Some(lost) = lost else {
            let text = format!("standard input is empty: {} would have nothing new", self.target);
            return Err(TransferError::misfit(text));
        };
        Err(TransferError::misfit(format!(
            "standard input is empty: {lost} bytes of {} would be lost; remove the target first if that \
             is intended",
            self.target
        )))
    }

    /// A file for a pipe of unknown length, emptied. `input`: the file behind the pipe.
    async fn open_growing(&mut self, input: &[FileId]) -> Result<Stack> {
        let layers = std::mem::take(&mut self.target_layers);
        let mut last =
            TransferError::new(TransferErrorKind::Full, TransferStep::OpenTarget, "no size fits");
        for size in PIPE_SIZES {
            let intent = Intent::growing(size);
            let opened = self.registry.open_target(&self.target, layers.clone(), intent).await;
            let (stack, preparation) = match opened {
                Ok(opened) => opened,
                Err(error) => {
                    let target = self.target.to_string();
                    last = TransferError::opening(Side::Target, &target, &error);
                    continue;
                }
            };
            self.check_apart(input, &stack.device().facts().files)?;
            // Some file systems refuse a size only when it is set.
            match self.touch(TargetContents::Unprepared(preparation)).await {
                Ok(()) => return Ok(stack),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn is_file_or_absent(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(data) => data.is_file(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Truncates a file to the length of the pipe's data.
fn cut(path: &Path, size: u64) -> Result<()> {
    let file = std::fs::File::options().write(true).open(path);
    file.and_then(|file| file.set_len(size)).map_err(|error| {
        let text = format!("cannot truncate {} to {size} bytes: {}", path.display(), plain(&error));
        TransferError::new(TransferErrorKind::Target, TransferStep::Copy, text)
    })
}
