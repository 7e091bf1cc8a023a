//! The copy of a job.

use std::sync::Arc;

use blockhaul_block::BITMAP_CONTEXT;
use blockhaul_catalog::{DeviceSpec, Stack};
use blockhaul_transfer::{CopyRequest, CopySetup, Endpoint, NamedOption, TransferOptions};

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_table::ExportTable;
use crate::job_config::JobTarget;
use crate::job_errors::ErrorPolicies;

/// The options of `copy` that a job takes: those that need no terminal, no other file, and no source
/// that is there only once.
const JOB_OPTIONS: &[&str] = &[
    "allocated",
    "connections",
    "destination-is-zero",
    "direct",
    "iops",
    "min-rate",
    "multi-conn",
    "no-extents",
    "rate",
    "request-size",
    "requests",
    "retries",
    "retry-delay",
    "sparse",
    "target-layer",
    "timeout",
    "verify",
];

/// The copy of a job.
pub(crate) fn copy(
    table: &ExportTable,
    command: &str,
    export: &OpenExport,
    target: &JobTarget,
    options: &[NamedOption],
    bitmap: Option<&str>,
) -> Result<CopySetup, JobError> {
    let wrong = |why: String| JobError::request(format!("{command}: {why}"));
    if let Some(option) = options.iter().find(|one| !JOB_OPTIONS.contains(&one.name.as_str())) {
        return Err(wrong(format!("--{} cannot be used here", option.name)));
    }
    let mut options =
        TransferOptions::from_named(options).map_err(|error| wrong(error.to_string()))?;
    options.flush = true;
    options.bitmap = bitmap.map(|name| format!("{BITMAP_CONTEXT}{name}"));
    let named = DeviceSpec::Path(export.storage().into());
    let target = match target {
        JobTarget::Spec(spec) => Endpoint::Device(spec.clone()),
        JobTarget::Open(spec, stack, _) => Endpoint::Open(spec.clone(), stack.clone()),
    };
    let request = CopyRequest { options, ..CopyRequest::new(Endpoint::Device(named), target) };
    let options = request.options.clone();
    let copy = CopySetup::new(request, table.config().registry.clone())?;
    (table.config().on_copy)(&options, copy.specs());
    Ok(copy.called(format!("the {command} of export {:?}", export.name)))
}

/// A source under the error policy.
pub(crate) async fn with_source_policy(
    errors: &Arc<ErrorPolicies>,
    source: Stack,
) -> Result<Stack, JobError> {
    if errors.watches_source() {
        Ok(source.with_layer(errors.over_source()).await?)
    } else {
        Ok(source)
    }
}
