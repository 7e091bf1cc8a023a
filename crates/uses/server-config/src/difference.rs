//! What a running server changes when its configuration file has changed. Pure: nothing is opened.

use std::fmt;

use blockhaul_server::Limits;

use crate::definition::{
    ClientRights, ConfiguredExport, ListenTable, MetricsTable, ServerConfigFile, TlsTable,
};
use crate::error::{ConfigErrorKind, ConfigFileError};

/// The changes from one configuration to another that a running server can make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigDifference {
    /// Exports to open, in the order of the new file.
    pub added: Vec<ConfiguredExport>,
    /// Names of exports to remove, in the order of the old file.
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
    /// The first change that a running server cannot make, with its line in the new file, or in the old one if the
    /// new one lacks it: of a listener, TLS's mode or files, metrics, the workers, the directory of bitmaps, a limit
    /// of all clients together, or an export that keeps its name. Nothing may be changed then.
    pub fn between(
        old: &ServerConfigFile,
        new: &ServerConfigFile,
    ) -> Result<ConfigDifference, ConfigFileError> {
        check_fixed(old, new)?;
        let limits = [old, new].map(|file| file.limits_over(Limits::default()));
        let [old_limits, new_limits] = limits;
        let (old_limits, new_limits) = (old_limits?, new_limits?);
        check_limits_of_all(old, new, &old_limits, &new_limits)?;
        let gone = old.exports.iter().filter(|export| named(new, &export.name).is_none());
        Ok(ConfigDifference {
            added: added(old, new)?,
            removed: gone.map(|export| export.name.clone()).collect(),
            clients: rules(old) != rules(new),
            limits: old_limits != new_limits,
        })
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == ConfigDifference::default()
    }
}

/// The changes in words, such as `1 export added, limits changed`.
impl fmt::Display for ConfigDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |count: usize, done: &str| match count {
            0 => None,
            1 => Some(format!("1 export {done}")),
            count => Some(format!("{count} exports {done}")),
        };
        let changes = [
            count(self.added.len(), "added"),
            count(self.removed.len(), "removed"),
            self.clients.then(|| "rights of clients changed".to_string()),
            self.limits.then(|| "limits changed".to_string()),
        ];
        let changes: Vec<_> = changes.into_iter().flatten().collect();
        f.write_str(if changes.is_empty() { "nothing changed in the configuration" } else { "" })?;
        f.write_str(&changes.join(", "))
    }
}

fn named<'a>(file: &'a ServerConfigFile, name: &str) -> Option<&'a ConfiguredExport> {
    file.exports.iter().find(|export| export.name == name)
}

/// The exports of `new` that `old` does not have.
fn added(
    old: &ServerConfigFile,
    new: &ServerConfigFile,
) -> Result<Vec<ConfiguredExport>, ConfigFileError> {
    let mut added = Vec::new();
    for export in &new.exports {
        match named(old, &export.name) {
            None => added.push(export.clone()),
            Some(before) if without_line(before) == without_line(export) => {}
            Some(_) => return Err(changed_export(new, export)),
        }
    }
    Ok(added)
}

fn without_line(export: &ConfiguredExport) -> ConfiguredExport {
    ConfiguredExport { line: 0, ..export.clone() }
}

/// The rules of a file, whatever their lines are.
fn rules(file: &ServerConfigFile) -> Vec<ClientRights> {
    file.clients.iter().map(|rule| ClientRights { line: 0, ..rule.clone() }).collect()
}

fn changed_export(new: &ServerConfigFile, export: &ConfiguredExport) -> ConfigFileError {
    let text = format!(
        "export {:?} cannot change while the server runs: give it another name, or remove it and reload first",
        export.name
    );
    ConfigFileError::new(ConfigErrorKind::Change, &new.path, export.line, text)
}

/// Refuses changes of what a running server keeps to its end.
fn check_fixed(old: &ServerConfigFile, new: &ServerConfigFile) -> Result<(), ConfigFileError> {
    let listen = |file: &ServerConfigFile| ListenTable { line: 0, ..file.listen.clone() };
    let tls = |file: &ServerConfigFile| TlsTable { line: 0, ..file.tls.clone() };
    let metrics = |file: &ServerConfigFile| MetricsTable {
        line: 0,
        destinations_line: 0,
        ..file.metrics.clone()
    };
    let lines = |line: fn(&ServerConfigFile) -> usize| [line(old), line(new)];
    let parts = [
        ("listen", listen(old) != listen(new), lines(|file| file.listen.line)),
        ("tls", tls(old) != tls(new), lines(|file| file.tls.line)),
        ("metrics", metrics(old) != metrics(new), lines(|file| file.metrics.line)),
        ("workers", old.workers != new.workers, lines(|file| file.workers_line)),
        ("bitmaps", old.bitmaps != new.bitmaps, lines(|file| file.bitmaps_line)),
    ];
    match parts.iter().find(|(_, changed, _)| *changed) {
        Some((key, _, lines)) => Err(fixed(new, key, *lines)),
        None => Ok(()),
    }
}

/// Refuses changes of limits that the server shares out from its start.
fn check_limits_of_all(
    old: &ServerConfigFile,
    new: &ServerConfigFile,
    old_limits: &Limits,
    new_limits: &Limits,
) -> Result<(), ConfigFileError> {
    let line = |file: &ServerConfigFile, name: &str| {
        file.limits.iter().find(|limit| limit.name == name).map_or(0, |limit| limit.line)
    };
    let is_changed = |name: &str| match name {
        "bytes-all" => old_limits.all_bytes != new_limits.all_bytes,
        _ => old_limits.requests_all != new_limits.requests_all,
    };
    match Limits::OF_ALL.iter().find(|name| is_changed(name)) {
        Some(name) => Err(fixed(new, name, [line(old, name), line(new, name)])),
        None => Ok(()),
    }
}

/// The error for a part that changed; its lines in the old and the new file, 0: it is absent.
fn fixed(new: &ServerConfigFile, key: &str, [old_line, line]: [usize; 2]) -> ConfigFileError {
    let text = "cannot change while the server runs: restart it";
    let error = if line > 0 {
        ConfigFileError::new(ConfigErrorKind::Change, &new.path, line, text)
    } else {
        let text = format!("{text}, or put back what line {old_line} was");
        ConfigFileError::new(ConfigErrorKind::Change, &new.path, old_line, text)
    };
    error.about(key)
}
