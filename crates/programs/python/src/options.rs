//! What a server says before an export is opened: each on a connection of its own.

use std::ffi::OsString;

use blockhaul_client::options::OptionSession;
use blockhaul_wire::ReplyForm;
use pyo3::prelude::*;

use crate::error::of_device;
use crate::handle::seconds;
use crate::opening::{connecting, place, protocol_name};
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
        let mut session = OptionSession::connect(place, &connecting(timeout)).await?;
        let entries = session.list().await;
        session.abort().await;
        Ok(entries?.into_iter().map(|entry| (entry.name, entry.description)).collect())
    })?;
    listed.map_err(|error: blockhaul_block::Error| of_device(&error))
}

/// Names of the contexts of an export that match queries: those that the server lists, or with ``select`` those
/// that it selects. Without queries it lists all, and selects none. The export is that of the URI, or ``export`` of
/// a command.
#[pyfunction]
#[pyo3(signature = (words, queries, *, select=false, export=None, timeout=60.0))]
pub(crate) fn list_contexts(
    py: Python<'_>,
    words: Vec<OsString>,
    queries: Vec<String>,
    select: bool,
    export: Option<String>,
    timeout: f64,
) -> PyResult<Vec<String>> {
    let timeout = seconds(timeout)?;
    let runtime = workers::runtime()?;
    let remote = workers::remote(&runtime);
    let listed = wait::run(py, &remote, move || async move {
        let (place, _command) = place(&words, export)?;
        let name = place.export.clone();
        let mut session = OptionSession::connect(place, &connecting(timeout)).await?;
        let contexts = session.matching_contexts(&name, &queries, select).await;
        session.abort().await;
        Ok(contexts?.into_iter().map(|context| context.name).collect())
    })?;
    listed.map_err(|error: blockhaul_block::Error| of_device(&error))
}

/// What is negotiated before an export is opened: the protocol, and whether TLS and structured replies are used.
#[pyfunction]
#[pyo3(signature = (words, *, command=false, structured=true, timeout=60.0))]
pub(crate) fn greet(
    py: Python<'_>,
    words: Vec<OsString>,
    command: bool,
    structured: bool,
    timeout: f64,
) -> PyResult<(&'static str, bool, bool)> {
    let timeout = seconds(timeout)?;
    let runtime = workers::runtime()?;
    let remote = workers::remote(&runtime);
    let greeted = wait::run(py, &remote, move || async move {
        let (place, _command) = place(&words, command.then(String::new))?;
        let mut options = connecting(timeout);
        options.structured = structured;
        options.extended &= structured;
        let session = OptionSession::connect(place, &options).await?;
        let protocol = session.protocol().map_or("newstyle-fixed", protocol_name);
        let found = (protocol, session.tls(), session.replies() != ReplyForm::Simple);
        session.abort().await;
        Ok(found)
    })?;
    greeted.map_err(|error: blockhaul_block::Error| of_device(&error))
}
