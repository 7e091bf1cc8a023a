//! Exceptions: every error is an OSError with a number.

use blockhaul_block::Kind;
use blockhaul_transfer::{TransferError, TransferErrorKind};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::workers::libc_numbers::{INVAL, IO};

pyo3::create_exception!(
    _blockhaul,
    Error,
    PyOSError,
    "A request, a connection or a device has failed. ``errno`` is an error number, and ``strerror`` says what \
     failed, where and why."
);
pyo3::create_exception!(
    _blockhaul,
    CopyError,
    Error,
    "A copy has failed. ``status`` is the exit status that ``blockhaul copy`` has in this case."
);

/// An exception with this number.
pub(crate) fn fail(number: i32, text: &str) -> PyErr {
    Error::new_err((number, text.to_string()))
}

/// The exception for an error of a device.
pub(crate) fn of_device(error: &blockhaul_block::Error) -> PyErr {
    fail(number(error.kind()), &error.to_string())
}

/// The number of an error on Linux.
fn number(kind: Kind) -> i32 {
    match kind {
        Kind::ReadOnly => 1,
        Kind::NotFound => 2,
        Kind::Io => IO,
        Kind::NoMemory => 12,
        Kind::Refused => 13,
        Kind::InUse => 16,
        Kind::Invalid | Kind::Usage => INVAL,
        Kind::NoSpace => 28,
        Kind::TooLarge => 75,
        Kind::Unsupported => 95,
        Kind::Disconnected => 104,
        Kind::ShuttingDown => 108,
        Kind::TimedOut => 110,
    }
}

/// The exception for a failed copy; `status` is the exit status of `blockhaul copy`.
pub(crate) fn of_copy(py: Python<'_>, error: &TransferError) -> PyErr {
    let (status, number) = match error.kind() {
        TransferErrorKind::Other => (1, IO),
        TransferErrorKind::Request => (2, INVAL),
        TransferErrorKind::Open => (3, IO),
        TransferErrorKind::Source => (4, IO),
        TransferErrorKind::Target => (5, IO),
        TransferErrorKind::Full => (6, number(Kind::NoSpace)),
        TransferErrorKind::Connection => (7, number(Kind::Disconnected)),
        TransferErrorKind::Difference => (8, IO),
    };
    let exception = CopyError::new_err((number, error.to_string()));
    // Fails only if memory for the attribute is missing.
    let _ = exception.value(py).setattr("status", status);
    exception
}
