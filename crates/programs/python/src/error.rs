//! Exceptions: every error is an OSError with a number, and of the class of Python for that number.

use blockhaul_block::Kind;
use blockhaul_transfer::{TransferError, TransferErrorKind};
use pyo3::PyTypeInfo;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict as _, PyDict, PyType};

use crate::workers::libc_numbers::{INVAL, IO};

pyo3::create_exception!(
    blockhaul._blockhaul,
    Error,
    PyOSError,
    "A request, a connection or a device has failed. ``errno`` is an error number, and ``strerror`` says what \
     failed, where and why."
);
pyo3::create_exception!(
    blockhaul._blockhaul,
    CopyError,
    Error,
    "A copy has failed. ``status`` is the exit status that ``blockhaul copy`` has in this case."
);

/// The classes of exceptions, by a class of this module and one of Python.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// Names of the classes of Python for error numbers.
const USUAL: [&str; 10] = [
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "FileExistsError",
    "FileNotFoundError",
    "IsADirectoryError",
    "NotADirectoryError",
    "PermissionError",
    "TimeoutError",
];

/// Adds the classes to the module: `FileNotFoundError` is an `Error` and a `FileNotFoundError` of Python, and
/// `CopyFileNotFoundError` a `CopyError`. Exceptions are pickled by these names.
pub(crate) fn add_classes(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let all = PyDict::new(py);
    let bases = [("", py.get_type::<Error>()), ("Copy", py.get_type::<CopyError>())];
    for (prefix, base) in bases {
        module.add(base.name()?, &base)?;
        for usual in USUAL {
            let name = format!("{prefix}{usual}");
            let usual = py.import("builtins")?.getattr(usual)?;
            let members = [("__module__", module.name()?)].into_py_dict(py)?;
            let made = py.get_type::<PyType>().call1((&name, (&base, &usual), members))?;
            module.add(&*name, &made)?;
            all.set_item((&base, usual), made)?;
        }
    }
    // The module is initialized once.
    let _ = CLASSES.set(py, all.unbind());
    Ok(())
}

/// The class of `base` for an error number.
fn class<'py>(base: Bound<'py, PyType>, number: i32) -> PyResult<Bound<'py, PyType>> {
    let py = base.py();
    let usual = PyOSError::new_err((number, "")).value(py).get_type();
    let found = CLASSES.get(py).map(|all| all.bind(py).get_item((&base, usual))).transpose()?;
    match found.flatten() {
        Some(class) => Ok(class.cast_into()?),
        None => Ok(base),
    }
}

/// An exception of this class with this number.
fn made<T: PyTypeInfo>(py: Python<'_>, number: i32, text: String) -> PyErr {
    match class(py.get_type::<T>(), number) {
        Ok(class) => PyErr::from_type(class, (number, text)),
        Err(error) => error,
    }
}

/// An exception with this number.
pub(crate) fn fail(number: i32, text: &str) -> PyErr {
    let text = text.to_string();
    Python::try_attach(|py| made::<Error>(py, number, text.clone()))
        .unwrap_or_else(|| Error::new_err((number, text)))
}

/// The exception for an error of a device.
pub(crate) fn of_device(error: &blockhaul_block::Error) -> PyErr {
    fail(error.os_error().unwrap_or(number(error.kind())), &error.to_string())
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
        TransferErrorKind::Full => (6, self::number(Kind::NoSpace)),
        TransferErrorKind::Connection => (7, self::number(Kind::Disconnected)),
        TransferErrorKind::Difference => (8, IO),
    };
    let number = error.os_error().or(error.cause().map(self::number)).unwrap_or(number);
    let exception = made::<CopyError>(py, number, error.to_string());
    // Fails only if memory for the attribute is missing.
    let _ = exception.value(py).setattr("status", status);
    exception
}
