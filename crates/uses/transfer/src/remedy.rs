//! Remedies for errors that have none of their own, by their kinds.

use blockhaul_block::{Error, Kind};

/// Error numbers of paths that cannot be followed: ENOTDIR, EISDIR, ENAMETOOLONG, ELOOP.
const PATH_ERRORS: [i32; 4] = [20, 21, 36, 40];
/// EFBIG.
const FILE_TOO_LARGE: i32 = 27;

/// The remedy for errors of this kind, with the punctuation before it. Empty if the error has its own,
/// or none is known. `opening`: a device was being opened.
pub fn kind_remedy(error: &Error, opening: bool) -> &'static str {
    if error.is_complete() {
        return "";
    }
    match error.kind() {
        Kind::NotFound => "; check the name",
        Kind::Refused => "; use another user, or change the permissions",
        Kind::ReadOnly if opening => "; open it read-only, or change its permissions",
        Kind::ReadOnly => "; choose another target, or serve it for writing",
        // A limit of the file system or of the process (ulimit -f).
        Kind::NoSpace if error.os_error() == Some(FILE_TOO_LARGE) => {
            "; no file of this size is allowed there: choose another place, or raise ulimit -f"
        }
        Kind::NoSpace => "; free some space, then run it again",
        Kind::NoMemory => "; use less memory (--request-size, --queue-size)",
        Kind::TimedOut => "; check that the server is alive, or wait longer with --timeout",
        Kind::Disconnected if opening => "; check the messages of the server",
        Kind::Disconnected => "; check the messages of the server, then run it again",
        Kind::ShuttingDown => "; connect to another server, or try again later",
        Kind::Io if error.os_error().is_some_and(|number| PATH_ERRORS.contains(&number)) => {
            "; check the path"
        }
        Kind::Io if opening => "; check the storage",
        Kind::Io => "; check the storage there, then run it again",
        // The error says who uses it.
        Kind::InUse => "",
        Kind::Unsupported | Kind::Invalid | Kind::TooLarge | Kind::Usage => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_fits_the_error() {
        let system = |number: i32| {
            Error::system("cannot open it", std::io::Error::from_raw_os_error(number))
        };
        for (error, advice) in [
            (system(2), "; check the name"),
            (system(5), "; check the storage"),
            (system(20), "; check the path"),
            (system(27), "choose another place"),
            (system(28), "; free some space"),
            (system(40), "; check the path"),
        ] {
            let found = kind_remedy(&error, true);
            assert!(found.contains(advice), "{error}{found}");
            let wrapped = error.reworded(format!("part 1: {}", error.located()));
            assert_eq!(kind_remedy(&wrapped, true), found, "{wrapped}");
            assert_eq!(kind_remedy(&error.clone().with_remedy("do that"), true), "", "{error}");
            assert_eq!(kind_remedy(&error.complete(), true), "");
        }
    }
}
