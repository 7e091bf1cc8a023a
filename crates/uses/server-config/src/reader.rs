//! Reads a configuration file.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blockhaul_catalog::{DeviceSpec, parse_number, parse_rate};
use blockhaul_server::Limits;
use blockhaul_tls::DistinguishedName;
use toml::de::{DeTable, DeValue};

use crate::client_pattern::{AddressRange, ClientPattern};
use crate::definition::{
    ClientRights, ConfiguredExport, ConfiguredLimit, ListenTable, MetricsTable, ServerConfigFile,
    TlsTable,
};
use crate::error::{ConfigErrorKind, ConfigFileError};
use crate::table::{ConfigTable, TomlText, toml_start};

/// Longer files cannot be configurations, in bytes.
const LONGEST: u64 = 4 << 20;
/// Maximum number of exports: all are open from the beginning.
const EXPORTS_MAX: usize = 10_000;
/// Maximum number of rules: each client is compared with each of them.
const CLIENTS_MAX: usize = 10_000;
/// Maximum length of an export's name in bytes, of the NBD protocol.
const NAME_MAX: usize = 4096;

const FILE_KEYS: &[&str] =
    &["bitmaps", "client", "export", "limits", "listen", "metrics", "tls", "workers"];
const EXPORT_KEYS: &[&str] = &["description", "device", "layers", "name", "readonly"];
const CLIENT_KEYS: &[&str] = &["address", "certificate", "exports", "iops", "psk", "rate", "write"];
const LISTEN_KEYS: &[&str] = &["ip-addr", "port", "unix"];
const TLS_KEYS: &[&str] = &["certificates", "mode", "psk", "verify-peer"];
const METRICS_KEYS: &[&str] = &["address", "page"];

/// A file in one state.
#[derive(PartialEq)]
struct FileVersion {
    inode: (u64, u64),
    len: u64,
    modified: (i64, i64),
}

impl FileVersion {
    fn of(found: &Metadata) -> FileVersion {
        let modified = (found.mtime(), found.mtime_nsec());
        FileVersion { inode: (found.dev(), found.ino()), len: found.len(), modified }
    }
}

impl ServerConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// If the file is no regular file, cannot be read or changes meanwhile, and those of [`ServerConfigFile::parse`].
    pub fn read(path: &Path) -> Result<ServerConfigFile, ConfigFileError> {
        let shown = path.display().to_string();
        let unreadable = |error: std::io::Error| {
            let text = format!("cannot read the configuration: {}", blockhaul_io::plain(&error));
            ConfigFileError::new(ConfigErrorKind::File, &shown, 0, text)
        };
        let refused = |text: &str| ConfigFileError::new(ConfigErrorKind::File, &shown, 0, text);
        let file = blockhaul_io::open_regular_file(path).map_err(unreadable)?;
        let before = FileVersion::of(&file.metadata().map_err(unreadable)?);
        let mut text = String::new();
        (&file).take(LONGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
        let is_same = |found: &Metadata| FileVersion::of(found) == before;
        let after = std::fs::metadata(path).map_err(unreadable)?;
        if !is_same(&after) || !is_same(&file.metadata().map_err(unreadable)?) {
            // A part of the file may be valid, and grant more than all of it.
            return Err(refused(
                "cannot read the configuration: it has changed meanwhile: write another file and rename it",
            ));
        }
        ServerConfigFile::parse(path, &text)
    }

    /// Parses the text of a file. `path` is its name in errors.
    ///
    /// # Errors
    /// The first fault, with line, key and guess: no TOML, an unknown key, a wrong value, no export, two exports of
    /// one name, or a rule about an export that is absent.
    pub fn parse(path: &Path, text: &str) -> Result<ServerConfigFile, ConfigFileError> {
        let shown = path.display().to_string();
        let file = TomlText { path: &shown, text };
        if text.len() as u64 > LONGEST {
            return Err(file.fault(0, format!("the file is longer than {LONGEST} bytes")));
        }
        let parsed = DeTable::parse(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            file.fault(offset, error.message())
        })?;
        let top = ConfigTable { file, table: parsed.get_ref(), offset: 0 };
        top.check_keys(FILE_KEYS)?;
        let exports = tables(&top, "export", EXPORTS_MAX)?;
        let clients = tables(&top, "client", CLIENTS_MAX)?;
        let config = ServerConfigFile {
            path: path.to_path_buf(),
            exports: exports.iter().map(export).collect::<Result<_, _>>()?,
            clients: clients.iter().map(client).collect::<Result<_, _>>()?,
            listen: section(&top, "listen")?.map(listen).transpose()?.unwrap_or_default(),
            tls: section(&top, "tls")?.map(tls).transpose()?.unwrap_or_default(),
            limits: section(&top, "limits")?.map(limits).transpose()?.unwrap_or_default(),
            metrics: section(&top, "metrics")?.map(metrics).transpose()?.unwrap_or_default(),
            workers: top.parsed("workers", workers)?.unwrap_or(0),
            workers_line: top.key_line("workers"),
            bitmaps: top.string("bitmaps")?.map(PathBuf::from),
            bitmaps_line: top.key_line("bitmaps"),
        };
        config.limits_over(Limits::default())?;
        check_names(&config, &exports, &clients)?;
        check_identities(&config, &clients)?;
        check_patterns(&config)?;
        Ok(config)
    }
}

fn workers(text: &str) -> Result<u16, String> {
    let number = parse_number::<u16>(text).ok().filter(|number| *number <= 1024);
    number.ok_or_else(|| format!("{text} is not a number from 0 to 1024"))
}

/// A table `[NAME]`.
fn section<'a>(
    top: &ConfigTable<'a>,
    name: &str,
) -> Result<Option<ConfigTable<'a>>, ConfigFileError> {
    match top.value(name) {
        None => Ok(None),
        Some(DeValue::Table(table)) => Ok(Some(inner(top, name, table))),
        Some(_) => Err(top.fault(name, format!("write it as [{name}]"))),
    }
}

/// A table inside another one, which begins at its first key.
fn inner<'a>(top: &ConfigTable<'a>, name: &str, table: &'a DeTable<'a>) -> ConfigTable<'a> {
    let offset = toml_start(table).unwrap_or_else(|| top.offset_of(name));
    ConfigTable { file: top.file, table, offset }
}

/// Tables `[[NAME]]`, at most `most` of them.
fn tables<'a>(
    top: &ConfigTable<'a>,
    name: &str,
    most: usize,
) -> Result<Vec<ConfigTable<'a>>, ConfigFileError> {
    let wrong = || top.fault(name, format!("write it as [[{name}]]"));
    let list = match top.value(name) {
        None => return Ok(Vec::new()),
        Some(DeValue::Array(list)) if list.len() <= most => list,
        Some(DeValue::Array(_)) => return Err(top.fault(name, format!("more than {most}"))),
        Some(_) => return Err(wrong()),
    };
    let table = |value: &'a DeValue<'a>| match value {
        DeValue::Table(table) => Ok(inner(top, name, table)),
        _ => Err(wrong()),
    };
    list.iter().map(|value| table(value.get_ref())).collect()
}

fn export(table: &ConfigTable<'_>) -> Result<ConfiguredExport, ConfigFileError> {
    table.check_keys(EXPORT_KEYS)?;
    let name = table.string("name")?.unwrap_or_default().to_string();
    if name.len() > NAME_MAX || name.contains('\0') {
        return Err(table.fault("name", "longer than 4096 bytes, or contains a NUL"));
    }
    Ok(ConfiguredExport {
        line: table.line(),
        name,
        description: table.string("description")?.unwrap_or_default().to_string(),
        device: device(table)?,
        layers: table.words("layers")?.unwrap_or_default(),
        readonly: table.switch("readonly")?.unwrap_or(false),
    })
}

/// A device: its description, or the words that start its server.
fn device(table: &ConfigTable<'_>) -> Result<DeviceSpec, ConfigFileError> {
    let wrong = |text: &str| table.fault("device", text);
    match table.value("device") {
        None => Err(wrong("missing: each [[export]] has a device")),
        Some(DeValue::String(text)) => match DeviceSpec::parse(OsStr::new(text.as_ref())) {
            Ok(DeviceSpec::Pipe) => Err(wrong("a server cannot serve a pipe")),
            Ok(spec) => Ok(spec),
            Err(error) => Err(wrong(&error.text())),
        },
        Some(DeValue::Array(list)) if !list.is_empty() => {
            let words = table.words("device")?.unwrap_or_default();
            Ok(DeviceSpec::Command(words.into_iter().map(OsString::from).collect()))
        }
        Some(_) => Err(wrong("must be a device, or a list of words that start a server")),
    }
}

fn client(table: &ConfigTable<'_>) -> Result<ClientRights, ConfigFileError> {
    table.check_keys(CLIENT_KEYS)?;
    let ranges = table.words("address")?.unwrap_or_default();
    let ranges = ranges.iter().map(|text| AddressRange::parse(text));
    let addresses = ranges.collect::<Result<_, _>>().map_err(|why| table.fault("address", why))?;
    let certificate = table.parsed("certificate", DistinguishedName::parse)?;
    let psk = table.string("psk")?.map(str::to_string);
    Ok(ClientRights {
        line: table.line(),
        pattern: ClientPattern { addresses, certificate, psk },
        exports: table.words("exports")?,
        write: table.switch("write")?.unwrap_or(true),
        rate: table.parsed("rate", |text| {
            above_zero(parse_rate(text).map_err(|error| error.text().to_string())?)
        })?,
        iops: table.parsed("iops", |text| {
            above_zero(parse_number(text).map_err(|error| error.text().to_string())?)
        })?,
    })
}

fn above_zero(number: u64) -> Result<u64, String> {
    if number > 0 { Ok(number) } else { Err("must be above 0; leave it out for no limit".into()) }
}

fn listen(table: ConfigTable<'_>) -> Result<ListenTable, ConfigFileError> {
    table.check_keys(LISTEN_KEYS)?;
    let ports = table.words("port")?.unwrap_or_default();
    let ports = ports.iter().map(|text| text.parse::<u16>());
    let wrong = |_| table.fault("port", "must be a number from 0 to 65535");
    Ok(ListenTable {
        line: table.line(),
        unix: table.words("unix")?.unwrap_or_default().into_iter().map(PathBuf::from).collect(),
        ports: ports.collect::<Result<_, _>>().map_err(wrong)?,
        addresses: table.words("ip-addr")?.unwrap_or_default(),
    })
}

fn tls(table: ConfigTable<'_>) -> Result<TlsTable, ConfigFileError> {
    table.check_keys(TLS_KEYS)?;
    let mode = table.string("mode")?;
    if mode.is_some_and(|mode| !["off", "on", "require"].contains(&mode)) {
        return Err(table.fault("mode", "must be off, on or require"));
    }
    let path = |key: &str| table.string(key).map(|path| path.map(PathBuf::from));
    let read = TlsTable {
        line: table.line(),
        mode: mode.map(str::to_string),
        certificates: path("certificates")?,
        psk: path("psk")?,
        verify_peer: table.switch("verify-peer")?.unwrap_or(false),
    };
    if read.psk.is_some() && (read.certificates.is_some() || read.verify_peer) {
        return Err(table.fault("psk", "cannot be used with certificates"));
    }
    Ok(read)
}

fn limits(table: ConfigTable<'_>) -> Result<Vec<ConfiguredLimit>, ConfigFileError> {
    let one = |name: &str| {
        let value = table.word(name)?.unwrap_or_default();
        Ok(ConfiguredLimit { line: table.key_line(name), name: name.to_string(), value })
    };
    let mut limits: Vec<_> =
        table.table.keys().map(|key| one(key.get_ref())).collect::<Result<_, _>>()?;
    limits.sort_by_key(|limit| limit.line);
    Ok(limits)
}

fn metrics(table: ConfigTable<'_>) -> Result<MetricsTable, ConfigFileError> {
    table.check_keys(METRICS_KEYS)?;
    let destinations = table.words("address")?.unwrap_or_default();
    let page = table.switch("page")?.unwrap_or(false);
    if page && destinations.is_empty() {
        return Err(table.fault("page", "requires the key address"));
    }
    let destinations_line = table.key_line("address");
    Ok(MetricsTable { line: table.line(), destinations, destinations_line, page })
}

/// Refuses a file without exports, a name that two exports have, and a rule about an export that is absent.
fn check_names(
    config: &ServerConfigFile,
    exports: &[ConfigTable<'_>],
    clients: &[ConfigTable<'_>],
) -> Result<(), ConfigFileError> {
    if config.exports.is_empty() {
        return Err(config.fault(1, "it lists no export: add [[export]] with device = …"));
    }
    let mut names = HashSet::new();
    for (export, table) in config.exports.iter().zip(exports) {
        if !names.insert(export.name.as_str()) {
            let text = format!("two exports have the name {:?}: choose another", export.name);
            return Err(table.fault("name", text));
        }
    }
    // An export may have exports of its own, below its name.
    let is_known = |name: &str| {
        let first = name.split('/').next().unwrap_or(name);
        names.contains(name) || names.contains(first) || names.contains("")
    };
    for (client, table) in config.clients.iter().zip(clients) {
        let mut visible = client.exports.iter().flatten();
        if let Some(name) = visible.find(|name| !is_known(name)) {
            let fault = table.fault("exports", format!("there is no export {name:?}"));
            return Err(fault.guessing(name, names.iter().copied()));
        }
    }
    Ok(())
}

/// Refuses rules that no client can match: their identity is not what TLS authenticates here.
fn check_identities(
    config: &ServerConfigFile,
    clients: &[ConfigTable<'_>],
) -> Result<(), ConfigFileError> {
    let tls = &config.tls;
    let is_off = tls.mode.as_deref() == Some("off");
    let needs_certificate =
        |pattern: &ClientPattern| pattern.certificate.is_some() && (is_off || !tls.verify_peer);
    let needs_key =
        |pattern: &ClientPattern| pattern.psk.is_some() && (is_off || tls.psk.is_none());
    for (client, table) in config.clients.iter().zip(clients) {
        let (key, need) = if needs_certificate(&client.pattern) {
            ("certificate", "verify-peer = true")
        } else if needs_key(&client.pattern) {
            ("psk", "psk")
        } else {
            continue;
        };
        let text = format!("no client can match: [tls] needs {need}, and a mode other than off");
        return Err(table.fault(key, text));
    }
    Ok(())
}

/// Refuses rules that no client reaches: an earlier one is about the same clients, or about all.
fn check_patterns(config: &ServerConfigFile) -> Result<(), ConfigFileError> {
    let mut before: HashMap<&ClientPattern, usize> = HashMap::new();
    for client in &config.clients {
        let all = ClientPattern::default();
        if let Some(line) = before.get(&client.pattern).or_else(|| before.get(&all)) {
            let text = format!(
                "no client reaches this rule: that of line {line} is about the same clients"
            );
            return Err(config.fault(client.line, text).about("client"));
        }
        before.insert(&client.pattern, client.line);
    }
    Ok(())
}
