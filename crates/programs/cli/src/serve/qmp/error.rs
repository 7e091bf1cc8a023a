//! Errors of the monitor protocol. Their remedies, if they have one, are commands of the protocol: those of
//! other errors are for a command line, and are left out.

use blockhaul_jobs::JobError;
use serde_json::{Value, json};

/// Why a command failed, in QEMU's classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    class: &'static str,
    text: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error without a class of its own.
    pub fn generic(text: impl Into<String>) -> Error {
        Error { class: "GenericError", text: text.into() }
    }

    /// There is no such command, or not now.
    pub fn no_command(text: impl Into<String>) -> Error {
        Error { class: "CommandNotFound", text: text.into() }
    }

    /// There is no such block job.
    pub fn no_block_job(name: &str) -> Error {
        Error { class: "DeviceNotActive", text: format!("Block job '{name}' not found") }
    }

    /// A job of this kind uses a node.
    pub fn busy(node: &str, kind: &str) -> Error {
        let text = format!("Node '{node}' is busy: block device is in use by block job: {kind}");
        Error::generic(text)
    }

    /// There is no such device or node.
    pub fn no_node(name: &str) -> Error {
        Error::generic(format!("Cannot find device='{name}' nor node-name='{name}'"))
    }

    /// There is no such bitmap.
    pub fn no_bitmap(name: &str) -> Error {
        Error::generic(format!("Dirty bitmap '{name}' not found"))
    }

    /// As a member of a reply.
    pub fn value(&self) -> Value {
        json!({ "class": self.class, "desc": self.text })
    }

    /// For users.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl From<JobError> for Error {
    fn from(error: JobError) -> Error {
        Error::generic(error.facts())
    }
}

impl From<blockhaul_block::Error> for Error {
    fn from(error: blockhaul_block::Error) -> Error {
        Error::generic(error.located())
    }
}
