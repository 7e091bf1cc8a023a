//! `qemu-img`, with the devices, the streams and the signals of this program.

use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use blockhaul_qemu_img::{QemuImg, QemuImgError, QemuImgHost};

use super::stand_in::log_as;
use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::{devices, session, signals};

/// Runs qemu-img with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    log_as("qemu-img", false);
    let signal = Arc::new(AtomicI32::new(0));
    let result = emulation(signal.clone()).run(words);
    let status = |error: &QemuImgError| {
        error.kind().code().unwrap_or_else(|| signals::status(signal.load(Ordering::Relaxed)))
    };
    result
        .map(|answer| answer.code())
        .map_err(|error| CommandFailure::new(status(&error), error.to_string()))
}

/// The emulation. The number of a signal that cancels a copy is kept in `signal`.
pub(super) fn emulation(signal: Arc<AtomicI32>) -> QemuImg {
    QemuImg::new(QemuImgHost {
        registry: Box::new(|timeout, contexts| devices::registry_asking(timeout, 0, contexts)),
        output: Box::new(stdout()),
        messages: Box::new(stderr()),
        on_copy: Box::new(move |copy| {
            let copies = vec![copy.progress().clone()];
            let caught = session::cancel_on_signal(copies, signal.clone());
            caught.map_err(|failure| failure.to_string())
        }),
    })
}

impl From<QemuImgError> for CommandFailure {
    fn from(error: QemuImgError) -> CommandFailure {
        CommandFailure::new(error.kind().code().unwrap_or(FAILED), error.to_string())
    }
}
