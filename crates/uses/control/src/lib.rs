//! The protocol of the control socket (`serve --control`): requests, refusals and the elements of replies.
//!
//! A client sends a request as a JSON object on one line, and the server answers each with one:
//! `{"ok":true,…}`, or `{"ok":false,…}` with the members of a [`Refusal`].
//!
//! ```
//! use blockhaul_control::{ControlRequest, JobRef};
//!
//! let request = ControlRequest::JobPause(JobRef { job: 7 });
//! let line = serde_json::to_string(&request).unwrap();
//! assert_eq!(line, r#"{"command":"job-pause","job":7}"#);
//! assert_eq!(ControlRequest::parse(line.as_bytes()), Ok(request));
//!
//! let error = ControlRequest::parse(br#"{"command":"job-pause","job":"seven"}"#).unwrap_err();
//! assert_eq!(error.to_string(), "job-pause: \"job\" is not an unsigned integer");
//! assert_eq!(error.member(), Some("job"));
//! ```
//!
//! - [`ControlRequest`]: the requests. `values`: the types of their members. [`Refusal`], [`ClientStatus`],
//!   [`ExportStatus`] and [`JobReport`]: replies.
//! - `members`: a JSON value as a deserializer whose errors name the member.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod job_report;
mod members;
mod reply;
mod request;
mod values;

pub use job_report::{
    BackupFigures, InterruptedFigures, JobFigures, JobReport, MirrorFigures, ResumeMode,
};
pub use reply::{
    BitmapStatus, ClientStatus, ExportStatus, LayerStatus, Refusal, RefusalKind, TlsIdentity,
};

pub use request::{
    BackupRequest, BackupTarget, BitmapRef, ControlRequest, JobRef, LayerChange, MirrorRequest,
    RequestError, SnapshotOptions, SnapshotRequest,
};
pub use values::{
    CopyMode, CopyOptions, DeviceDescription, ErrorPolicy, Seconds, SnapshotFailurePolicy, SyncMode,
};
