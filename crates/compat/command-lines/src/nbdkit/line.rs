//! Parses nbdkit's command line: its options, and the words after them.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, ToSocketAddrs as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use super::parameter_file;
use crate::getopt;

/// nbdkit's options, in its order (1.48).
pub const OPTIONS: &str = "\
    4|ipv4-only 6|ipv6-only D|debug= dump-config dump-plugin exit-with-parent \
    export:exportname= export-name:exportname= e|exportname= filter= f|foreground \
    no-fork:foreground g|group= help ip-addr:ipaddr= i|ipaddr= keepalive keep-alive:keepalive \
    log= long-options mask-handshake= name= new-style:newstyle n|newstyle no-mc \
    no-meta-contexts:no-mc no-sr no-structured-replies:no-sr old-style:oldstyle o|oldstyle \
    pid-file:pidfile= P|pidfile= print-uri print-url:print-uri p|port= read-only:readonly \
    r|readonly run= selinux-label= short-options show-uri:print-uri show-url:print-uri \
    s|single stdin:single swap t|threads= timeout= time-out:timeout= tls= tls-certificates= \
    tls-priority= tls-psk= tls-verify-peer U|unix= u|user= v|verbose V|version vsock";

/// The first word of a server that has restarted itself to go to the background.
pub const IN_BACKGROUND: &str = "--in-background";

/// A parameter: its key, and its value. No key: the plugin interprets the bare value.
pub type PluginParameter = (Option<String>, String);

/// A parsed command line.
#[derive(Debug, Default)]
pub struct NbdkitCommand {
    /// The requested output instead of serving: `help`, `version`, `dump-config` …
    pub ask: Option<&'static str>,
    /// Options of the server, in the form of `blockhaul serve`.
    pub serve: Vec<OsString>,
    /// Names and paths of filters; the first is outermost.
    pub filters: Vec<String>,
    /// Global variables of plugins and filters to set: name, flag, value.
    pub debug: Vec<(String, String, i32)>,
    /// The plugin's name or path.
    pub plugin: Option<String>,
    /// Parameters of plugin and filters.
    pub parameters: Vec<PluginParameter>,
    /// The destination of errors.
    pub log: LogDestination,
    /// The name of this server in messages.
    pub name: Option<String>,
    /// Print more detail.
    pub verbose: bool,
    /// Nothing will be changed.
    pub readonly: bool,
    /// Stay in the foreground.
    pub foreground: bool,
    /// Threads of a plugin with parallel calls.
    pub threads: Option<u32>,
    /// A TLS option was given.
    tls: bool,
    /// Credentials for TLS were given.
    credentials: bool,
    unix: Option<OsString>,
    port: Option<String>,
    address: Option<String>,
    family: Option<IpFamily>,
    vsock: bool,
    /// Serve the client at standard input and output.
    pub single: bool,
    run: bool,
}

/// The destination of errors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LogDestination {
    /// Standard error; syslog for a server in the background.
    #[default]
    Usual,
    /// Standard error.
    Stderr,
    /// The system's log.
    Syslog,
    /// Nowhere.
    Null,
    /// The end of this file.
    File(PathBuf),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IpFamily {
    V4,
    V6,
}

impl NbdkitCommand {
    /// Parses a command line; an error says what is invalid.
    pub fn parse(words: &[OsString]) -> Result<NbdkitCommand, String> {
        let parts = getopt::parse(OPTIONS, words)?;
        let mut line = NbdkitCommand::default();
        for (name, value) in parts.options {
            line.option(name, value)?;
        }
        let mut operands = parts.operands.into_iter();
        line.plugin = match operands.next() {
            Some(plugin) => Some(text(plugin, "the plugin's name")?),
            None => None,
        };
        for operand in operands {
            parameter_file::expand(&text(operand, "a parameter")?, &mut line.parameters)?;
        }
        if line.ask.is_none() {
            line.place()?;
            line.tls_words();
        }
        Ok(line)
    }

    fn option(&mut self, name: &'static str, value: Option<OsString>) -> Result<(), String> {
        let value = value.unwrap_or_default();
        match name {
            "help" | "version" | "dump-config" | "dump-plugin" | "long-options"
            | "short-options" => self.ask = Some(name),
            "ipv4-only" => self.family = Some(IpFamily::V4),
            "ipv6-only" => self.family = Some(IpFamily::V6),
            "debug" => self.debug_flag(&text(value, "--debug")?)?,
            "exit-with-parent" => {
                self.foreground = true;
                self.flag("--exit-with-parent");
            }
            "exportname" => self.pair("--uri-export", value),
            "filter" => self.filters.push(text(value, "--filter")?),
            "foreground" => self.foreground = true,
            "group" | "user" => self.pair(&format!("--{name}"), value),
            "ipaddr" => self.address = Some(text(value, "--ipaddr")?),
            // Always on here.
            "keepalive" => {}
            // The default.
            "newstyle" => self.serve.retain(|word| word != "--oldstyle"),
            "log" => self.log = log(&value)?,
            "mask-handshake" => self.pair("--mask-handshake", value),
            "name" => self.name = Some(text(value, "--name")?),
            "no-mc" => self.flag("--no-contexts"),
            "no-sr" => self.flag("--no-structured"),
            "oldstyle" => self.flag("--oldstyle"),
            "pidfile" => self.pair("--pidfile", value),
            "port" => self.port = Some(text(value, "--port")?),
            "print-uri" => self.flag("--print-uri"),
            "readonly" => {
                self.readonly = true;
                self.flag("--readonly");
            }
            "run" => {
                (self.run, self.foreground) = (true, true);
                self.pair("--run", value);
            }
            "selinux-label" => self.pair("--selinux-label", value),
            "single" => (self.single, self.foreground) = (true, true),
            "swap" => self.flag("--swap"),
            "threads" => {
                let wrong = |_| format!("--threads: {} is not a number", value.display());
                let threads: u32 =
                    blockhaul_catalog::parse_number(&value.to_string_lossy()).map_err(wrong)?;
                // 0 is nbdkit's default.
                self.threads = (threads > 0).then_some(threads);
            }
            "timeout" => self.pair("--timeout", value),
            "tls" => {
                self.tls = true;
                self.pair("--tls", value);
            }
            "tls-priority" => priority(&text(value, "--tls-priority")?)?,
            "tls-certificates" | "tls-psk" => {
                self.credentials = true;
                self.pair(&format!("--{name}"), value);
            }
            "tls-verify-peer" => self.flag("--tls-verify-peer"),
            "unix" => self.unix = Some(value),
            "verbose" => self.verbose = true,
            "vsock" => self.vsock = true,
            _ => return Err(format!("option --{name} is not supported")),
        }
        Ok(())
    }

    /// Adds a flag; a repeated one counts once, as usual with getopt_long(3).
    fn flag(&mut self, word: &str) {
        if !self.serve.iter().any(|there| there == word) {
            self.serve.push(word.into());
        }
    }

    /// Adds an option with a value; the last one of repeated options counts.
    fn pair(&mut self, name: &str, value: OsString) {
        let mut word = OsString::from(format!("{name}="));
        self.serve.retain(|there| !there.as_bytes().starts_with(word.as_bytes()));
        word.push(value);
        self.serve.push(word);
    }

    fn debug_flag(&mut self, text: &str) -> Result<(), String> {
        let wrong = || "-D option must have the format NAME.FLAG=N".to_string();
        let (path, value) = text.split_once('=').ok_or_else(wrong)?;
        let (name, flag) = path.split_once('.').ok_or_else(wrong)?;
        if name.is_empty() || flag.is_empty() || value.is_empty() {
            return Err(wrong());
        }
        let value = value.parse().map_err(|_| format!("-D {text}: {value:?} is not a number"))?;
        self.debug.push((name.to_string(), flag.replace('.', "_"), value));
        Ok(())
    }

    /// Where to listen: only one kind, as in nbdkit.
    fn place(&mut self) -> Result<(), String> {
        let ways = [self.unix.is_some(), self.single, self.vsock];
        let tcp = self.port.is_some() || self.address.is_some();
        let ways = ways.iter().filter(|&&way| way).count() + usize::from(tcp && !self.vsock);
        if ways > 1 {
            return Err("the -p, -U, --vsock and -s options exclude each other".into());
        }
        if self.single && self.run {
            return Err("-s and --run exclude each other".into());
        }
        if self.vsock {
            if self.address.is_some() {
                return Err("--vsock and -i exclude each other".into());
            }
            let port = self.port.clone().unwrap_or_else(|| "10809".into());
            self.pair("--vsock", port.into());
            return Ok(());
        }
        if self.single {
            self.flag("--single");
        }
        if let Some(path) = self.unix.take() {
            self.pair("--unix", path);
        }
        if let Some(port) = self.port.clone() {
            self.pair("--port", service(&port).into());
        }
        let usual = !self.single && !self.run && ways == 0;
        match (self.address.clone(), self.family) {
            (Some(address), family) => {
                let address = resolved(&address, family)?;
                self.pair("--ip-addr", address.into());
            }
            (None, Some(family)) if tcp || usual => {
                let any = if family == IpFamily::V4 { "0.0.0.0" } else { "::" };
                self.pair("--ip-addr", any.into());
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Like nbdkit, offers TLS if there are credentials, and requires it on request.
    fn tls_words(&mut self) {
        if !self.tls {
            let offered = self.credentials || blockhaul_tls::usual_certificates().is_some();
            self.flag(if offered { "--tls=on" } else { "--tls=off" });
        }
    }
}

fn text(word: OsString, what: &str) -> Result<String, String> {
    word.into_string().map_err(|word| format!("{what} is not UTF-8: {}", word.display()))
}

fn log(value: &OsStr) -> Result<LogDestination, String> {
    match value.to_str() {
        Some("default") => Ok(LogDestination::Usual),
        Some("stderr") => Ok(LogDestination::Stderr),
        Some("syslog") => Ok(LogDestination::Syslog),
        Some("null") => Ok(LogDestination::Null),
        _ if value.as_bytes().starts_with(b"/") => Ok(LogDestination::File(value.into())),
        _ => Err("--log must be \"default\", \"stderr\", \"syslog\", \"null\" or an absolute path"
            .into()),
    }
}

/// Checks a priority string of GnuTLS: OpenSSL has none. One that only permits algorithms changes
/// nothing; one that forbids some is refused, as it would not be obeyed.
fn priority(text: &str) -> Result<(), String> {
    let permits = |word: &str| {
        matches!(word, "NORMAL" | "PERFORMANCE" | "LEGACY" | "SYSTEM")
            || word.starts_with(['@', '+'])
    };
    if text.split(':').all(permits) {
        return Ok(());
    }
    Err(format!(
        "--tls-priority={text}: only NORMAL, PERFORMANCE, LEGACY, SYSTEM and additions (+…) are supported: \
         TLS is OpenSSL's here, and its openssl.cnf (MinProtocol, CipherString) restricts algorithms"
    ))
}

/// Parses a parameter. The text before `=` is a key if it looks like one.
pub fn parameter(word: &str) -> PluginParameter {
    match word.split_once('=') {
        Some((key, value)) if is_key(key) => (Some(key.into()), value.into()),
        _ => (None, word.into()),
    }
}

fn is_key(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// A port by its number or by its name in services(5).
fn service(port: &str) -> String {
    if port.bytes().all(|byte| byte.is_ascii_digit()) {
        return port.into();
    }
    let services = std::fs::read_to_string("/etc/services").unwrap_or_default();
    let found = services.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let name = words.next()?;
        let number = words.next()?;
        let number = number.strip_suffix("/tcp")?;
        (name == port || words.any(|alias| alias == port)).then(|| number.to_string())
    });
    // The code that reads ports reports invalid ones.
    found.unwrap_or_else(|| port.into())
}

/// An address of this family, if one is requested.
fn resolved(address: &str, family: Option<IpFamily>) -> Result<String, String> {
    let Some(family) = family else { return Ok(address.into()) };
    let found = (address, 0)
        .to_socket_addrs()
        .map_err(|error| format!("{address}: {}", blockhaul_io::plain(&error)))?;
    let mut found = found.map(|found| found.ip());
    let fits = |ip: &IpAddr| ip.is_ipv4() == (family == IpFamily::V4);
    let missing = || format!("{address} has no address of the family that is asked for");
    found.find(fits).map(|ip| ip.to_string()).ok_or_else(missing)
}

/// `text` as part of a device or layer, with all special bytes escaped.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in OsStr::new(text).as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'/' | b':' => {
                out.push(char::from(*byte));
            }
            _ => out += &format!("%{byte:02x}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<NbdkitCommand, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        NbdkitCommand::parse(&words)
    }

    fn serve(text: &str) -> Vec<String> {
        let words = line(text).unwrap().serve;
        let words = words.into_iter().map(|word| word.into_string().unwrap());
        words.filter(|word| !word.starts_with("--tls")).collect()
    }

    #[test]
    fn options_become_those_of_serve() {
        assert_eq!(serve("-f -U /s -P pid null"), ["--pidfile=pid", "--unix=/s"]);
        assert_eq!(serve("-p 1 -i ::1 -r null"), ["--readonly", "--port=1", "--ip-addr=::1"]);
        assert_eq!(serve("-4 null"), ["--ip-addr=0.0.0.0"]);
        assert_eq!(serve("--vsock -p 5 null"), ["--vsock=5"]);
        assert_eq!(serve("--no-sr --no-meta null"), ["--no-structured", "--no-contexts"]);
        assert_eq!(
            serve("-r -r --no-mc --read-only --no-mc null"),
            ["--readonly", "--no-contexts"]
        );
        assert!(serve("-o -n null").is_empty());
        assert_eq!(
            serve("-P a --run x -U /s -P b --run y -U - null"),
            ["--pidfile=b", "--run=y", "--unix=-"]
        );
        let parsed = line("--run true --tls=require null").unwrap();
        assert!(parsed.foreground && parsed.serve.contains(&"--tls=require".into()));
    }

    #[test]
    fn words_behind_the_options_are_plugin_and_parameters() {
        let parsed = line("--filter=a --filter b -f p k=v=w 1=2 bare -r -- -x").unwrap();
        assert_eq!(parsed.plugin.as_deref(), Some("p"));
        assert_eq!(parsed.filters, ["a", "b"]);
        let key = |key: Option<&str>, value: &str| (key.map(str::to_string), value.to_string());
        let wanted = [key(Some("k"), "v=w"), key(None, "1=2"), key(None, "bare"), key(None, "-x")];
        assert_eq!(parsed.parameters, wanted);
        assert!(parsed.readonly);
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for bad in [
            "-U s -p 1 x",
            "-s -U s x",
            "-s --run y x",
            "--log=x y",
            "--log=./x y",
            "--what",
            "--threads=x y",
            "--tls-priority=NORMAL:-VERS-TLS1.2 y",
            "x @/no/such/file",
        ] {
            assert!(line(bad).is_err(), "{bad}");
        }
        for bad in ["=", ".", "=.", ".=", ".a=1", "a.=1", "a.b="] {
            let error = line(&format!("-D {bad} x")).unwrap_err();
            assert!(error.contains("must have the format"), "{error}");
        }
        assert_eq!(line("-D a.b.c=1 x").unwrap().debug, [("a".into(), "b_c".into(), 1)]);
    }

    #[test]
    fn errors_go_where_the_option_says() {
        assert_eq!(line("--log=null --log=default x").unwrap().log, LogDestination::Usual);
        assert_eq!(line("--log=/a/b x").unwrap().log, LogDestination::File("/a/b".into()));
        let parsed = line("--name in --tls-priority=NORMAL:+ECDHE-PSK x").unwrap();
        assert_eq!(parsed.name.as_deref(), Some("in"));
    }

    #[test]
    fn escapes_hold_what_means_something() {
        assert_eq!(escaped("a b&c=%d?é\n"), "a%20b%26c%3d%25d%3f%c3%a9%0a");
    }
}
