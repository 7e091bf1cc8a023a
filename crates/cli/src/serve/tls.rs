//! `--tls` and its companions: what a server brings for TLS, and how clients are told.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use server::Tls;
use tls::{Acceptor, Credentials};

use crate::args;
use crate::exit::{Failure, OPEN, USAGE};

/// Whether clients may or must use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They cannot.
    Off,
    /// They may.
    On,
    /// They must.
    Require,
}

impl FromStr for Mode {
    type Err = String;

    /// nbdkit's words.
    fn from_str(text: &str) -> Result<Mode, String> {
        match text.to_ascii_lowercase().as_str() {
            "off" | "no" | "false" | "0" => Ok(Mode::Off),
            "on" | "yes" | "true" | "1" => Ok(Mode::On),
            "require" | "required" | "force" => Ok(Mode::Require),
            _ => Err(format!("{text:?} is none of off, on, require")),
        }
    }
}

/// What the options ask for.
#[derive(Clone)]
pub struct Secured {
    mode: Mode,
    certificates: Option<PathBuf>,
    keys: Option<PathBuf>,
    verify_peer: bool,
    /// Folder and file as they were typed, for the command of `--run`.
    typed: (Option<PathBuf>, Option<PathBuf>),
}

impl Secured {
    /// Checks the options, and makes paths absolute: a server in the background leaves the directory.
    pub fn new(args: &args::ServeTls) -> Result<Secured, Failure> {
        let given = args.tls_certificates.is_some() || args.tls_psk.is_some();
        let given = given || args.tls_verify_peer;
        let mode = args.tls.unwrap_or(if given { Mode::Require } else { Mode::Off });
        let absolute = |path: &Option<PathBuf>| match path {
            None => Ok(None),
            Some(path) => std::path::absolute(path).map(Some).map_err(|error| {
                Failure::usage(format!("cannot use the path {}: {error}", path.display()))
            }),
        };
        Ok(Secured {
            mode,
            certificates: absolute(&args.tls_certificates)?,
            keys: absolute(&args.tls_psk)?,
            verify_peer: args.tls_verify_peer,
            typed: (args.tls_certificates.clone(), args.tls_psk.clone()),
        })
    }

    /// Reads keys and certificates.
    pub fn open(&self) -> Result<Tls, Failure> {
        if self.mode == Mode::Off {
            return Ok(Tls::Off);
        }
        let credentials = match (&self.keys, &self.certificates) {
            (Some(file), _) => Credentials::Keys(file.clone()),
            (None, Some(dir)) => Credentials::Certificates(dir.clone()),
            (None, None) => Credentials::Usual,
        };
        let acceptor = Acceptor::new(&credentials, self.verify_peer).map_err(|error| {
            let status = if error.kind() == tls::Kind::Setup { USAGE } else { OPEN };
            Failure::new(status, format!("cannot offer TLS: {error}"))
        })?;
        let acceptor = Arc::new(acceptor);
        Ok(if self.mode == Mode::On { Tls::On(acceptor) } else { Tls::Require(acceptor) })
    }

    /// Whether there is nothing to read again.
    pub fn is_off(&self) -> bool {
        self.mode == Mode::Off
    }

    /// Whether a URI for clients must demand TLS.
    pub fn is_required(&self) -> bool {
        self.mode == Mode::Require
    }

    /// Parameters of a URI with which clients on this machine get in, as nbdkit has them.
    pub fn parameters(&self) -> Vec<(&'static str, &Path)> {
        let certificates = self.certificates.as_deref().map(|dir| ("tls-certificates", dir));
        let keys = self.keys.as_deref().map(|file| ("tls-psk-file", file));
        certificates.into_iter().chain(keys).collect()
    }

    /// Variables for `--run`, as nbdkit names them.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let text = |path: &Option<PathBuf>| {
            path.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let (certificates, keys) = &self.typed;
        let tls = match self.mode {
            Mode::Off => return Vec::new(),
            Mode::On => "1",
            Mode::Require => "2",
        };
        vec![
            ("tls", tls.to_string()),
            ("tls_certificates", text(certificates)),
            ("tls_psk", text(keys)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secured(tls: Option<Mode>, keys: Option<&str>) -> Secured {
        let tls_psk = keys.map(PathBuf::from);
        let args = args::ServeTls { tls, tls_certificates: None, tls_psk, tls_verify_peer: false };
        Secured::new(&args).unwrap()
    }

    #[test]
    fn keys_are_not_given_for_nothing() {
        assert_eq!(secured(None, None).mode, Mode::Off);
        assert_eq!(secured(None, Some("/k")).mode, Mode::Require);
        assert_eq!(secured(Some(Mode::On), Some("/k")).mode, Mode::On);
        assert_eq!(secured(Some(Mode::Off), Some("/k")).mode, Mode::Off);
    }

    #[test]
    fn modes_have_nbdkits_words() {
        for (text, mode) in [("off", Mode::Off), ("ON", Mode::On), ("required", Mode::Require)] {
            assert_eq!(text.parse(), Ok(mode));
        }
        assert!("maybe".parse::<Mode>().is_err());
    }
}
