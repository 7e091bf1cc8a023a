//! `list_exports`: what a server offers.

use std::ffi::OsString;

use blockhaul::library;
use blockhaul_client::options::OptionSession;
use pyo3::prelude::*;

use crate::error::of_device;
use crate::handle::seconds;
use crate::opening::place;
use crate::{wait, workers};

/// The name and description of each export.
type Exports = Vec<(String, String)>;

/// The exports that a server lists: their names and descriptions. ``words`` is a URI, or a command that
/// serves on its standard input and output.
#[pyfunction]
#[pyo3(signature = (words, *, command=false, timeout=60.0))]
pub(crate) fn list_exports(
    py: Python<'_>,
    words: Vec<OsString>,
    command: bool,
    timeout: f64,
) -> PyResult<Exports> {
    let timeout = seconds(timeout)?;
    let runtime = workers::runtime()?;
    let remote = workers::remote(&runtime);
    let listed = wait::run(py, &remote, move || async move {
        let (place, _command) = place(&words, command.then(String::new))?;
        let mut session = OptionSession::connect(place, &library::connecting(timeout)).await?;
        let entries = session.list().await;
        session.abort().await;
        Ok(entries?.into_iter().map(|entry| (entry.name, entry.description)).collect())
    })?;
    listed.map_err(|error: blockhaul_block::Error| of_device(&error))
}
