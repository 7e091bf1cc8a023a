//! Interprets the result of a run: exit statuses, and error names on standard error.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use blockhaul_block::{Error, Kind};

use crate::call::{RunError, RunOutput};

/// The highest defined exit status; what nbdkit prints as `max_known_status`.
pub(crate) const KNOWN_STATUS_MAX: i32 = 8;

/// Names at the start of standard error, and their meaning for clients.
const NAMES: [(&str, Kind); 12] = [
    ("EPERM", Kind::ReadOnly),
    ("EIO", Kind::Io),
    ("ENOMEM", Kind::NoMemory),
    ("EINVAL", Kind::Invalid),
    ("ENOSPC", Kind::NoSpace),
    ("EOVERFLOW", Kind::TooLarge),
    ("ESHUTDOWN", Kind::ShuttingDown),
    ("ENOTSUP", Kind::Unsupported),
    ("EOPNOTSUPP", Kind::Unsupported),
    ("EROFS", Kind::ReadOnly),
    ("EDQUOT", Kind::NoSpace),
    ("EFBIG", Kind::NoSpace),
];

/// The result of a method that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MethodResult {
    /// Success, or the answer is yes.
    Done,
    /// The script does not have it.
    Missing,
    /// The answer is no.
    No,
}

/// A further request of an exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitRequest {
    /// Stop the server.
    Shutdown,
    /// Close the connection at once.
    Disconnect,
    /// Close the connection, once its requests are answered.
    Leave,
}

impl fmt::Display for ExitRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExitRequest::Shutdown => "stop the server",
            ExitRequest::Disconnect => "close the connection",
            ExitRequest::Leave => "close the connection after its replies",
        })
    }
}

/// Interprets the result of a run (nbdkit-sh-plugin(1), "Exit codes").
pub(crate) fn meaning(
    script: &Path,
    run: &RunOutput,
) -> (Result<MethodResult, Error>, Option<ExitRequest>) {
    let shown = script.display();
    let Some(code) = run.status.code() else {
        let number = run.status.signal().unwrap_or(0);
        let text = format!("{shown}: script terminated by signal {number}");
        return (Err(Error::new(Kind::Io, text).complete()), None);
    };
    let failed = |otherwise| Err(error(script, &run.said, otherwise));
    match code {
        0 => (Ok(MethodResult::Done), None),
        2 => (Ok(MethodResult::Missing), None),
        3 => (Ok(MethodResult::No), None),
        4 => (Ok(MethodResult::Done), Some(ExitRequest::Shutdown)),
        5 => (failed(Kind::ShuttingDown), Some(ExitRequest::Shutdown)),
        // The reply has no receiver.
        6 => (Ok(MethodResult::Missing), Some(ExitRequest::Disconnect)),
        7 => (Ok(MethodResult::Done), Some(ExitRequest::Leave)),
        KNOWN_STATUS_MAX => (failed(Kind::ShuttingDown), Some(ExitRequest::Leave)),
        _ => (failed(Kind::Io), None),
    }
}

/// The error on standard error: maybe a name, then its first line.
fn error(script: &Path, said: &[u8], otherwise: Kind) -> Error {
    let said = String::from_utf8_lossy(said);
    let shown = script.display();
    let front = |name: &str| {
        let rest = said.get(name.len()..)?;
        let fits = said[..name.len()].eq_ignore_ascii_case(name)
            && rest.bytes().next().is_none_or(|next| next.is_ascii_whitespace());
        fits.then_some(rest)
    };
    let named = NAMES.iter().find_map(|(name, kind)| Some((*kind, front(name)?)));
    // Words that only begin like a name are words, and so is a name without a space behind it.
    let (kind, rest) = named.unwrap_or((otherwise, &said));
    let rest = rest.trim_start().trim_end_matches('\n');
    if said.trim_end_matches('\n').is_empty() {
        let text = format!("{shown}: script exited with error, but said nothing on standard error");
        return Error::new(kind, text).of_plugin();
    }
    let line = rest.lines().next().unwrap_or_default();
    if line.len() < rest.len() {
        log::debug!("{shown}: {said}");
    }
    Error::new(kind, format!("{shown}: {line}")).of_plugin()
}

/// The error of a run without a result.
pub(crate) fn broken(script: &Path, method: &str, broken: RunError) -> Error {
    let shown = script.display();
    match broken {
        RunError::System(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let text = format!("cannot run {shown}: check that it is executable (chmod +x)");
            Error::system(text, error).complete()
        }
        RunError::System(error) => {
            Error::system(format!("cannot run {shown} {method}"), error).of_plugin()
        }
        RunError::TimedOut(limit) => {
            let limit = limit.as_secs_f32();
            log::error!("{shown}: {method} has not ended within {limit} s and was killed");
            let text = format!("{shown}: {method} has not ended within {limit} s");
            let remedy = "see why the script takes so long, or wait longer with @timeout";
            // No server was late: the script, which is the device, has failed.
            Error::new(Kind::Io, text).complete().with_remedy(remedy)
        }
        RunError::TooMuch => {
            let text = format!("{shown}: {method} printed too much and was killed");
            Error::new(Kind::Io, text).complete()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    fn of(code: i32, said: &str) -> (Result<MethodResult, Error>, Option<ExitRequest>) {
        let run =
            RunOutput { status: ExitStatus::from_raw(code << 8), said: said.into(), printed: 0 };
        meaning(Path::new("/s"), &run)
    }

    #[test]
    fn each_status_has_its_meaning() {
        for (code, ended, wish) in [
            (0, Some(MethodResult::Done), None),
            (1, None, None),
            (2, Some(MethodResult::Missing), None),
            (3, Some(MethodResult::No), None),
            (4, Some(MethodResult::Done), Some(ExitRequest::Shutdown)),
            (5, None, Some(ExitRequest::Shutdown)),
            (6, Some(MethodResult::Missing), Some(ExitRequest::Disconnect)),
            (7, Some(MethodResult::Done), Some(ExitRequest::Leave)),
            (8, None, Some(ExitRequest::Leave)),
            (9, None, None),
            (255, None, None),
        ] {
            let (result, wished) = of(code, "");
            assert_eq!((result.ok(), wished), (ended, wish), "{code}");
        }
    }

    #[test]
    fn names_of_errors_are_understood() {
        for (code, said, kind, text) in [
            (1, "ENOSPC out of space\n", Kind::NoSpace, "/s: out of space"),
            (1, "enospc\tout of space\nmore\n", Kind::NoSpace, "/s: out of space"),
            (1, "EINVALID x\n", Kind::Io, "/s: EINVALID x"),
            (1, "EIO", Kind::Io, "/s: "),
            (1, "other\n\n", Kind::Io, "/s: other"),
            (5, "other", Kind::ShuttingDown, "/s: other"),
            (5, "EPERM other", Kind::ReadOnly, "/s: other"),
            (8, "", Kind::ShuttingDown, "said nothing"),
            (1, "ü", Kind::Io, "/s: ü"),
        ] {
            let error = of(code, said).0.unwrap_err();
            assert_eq!(error.kind(), kind, "{said}");
            assert!(error.text().contains(text), "{said}: {error}");
        }
        let run = RunOutput { status: ExitStatus::from_raw(9), said: Vec::new(), printed: 0 };
        let error = meaning(Path::new("/s"), &run).0.unwrap_err();
        assert!(error.text().contains("signal 9"), "{error}");
    }
}
