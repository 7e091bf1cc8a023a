//! The command line of qemu-storage-daemon as that of `blockhaul serve`: options become commands of
//! its monitor protocol, which the server runs in their order before it is ready.

use std::ffi::OsString;

use blockhaul_catalog::{insert_option, options_of_json};
use serde_json::{Map, Value as Json, json};

use crate::getopt;
use crate::{ToolInvocation, words};

/// The version of QEMU whose program is emulated.
const VERSION: &str = "10.0.13";

/// The first word of a server that has restarted itself to go to the background.
pub const IN_BACKGROUND: &str = "--in-background";

/// As [`getopt::parse`] reads them.
const OPTIONS: &str = "blockdev= chardev= daemonize export= h|help monitor= nbd-server= object= pidfile= T|trace= \
    V|version";

const HELP: &str = "\
Serves disks over NBD, controlled by QEMU's monitor protocol (QMP).

    qemu-storage-daemon [OPTIONS]

This is blockhaul, with the command line of QEMU's qemu-storage-daemon.

    --blockdev [driver=]DRIVER,node-name=N,...
                            add a node: file, host_device, raw, qcow2, nbd, null-co,
                            throttle, copy-before-write, snapshot-access
    --chardev socket,id=ID,path=PATH,server=on,wait=off
                            a Unix socket for clients of a monitor
    --chardev socket,id=ID,path=PATH
                            connect to this Unix socket of a client
    --chardev socket,id=ID,fd=N
                            this inherited descriptor, a socket connected to a client
    --chardev stdio,id=ID   standard input and output
    --daemonize             return when ready, and go on in the background
    --export [type=]nbd,id=ID,node-name=N[,name=NAME][,writable=on|off][,description=TEXT]
                            export a node over NBD
    --monitor [chardev=]ID  serve QMP on this character device
    --nbd-server addr.type=unix,addr.path=PATH[,tls-creds=ID]
    --nbd-server addr.type=inet,addr.host=HOST,addr.port=PORT[,tls-creds=ID]
                            listen for NBD clients
    --object tls-creds-x509,id=ID,dir=DIR,endpoint=server[,verify-peer=on|off]
                            certificates for --nbd-server
    --object throttle-group,id=ID,limits.LIMIT=N,...
                            limits of nodes of driver throttle: bps-total, iops-read, ...
    --object iothread,id=ID accepted, without effect
    --pidfile PATH          write the process ID when ready
    -V, --version           print the version of QEMU that this implements

See `blockhaul serve --help` and docs/qmp.md for details.
";

/// A command line that was understood.
#[derive(Debug, Default)]
pub struct StorageDaemon {
    /// Commands of the monitor protocol, in order.
    commands: Vec<Json>,
    chardevs: Vec<(String, MonitorAddress)>,
    monitors: Vec<MonitorAddress>,
    credentials: Vec<X509Credentials>,
    tls: Option<String>,
    pidfile: Option<OsString>,
    /// It goes to the background.
    pub daemonize: bool,
}

/// Where a monitor has its clients.
#[derive(Debug, Clone)]
enum MonitorAddress {
    /// It listens on a socket of this path.
    Listens(String),
    /// One client, as `--qmp-client` describes it.
    Client(String),
}

/// A `tls-creds-x509` object.
#[derive(Debug)]
struct X509Credentials {
    id: String,
    directory: String,
    verifies: bool,
}

/// Understands these words, without the name of the program.
///
/// # Errors
/// What is wrong, or not supported, by name.
pub fn parse(words: &[OsString]) -> Result<ToolInvocation<StorageDaemon>, String> {
    let parts = getopt::parse(OPTIONS, words)?;
    if let Some(operand) = parts.operands.first() {
        return Err(format!("Unexpected argument: {}", operand.to_string_lossy()));
    }
    let mut daemon = StorageDaemon::default();
    for (means, value) in parts.options {
        let value = value.unwrap_or_default();
        let text = || {
            let text = value.to_str().map(str::to_string);
            text.ok_or_else(|| format!("--{means}: the value is not UTF-8"))
        };
        match means {
            "help" => return Ok(ToolInvocation::Text(HELP.to_string())),
            "version" => {
                let text = format!("qemu-storage-daemon version {VERSION}\n");
                return Ok(ToolInvocation::Text(text));
            }
            "daemonize" => daemon.daemonize = true,
            "pidfile" => daemon.pidfile = Some(value),
            "trace" => return Err("--trace is not supported".to_string()),
            "blockdev" => daemon.add("blockdev-add", parameters(&text()?, "driver")?),
            "export" => daemon.add("block-export-add", parameters(&text()?, "type")?),
            "nbd-server" => daemon.serve(parameters(&text()?, "addr")?)?,
            "chardev" => daemon.add_chardev(&parameters(&text()?, "backend")?)?,
            "monitor" => daemon.add_monitor(&parameters(&text()?, "chardev")?)?,
            _ => daemon.add_object(parameters(&text()?, "qom-type")?)?,
        }
    }
    if daemon.daemonize && daemon.monitors.iter().any(MonitorAddress::is_stdio) {
        return Err("--daemonize: a monitor cannot use standard input and output".to_string());
    }
    Ok(ToolInvocation::Run(daemon))
}

impl MonitorAddress {
    fn is_stdio(&self) -> bool {
        matches!(self, MonitorAddress::Client(client) if client == "stdio")
    }
}

impl StorageDaemon {
    fn add(&mut self, command: &str, arguments: Map<String, Json>) {
        self.commands.push(json!({ "execute": command, "arguments": arguments }));
    }

    fn serve(&mut self, mut arguments: Map<String, Json>) -> Result<(), String> {
        if let Some(id) = arguments.remove("tls-creds") {
            let id = id.as_str().unwrap_or_default().to_string();
            if !self.credentials.iter().any(|one| one.id == id) {
                return Err(format!("No TLS credentials with id '{id}'"));
            }
            self.tls = Some(id);
        }
        self.add("nbd-server-start", arguments);
        Ok(())
    }

    fn add_chardev(&mut self, given: &Map<String, Json>) -> Result<(), String> {
        let backend = text(given, "backend");
        let id = || needed("--chardev", given, "id");
        let (id, place) = match backend {
            "stdio" => {
                known("--chardev stdio", given, &["backend", "id"])?;
                (id()?, MonitorAddress::Client("stdio".to_string()))
            }
            "socket" => (id()?, socket(given)?),
            _ => return Err(format!("--chardev {backend}: only socket and stdio are supported")),
        };
        self.chardevs.push((id, place));
        Ok(())
    }

    fn add_monitor(&mut self, given: &Map<String, Json>) -> Result<(), String> {
        known("--monitor", given, &["chardev", "id", "mode", "pretty"])?;
        if !["", "control"].contains(&text(given, "mode")) {
            return Err("--monitor: only mode=control is supported".to_string());
        }
        if given.get("pretty").and_then(Json::as_bool) == Some(true) {
            return Err("--monitor: pretty=on is not supported".to_string());
        }
        let id = needed("--monitor", given, "chardev")?;
        let found = self.chardevs.iter().find(|(known, _)| *known == id);
        let (_, place) = found.ok_or_else(|| format!("Character device '{id}' not found"))?;
        self.monitors.push(place.clone());
        Ok(())
    }

    fn add_object(&mut self, given: Map<String, Json>) -> Result<(), String> {
        let kind = text(&given, "qom-type");
        needed("--object", &given, "id")?;
        match kind {
            "iothread" | "throttle-group" => {
                self.add("object-add", given);
                Ok(())
            }
            "tls-creds-x509" => self.add_credentials(&given),
            _ => Err(format!("--object {kind} is not supported")),
        }
    }

    fn add_credentials(&mut self, given: &Map<String, Json>) -> Result<(), String> {
        let names = ["qom-type", "id", "dir", "endpoint", "verify-peer"];
        known("--object tls-creds-x509", given, &names)?;
        if text(given, "endpoint") != "server" {
            return Err("--object tls-creds-x509: only endpoint=server is supported".to_string());
        }
        self.credentials.push(X509Credentials {
            id: text(given, "id").to_string(),
            directory: needed("--object tls-creds-x509", given, "dir")?,
            verifies: given.get("verify-peer").and_then(Json::as_bool).unwrap_or(true),
        });
        Ok(())
    }

    /// The words of `blockhaul serve`.
    pub fn words(&self, in_background: bool) -> Vec<OsString> {
        let mut words = words(&["blockhaul", "serve", "--quiet", "--no-listen"]);
        words.push(if in_background { "--in-background" } else { "--foreground" }.into());
        words.extend(self.monitors.iter().map(|place| match place {
            MonitorAddress::Listens(path) => format!("--qmp={path}").into(),
            MonitorAddress::Client(client) => format!("--qmp-client={client}").into(),
        }));
        let credentials = self.credentials.iter();
        for one in credentials.filter(|one| self.tls.as_ref() == Some(&one.id)) {
            words.push("--tls=require".into());
            words.push(format!("--tls-certificates={}", one.directory).into());
            if one.verifies {
                words.push("--tls-verify-peer".into());
            }
        }
        if let Some(path) = &self.pidfile {
            let mut word = OsString::from("--pidfile=");
            word.push(path);
            words.push(word);
        }
        if self.commands.is_empty() && self.monitors.is_empty() {
            // It serves nothing until it is ended.
            words.push(format!("--qmp-run={}", json!({ "execute": "query-version" })).into());
        }
        words.extend(self.commands.iter().map(|command| format!("--qmp-run={command}").into()));
        words
    }
}

/// Where the clients of a `--chardev socket` are.
fn socket(given: &Map<String, Json>) -> Result<MonitorAddress, String> {
    known("--chardev socket", given, &["backend", "id", "path", "fd", "server", "wait"])?;
    let is_on = |name: &str| given.get(name).and_then(Json::as_bool);
    let listens = is_on("server") == Some(true);
    match (text(given, "path"), text(given, "fd")) {
        ("", "") => Err("--chardev socket: Parameter 'path' is missing".to_string()),
        (path, "") if listens && is_on("wait") == Some(false) => {
            Ok(MonitorAddress::Listens(path.to_string()))
        }
        (_, "") if listens => {
            Err("--chardev socket: with server=on, only wait=off is supported".to_string())
        }
        ("", _) if listens => {
            Err("--chardev socket: fd with server=on is not supported".to_string())
        }
        _ if given.contains_key("wait") => {
            Err("--chardev socket: Parameter 'wait' needs server=on and a path".to_string())
        }
        (path, "") => Ok(MonitorAddress::Client(format!("unix:{path}"))),
        ("", fd) => Ok(MonitorAddress::Client(format!("fd:{fd}"))),
        _ => Err("--chardev socket: path and fd cannot be used together".to_string()),
    }
}

/// Options in JSON, or as `key=value,key.member=value`. The first word may lack its key, which is
/// `implied`; a double comma is a comma in a value.
pub(crate) fn parameters(text: &str, implied: &str) -> Result<Map<String, Json>, String> {
    if text.trim_start().starts_with('{') {
        return options_of_json(text).map_err(|error| error.text());
    }
    let mut members = Map::new();
    let mut insert =
        |key: &str, value| insert_option(&mut members, key, value).map_err(|error| error.text());
    for (index, word) in split(text).iter().enumerate() {
        match word.split_once('=') {
            Some((key, value)) => insert(key, typed(key, value))?,
            None if index == 0 => insert(implied, Json::from(word.as_str()))?,
            // As in QEMU, a key alone is a switch.
            None => insert(word, Json::Bool(true))?,
        }
    }
    Ok(members)
}

/// The parts between single commas.
pub(crate) fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.peek() == Some(&',') => {
                letters.next();
                parts.iter_mut().last().into_iter().for_each(|part| part.push(','));
            }
            ',' => parts.push(String::new()),
            _ => parts.iter_mut().last().into_iter().for_each(|part| part.push(letter)),
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Keys whose values are switches.
const SWITCHES: &[&str] = &[
    "auto-read-only",
    "allocation-depth",
    "direct",
    "drop-cache",
    "fixed-iothread",
    "force-share",
    "no-flush",
    "pretty",
    "read-only",
    "read-zeroes",
    "server",
    "verify-peer",
    "wait",
    "writable",
    "writethrough",
];

/// Keys whose values are numbers.
const NUMBERS: &[&str] = &[
    "aio-max-batch",
    "cbw-timeout",
    "handshake-max-seconds",
    "latency-ns",
    "max-connections",
    "min-cluster-size",
    "offset",
    "open-timeout",
    "reconnect-delay",
    "size",
    "thread-pool-max",
    "thread-pool-min",
];

/// A value in the type that its key has.
fn typed(key: &str, value: &str) -> Json {
    let last = key.rsplit('.').next().unwrap_or(key);
    let limit = last.strip_prefix("x-").unwrap_or(last);
    let is_limit = limit.starts_with("bps-") || limit.starts_with("iops-");
    let is_number = is_limit || limit.starts_with("poll-") || NUMBERS.contains(&last);
    let number = || blockhaul_catalog::parse_size(value).ok();
    match value {
        "on" | "yes" | "true" | "y" if SWITCHES.contains(&last) => Json::Bool(true),
        "off" | "no" | "false" | "n" if SWITCHES.contains(&last) => Json::Bool(false),
        _ if is_number => number().map_or_else(|| Json::from(value), Json::from),
        _ => Json::from(value),
    }
}

pub(crate) fn text<'a>(given: &'a Map<String, Json>, name: &str) -> &'a str {
    given.get(name).and_then(Json::as_str).unwrap_or_default()
}

fn needed(option: &str, given: &Map<String, Json>, name: &str) -> Result<String, String> {
    match text(given, name) {
        "" => Err(format!("{option}: Parameter '{name}' is missing")),
        text => Ok(text.to_string()),
    }
}

pub(crate) fn known(option: &str, given: &Map<String, Json>, names: &[&str]) -> Result<(), String> {
    match given.keys().find(|name| !names.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(format!("{option}: Parameter '{name}' is not supported")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &[&str]) -> Result<Vec<String>, String> {
        let line: Vec<OsString> = line.iter().map(OsString::from).collect();
        match parse(&line)? {
            ToolInvocation::Text(text) => Err(text),
            ToolInvocation::Run(daemon) => {
                let words = daemon.words(false).into_iter();
                Ok(words.map(|word| word.into_string().unwrap()).collect())
            }
        }
    }

    #[test]
    fn options_become_commands_in_their_order() {
        let words = run(&[
            "--chardev",
            "socket,id=c,path=/q,server=on,wait=off",
            "--monitor=c",
            "--blockdev",
            "raw,node-name=a,file.driver=file,file.filename=/x,,y,read-only=on",
            "--nbd-server=addr.type=unix,addr.path=/s",
            "--export={\"type\":\"nbd\",\"id\":\"e\",\"node-name\":\"a\"}",
        ]);
        let words = words.unwrap();
        assert!(words.contains(&"--qmp=/q".to_string()), "{words:?}");
        let commands: Vec<Json> = words
            .iter()
            .filter_map(|word| word.strip_prefix("--qmp-run="))
            .map(|text| serde_json::from_str(text).unwrap())
            .collect();
        assert_eq!(commands[0]["arguments"]["file"]["filename"], "/x,y");
        assert_eq!(commands[0]["arguments"]["read-only"], true);
        assert_eq!(commands[1]["arguments"]["addr"], json!({ "type": "unix", "path": "/s" }));
        assert_eq!(commands[2]["execute"], "block-export-add");
    }

    #[test]
    fn a_monitor_may_have_one_client_from_the_beginning() {
        for (chardev, client) in [
            ("socket,id=c,path=/q", "unix:/q"),
            ("socket,id=c,path=/q,server=off", "unix:/q"),
            ("socket,id=c,fd=7", "fd:7"),
            ("stdio,id=c", "stdio"),
        ] {
            let words = run(&["--chardev", chardev, "--monitor", "c"]).unwrap();
            assert!(words.contains(&format!("--qmp-client={client}")), "{words:?}");
        }
        let words = run(&["--chardev=stdio,id=c", "--monitor=c", "--daemonize"]);
        assert!(words.unwrap_err().contains("--daemonize"));
    }

    #[test]
    fn limits_of_a_group_are_numbers() {
        let words = run(&["--object", "throttle-group,id=t,limits.bps-total=1M,x-iops-read=3"]);
        let command = words.unwrap().pop().unwrap();
        let command: Json =
            serde_json::from_str(command.strip_prefix("--qmp-run=").unwrap()).unwrap();
        assert_eq!(command["arguments"]["limits"]["bps-total"], 1 << 20);
        assert_eq!(command["arguments"]["x-iops-read"], 3);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (line, why) in [
            (["--chardev", "vc,id=c"], "--chardev vc"),
            (["--chardev", "socket,id=c,path=/q,server=on"], "wait=off"),
            (["--chardev", "socket,id=c,path=/q,wait=off"], "'wait'"),
            (["--chardev", "socket,id=c,fd=3,server=on,wait=off"], "fd with server=on"),
            (["--chardev", "socket,id=c,fd=3,path=/q"], "path and fd"),
            (["--chardev", "socket,id=c"], "'path' is missing"),
            (["--monitor", "c"], "Character device 'c' not found"),
            (["--object", "secret,id=t"], "--object secret"),
            (["--trace", "x"], "--trace"),
            (["--nbd-server", "addr.type=unix,addr.path=/s,tls-creds=t"], "'t'"),
            (["--blockdev", "driver=raw,file=a,file.driver=x"], "inconsistently"),
        ] {
            let said = run(&line).unwrap_err();
            assert!(said.contains(why), "{line:?}: {said}");
        }
        assert!(run(&["-V"]).unwrap_err().starts_with("qemu-storage-daemon version 10."));
    }

    #[test]
    fn certificates_are_those_of_the_server() {
        let words = run(&[
            "--object",
            "tls-creds-x509,id=t,dir=/pki,endpoint=server,verify-peer=off",
            "--nbd-server",
            "addr.type=inet,addr.host=localhost,addr.port=1,tls-creds=t",
        ]);
        let words = words.unwrap().join(" ");
        assert!(words.contains("--tls=require --tls-certificates=/pki"), "{words}");
        assert!(!words.contains("verify-peer") && !words.contains("tls-creds"), "{words}");
    }
}
