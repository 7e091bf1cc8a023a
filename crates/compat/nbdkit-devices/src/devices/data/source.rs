//! External bytes: files, and output of scripts.

use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom};
use std::process::{Command, Stdio};

use blockhaul_block::{Error, Kind, Result};

use super::item::WORK_MAX;

/// A file or a script that is read once the required range is known.
#[derive(Debug, Clone)]
pub enum Source {
    /// `<NAME`
    File(String),
    /// `<(COMMANDS)`, for `/bin/sh`.
    Script(String),
}

impl Source {
    /// All bytes.
    pub fn all(&self) -> Result<Vec<u8>> {
        match self {
            Source::File(name) => read(name, &mut open(name)?, None),
            Source::Script(script) => run(script, None),
        }
    }

    /// Bytes from `start` up to `end`, or to the end, or as many as there are.
    pub fn part(&self, start: u64, end: Option<u64>) -> Result<Vec<u8>> {
        let len = end.map(|end| end.saturating_sub(start));
        match self {
            Source::File(name) => {
                let mut file = open(name)?;
                file.seek(SeekFrom::Start(start)).map_err(|error| {
                    Error::system(format!("data: {name}: cannot go to offset {start}"), error)
                })?;
                read(name, &mut file, len)
            }
            Source::Script(script) => {
                let mut bytes = run(script, end)?;
                bytes.drain(..usize::try_from(start).unwrap_or(usize::MAX).min(bytes.len()));
                Ok(bytes)
            }
        }
    }
}

fn open(name: &str) -> Result<File> {
    File::open(name).map_err(|error| Error::system(format!("data: cannot open {name}"), error))
}

/// Reads up to `len` bytes, or all, within the limit of a description.
fn read(name: &str, from: &mut impl Read, len: Option<u64>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let most = len.unwrap_or(u64::MAX).min(WORK_MAX + 1);
    let outcome = from.take(most).read_to_end(&mut bytes);
    outcome.map_err(|error| Error::system(format!("data: cannot read {name}"), error))?;
    if bytes.len() as u64 > WORK_MAX {
        let text = format!(
            "data: {name} has more than {} MiB: take a part, as in <FILE[:1000]",
            WORK_MAX >> 20
        );
        return Err(Error::new(Kind::Usage, text));
    }
    Ok(bytes)
}

/// The output of a script, or its first `len` bytes. The exit status matters only if all output is
/// requested: an endless script ends when its output is closed.
fn run(script: &str, len: Option<u64>) -> Result<Vec<u8>> {
    let shown: String = script.trim().chars().take(40).collect();
    let failed =
        |what: &str, error| Error::system(format!("data: script {shown:?}: {what}"), error);
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(script).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed("cannot be started", error))?;
    let bytes = match child.stdout.take() {
        Some(mut out) => read(&format!("the output of script {shown:?}"), &mut out, len),
        None => Ok(Vec::new()),
    };
    let status = child.wait().map_err(|error| failed("cannot be waited for", error))?;
    let bytes = bytes?;
    if len.is_none() && !status.success() {
        let text = format!("data: script {shown:?} failed: {status}");
        return Err(Error::new(Kind::Usage, text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_read_as_far_as_needed() {
        let script = |text: &str| Source::Script(text.into());
        assert_eq!(script("printf abc").all().unwrap(), b"abc");
        assert_eq!(script("yes").part(0, Some(5)).unwrap(), b"y\ny\ny");
        assert_eq!(script("printf abcdef; exit 3").part(2, Some(4)).unwrap(), b"cd");
        assert_eq!(script("printf abc").part(5, None).unwrap(), b"");
        let error = script("echo x; exit 3").all().unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    fn files_are_read_as_far_as_needed() {
        let endless = Source::File("/dev/zero".into());
        assert_eq!(endless.part(0, Some(5)).unwrap(), [0; 5]);
        assert!(endless.all().unwrap_err().to_string().contains("256 MiB"));
        let error = Source::File("/no such file".into()).all().unwrap_err();
        assert!(error.to_string().contains("/no such file"), "{error}");
    }
}
