//! Errors of the monitor protocol. Their remedies, if they have one, are commands of the protocol: those of
//! other errors are for a command line, and are left out.

use std::fmt;

use blockhaul_jobs::JobError;
use serde_json::{Value, json};

/// Why a command failed, in QEMU's classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QmpError {
    class: &'static str,
    text: String,
}

pub(crate) type Result<T> = std::result::Result<T, QmpError>;

impl QmpError {
    /// An error without a class of its own.
    pub(crate) fn generic(text: impl Into<String>) -> QmpError {
        QmpError { class: "GenericError", text: text.into() }
    }

    /// There is no such command, or not now.
    pub(crate) fn no_command(text: impl Into<String>) -> QmpError {
        QmpError { class: "CommandNotFound", text: text.into() }
    }

    /// There is no such block job.
    pub(crate) fn no_block_job(name: &str) -> QmpError {
        QmpError { class: "DeviceNotActive", text: format!("Block job '{name}' not found") }
    }

    /// A job of this kind uses a node.
    pub(crate) fn busy(node: &str, kind: &str) -> QmpError {
        let text = format!("Node '{node}' is busy: block device is in use by block job: {kind}");
        QmpError::generic(text)
    }

    /// There is no such device or node.
    pub(crate) fn no_node(name: &str) -> QmpError {
        QmpError::generic(format!("Cannot find device='{name}' nor node-name='{name}'"))
    }

    /// There is no such bitmap.
    pub(crate) fn no_bitmap(name: &str) -> QmpError {
        QmpError::generic(format!("Dirty bitmap '{name}' not found"))
    }

    /// As a member of a reply.
    pub(crate) fn value(&self) -> Value {
        json!({ "class": self.class, "desc": self.text })
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for QmpError {}

impl From<JobError> for QmpError {
    fn from(error: JobError) -> QmpError {
        QmpError::generic(error.facts())
    }
}

impl From<blockhaul_block::Error> for QmpError {
    fn from(error: blockhaul_block::Error) -> QmpError {
        QmpError::generic(error.located())
    }
}
