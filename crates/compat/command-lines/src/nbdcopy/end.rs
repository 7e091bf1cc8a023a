//! One side of a copy: how nbdcopy interprets a word, and its form for `blockhaul copy`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_catalog::brackets::Groups;
use blockhaul_io::plain;

/// The size of `null:` in libnbd's nbdcopy.
pub(super) const NULL_SIZE: u64 = i64::MAX as u64;
/// Which side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Source,
    Target,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CopyEndpoint {
    /// `null:`
    Null,
    /// Standard input or output.
    Standard,
    /// A path that is read or written in order.
    Stream(PathBuf),
    /// An NBD URI.
    Server(String),
    /// `[ CMD … ]`.
    Command(Vec<OsString>),
    /// A file or block device, which need not exist yet.
    Storage(PathBuf),
}

impl CopyEndpoint {
    /// Interprets a word like nbdcopy: anything that is not a URI is a path.
    pub(super) fn new(word: &OsStr, groups: &Groups, role: Role) -> Result<CopyEndpoint, String> {
        let spec = groups.spec(word).map_err(|error| error.to_string())?;
        if let DeviceSpec::Command(words) = spec {
            return Ok(CopyEndpoint::Command(words));
        }
        match word.to_str() {
            // A file is read from its start, out of order.
            Some("-") if role == Role::Source && is_file_to_read(Path::new(STDIN)) => {
                return Ok(CopyEndpoint::Storage(STDIN.into()));
            }
            Some("-") => return Ok(CopyEndpoint::Standard),
            Some("null:") if role == Role::Target => return Ok(CopyEndpoint::Null),
            Some(text) if blockhaul_wire::uri::is_uri(text) => {
                return Ok(CopyEndpoint::Server(text.to_string()));
            }
            _ => {}
        }
        let path = PathBuf::from(word);
        let kind = std::fs::metadata(&path).map(|data| data.file_type());
        Ok(match kind {
            Ok(kind) if kind.is_fifo() || kind.is_char_device() || kind.is_socket() => {
                CopyEndpoint::Stream(path)
            }
            _ => CopyEndpoint::Storage(path),
        })
    }

    pub(super) fn is_pipe(&self) -> bool {
        matches!(self, CopyEndpoint::Standard | CopyEndpoint::Stream(_))
    }

    /// Puts a stream with a path in the place of standard input or output.
    pub(super) fn take_place(&mut self, role: Role) -> Result<(), String> {
        let CopyEndpoint::Stream(path) = self else { return Ok(()) };
        let cannot =
            |error: std::io::Error| format!("cannot open {}: {}", path.display(), plain(&error));
        let placed = match role {
            Role::Source => rustix::stdio::dup2_stdin(File::open(&*path).map_err(cannot)?),
            Role::Target => {
                let file = File::options().write(true).open(&*path).map_err(cannot)?;
                rustix::stdio::dup2_stdout(file)
            }
        };
        placed.map_err(|errno| cannot(errno.into()))?;
        *self = CopyEndpoint::Standard;
        Ok(())
    }

    /// Words of `blockhaul copy`. `unbounded`: large enough for any input.
    pub(super) fn words(&self, unbounded: bool) -> Vec<OsString> {
        match self {
            CopyEndpoint::Null if unbounded => vec![format!("null:{NULL_SIZE}").into()],
            CopyEndpoint::Null => vec!["null:".into()],
            CopyEndpoint::Standard | CopyEndpoint::Stream(_) => vec!["-".into()],
            CopyEndpoint::Server(uri) => vec![uri.into()],
            CopyEndpoint::Command(words) => {
                let open = OsString::from("[");
                let close = OsString::from("]");
                [&[open], &words[..], &[close]].concat()
            }
            CopyEndpoint::Storage(path) => vec![literal(path)],
        }
    }
}

/// Standard input as a separate file.
pub(super) const STDIN: &str = "/proc/self/fd/0";

/// Whether it is a file that can be reopened: the parent may have had other permissions.
fn is_file_to_read(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.is_file()) && File::open(path).is_ok()
}

pub(super) fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device())
}

/// A path in a form that cannot be mistaken for anything else.
fn literal(path: &Path) -> OsString {
    let word = path.as_os_str();
    match DeviceSpec::parse(word) {
        Ok(DeviceSpec::Path(_)) | Err(_) if word != "[" && word != "]" => word.to_owned(),
        _ => Path::new(".").join(path).into_os_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_uri_is_a_path() {
        let groups = Groups::default();
        let end = |text: &str, role| CopyEndpoint::new(OsStr::new(text), &groups, role).unwrap();
        assert_eq!(end("null:", Role::Target), CopyEndpoint::Null);
        assert_eq!(end("null:", Role::Source), CopyEndpoint::Storage("null:".into()));
        assert_eq!(end("-", Role::Target), CopyEndpoint::Standard);
        assert_eq!(end("/dev/null", Role::Source), CopyEndpoint::Stream("/dev/null".into()));
        assert_eq!(end("memory:1m", Role::Target), CopyEndpoint::Storage("memory:1m".into()));
        assert_eq!(end("NBD://h/x", Role::Target), CopyEndpoint::Server("NBD://h/x".into()));
        assert_eq!(end("memory:1m", Role::Target).words(false), ["./memory:1m"]);
        assert_eq!(end("null:", Role::Source).words(false), ["./null:"]);
        assert_eq!(end("/a:b/c", Role::Target).words(false), ["/a:b/c"]);
        let command = CopyEndpoint::Command(vec!["a".into(), "b".into()]);
        assert_eq!(command.words(false), ["[", "a", "b", "]"]);
        assert_eq!(CopyEndpoint::Null.words(true), ["null:9223372036854775807"]);
    }
}
