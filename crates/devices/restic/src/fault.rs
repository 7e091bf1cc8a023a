//! Faults of a repository.

use std::error::Error as StdError;
use std::fmt;

use blockhaul_block::{Error, Kind};

use crate::digest::Digest;

/// The result of reading a repository.
pub(crate) type Result<T, E = RepositoryFault> = std::result::Result<T, E>;

/// A reason why a repository cannot be read. It is the cause of an [`Error`] of a device.
#[derive(Debug, Clone)]
pub enum RepositoryFault {
    /// The place has no file `config`.
    NoRepository,
    /// No key belongs to the password.
    WrongPassword {
        /// Keys that were tried.
        keys: usize,
        /// Files of keys that cannot be read.
        damaged: usize,
    },
    /// The repository that is written was moved, replaced or removed.
    RepositoryGone {
        /// Its directory, or its place at a service.
        place: String,
    },
    /// A format that this program does not know.
    UnknownVersion(u32),
    /// A file does not exist.
    MissingFile {
        /// Its name in the repository.
        file: String,
    },
    /// A file is not what was written.
    DamagedFile {
        /// Its name in the repository.
        file: String,
        /// The check that failed.
        why: String,
    },
    /// A blob is not what was written.
    DamagedBlob {
        /// The file in the repository.
        pack: String,
        /// The digest of the blob.
        blob: String,
        /// The check that failed.
        why: String,
    },
    /// No index has a blob.
    UnknownBlob {
        /// The digest of the blob.
        blob: String,
        /// An index that cannot be read.
        damaged_index: Option<String>,
    },
    /// Another program has the repository for itself.
    Locked {
        /// The program, its host and user, and since when.
        holder: String,
    },
    /// The own lock was removed.
    LockLost,
    /// The storage fails, or the description is wrong.
    Other(Error),
}

impl RepositoryFault {
    pub(crate) fn damaged(file: &str, why: impl Into<String>) -> RepositoryFault {
        RepositoryFault::DamagedFile { file: file.to_owned(), why: why.into() }
    }

    pub(crate) fn missing(file: &str) -> RepositoryFault {
        RepositoryFault::MissingFile { file: file.to_owned() }
    }

    pub(crate) fn blob(pack: &Digest, blob: &Digest, why: impl Into<String>) -> RepositoryFault {
        let (pack, blob) = (pack.to_string(), blob.to_string());
        RepositoryFault::DamagedBlob { pack, blob, why: why.into() }
    }

    fn kind(&self) -> Kind {
        match self {
            RepositoryFault::NoRepository | RepositoryFault::RepositoryGone { .. } => {
                Kind::NotFound
            }
            RepositoryFault::WrongPassword { .. } => Kind::Refused,
            RepositoryFault::UnknownVersion(_) => Kind::Unsupported,
            RepositoryFault::Locked { .. } => Kind::InUse,
            RepositoryFault::Other(error) => error.kind(),
            _ => Kind::Io,
        }
    }

    fn remedy(&self) -> &'static str {
        match self {
            RepositoryFault::NoRepository => {
                "name the place that has the file config; restic init makes a repository"
            }
            RepositoryFault::WrongPassword { .. } => {
                "check the password: password-file=FILE, or RESTIC_PASSWORD_FILE in the environment"
            }
            RepositoryFault::RepositoryGone { .. } => {
                "check that the repository is there (its file system mounted, with all folders), then run the command again"
            }
            RepositoryFault::UnknownVersion(_) => "use a newer program, or restic",
            RepositoryFault::MissingFile { .. } => {
                "open it again if restic has just removed old snapshots; else run restic check and restore the file from \
                 a copy of the repository"
            }
            RepositoryFault::Locked { .. } => {
                "wait until it ends; if it has crashed, run restic unlock"
            }
            RepositoryFault::LockLost => {
                "run it again: what was written is found, unless a prune has removed it"
            }
            RepositoryFault::UnknownBlob { .. } => "run restic check, then restic repair index",
            _ => "run restic check --read-data, and restore the file from a copy of the repository",
        }
    }
}

impl fmt::Display for RepositoryFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RepositoryFault::NoRepository => f.write_str("there is no repository: no file config"),
            RepositoryFault::RepositoryGone { place } => {
                write!(
                    f,
                    "the repository is gone: {place} or a part of it was moved, replaced or removed"
                )
            }
            RepositoryFault::WrongPassword { keys: 0, damaged: 0 } => {
                f.write_str("the repository has no keys")
            }
            RepositoryFault::WrongPassword { keys, damaged } => {
                write!(f, "the password is wrong: none of {keys} keys fits")?;
                if *damaged > 0 {
                    write!(f, ", and {damaged} files of keys are damaged")?;
                }
                Ok(())
            }
            RepositoryFault::UnknownVersion(version) => {
                write!(f, "the repository has version {version}; known are 1 and 2")
            }
            RepositoryFault::MissingFile { file } => write!(f, "{file} does not exist"),
            RepositoryFault::DamagedFile { file, why } => write!(f, "{file} is damaged: {why}"),
            RepositoryFault::DamagedBlob { pack, blob, why } => {
                write!(f, "blob {blob} in {} is damaged: {why}", pack_file(pack))
            }
            RepositoryFault::UnknownBlob { blob, damaged_index: None } => {
                write!(f, "no index has blob {blob}")
            }
            RepositoryFault::UnknownBlob { blob, damaged_index: Some(index) } => {
                write!(f, "no index has blob {blob}, and {index} cannot be read")
            }
            RepositoryFault::Locked { holder } => {
                write!(f, "the repository is locked exclusively by {holder}")
            }
            RepositoryFault::LockLost => {
                f.write_str("the lock of this backup was removed by another program")
            }
            RepositoryFault::Other(error) => error.fmt(f),
        }
    }
}

impl StdError for RepositoryFault {}

impl From<RepositoryFault> for Error {
    fn from(fault: RepositoryFault) -> Error {
        if let RepositoryFault::Other(error) = fault {
            return error;
        }
        let (kind, remedy) = (fault.kind(), fault.remedy());
        let text = match fault {
            RepositoryFault::Locked { .. }
            | RepositoryFault::LockLost
            | RepositoryFault::RepositoryGone { .. } => "cannot write to the repository",
            _ => "cannot read the repository",
        };
        Error::new(kind, text).because(fault).with_remedy(remedy)
    }
}

impl From<Error> for RepositoryFault {
    fn from(error: Error) -> RepositoryFault {
        RepositoryFault::Other(error)
    }
}

/// The name of a pack in the repository.
pub(crate) fn pack_file(pack: &str) -> String {
    format!("data/{}/{pack}", pack.get(..2).unwrap_or_default())
}
