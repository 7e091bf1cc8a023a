//! `nbdcopy`: its command line, carried out by `blockhaul copy`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::Spec;
use client::options::{OptionSession, Place};
use client::{Address, ServerProcess};
use wire::uri::{Transport, Uri};

use super::options::{self, Opt, Value, alias, opt};
use super::{answer, failure, log_as, own, version};
use crate::args::Command;
use crate::brackets::{self, Groups};
use crate::exit::{FAILED, Failure, Outcome, plain};
use crate::{copy, out};

const OPTIONS: &[Opt] = &[
    opt("help", None, Value::No),
    opt("allocated", None, Value::No),
    opt("connections", Some(b'C'), Value::Must),
    opt("destination-is-zero", None, Value::No),
    opt("flush", None, Value::No),
    opt("long-options", None, Value::No),
    opt("no-extents", None, Value::No),
    opt("progress", Some(b'p'), Value::May),
    opt("queue-size", None, Value::Must),
    opt("request-size", None, Value::Must),
    opt("requests", Some(b'R'), Value::Must),
    opt("short-options", None, Value::No),
    opt("sparse", Some(b'S'), Value::Must),
    opt("synchronous", None, Value::No),
    alias("target-is-zero", Value::No, "destination-is-zero"),
    opt("threads", Some(b'T'), Value::Must),
    opt("verbose", Some(b'v'), Value::No),
    opt("version", Some(b'V'), Value::No),
];

const HELP: &str = "\
Copies from and to NBD servers and files.

    nbdcopy [OPTIONS] SOURCE DESTINATION

This is blockhaul in the place of libnbd's nbdcopy.

    SOURCE, DESTINATION     - (a pipe), a file, a block device, an NBD URI, [ CMD ARG... ]
    DESTINATION             also null:

    --allocated             make no holes
    -C, --connections=N     connections to each side (4)
    --destination-is-zero, --target-is-zero
                            the destination reads as zeroes already
    --flush                 make the destination durable before ending
    --no-extents            do not ask the source where its holes are
    -p, --progress[=FD]     show a bar, or print N/100 to a descriptor
    --queue-size=SIZE       bytes in flight on each connection (16M)
    --request-size=SIZE     bytes of a request (256K)
    -R, --requests=N        requests in flight on each connection, at most (64)
    -S, --sparse=SIZE       zeroes from this length on become holes; 0 to not look (4K)
    --synchronous           one request at a time, in order
    -T, --threads=N         threads, and connections at most; 0 for one per core
    -v, --verbose           say what is going on
    -V, --version           the version of nbdcopy that this one follows

`blockhaul copy --help` tells of what else can be done.
";

/// Connections to each side where none are asked for.
const CONNECTIONS: u32 = 4;
/// Requests in flight on each connection, at most.
const REQUESTS: u32 = 64;
/// The size of `null:`, as libnbd's nbdcopy has it.
const NULL_SIZE: u64 = i64::MAX as u64;
/// The preferred block size where the other side tells none.
const PREFERRED: u64 = 4096;

/// Runs nbdcopy with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let (words, groups) = brackets::take(words.to_vec()).map_err(failure)?;
    let parts = options::parse(OPTIONS, &words)
        .map_err(|text| failure(format!("{text}; see nbdcopy --help")))?;
    let mut settings = Settings::default();
    for (means, value) in parts.options {
        match means {
            "help" => return answer(HELP),
            "version" => return answer(&version("nbdcopy")),
            "long-options" => return answer(&options::long_list(OPTIONS)),
            "short-options" => return answer(&options::short_list(OPTIONS)),
            _ => settings.set(means, value).map_err(failure)?,
        }
    }
    let [source, target] = &parts.operands[..] else {
        return Err(failure("give a SOURCE and a DESTINATION; see nbdcopy --help"));
    };
    let source = End::new(source, &groups, Role::Source)?;
    let target = End::new(target, &groups, Role::Target)?;
    carry_out(&settings, source, target).map_err(|failure: Failure| match failure.status() {
        // As a shell sees a program that a signal has ended.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}

fn carry_out(settings: &Settings, source: End, target: End) -> Outcome {
    log_as("nbdcopy", settings.has("verbose"));
    let piped = source.is_pipe() || target.is_pipe();
    let mut started = Vec::new();
    let (mut source, mut target) = (source, target);
    if settings.has("verbose") {
        let facts = Facts::of(&mut source, &mut started);
        let size = facts.size;
        out::error(&facts.lines("src"));
        let mut facts = Facts::of(&mut target, &mut started);
        if matches!(target, End::Storage(_)) {
            // A file is made as large as the source.
            facts.size = size;
        }
        out::error(&facts.lines("dst"));
        out::error(&settings.line(piped));
    }
    source.take_place(Role::Source)?;
    target.take_place(Role::Target)?;
    if source.is_pipe() && target.is_pipe() {
        return pour();
    }
    let mut words: Vec<OsString> = vec!["blockhaul".into(), "copy".into()];
    words.extend(settings.words(&target));
    words.push("--".into());
    // Here a copy onto itself is refused, as it is hardly ever meant. nbdcopy lets people do it, so
    // the target is reached by another way.
    let same = matches!((&source, &target), (End::Server(one), End::Server(other)) if one == other);
    words.extend(source.words(false));
    if same {
        words.extend(["[", "blockhaul", "serve", "-f"].map(OsString::from));
        words.extend(target.words(false));
        words.push("]".into());
    } else {
        words.extend(target.words(source.is_pipe()));
    }
    let (cli, groups) = own(words)?;
    let Command::Copy(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    let outcome = copy::run(&args, &groups);
    // Servers that were started here end here.
    drop(started);
    outcome
}

/// Copies standard input to standard output.
fn pour() -> Outcome {
    let copied = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    match copied {
        Ok(_) => Ok(0),
        // Whoever reads has had enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        Err(error) => {
            let text = format!("cannot copy standard input to output: {}", plain(&error));
            Err(failure(text))
        }
    }
}

/// Options in the words of `blockhaul copy`; of those given twice, the last one.
#[derive(Debug, Default)]
struct Settings {
    options: BTreeMap<&'static str, Option<String>>,
    connections: Option<u32>,
    requests: Option<u32>,
    threads: Option<u32>,
}

impl Settings {
    fn set(&mut self, name: &'static str, value: Option<OsString>) -> Result<(), String> {
        let Some(value) = value else {
            self.options.insert(name, None);
            return Ok(());
        };
        let text = value.to_string_lossy().into_owned();
        let count = || {
            text.trim().parse::<u32>().map_err(|_| format!("--{name}: {text:?} is not a number"))
        };
        let at_least_1 = |count: u32| match count {
            0 => Err(format!("--{name}: at least 1")),
            count => Ok(count),
        };
        let size =
            || block::parse_size(&text).map_err(|error| format!("--{name}: {}", error.text()));
        let power_of_2 = |least: u64, most: u64| match size()? {
            size if size.is_power_of_two() && (least..=most).contains(&size) => Ok(size),
            _ => Err(format!("--{name}: {text:?} is not a power of 2 from {least} to {most}")),
        };
        let value = match name {
            "connections" => {
                self.connections = Some(at_least_1(count()?)?);
                return Ok(());
            }
            "requests" => {
                self.requests = Some(at_least_1(count()?)?);
                return Ok(());
            }
            "threads" => {
                self.threads = Some(count()?);
                return Ok(());
            }
            "progress" => {
                let fd = text.parse::<i32>().ok().filter(|fd| *fd >= 0);
                fd.ok_or_else(|| format!("--progress: {text:?} is not a descriptor"))?.to_string()
            }
            "request-size" => {
                power_of_2(engine::MIN_REQUEST.into(), engine::MAX_REQUEST.into())?.to_string()
            }
            "sparse" => match size()? {
                0 => "0".to_string(),
                _ => power_of_2(512, u32::MAX.into())?.to_string(),
            },
            // Raised to the size of a request by the copy. More than the bound is no bound at all.
            "queue-size" => size()?.clamp(1, 64 << 30).to_string(),
            _ => return Err(format!("--{name} takes no value")),
        };
        self.options.insert(name, Some(value));
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.options.contains_key(name)
    }

    /// Connections to each side: each has a thread of its own in nbdcopy, so that fewer threads mean
    /// fewer connections. Unlike there, the number of cores does not.
    fn connections(&self) -> u32 {
        let asked = self.connections.unwrap_or(CONNECTIONS);
        match self.threads {
            None | Some(0) => asked,
            Some(threads) => asked.min(threads),
        }
    }

    fn words(&self, target: &End) -> Vec<OsString> {
        let mut options = self.options.clone();
        // A file is made anew, and nbdcopy allocates all of it then; only what is zeroed is allocated
        // here.
        if self.has("allocated") && matches!(target, End::Storage(path) if !is_block_device(path)) {
            options.remove("destination-is-zero");
        }
        options.insert("connections", Some(self.connections().min(1024).to_string()));
        if options.contains_key("destination-is-zero") {
            // It takes the user's word.
            options.insert("trust", None);
        }
        if let Some(requests) = self.requests {
            options.insert("requests", Some(requests.min(65536).to_string()));
        }
        if let Some(threads) = self.threads {
            options.insert("threads", Some(threads.min(1024).to_string()));
        }
        // nbdcopy looks at all bytes, shows nothing unasked, waits as long as it takes, and ends with
        // the first error.
        options.entry("sparse").or_insert_with(|| Some("4096".to_string()));
        options.entry("request-size").or_insert_with(|| Some("262144".to_string()));
        options.insert("segment", Some("128m".to_string()));
        options.insert("timeout", Some("0".to_string()));
        options.insert("retries", Some("0".to_string()));
        options.insert("zero-all", None);
        if !self.has("progress") {
            options.insert("no-progress", None);
        }
        let word = |(name, value): (&str, Option<String>)| match value {
            Some(value) => format!("--{name}={value}").into(),
            None => format!("--{name}").into(),
        };
        options.into_iter().map(word).collect()
    }

    /// What `--verbose` tells of the options.
    fn line(&self, piped: bool) -> String {
        let alone = piped || self.has("synchronous");
        let connections = if alone { 1 } else { self.connections() };
        let requests = self.requests.unwrap_or(REQUESTS);
        format!(
            "nbdcopy: connections={connections} requests={requests} threads={connections} \
             synchronous={alone}\n"
        )
    }
}

/// Which side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Source,
    Target,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// `null:`
    Null,
    /// Standard input or output.
    Standard,
    /// Something with a path that is read or written in order.
    Stream(PathBuf),
    /// An NBD URI.
    Server(String),
    /// `[ CMD … ]`.
    Command(Vec<OsString>),
    /// A file or block device, also one that is not there yet.
    Storage(PathBuf),
}

impl End {
    /// What nbdcopy takes a word for: anything that is no URI is a path, whatever it looks like.
    fn new(word: &OsStr, groups: &Groups, role: Role) -> Result<End, Failure> {
        if let Spec::Command(words) = groups.spec(word)? {
            return Ok(End::Command(words));
        }
        match word.to_str() {
            // A file is read from its start, out of order.
            Some("-") if role == Role::Source && is_file_to_read(Path::new(STDIN)) => {
                return Ok(End::Storage(STDIN.into()));
            }
            Some("-") => return Ok(End::Standard),
            Some("null:") if role == Role::Target => return Ok(End::Null),
            Some(text) if wire::uri::is_uri(text) => return Ok(End::Server(text.to_string())),
            _ => {}
        }
        let path = PathBuf::from(word);
        let kind = std::fs::metadata(&path).map(|data| data.file_type());
        Ok(match kind {
            Ok(kind) if kind.is_fifo() || kind.is_char_device() || kind.is_socket() => {
                End::Stream(path)
            }
            _ => End::Storage(path),
        })
    }

    fn is_pipe(&self) -> bool {
        matches!(self, End::Standard | End::Stream(_))
    }

    /// Puts a stream with a path in the place of standard input or output.
    fn take_place(&mut self, role: Role) -> Result<(), Failure> {
        let End::Stream(path) = self else { return Ok(()) };
        let cannot = |error: std::io::Error| {
            failure(format!("cannot open {}: {}", path.display(), plain(&error)))
        };
        let placed = match role {
            Role::Source => rustix::stdio::dup2_stdin(File::open(&*path).map_err(cannot)?),
            Role::Target => {
                let file = File::options().write(true).open(&*path).map_err(cannot)?;
                rustix::stdio::dup2_stdout(file)
            }
        };
        placed.map_err(|errno| cannot(errno.into()))?;
        *self = End::Standard;
        Ok(())
    }

    /// Words of `blockhaul copy`. `unbounded`: as large as anything that may come.
    fn words(&self, unbounded: bool) -> Vec<OsString> {
        match self {
            End::Null if unbounded => vec![format!("null:{NULL_SIZE}").into()],
            End::Null => vec!["null:".into()],
            End::Standard | End::Stream(_) => vec!["-".into()],
            End::Server(uri) => vec![uri.into()],
            End::Command(words) => {
                let (open, close) = (OsString::from("["), OsString::from("]"));
                [&[open], &words[..], &[close]].concat()
            }
            End::Storage(path) => vec![literal(path)],
        }
    }
}

/// Standard input as a file of its own.
const STDIN: &str = "/proc/self/fd/0";

/// Whether it is a file that can be opened once more: who gave it to us may have had other rights.
fn is_file_to_read(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.is_file()) && File::open(path).is_ok()
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device())
}

/// A path, so written that it is taken for nothing else.
fn literal(path: &Path) -> OsString {
    let word = path.as_os_str();
    match Spec::parse(word) {
        Ok(Spec::Path(_)) | Err(_) if word != "[" && word != "]" => word.to_owned(),
        _ => Path::new(".").join(path).into_os_string(),
    }
}

/// What `--verbose` tells of a side.
struct Facts {
    operations: &'static str,
    name: String,
    /// In bytes; unknown for streams and where nothing answers.
    size: Option<u64>,
    preferred: u64,
}

impl Facts {
    /// Asks a side. A server of `[ CMD … ]` is started for that and kept in `started`.
    fn of(end: &mut End, started: &mut Vec<Arc<ServerProcess>>) -> Facts {
        let known = |operations, name: &str, size| Facts {
            operations,
            name: name.to_string(),
            size,
            preferred: PREFERRED,
        };
        let served = |name: String, answer: Option<(u64, u64)>| Facts {
            operations: "nbd_ops",
            name,
            size: answer.map(|answer| answer.0),
            preferred: answer.map_or(PREFERRED, |answer| answer.1),
        };
        match end {
            End::Null => known("null_ops", "null:", Some(NULL_SIZE)),
            End::Standard => known("pipe_ops", "-", None),
            End::Stream(path) => known("pipe_ops", &path.display().to_string(), None),
            End::Storage(path) if path == Path::new(STDIN) => known("file_ops", "-", size_of(path)),
            End::Storage(path) => known("file_ops", &path.display().to_string(), size_of(path)),
            End::Server(uri) => {
                let answer = Place::parse(uri).ok().and_then(ask);
                served(uri.clone(), answer)
            }
            End::Command(words) => {
                let name = words.first().map(|word| word.display().to_string());
                let name = name.unwrap_or_default();
                // What goes wrong here goes wrong again in the copy, which tells of it.
                let Ok(process) = ServerProcess::start(words) else { return served(name, None) };
                let socket = process.socket().to_path_buf();
                let uri = Uri {
                    transport: Transport::Unix {
                        socket: socket.as_os_str().as_encoded_bytes().to_vec(),
                    },
                    export: String::new(),
                    tls: None,
                };
                let address = Address::Unix(socket);
                let place = Place { name: name.clone(), address, export: String::new(), tls: None };
                let answer = ask(place);
                started.push(process);
                *end = End::Server(uri.to_string());
                served(name, answer)
            }
        }
    }

    fn lines(&self, side: &str) -> String {
        let Facts { operations, name, preferred, .. } = self;
        let mut text = format!("nbdcopy: {side}: {operations} \"{name}\"\n");
        let size = match self.size {
            Some(size) => format!("{size} ({})", block::format_size(size)),
            // As nbdcopy has it: -1, also seen as a number without sign.
            None => format!("-1 ({})", u64::MAX),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "nbdcopy: {side}: size={size}, preferred block size={preferred}");
        text
    }
}

/// Size and preferred block size of an export, without opening it: the connection ends before
/// transmission, which servers that serve a single client do not count.
fn ask(place: Place) -> Option<(u64, u64)> {
    let config = io::Config { workers: 1, engine: io::Engine::Auto };
    let runtime = io::Runtime::start(&config).ok()?;
    runtime.block_on(move || async move {
        let export = place.export.clone();
        let mut session = OptionSession::connect(place, &client::Options::default()).await.ok()?;
        let info = session.info(&export).await.ok();
        session.abort().await;
        let info = info?;
        let preferred = info.block_sizes.map(|sizes| u64::from(sizes.preferred));
        Some((info.size, preferred.filter(|size| size.is_power_of_two()).unwrap_or(PREFERRED)))
    })
}

/// The size of a file or block device.
fn size_of(path: &Path) -> Option<u64> {
    use std::io::{Seek as _, SeekFrom};
    File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Result<Settings, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        let mut settings = Settings::default();
        for (name, value) in options::parse(OPTIONS, &words)?.options {
            settings.set(name, value)?;
        }
        Ok(settings)
    }

    fn words(text: &str) -> String {
        let words: Vec<String> = settings(text)
            .unwrap()
            .words(&End::Null)
            .into_iter()
            .map(|w| w.into_string().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn defaults_are_nbdcopys() {
        assert_eq!(
            words(""),
            "--connections=4 --no-progress --request-size=262144 --retries=0 --segment=128m \
             --sparse=4096 --timeout=0 --zero-all"
        );
        let line = settings("").unwrap().line(false);
        assert_eq!(line, "nbdcopy: connections=4 requests=64 threads=4 synchronous=false\n");
    }

    #[test]
    fn options_become_our_own() {
        let text = "-C 8 -R5 -T 2 --request-s=64k -S 0 --queue 1m --alloc --target --fl -p --synch";
        assert_eq!(
            words(text),
            "--allocated --connections=2 --destination-is-zero --flush --progress \
             --queue-size=1048576 --request-size=65536 --requests=5 --retries=0 --segment=128m --sparse=0 --synchronous \
             --threads=2 --timeout=0 --trust --zero-all"
        );
        assert!(words("--progress=3 --progress=4").contains("--progress=4"));
        // A file that is to be allocated is not taken for zero.
        let settings_of = settings("--allocated --destination-is-zero").unwrap();
        let file = settings_of.words(&End::Storage("x".into()));
        assert!(file.iter().all(|word| word != "--destination-is-zero"), "{file:?}");
        let line = settings("--synchronous -T3").unwrap().line(false);
        assert_eq!(line, "nbdcopy: connections=1 requests=64 threads=1 synchronous=true\n");
    }

    #[test]
    fn every_line_of_words_is_understood_by_copy() {
        let lines = [
            "",
            "-C 99999 -R 99999999 -T 4294967295 --queue-size=0",
            "--queue-size=7E -S 2147483648 --request-size=32M",
            "-p -v --allocated --flush --no-extents --target-is-zero --synchronous",
            "--progress=3 -C1 -R1 -T1 -S 512",
        ];
        for line in lines {
            let mut all: Vec<OsString> = vec!["blockhaul".into(), "copy".into()];
            all.extend(settings(line).unwrap().words(&End::Standard));
            all.extend(["--", "a", "b"].map(OsString::from));
            assert!(matches!(own(all).unwrap().0.command, Command::Copy(_)), "{line}");
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        let bad = [
            "-C 0",
            "-C x",
            "-C -1",
            "-R 0",
            "-T x",
            "-S 513",
            "-S 256",
            "-S 8G",
            "--request-size=2k",
            "--request-size=64m",
            "--request-size=1.5k",
            "--queue-size=",
            "--progress=json",
            "--progress=-1",
        ];
        for text in bad {
            let error = settings(text).unwrap_err();
            assert!(error.starts_with("--"), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_uri_is_a_path() {
        let groups = Groups::default();
        let end = |text: &str, role| End::new(OsStr::new(text), &groups, role).unwrap();
        assert_eq!(end("null:", Role::Target), End::Null);
        assert_eq!(end("null:", Role::Source), End::Storage("null:".into()));
        assert_eq!(end("-", Role::Target), End::Standard);
        assert_eq!(end("/dev/null", Role::Source), End::Stream("/dev/null".into()));
        assert_eq!(end("memory:1m", Role::Target), End::Storage("memory:1m".into()));
        assert_eq!(end("NBD://h/x", Role::Target), End::Server("NBD://h/x".into()));
        assert_eq!(end("memory:1m", Role::Target).words(false), ["./memory:1m"]);
        assert_eq!(end("null:", Role::Source).words(false), ["./null:"]);
        assert_eq!(end("/a:b/c", Role::Target).words(false), ["/a:b/c"]);
        let command = End::Command(vec!["a".into(), "b".into()]);
        assert_eq!(command.words(false), ["[", "a", "b", "]"]);
        assert_eq!(End::Null.words(true), ["null:9223372036854775807"]);
    }
}
