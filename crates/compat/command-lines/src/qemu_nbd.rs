//! The command line of qemu-nbd as that of `blockhaul serve`.

use std::ffi::OsString;

use crate::getopt;
use crate::qemu_image::{QemuFormat, QemuImage, encoded};
use crate::qemu_img::VERSION;
use crate::qemu_tls::CredentialsObject;
use crate::{ToolInvocation, words};

/// The first word of the program that was started to serve in the background.
pub const IN_BACKGROUND: &str = "--in-background";
/// The port of NBD.
const PORT: &str = "10809";
/// Seconds that a client of the original has for the handshake.
const HANDSHAKE_LIMIT: &str = "10";
/// The unit in bytes in which the original counts the length of a raw disk, and in which it accesses one
/// that it has guessed.
const SECTOR: u64 = 512;

/// As [`getopt::parse`] reads them.
const OPTIONS: &str = "h|help V|version p|port= b|bind= k|socket= e|shared= t|persistent v|verbose x|export-name= \
    D|description= o|offset= A|allocation-depth B|bitmap= f|format= r|read-only s|snapshot \
    l|load-snapshot= n|nocache cache= aio= discard= detect-zeroes= image-opts fork pid-file= \
    L|list c|connect= d|disconnect object= tls-creds= tls-authz= tls-hostname= T|trace= \
    handshake-limit= selinux-label=";

const HELP: &str = "\
Serves the disk in an image over NBD.

    qemu-nbd [OPTIONS] FILE

This is blockhaul, with the command line of QEMU's qemu-nbd.

    -k, --socket=PATH          listen on this Unix socket
    -p, --port=PORT            listen on this TCP port (10809)
    -b, --bind=ADDRESS         listen on this address (all)
    -f, --format=FORMAT        raw, qcow2; with -r, the formats that are only read
    --image-opts               FILE is driver=...,file.filename=...
    -r, --read-only            serve read-only
    -s, --snapshot             keep writes in memory, and forget them at the end
    -l, --load-snapshot=NAME   serve an internal snapshot, read-only
    -o, --offset=OFFSET        serve what is behind this offset
    -x, --export-name=NAME     name of the export
    -D, --description=TEXT     description of the export
    -e, --shared=N             maximum number of clients (1; 0: no limit); others wait
    -t, --persistent           do not end with the last client
    -A, --allocation-depth     show the context qemu:allocation-depth
    -B, --bitmap=NAME          show this bitmap of the image, or of one below it; may be repeated
    -n, --nocache, --cache=none
                               bypass the page cache, with -f raw
    --detect-zeroes=MODE       off; on: zero requests for writes of zeroes; unmap: these free
                               blocks, with --discard=unmap
    --cache=MODE, --aio=MODE, --discard=MODE
                               accepted
    --handshake-limit=SECONDS  end clients that do not complete the handshake in time (10; 0: no
                               limit)
    --selinux-label=LABEL      label of the socket
    -L, --list                 list the exports of the server at -k, or -b and -p
    --object=tls-creds-x509,id=ID,endpoint=server|client,dir=DIR[,verify-peer=off]
    --object=tls-creds-psk,id=ID,endpoint=server|client,dir=DIR[,username=NAME]
    --tls-creds=ID             require TLS with these credentials; with -L, use it
    --tls-hostname=NAME        with -L: name in the certificate of the server
    --fork                     return when ready, and go on in the background
    --pid-file=PATH            write the process ID when ready
    -v, --verbose              accepted

See `blockhaul serve --help` and docs/qemu-img.md for details.
";

/// The modes that an option knows.
fn modes(option: &str) -> &'static [&'static str] {
    match option {
        "cache" => &["none", "writeback", "writethrough", "directsync", "unsafe"],
        "aio" => &["threads", "native", "io_uring"],
        "detect-zeroes" => &["off", "on", "unmap"],
        _ => &["ignore", "off", "unmap", "on"],
    }
}

/// What a command line asks for.
#[derive(Debug)]
pub enum QemuNbdAction {
    /// A server.
    Serve(QemuNbdServer),
    /// The list of the exports of the server with this URI.
    List(String),
}

/// A server that a command line asks for.
#[derive(Debug)]
pub struct QemuNbdServer {
    image: QemuImage,
    options: Vec<(&'static str, String)>,
    /// The options of `blockhaul serve` for TLS.
    tls: Vec<String>,
}

/// Parses the command line of qemu-nbd, without the name of the program.
///
/// # Errors
/// What is wrong, or not supported, by name.
pub fn parse(line: &[OsString]) -> Result<ToolInvocation<QemuNbdAction>, String> {
    let parts = getopt::parse(OPTIONS, line)
        .map_err(|error| format!("{error}\nTry `qemu-nbd --help' for more information."))?;
    let mut options = Vec::new();
    let mut credentials = Vec::new();
    for (means, value) in parts.options {
        let value = value.unwrap_or_default().into_string();
        let value = value.map_err(|_| format!("--{means}: the value is not UTF-8"))?;
        let instead = match (means, value.as_str()) {
            ("help", _) => return Ok(ToolInvocation::Text(HELP.to_string())),
            ("version", _) => {
                return Ok(ToolInvocation::Text(format!("qemu-nbd {VERSION} (blockhaul)\n")));
            }
            ("connect" | "disconnect", _) => {
                "serve with -k SOCKET, and use nbd-client for /dev/nbdN"
            }
            ("object", text) => {
                credentials.push(CredentialsObject::parse(text)?);
                continue;
            }
            ("tls-authz", _) => "a client is admitted by its certificate or key",
            ("trace", _) => "use blockhaul serve --trace",
            ("cache" | "aio" | "discard" | "detect-zeroes", other)
                if !modes(means).contains(&other) =>
            {
                let known = modes(means).join(", ");
                return Err(format!("--{means}: unknown mode '{other}'; known are {known}"));
            }
            _ => {
                options.push((means, value));
                continue;
            }
        };
        return Err(format!("--{means} is not supported: {instead}"));
    }
    let has = |wanted: &str| options.iter().any(|one: &(&str, String)| one.0 == wanted);
    if has("socket") && (has("port") || has("bind")) {
        return Err("-k excludes -p and -b".to_string());
    }
    let value =
        |wanted: &str| options.iter().rev().find(|one| one.0 == wanted).map(|one| one.1.as_str());
    let is_list = has("list");
    let tls = value("tls-creds").map(|id| CredentialsObject::find(&credentials, id, !is_list));
    let tls = tls.transpose()?;
    if is_list {
        if !parts.operands.is_empty() {
            return Err("List mode is incompatible with a file name".to_string());
        }
        let host = value("tls-hostname").unwrap_or_default();
        let uri = address(value);
        return Ok(ToolInvocation::Run(QemuNbdAction::List(
            tls.map_or(uri.clone(), |tls| tls.uri(&uri, host)),
        )));
    }
    if has("tls-hostname") {
        return Err("TLS hostname is only supported with export list".to_string());
    }
    if value("detect-zeroes") == Some("unmap") && !matches!(value("discard"), Some("unmap" | "on"))
    {
        let text = "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap";
        return Err(text.to_string());
    }
    let tls = tls.map(CredentialsObject::serve_options).unwrap_or_default();
    let [name] = &parts.operands[..] else {
        return Err("give one FILE\nTry `qemu-nbd --help' for more information.".to_string());
    };
    let name = name.to_str().ok_or_else(|| format!("{name:?} is not UTF-8"))?;
    let format = value("format");
    let image =
        if has("image-opts") { QemuImage::options(name)? } else { QemuImage::named(name, format)? };
    Ok(ToolInvocation::Run(QemuNbdAction::Serve(QemuNbdServer { image, options, tls })))
}

/// The URI of a server.
fn address<'a>(value: impl Fn(&str) -> Option<&'a str>) -> String {
    let export = encoded(value("export-name").unwrap_or_default());
    if let Some(path) = value("socket") {
        return format!("nbd+unix:///{export}?socket={}", encoded(path));
    }
    let host = value("bind").filter(|host| *host != "0.0.0.0").unwrap_or("localhost");
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
    format!("nbd://{host}:{}/{export}", value("port").unwrap_or(PORT))
}

impl QemuNbdServer {
    /// The image that is served.
    pub fn image(&self) -> &QemuImage {
        &self.image
    }

    /// Whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|one| one.0 == name)
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|one| one.0 == name).map(|one| one.1.as_str())
    }

    /// Maximum number of clients; 0: no limit.
    fn clients(&self) -> Result<u32, String> {
        let given = self.value("shared").unwrap_or("1");
        // Scripts give `-e 2` as one word, so that the number begins with a blank.
        blockhaul_catalog::parse_number(given)
            .map_err(|_| format!("Invalid shared device number '{given}'"))
    }

    /// Seconds that a client has for the handshake; 0: no limit.
    fn handshake_limit(&self) -> Result<u32, String> {
        let given = self.value("handshake-limit").unwrap_or(HANDSHAKE_LIMIT);
        blockhaul_catalog::parse_number(given)
            .map_err(|_| format!("Invalid handshake limit '{given}'"))
    }

    /// The layer that detects zeroes in writes, if one is to be used.
    fn zero_detection(&self) -> Option<String> {
        let unmap = match self.value("detect-zeroes") {
            Some("on") => "off",
            Some("unmap") => "on",
            _ => return None,
        };
        Some(format!("--layer=detect-zeroes?unmap={unmap}"))
    }

    /// The metadata contexts that clients see, for the layer `contexts`.
    fn contexts(&self) -> String {
        let bitmaps = self.options.iter().filter(|one| one.0 == "bitmap");
        let bitmaps = bitmaps.map(|one| format!("qemu:dirty-bitmap:{}", one.1.replace(',', ",,")));
        let depth = self.has("allocation-depth").then(|| "qemu:allocation-depth".to_string());
        depth.into_iter().chain(bitmaps).collect::<Vec<_>>().join(",")
    }

    /// Whether a disk in this format is taken for a raw one that may be written, only because its first
    /// bytes tell no format.
    pub fn guesses_raw(&self, format: QemuFormat) -> bool {
        let reads = ["read-only", "load-snapshot", "snapshot"].iter().any(|name| self.has(name));
        self.image.format.is_none() && format == QemuFormat::Raw && !reads
    }

    /// The words of `blockhaul serve` for the image in this format. `len`: the length in bytes of a
    /// file with a raw disk; the original shows whole sectors.
    ///
    /// # Errors
    /// If an option does not fit the format.
    pub fn words(
        &self,
        format: QemuFormat,
        len: Option<u64>,
        in_background: bool,
    ) -> Result<Vec<OsString>, String> {
        let mut all = words(&["blockhaul", "serve"]);
        let mut add = |text: String| all.push(text.into());
        add(if in_background { "--in-background" } else { "--foreground" }.to_string());
        // The original does not tell what it serves, with -v either.
        add("--quiet".to_string());
        match self.value("socket") {
            Some(path) => add(format!("--unix={path}")),
            None => {
                add(format!("--port={}", self.value("port").unwrap_or(PORT)));
                if let Some(address) = self.value("bind").filter(|text| *text != "0.0.0.0") {
                    add(format!("--ip-addr={address}"));
                }
            }
        }
        add(format!("--timeout={}s", self.handshake_limit()?));
        let mut device = Vec::new();
        let reads = self.has("read-only") || self.has("load-snapshot");
        let is_writable = matches!(format, QemuFormat::Raw | QemuFormat::Qcow2);
        if !reads && !is_writable && !self.has("snapshot") {
            return Err(format!("format {} is only read: add -r", format.name()));
        }
        if let Some(given) = self.value("load-snapshot") {
            if format != QemuFormat::Qcow2 {
                return Err(format!("format {} has no internal snapshots", format.name()));
            }
            let name = given.strip_prefix("snapshot.name=").or(given.strip_prefix("snapshot.id="));
            device.push(format!("snapshot={}", encoded(name.unwrap_or(given))));
        }
        if self.has("bitmap") && format != QemuFormat::Qcow2 {
            return Err(format!("format {} has no bitmaps", format.name()));
        }
        // The original finds a bitmap in any image of the chain.
        if self.has("bitmap") && format == QemuFormat::Qcow2 {
            device.push("backing-bitmaps=on".to_string());
        }
        let direct =
            self.has("nocache") || matches!(self.value("cache"), Some("none" | "directsync"));
        if direct && format == QemuFormat::Raw && self.image.path().is_some() {
            device.push("direct=on".to_string());
        }
        if reads {
            add("--readonly".to_string());
        }
        if format == QemuFormat::Raw && len.is_some_and(|len| !len.is_multiple_of(SECTOR)) {
            add(format!("--layer=truncate?round-up={SECTOR}"));
        }
        if let Some(offset) = self.value("offset") {
            add(format!("--layer=offset?offset={offset}"));
        } else if format == QemuFormat::Raw && self.image.format.is_none() {
            add(format!("--layer=blocksize?minimum={SECTOR}"));
        }
        // Writes that are kept in memory need no flush.
        if !reads && !self.has("snapshot") {
            match self.value("cache") {
                Some("writethrough" | "directsync") => add("--layer=fua?fuamode=force".to_string()),
                Some("unsafe") => add("--layer=fua?fuamode=discard".to_string()),
                _ => {}
            }
        }
        if !reads && !self.has("snapshot") {
            self.zero_detection().into_iter().for_each(&mut add);
        }
        if format == QemuFormat::Qcow2 {
            add(format!("--layer=contexts?show={}", encoded(&self.contexts())));
        }
        // Clients of the original never see another value.
        add("--layer=rotational?rotational=off".to_string());
        if self.has("snapshot") {
            add("--layer=cow".to_string());
        }
        if self.has("allocation-depth") && format == QemuFormat::Raw {
            add("--layer=allocation-depth".to_string());
        }
        match self.clients()? {
            0 => {}
            1 => {
                // A client would wait for its own first connection.
                add("--layer=multi-conn?mode=disable".to_string());
                add("--layer=limit?limit=1&wait=on".to_string());
            }
            most => add(format!("--layer=limit?limit={most}&wait=on")),
        }
        if !self.has("persistent") {
            add("--layer=exitlast".to_string());
        }
        let names = [
            ("export-name", "export"),
            ("description", "description"),
            ("pid-file", "pidfile"),
            ("selinux-label", "selinux-label"),
        ];
        for (given, ours) in names {
            if let Some(value) = self.value(given) {
                add(format!("--{ours}={value}"));
            }
        }
        if self.has("pid-file") {
            // Scripts remove it once they have ended the server.
            add("--keep-pidfile".to_string());
        }
        self.tls.iter().cloned().for_each(&mut add);
        add("--".to_string());
        add(self.image.disk(format, &device));
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<String, String> {
        let line: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        match parse(&line)? {
            ToolInvocation::Text(text) => Err(text),
            ToolInvocation::Run(QemuNbdAction::List(uri)) => Ok(uri),
            ToolInvocation::Run(QemuNbdAction::Serve(server)) => {
                let format = server.image().format.unwrap_or(QemuFormat::Raw);
                let words = server.words(format, Some(1000), false)?;
                Ok(words.join(" ".as_ref()).into_string().unwrap())
            }
        }
    }

    #[test]
    fn options_become_those_of_serve() {
        let words = run("-k /s -f qcow2 -t -e 4 -x n -D d -r /a.qcow2").unwrap();
        for part in [
            "--unix=/s",
            "--layer=limit?limit=4&wait=on",
            "--export=n",
            "--description=d",
            "--readonly",
        ] {
            assert!(words.contains(part), "{words}");
        }
        assert!(words.ends_with("-- qcow2:/a.qcow2?names=allow"), "{words}");
        assert!(!words.contains("exitlast"), "{words}");
        assert_eq!(run("-L -k /s").unwrap(), "nbd+unix:///?socket=/s");
        assert_eq!(run("-L -b ::1 -p 7").unwrap(), "nbd://[::1]:7/");
        let object = "tls-creds-x509,dir=/c,endpoint";
        let words = run(&format!("--object {object}=server,id=t --tls-creds t /a")).unwrap();
        assert!(words.contains("--tls=require --tls-certificates=/c --tls-verify-peer"), "{words}");
        let line = format!("-L --object {object}=client,id=t --tls-creds t --tls-hostname h");
        let uri = run(&line).unwrap();
        assert_eq!(uri, "nbds://localhost:10809/?tls-certificates=/c&tls-hostname=h");
        let words = run("-B b -f qcow2 /a.qcow2").unwrap();
        assert!(words.ends_with("qcow2:/a.qcow2?names=allow&backing-bitmaps=on"), "{words}");
        assert!(words.contains("contexts?show=qemu:dirty-bitmap:b "), "{words}");
        let words = run("-A -B a,b -B c -f qcow2 /a.qcow2").unwrap();
        let shown = "show=qemu:allocation-depth,qemu:dirty-bitmap:a,,b,qemu:dirty-bitmap:c ";
        assert!(words.contains(shown), "{words}");
        let words = run("--detect-zeroes=on --handshake-limit 3 /a").unwrap();
        assert!(
            words.contains("detect-zeroes?unmap=off") && words.contains("--timeout=3s"),
            "{words}"
        );
        let words = run("--detect-zeroes=unmap --discard=unmap /a").unwrap();
        assert!(words.contains("detect-zeroes?unmap=on"), "{words}");
        assert!(!run("-r --detect-zeroes=on /a").unwrap().contains("detect-zeroes"));
        assert!(run("-e 1 /a").unwrap().contains("multi-conn?mode=disable"));
        assert!(!run("-e 2 /a").unwrap().contains("multi-conn"));
        let line = ["-e 2", "/a"].map(OsString::from);
        let ToolInvocation::Run(QemuNbdAction::Serve(server)) = parse(&line).unwrap() else {
            panic!("{line:?}")
        };
        assert_eq!(server.clients(), Ok(2));
        assert!(run("-A /a").unwrap().contains("--layer=allocation-depth"));
        assert!(!run("-A -f qcow2 /a").unwrap().contains("--layer=allocation-depth"));
        let words = run("-f raw -A /a").unwrap();
        assert!(!words.contains("blocksize"), "{words}");
        assert!(words.contains("truncate?round-up=512 "), "{words}");
        assert!(run("/a").unwrap().contains("blocksize?minimum=512 "));
        let words = run("-n -s -o 1M /a").unwrap();
        for part in [
            "round-up=512 --layer=offset",
            "--port=10809",
            "limit=1",
            "exitlast",
            "offset=1M",
            "--layer=cow",
            "direct=on",
        ] {
            assert!(words.contains(part), "{words}");
        }
        for (mode, layer) in
            [("writethrough", "force"), ("directsync", "force"), ("unsafe", "discard")]
        {
            let words = run(&format!("--cache={mode} /a")).unwrap();
            assert!(words.contains(&format!("fua?fuamode={layer}")), "{words}");
            assert!(!run(&format!("-r --cache {mode} /a")).unwrap().contains("fua"), "{mode}");
        }
        assert!(!run("--cache=none /a").unwrap().contains("fua"));
    }

    #[test]
    fn what_is_not_supported_is_refused_with_a_way() {
        for (line, why) in [
            ("-c /dev/nbd0 a", "nbd-client"),
            ("-d /dev/nbd0", "nbd-client"),
            ("-L a", "incompatible"),
            ("--tls-creds t a", "'t'"),
            ("--tls-authz t a", "--tls-authz is not supported"),
            ("--tls-hostname t a", "export list"),
            ("-f vhdx a", "add -r"),
            ("-f raw -l x a", "no internal snapshots"),
            ("-k /s -p 1 a", "-k excludes"),
            ("-e x a", "Invalid shared device number 'x'"),
            ("--cache x a", "writethrough"),
            ("--aio x a", "unknown mode"),
            ("--discard x a", "unknown mode"),
            ("--detect-zeroes x a", "unknown mode"),
            ("--detect-zeroes unmap a", "discard operation to unmap"),
            ("--handshake-limit x a", "Invalid handshake limit"),
            ("-f raw -B b a", "no bitmaps"),
            ("", "FILE"),
        ] {
            let said = run(line).unwrap_err();
            assert!(said.contains(why), "{line}: {said}");
        }
    }
}
