//! Data that a layer had accepted and lost.

use std::sync::atomic::{AtomicBool, Ordering};

/// A layer of this process could not write data that it had accepted.
static DATA_LOST: AtomicBool = AtomicBool::new(false);

/// Whether a layer of this process has lost data that it had accepted, because its device could not
/// be written at the end. The log says which layer. A program that served or copied must then not
/// exit with success.
pub fn data_was_lost() -> bool {
    DATA_LOST.load(Ordering::SeqCst)
}

/// A layer has lost data that it had accepted.
pub(crate) fn lose_data() {
    DATA_LOST.store(true, Ordering::SeqCst);
}
