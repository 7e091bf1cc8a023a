//! The configuration of a running server: what of a changed file is carried out, and how.

use std::path::Path;
use std::sync::{Arc, Mutex};

use blockhaul_catalog::{DeviceSpec, Exports};
use blockhaul_jobs::{ExportTable, ExportTableConfig, JobError};
use blockhaul_server::{Limits, Server};

use crate::access::ClientAccess;
use crate::definition::{ConfiguredExport, ServerConfigFile};
use crate::difference::ConfigDifference;
use crate::error::{ConfigErrorKind, ConfigFileError};

impl ServerConfigFile {
    /// Makes the exports of the file those of a table that is not open yet.
    ///
    /// # Errors
    /// The first export whose device or layer is unknown or invalid, or whose file is absent.
    pub fn describe_exports(&self, table: &mut ExportTableConfig) -> Result<(), ConfigFileError> {
        for export in &self.exports {
            let config = export.config();
            table.check_one(&config).map_err(|error| self.export_fault(export, error))?;
            if let DeviceSpec::Path(path) = &export.device {
                check_path(path).map_err(|why| self.export_fault(export, why))?;
            }
            table.exports.push(config);
        }
        Ok(())
    }

    fn export_fault(
        &self,
        export: &ConfiguredExport,
        why: impl std::fmt::Display,
    ) -> ConfigFileError {
        let text = format!("export {:?}: {why}", export.name);
        ConfigFileError::new(ConfigErrorKind::Device, &self.path, export.line, text)
    }
}

fn check_path(path: &Path) -> Result<(), String> {
    let found = std::fs::metadata(path).map(drop);
    found.map_err(|error| format!("{}: {}", path.display(), blockhaul_io::plain(&error)))
}

/// The configuration of a running server.
pub struct RunningConfig {
    /// The file as it is in force.
    file: Mutex<ServerConfigFile>,
    /// Limits without those of the file.
    limits: Limits,
    table: Arc<ExportTable>,
    access: Arc<ClientAccess>,
}

impl RunningConfig {
    /// The configuration of a server with these exports; `limits` are those without the file.
    pub fn new(file: ServerConfigFile, limits: Limits, table: Arc<ExportTable>) -> RunningConfig {
        let access = ClientAccess::new(&file.clients, table.clone());
        RunningConfig { file: Mutex::new(file), limits, table, access }
    }

    /// This error of an export that cannot be opened with the file and the line of the export.
    pub fn locate(&self, error: JobError) -> JobError {
        let file = self.file();
        let failed = file.exports.iter().find(|export| error.export() == Some(&export.name));
        match failed {
            Some(export) => error.reworded(file.export_fault(export, error.facts()).to_string()),
            None => error,
        }
    }

    /// The exports of the server as each client sees them.
    pub fn guard(&self, exports: Arc<dyn Exports>) -> Arc<dyn Exports> {
        self.access.guard(exports)
    }

    /// The file as it is in force.
    fn file(&self) -> ServerConfigFile {
        self.file.lock().expect("no panic under this lock").clone()
    }

    /// Reads the file again, without a change of the server. It may block.
    ///
    /// # Errors
    /// Those of [`ServerConfigFile::read`].
    pub fn read(&self) -> Result<ServerConfigFile, ConfigFileError> {
        ServerConfigFile::read(&self.file().path)
    }

    /// Carries out the difference from the file in force to `new`; `secure` exchanges keys and certificates, once
    /// nothing can fail any more. Call it on a worker, and only one call at a time:
    /// the last file that was read is the one in force at the end.
    ///
    /// # Errors
    /// Those of [`ConfigDifference::between`], or an export that cannot be opened. Nothing has changed then.
    pub async fn change(
        &self,
        new: ServerConfigFile,
        server: &Server,
        secure: impl FnOnce(),
    ) -> Result<ConfigDifference, ConfigFileError> {
        let difference = ConfigDifference::between(&self.file(), &new)?;
        let limits = new.limits_over(self.limits.clone())?;
        self.open(&new, &difference.added).await?;
        // Under the new rules nobody proves an identity by an old key, and nobody sees what is about to be removed;
        // under the old rules nobody sees what is new.
        secure();
        difference.removed.iter().for_each(|name| self.table.show(name, false));
        self.access.set(&new.clients);
        difference.added.iter().for_each(|export| self.table.show(&export.name, true));
        server.set_limits(limits);
        for name in &difference.removed {
            self.table.remove(name).await;
        }
        *self.file.lock().expect("no panic under this lock") = new;
        Ok(difference)
    }

    /// Opens exports, which stay hidden. If one cannot be opened, the others are closed.
    async fn open(
        &self,
        new: &ServerConfigFile,
        added: &[ConfiguredExport],
    ) -> Result<(), ConfigFileError> {
        for (index, export) in added.iter().enumerate() {
            if let Err(error) = self.table.add_hidden(export.config()).await {
                for opened in &added[..index] {
                    self.table.remove(&opened.name).await;
                }
                return Err(new.export_fault(export, error));
            }
        }
        Ok(())
    }
}
