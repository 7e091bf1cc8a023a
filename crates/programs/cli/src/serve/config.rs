//! `--config` and `--check-config`: the options that a configuration file gives, and the result of a check of it.

use blockhaul_server_config::{ConfigErrorKind, ConfigFileError, ServerConfigFile};
use serde_json::json;

use super::ServeConfig;
use crate::args::ServeArgs;
use crate::args::value::TlsMode;
use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult, OPEN, USAGE};
use crate::out;

impl From<ConfigFileError> for CommandFailure {
    fn from(error: ConfigFileError) -> CommandFailure {
        let status = match error.kind {
            ConfigErrorKind::File | ConfigErrorKind::Device => OPEN,
            ConfigErrorKind::Text | ConfigErrorKind::Change => USAGE,
        };
        CommandFailure::new(status, error.to_string())
    }
}

/// The file of `--config`, whose keys take the place of options.
pub fn read(args: &mut ServeArgs) -> Result<Option<ServerConfigFile>, ConfigFileError> {
    let Some(path) = &args.config else { return Ok(None) };
    let file = ServerConfigFile::read(path)?;
    args.unix.clone_from(&file.listen.unix);
    args.port.clone_from(&file.listen.ports);
    args.ip_addr.clone_from(&file.listen.addresses);
    args.tls.tls = file.tls.mode.as_deref().map(|mode| match mode {
        "off" => TlsMode::Off,
        "on" => TlsMode::On,
        _ => TlsMode::Require,
    });
    args.tls.tls_certificates.clone_from(&file.tls.certificates);
    args.tls.tls_psk.clone_from(&file.tls.psk);
    args.tls.tls_verify_peer = file.tls.verify_peer;
    args.bitmaps.clone_from(&file.bitmaps);
    args.workers = file.workers;
    args.page = file.metrics.page;
    for destination in &file.metrics.destinations {
        let wrong =
            |why| file.fault(file.metrics.destinations_line, format!("{why}")).about("address");
        args.metrics.push(destination.parse().map_err(wrong)?);
    }
    Ok(Some(file))
}

/// Checks everything that a server with these options checks before it opens anything, and prints the result.
pub fn check(args: &mut ServeArgs, groups: &Groups) -> CommandResult {
    let (path, json) = (args.config.clone().unwrap_or_default(), args.json);
    let shown = path.display().to_string();
    let outcome = match ServerConfigFile::read(&path) {
        Ok(file) => ServeConfig::check(args, groups).map(|_| file).map_err(|error| (error, None)),
        Err(error) => Err((error.clone().into(), Some(error))),
    };
    match outcome {
        Ok(file) => {
            let (exports, clients) = (file.exports.len(), file.clients.len());
            let text =
                format!("{shown}: valid, exports: {exports}, rules for clients: {clients}\n");
            let value =
                json!({ "file": shown, "valid": true, "exports": exports, "clients": clients });
            out::result(json, &value, &text)?;
            Ok(0)
        }
        Err((failure, error)) if json => {
            let line = error.as_ref().map(|error| error.line).filter(|line| *line > 0);
            let (key, guess) = error.map(|error| (error.key, error.guess)).unwrap_or_default();
            let value = json!({ "file": shown, "valid": false, "error": failure.to_string(),
                "line": line, "key": key, "guess": guess });
            out::result(true, &value, "")?;
            Ok(failure.status())
        }
        Err((failure, _)) => Err(failure),
    }
}
