//! What a running server changes when its configuration file has changed. Pure: nothing is opened.

use crate::definition::{ConfiguredExport, ServerConfigFile};
use crate::error::ConfigFileError;

/// The changes from one configuration to another that a running server can make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigDifference {
    /// Exports to open, in the order of the new file.
    pub added: Vec<ConfiguredExport>,
    /// Names of exports to close for new clients, in the order of the old file.
    pub removed: Vec<String>,
    /// Whether the rights or rates of clients change.
    pub clients: bool,
    /// Whether limits change.
    pub limits: bool,
}

impl ConfigDifference {
    /// The changes from `old` to `new`.
    ///
    /// # Errors
    /// The first change that a running server cannot make, with its line in the new file: of a listener, TLS's mode or
    /// files, metrics, the workers, or an export that keeps its name. Nothing may be changed then.
    pub fn between(
        old: &ServerConfigFile,
        new: &ServerConfigFile,
    ) -> Result<ConfigDifference, ConfigFileError> {
        check_fixed(old, new)?;
        let find = |file: &'_ ServerConfigFile, name: &str| {
            file.exports.iter().find(|export| export.name == name).cloned()
        };
        let mut added = Vec::new();
        for export in &new.exports {
            match find(old, &export.name) {
                None => added.push(export.clone()),
                Some(before) if without_line(&before) == without_line(export) => {}
                Some(_) => return Err(changed_export(new, export)),
            }
        }
        let gone = old.exports.iter().filter(|export| find(new, &export.name).is_none());
        let limits = |file: &ServerConfigFile| {
            let pair = |limit: &crate::ConfiguredLimit| (limit.name.clone(), limit.value.clone());
            file.limits.iter().map(pair).collect::<std::collections::BTreeMap<_, _>>()
        };
        let clients = |file: &ServerConfigFile| {
            let rules = file.clients.iter().cloned();
            rules.map(|rule| crate::ClientRights { line: 0, ..rule }).collect::<Vec<_>>()
        };
        Ok(ConfigDifference {
            added,
            removed: gone.map(|export| export.name.clone()).collect(),
            clients: clients(old) != clients(new),
            limits: limits(old) != limits(new),
        })
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == ConfigDifference::default()
    }
}

fn without_line(export: &ConfiguredExport) -> ConfiguredExport {
    ConfiguredExport { line: 0, ..export.clone() }
}

fn changed_export(new: &ServerConfigFile, export: &ConfiguredExport) -> ConfigFileError {
    let text = format!(
        "export {:?} cannot change while the server runs: give it another name, or remove it and reload first",
        export.name
    );
    ConfigFileError { path: new.path.clone(), line: export.line, key: None, text, guess: None }
}

/// Refuses changes of what a running server keeps to its end.
fn check_fixed(old: &ServerConfigFile, new: &ServerConfigFile) -> Result<(), ConfigFileError> {
    let listen = |file: &ServerConfigFile| crate::ListenTable { line: 0, ..file.listen.clone() };
    let tls = |file: &ServerConfigFile| crate::TlsTable { line: 0, ..file.tls.clone() };
    let metrics = |file: &ServerConfigFile| crate::MetricsTable { line: 0, ..file.metrics.clone() };
    let (key, line) = if listen(old) != listen(new) {
        ("listen", new.listen.line)
    } else if tls(old) != tls(new) {
        ("tls", new.tls.line)
    } else if metrics(old) != metrics(new) {
        ("metrics", new.metrics.line)
    } else if old.workers != new.workers {
        ("workers", new.workers_line)
    } else {
        return Ok(());
    };
    let text = "cannot change while the server runs: restart it".to_string();
    let path = new.path.clone();
    // The new file may lack the table: its end is at no line.
    Err(ConfigFileError { path, line: line.max(1), key: Some(key.into()), text, guess: None })
}
