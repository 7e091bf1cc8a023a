//! `--tls` and related options: the server's credentials, and the parameters for clients.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_server::TlsPolicy;
use blockhaul_tls::{RecordImplementation, TlsAcceptor, TlsCredentials};

use crate::args::serve::ServeTls;
use crate::args::value::{TlsMode, TlsRecords};
use crate::exit::{CommandFailure, OPEN, USAGE};

/// The TLS options.
#[derive(Clone)]
pub struct TlsSettings {
    mode: TlsMode,
    certificates: Option<PathBuf>,
    keys: Option<PathBuf>,
    verify_peer: bool,
    records: RecordImplementation,
    /// Directory and file as typed, for the command of `--run`.
    typed: (Option<PathBuf>, Option<PathBuf>),
}

impl TlsSettings {
    /// Checks the options, and makes paths absolute: a background server leaves the directory.
    pub fn new(args: &ServeTls) -> Result<TlsSettings, CommandFailure> {
        let given = args.tls_certificates.is_some() || args.tls_psk.is_some();
        let given = given || args.tls_verify_peer;
        let mode = args.tls.unwrap_or(if given { TlsMode::Require } else { TlsMode::Off });
        let absolute = |path: &Option<PathBuf>| match path {
            None => Ok(None),
            Some(path) => std::path::absolute(path).map(Some).map_err(|error| {
                CommandFailure::usage(format!("cannot use the path {}: {error}", path.display()))
            }),
        };
        Ok(TlsSettings {
            mode,
            certificates: absolute(&args.tls_certificates)?,
            keys: absolute(&args.tls_psk)?,
            verify_peer: args.tls_verify_peer,
            records: match args.tls_records {
                None | Some(TlsRecords::Own) => RecordImplementation::Own,
                Some(TlsRecords::Openssl) => RecordImplementation::OpenSsl,
            },
            typed: (args.tls_certificates.clone(), args.tls_psk.clone()),
        })
    }

    /// Whether clients use TLS, in words.
    pub fn audience(&self) -> &'static str {
        match self.mode {
            TlsMode::Off => "without TLS",
            TlsMode::On => "with or without TLS",
            TlsMode::Require => "with TLS",
        }
    }

    /// Reads keys and certificates.
    pub fn open(&self) -> Result<TlsPolicy, CommandFailure> {
        if self.mode == TlsMode::Off {
            return Ok(TlsPolicy::Off);
        }
        let credentials = match (&self.keys, &self.certificates) {
            (Some(file), _) => TlsCredentials::Keys(file.clone()),
            (None, Some(dir)) => TlsCredentials::Certificates(dir.clone()),
            (None, None) => TlsCredentials::Usual,
        };
        let acceptor = TlsAcceptor::new(&credentials, self.verify_peer).map_err(|error| {
            let status =
                if error.kind() == blockhaul_tls::TlsErrorKind::Setup { USAGE } else { OPEN };
            CommandFailure::new(status, format!("cannot offer TLS: {error}"))
        })?;
        let acceptor = Arc::new(acceptor.with_records(self.records));
        Ok(if self.mode == TlsMode::On {
            TlsPolicy::On(acceptor)
        } else {
            TlsPolicy::Require(acceptor)
        })
    }

    /// Whether there is nothing to reload.
    pub fn is_off(&self) -> bool {
        self.mode == TlsMode::Off
    }

    /// Whether a URI for clients must require TLS.
    pub fn is_required(&self) -> bool {
        self.mode == TlsMode::Require
    }

    /// URI parameters for clients on this machine, like nbdkit's.
    pub fn parameters(&self) -> Vec<(&'static str, &Path)> {
        let certificates = self.certificates.as_deref().map(|dir| ("tls-certificates", dir));
        let keys = self.keys.as_deref().map(|file| ("tls-psk-file", file));
        certificates.into_iter().chain(keys).collect()
    }

    /// Variables for `--run`, with nbdkit's names.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let text = |path: &Option<PathBuf>| path.clone().unwrap_or_default().into_os_string();
        let (certificates, keys) = &self.typed;
        let tls = match self.mode {
            TlsMode::Off => return Vec::new(),
            TlsMode::On => "1",
            TlsMode::Require => "2",
        };
        vec![("tls", tls.into()), ("tls_certificates", text(certificates)), ("tls_psk", text(keys))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secured(tls: Option<TlsMode>, keys: Option<&str>) -> TlsSettings {
        let tls_psk = keys.map(PathBuf::from);
        let args = ServeTls {
            tls,
            tls_certificates: None,
            tls_psk,
            tls_verify_peer: false,
            tls_records: None,
        };
        TlsSettings::new(&args).unwrap()
    }

    #[test]
    fn keys_are_not_given_for_nothing() {
        assert_eq!(secured(None, None).mode, TlsMode::Off);
        assert_eq!(secured(None, Some("/k")).mode, TlsMode::Require);
        assert_eq!(secured(Some(TlsMode::On), Some("/k")).mode, TlsMode::On);
        assert_eq!(secured(Some(TlsMode::Off), Some("/k")).mode, TlsMode::Off);
    }
}
