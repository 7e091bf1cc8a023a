//! Output of layers that report: standard error or a file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use blockhaul_block::{Error, Result};
use blockhaul_catalog::{Param, ParamKind, ParamValues};

/// Output for lines. Each line is written in one call, so lines of several workers do not mix.
pub(crate) enum LineOutput {
    Stderr,
    File(Mutex<File>),
}

impl LineOutput {
    /// The parameter that names the file.
    pub(crate) const PARAM: Param = Param {
        name: "file",
        kind: ParamKind::Text,
        default: None,
        doc: "Write to this file [default: standard error].",
    };

    /// The parameter for a file with lines of former runs.
    pub(crate) const APPEND: Param = Param {
        name: "append",
        kind: ParamKind::Switch,
        default: Some("on"),
        doc: "Append to the file; off: replace its contents.",
    };

    /// Opens the file of `file=`; default: standard error.
    pub(crate) fn open(layer: &str, args: &ParamValues) -> Result<LineOutput> {
        let Some(path) = args.text("file") else { return Ok(LineOutput::Stderr) };
        match OpenOptions::new().create(true).append(true).open(path) {
            Ok(file) => {
                if !args.switch("append") {
                    // Terminals and pipes have nothing to remove.
                    let _ = file.set_len(0);
                }
                Ok(LineOutput::File(Mutex::new(file)))
            }
            Err(error) => {
                let text = format!("{layer}: cannot open file={path} for writing");
                Err(Error::system(text, error))
            }
        }
    }

    /// Writes a line; `line` ends with a newline.
    pub(crate) fn write(&self, line: &str) {
        // A failed write (a full disk) must not fail the device's requests.
        let _ = match self {
            LineOutput::Stderr => std::io::stderr().lock().write_all(line.as_bytes()),
            LineOutput::File(file) => {
                file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes())
            }
        };
    }
}
