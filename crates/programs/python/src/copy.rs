//! `PythonCopy` (`Copying` in Python): a copy, as `blockhaul copy` does it.

use std::ffi::OsString;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use blockhaul_catalog::DeviceSpec;
use blockhaul_engine::CopyProgress;
use blockhaul_io::{Pool, Runtime};
use blockhaul_registry::device_registry;
use blockhaul_transfer::{
    CopyReport, CopyRequest, CopySetup, Endpoint, NamedOption, TransferError, TransferOptions,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{of_copy, of_device};
use crate::handle::seconds;
use crate::opening::spec;
use crate::wait::wait_looking;
use crate::workers;

/// Bytes done and in total, those written as data, zeroed, skipped, resumed and verified, connections,
/// requests, bytes of a request.
type Counters = (u64, u64, u64, u64, u64, u64, u64, usize, usize, u64);

/// An option by its name on the command line, with its texts; a flag that is set has none.
type OptionTexts = (String, Vec<OsString>);

/// A copy that has not begun, or runs.
#[pyclass(frozen, name = "Copying", module = "blockhaul._blockhaul")]
pub(crate) struct PythonCopy {
    copy: Mutex<Option<CopySetup>>,
    progress: Arc<CopyProgress>,
}

/// The result of a copy.
#[pyclass(frozen, get_all, name = "Copied", module = "blockhaul._blockhaul")]
pub(crate) struct PythonCopyResult {
    /// Bytes to copy.
    size: u64,
    /// Bytes written as data.
    data: u64,
    /// Bytes zeroed on the target.
    zeroed: u64,
    /// Bytes that were already zero on the target.
    skipped: u64,
    /// Bytes that an earlier run had copied.
    resumed: u64,
    /// Bytes discarded at the source.
    discarded: u64,
    /// Bytes that the verification compared.
    verified: u64,
    /// Connections used, to each side.
    connections: usize,
    /// Elapsed time in seconds.
    elapsed: f64,
    /// The digest in hexadecimal, if it was asked for.
    digest: Option<String>,
    /// Warnings.
    warnings: Vec<String>,
    /// Requests and connections that had to be repeated.
    retries: u64,
    /// One line about all this.
    text: String,
}

impl PythonCopyResult {
    fn of(report: CopyReport) -> PythonCopyResult {
        let summary = report.summary;
        let retried = summary.retried;
        PythonCopyResult {
            size: summary.size,
            data: summary.data,
            zeroed: summary.zeroed,
            skipped: summary.skipped,
            resumed: summary.resumed,
            discarded: summary.discarded,
            verified: report.verified,
            connections: summary.lanes,
            elapsed: summary.elapsed.as_secs_f64(),
            digest: summary.digest,
            warnings: summary.warnings,
            retries: retried.source_requests
                + retried.target_requests
                + retried.source_connections
                + retried.target_connections,
            text: report.text,
        }
    }
}

#[pymethods]
impl PythonCopyResult {
    fn __repr__(&self) -> String {
        format!("<blockhaul.Copied {}>", self.text)
    }
}

#[pymethods]
impl PythonCopy {
    #[new]
    fn new(
        py: Python<'_>,
        source: Vec<OsString>,
        target: Vec<OsString>,
        options: Vec<OptionTexts>,
    ) -> PyResult<PythonCopy> {
        let ends = spec(&source).and_then(|source| Ok((source, spec(&target)?)));
        let (source, target) = ends.map_err(|error| of_device(&error))?;
        // It reads files: manifests and lists of ranges.
        let copy = py.detach(move || set_up(source, target, &options));
        let copy = copy.map_err(|error| of_copy(py, &error))?;
        let progress = copy.control().progress().clone();
        Ok(PythonCopy { copy: Mutex::new(Some(copy)), progress })
    }

    /// Copies, and calls ``look`` each ``interval`` seconds. If that or a signal handler raises, the copy
    /// stops, waits for what is in flight, and the exception goes on.
    fn run(
        &self,
        py: Python<'_>,
        look: &Bound<'_, PyAny>,
        interval: f64,
    ) -> PyResult<PythonCopyResult> {
        let copy = self.copy.lock().expect("no panic under this lock").take();
        let Some(copy) = copy else { return Err(PyValueError::new_err("a copy runs only once")) };
        let runtime = workers::runtime()?;
        let interval = seconds(interval)?;
        let (sender, receiver) = channel();
        let (done, ended) = channel::<()>();
        let copying = move || {
            let result = run(copy, &runtime);
            // Nobody waits any more after an exception.
            let _ = sender.send(result);
            drop(done);
        };
        std::thread::Builder::new().name("copy".into()).spawn(copying)?;
        let waited = wait_looking(py, receiver, interval, |_| {
            if look.is_none() {
                return Ok(());
            }
            look.call0().map(drop)
        });
        match waited {
            Ok(result) => result.map(PythonCopyResult::of).map_err(|error| of_copy(py, &error)),
            Err(raised) => {
                self.progress.cancel();
                // What is in flight is awaited, so that the target changes no more after this.
                py.detach(move || {
                    let _ = ended.recv();
                });
                Err(raised)
            }
        }
    }

    /// Stops the copy soon, from another thread.
    fn cancel(&self) {
        self.progress.cancel();
    }

    /// The counters.
    fn counters(&self) -> Counters {
        let now = self.progress.snapshot();
        (
            now.done(),
            now.total,
            now.data,
            now.zeroed,
            now.skipped,
            now.resumed,
            now.verified,
            now.connections,
            now.requests,
            now.request_size,
        )
    }
}

/// Checks a copy, as far as nothing must be opened for that.
fn set_up(
    source: DeviceSpec,
    target: DeviceSpec,
    options: &[OptionTexts],
) -> Result<CopySetup, TransferError> {
    let named: Vec<_> =
        options.iter().map(|(name, texts)| NamedOption::from_texts(name, texts)).collect();
    let options = TransferOptions::from_named(&named)
        .map_err(|error| TransferError::request(error.to_string()))?;
    let [source, target] = [source, target].map(Endpoint::Device);
    let request = CopyRequest { options, ..CopyRequest::new(source, target) };
    CopySetup::new(request, device_registry().for_command())
}

/// Copies, and waits for the end: not on a worker. After a cancel, the error says in which state the
/// target is.
fn run(copy: CopySetup, runtime: &Runtime) -> Result<CopyReport, TransferError> {
    let pool = Pool::new(copy.memory());
    let control = copy.control();
    let copied = runtime.block_on(move || async move { copy.open().await?.run(pool).await });
    let failed = |error: TransferError| {
        if !control.progress().is_cancelled() {
            return error;
        }
        let text = format!("stopped{}", control.target_state());
        TransferError::new(error.kind(), error.step(), text)
    };
    copied.map_err(failed)
}
