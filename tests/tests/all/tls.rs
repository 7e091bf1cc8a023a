//! TLS both ways, with certificates and with pre-shared keys: our server with libnbd's and QEMU's
//! clients, our client with nbdkit's and QEMU's servers, and each of ours with the other.

use std::cell::OnceCell;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir, until, until_ok};
use blockhaul_testkit::{image, require_peer};
use blockhaul_tests::{
    LIMIT, assert_same, blockhaul, bounded, done, lossy, peer, resident, run, serve, succeed, text,
};

/// Whole sectors, for QEMU writes no others.
const SIZE: u64 = (24 << 20) + 1536;

/// Keys, certificates and an image, made once for all tests that run at the same time.
struct Kit {
    _scratch: ScratchDir,
    keys: PathBuf,
    pki: PathBuf,
    image: PathBuf,
}

/// The kit, which the thread of a test keeps until it ends; the last one removes it. A static value
/// would never be dropped, and its directory stay.
fn kit() -> Arc<Kit> {
    static KIT: Mutex<Weak<Kit>> = Mutex::new(Weak::new());
    thread_local!(static KEPT: OnceCell<Arc<Kit>> = const { OnceCell::new() });
    let shared = || {
        let mut kit = KIT.lock().unwrap_or_else(PoisonError::into_inner);
        kit.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Kit::make());
            *kit = Arc::downgrade(&made);
            made
        })
    };
    KEPT.with(|kept| kept.get_or_init(shared).clone())
}

impl Kit {
    fn make() -> Kit {
        let scratch = ScratchDir::new().unwrap();
        let [keys, pki, image] = ["keys.psk", "pki", "image"].map(|name| scratch.file(name));
        let told = succeed(&["tls", "init", "--psk", "alice", "--psk", "qemu", text(&keys)]);
        assert_eq!(told, format!("{}\n", keys.display()));
        let told = succeed(&["tls", "init", text(&pki)]);
        assert_eq!(told.lines().count(), 6);
        image::sparse(&image, SIZE, 5).unwrap();
        Kit { _scratch: scratch, keys, pki, image }
    }
}

/// A URI with the parameters of TLS behind the socket.
fn uri(user: &str, socket: &Path, parameters: &str) -> String {
    format!("nbds+unix://{user}/?socket={}&{parameters}", socket.display())
}

fn with_keys(socket: &Path) -> String {
    uri("alice@", socket, &format!("tls-psk-file={}", kit().keys.display()))
}

fn with_certificates(socket: &Path) -> String {
    let pki = &kit().pki;
    uri("", socket, &format!("tls-certificates={}&tls-hostname=localhost", pki.display()))
}

/// Our server's options, and a client's URI for it.
fn both_ways<'a>(kit: &'a Kit, scratch: &ScratchDir) -> [(&'static str, Vec<&'a str>, String); 4] {
    let [k, o, c, v] = ["k", "o", "c", "v"].map(|name| scratch.socket(name));
    let pki = text(&kit.pki);
    [
        ("k", vec!["--tls-psk", text(&kit.keys)], with_keys(&k)),
        ("o", vec!["--tls-psk", text(&kit.keys), "--tls-records=openssl"], with_keys(&o)),
        ("c", vec!["--tls-certificates", pki], with_certificates(&c)),
        ("v", vec!["--tls-certificates", pki, "--tls-verify-peer"], with_certificates(&v)),
    ]
}

#[test]
fn libnbd_and_we_read_and_write_through_our_server() {
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let nbdcopy = PeerProgram::find("nbdcopy").ok();
    let nbdinfo = PeerProgram::find("nbdinfo").ok();
    for (name, options, uri) in both_ways(&kit, &scratch) {
        let target = scratch.file(&format!("target-{name}"));
        fs::File::create(&target).unwrap().set_len(SIZE).unwrap();
        let server = serve(&scratch, name, &[&options[..], &[text(&target)]].concat());
        succeed(&["copy", "--no-progress", "--verify", text(&kit.image), &uri]);
        assert_same(&kit.image, &target, "our copy to our server");
        let copied = scratch.file("copied");
        succeed(&["copy", "--no-progress", &uri, text(&copied)]);
        assert_same(&kit.image, &copied, "our copy from our server");
        assert!(succeed(&["info", &uri]).contains("newstyle-fixed with TLS"));
        assert!(succeed(&["map", "--totals", &uri]).contains("hole"));
        assert_eq!(run(&["info", "--can", "tls", &uri]).status.code(), Some(0));
        succeed(&["compare", &uri, text(&kit.image)]);
        if let (Some(nbdcopy), Some(nbdinfo)) = (&nbdcopy, &nbdinfo) {
            fs::remove_file(&copied).unwrap();
            peer(nbdcopy, &[&uri, text(&copied)]);
            assert_same(&kit.image, &copied, "nbdcopy from our server");
            fs::File::options().write(true).open(&target).unwrap().set_len(0).unwrap();
            fs::File::options().write(true).open(&target).unwrap().set_len(SIZE).unwrap();
            peer(nbdcopy, &["--request-size=32M", text(&kit.image), &uri]);
            assert_same(&kit.image, &target, "nbdcopy to our server");
            assert!(peer(nbdinfo, &[&uri]).contains("with TLS, using extended packets"));
        }
        drop(server);
    }
    assert!(nbdcopy.is_some() || std::env::var_os("CI").is_none(), "nbdcopy is missing");
}

/// QEMU's own layout: a directory with the keys, or with the certificates.
fn qemu_credentials(kind: &str, end: &str, scratch: &ScratchDir) -> String {
    let kit = kit();
    if kind == "x509" {
        return format!("tls-creds-x509,id=t,endpoint={end},dir={}", kit.pki.display());
    }
    let dir = scratch.file(&format!("psk-{end}"));
    fs::create_dir(&dir).unwrap();
    fs::copy(&kit.keys, dir.join("keys.psk")).unwrap();
    let user = if end == "client" { ",username=alice" } else { "" };
    format!("tls-creds-psk,id=t,endpoint={end},dir={}{user}", dir.display())
}

#[test]
fn qemu_reads_and_writes_through_our_server() {
    let qemu_img = require_peer!("qemu-img");
    let kit = kit();
    for (kind, options) in [
        ("psk", vec!["--tls-psk", text(&kit.keys)]),
        ("x509", vec!["--tls-certificates", text(&kit.pki), "--tls-verify-peer"]),
    ] {
        let scratch = ScratchDir::new().unwrap();
        let memory = format!("memory:{SIZE}");
        let server = serve(&scratch, "s", &[&options[..], &[&memory]].concat());
        let object = qemu_credentials(kind, "client", &scratch);
        let socket = scratch.socket("s");
        let name = if kind == "x509" { ",tls-hostname=localhost" } else { "" };
        let opts = format!(
            "driver=nbd,server.type=unix,server.path={},tls-creds=t{name}",
            socket.display()
        );
        let image = format!("driver=file,filename={}", text(&kit.image));
        let args = ["convert", "--object", &object, "-n", "--image-opts", "--target-image-opts"];
        peer(&qemu_img, &[&args[..], &[&image, &opts]].concat());
        let back = scratch.file("back");
        let args = ["convert", "--object", &object, "-O", "raw", "--image-opts"];
        peer(&qemu_img, &[&args[..], &[&opts, text(&back)]].concat());
        assert_same(&kit.image, &back, "qemu-img to and from our server");
        drop(server);
    }
}

#[test]
fn we_read_and_write_through_nbdkit_and_qemu() {
    let nbdkit = require_peer!("nbdkit");
    let qemu_nbd = require_peer!("qemu-nbd");
    let kit = kit();
    let keys = format!("--tls-psk={}", kit.keys.display());
    let pki = format!("--tls-certificates={}", kit.pki.display());
    let verify = "--tls-verify-peer";
    for (name, options) in [("k", vec![&*keys]), ("c", vec![&*pki]), ("v", vec![&*pki, verify])] {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket(name);
        let uri = if name == "k" { with_keys(&socket) } else { with_certificates(&socket) };
        let mut command = nbdkit.command();
        command.args(["-f", "--exit-with-parent", "--tls=require", "-U"]).arg(&socket);
        command.args(&options).args(["memory", &SIZE.to_string()]);
        let server = PeerServer::start(command, &socket).unwrap();
        there_and_back(&scratch, &uri);
        drop(server);
    }
    for kind in ["psk", "x509"] {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("q");
        let disk = scratch.file("disk");
        fs::File::create(&disk).unwrap().set_len(SIZE).unwrap();
        let mut command = qemu_nbd.command();
        command.args(["-t", "-e", "8", "-f", "raw", "--object"]);
        command.arg(qemu_credentials(kind, "server", &scratch));
        command.args(["--tls-creds", "t", "-k"]).arg(&socket).arg(&disk);
        let server = PeerServer::start(command, &socket).unwrap();
        let uri = if kind == "psk" { with_keys(&socket) } else { with_certificates(&socket) };
        there_and_back(&scratch, &uri);
        drop(server);
    }
}

fn there_and_back(scratch: &ScratchDir, uri: &str) {
    let kit = kit();
    succeed(&["copy", "--no-progress", "--flush", text(&kit.image), uri]);
    let back = scratch.file("back");
    succeed(&["copy", "--no-progress", "--verify", uri, text(&back)]);
    assert_same(&kit.image, &back, uri);
    assert!(succeed(&["info", uri]).contains("with TLS"));
}

#[test]
fn both_engines_and_tcp() {
    let kit = kit();
    for engine in ["uring", "threads"] {
        let scratch = ScratchDir::new().unwrap();
        let back = scratch.file("back");
        let copy = format!(
            "\"$copy\" copy --no-progress --engine {engine} \"nbds://localhost:$port/\
             ?tls-certificates=$tls_certificates\" '{}'",
            back.display()
        );
        let mut command = blockhaul(&["serve", "-r", "-i", "127.0.0.1", "-p", "0", "--engine"]);
        command.args([engine, "--tls-certificates"]).arg(&kit.pki).env("copy", program());
        done(command.args(["--run", &copy]).arg(&kit.image));
        assert_same(&kit.image, &back, engine);
    }
}

fn program() -> &'static Path {
    blockhaul_tests::program()
}

/// A server that says what it logs.
struct Logged {
    scratch: ScratchDir,
    child: std::process::Child,
}

impl Logged {
    fn start(options: &[&str], device: &str) -> Logged {
        let scratch = ScratchDir::new().unwrap();
        let mut command = blockhaul(&["serve", "-f", "--exit-with-parent", "-U"]);
        command.arg(scratch.socket("s")).args(options).arg(device);
        command.stderr(fs::File::create(scratch.file("log")).unwrap());
        let mut server = Logged { child: command.spawn().unwrap(), scratch };
        let socket = server.scratch.socket("s");
        until_ok("the server listens", || {
            if let Some(status) = server.child.try_wait().unwrap() {
                let log = fs::read_to_string(server.scratch.file("log")).unwrap();
                panic!("the server has ended: {status}: {log}");
            }
            UnixStream::connect(&socket)
        });
        server
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.scratch.socket("s")).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Its memory in bytes, once it has so many more descriptors than `rest`.
    fn memory_with(&self, more: usize, rest: usize) -> u64 {
        until("its connections are open", || self.descriptors() >= rest + more);
        resident(self.child.id())
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// What it has logged by the time that this stands in it.
    fn log_with(&self, text: &str) -> String {
        until_ok(&format!("{text:?} is in the log"), || {
            let log = fs::read_to_string(self.scratch.file("log")).unwrap();
            if log.contains(text) { Ok(log) } else { Err(log) }
        })
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The greeting taken, the flags and options said.
fn begin(stream: &mut UnixStream, options: &[u8]) {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&[0, 0, 0, 3]).unwrap();
    stream.write_all(options).unwrap();
}

/// An option without data.
fn option(number: u8) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &[0, 0, 0, number, 0, 0, 0, 0]].concat()
}

const ABORT: u8 = 2;
const LIST: u8 = 3;
const STARTTLS: u8 = 5;

/// An answer to an option: its number.
fn answer(stream: &mut UnixStream) -> u32 {
    let mut head = [0; 20];
    stream.read_exact(&mut head).unwrap();
    let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
    stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
    word(12)
}

/// What comes until the server closes. A reset is an end, too.
fn rest(stream: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn strangers_are_refused_and_harm_nobody() {
    let kit = kit();
    // Read-only: other tests read the image with programs that lock it against writers.
    let server = Logged::start(&["-r", "--tls-psk", text(&kit.keys)], text(&kit.image));
    let socket = server.scratch.socket("s");
    let back = server.scratch.file("back");
    // An authorized client is served all the while.
    let copy = ["copy", "--no-progress", "--rate", "20M", &with_keys(&socket), text(&back)];
    let mut served = blockhaul(&copy).spawn().unwrap();

    // Whatever is asked for before TLS is refused, but for the farewell.
    const TLS_REQUIRED: u32 = 0x8000_0005;
    let mut plain = server.connect();
    begin(&mut plain, &[option(LIST), option(ABORT)].concat());
    assert_eq!((answer(&mut plain), answer(&mut plain)), (TLS_REQUIRED, 1));
    assert_eq!(rest(&mut plain), b"");

    // Plaintext behind STARTTLS, in one go with it: the session ends.
    let mut smuggler = server.connect();
    begin(&mut smuggler, &[option(STARTTLS), option(LIST)].concat());
    assert!(rest(&mut smuggler).len() <= 20);

    // Plaintext and garbage instead of TLS.
    for garbage in [option(LIST), vec![0xA5; 40_000], vec![0x16, 3, 1, 0xff, 0xff, 0, 0]] {
        let mut stream = server.connect();
        begin(&mut stream, &option(STARTTLS));
        assert_eq!(answer(&mut stream), 1);
        // The server may have closed in between.
        let _ = stream.write_all(&garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let rest = rest(&mut stream);
        assert!(!rest.windows(8).any(|window| window == b"\0\x03\xe8\x89\x04\x55\x65\xa9"));
    }
    server.log_with("refused connection");

    // Wrong keys, unknown users.
    let wrong = server.scratch.file("wrong");
    fs::write(&wrong, "alice:00112233445566778899aabbccddeeff\nmallory:00\n").unwrap();
    for (user, why) in
        [("alice", "user \"alice\" has another key"), ("mallory", "user \"mallory\" has no key")]
    {
        let parameters = format!("tls-psk-file={}", wrong.display());
        let output = run(&["info", &uri(&format!("{user}@"), &socket, &parameters)]);
        assert!(!output.status.success() && lossy(&output.stderr).contains("TLS"), "{output:?}");
        server.log_with(why);
    }
    // Certificates where keys are wanted.
    let output = run(&["info", &with_certificates(&socket)]);
    assert!(!output.status.success(), "{output:?}");
    assert!(served.wait().unwrap().success());
    assert_same(&kit.image, &back, "a copy among strangers");
    let log = fs::read_to_string(server.scratch.file("log")).unwrap();
    assert!(!log.contains("panic"), "{log}");
}

/// What comes at once is held in memory that connections share.
#[test]
fn connections_that_rest_are_cheap() {
    let kit = kit();
    let server = Logged::start(&["--tls-psk", text(&kit.keys)], "memory:1M");
    let rest = server.descriptors();
    let uri = with_keys(&server.scratch.socket("s"));
    let args = ["bench", "helper", "idle", &uri, "--connections=260", "--keep-ms=120000"];
    // A few more than are counted: the server may not have closed what came before.
    let mut crowd = blockhaul(&args).spawn().unwrap();
    let [few, many] = [50, 250].map(|count| server.memory_with(count, rest));
    crowd.kill().unwrap();
    crowd.wait().unwrap();
    let cost = many.saturating_sub(few) / 200;
    assert!((1 << 10..32 << 10).contains(&cost), "{cost} bytes a connection");
}

fn info_fails(uri: &str, part: &str) {
    let output: Output = run(&["info", uri]);
    let told = lossy(&output.stderr);
    assert!(!output.status.success() && told.contains(part), "{part} in {told}");
}

#[test]
fn certificates_are_checked_on_both_sides() {
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let other = scratch.file("other");
    succeed(&["tls", "init", "--host", "elsewhere.example", text(&other)]);
    let pki = kit.pki.display().to_string();
    let server = Logged::start(&["--tls-certificates", &pki, "--tls-verify-peer"], "memory:1M");
    let socket = server.scratch.socket("s");
    info_fails(&uri("", &socket, &format!("tls-certificates={pki}&tls-hostname=a")), "for \"a\"");
    // Signed by another authority: detected by the client, and with its check off by the server.
    let foreign = format!("tls-certificates={}", other.display());
    info_fails(&uri("", &socket, &foreign), "certificate is not accepted");
    info_fails(&uri("", &socket, &format!("{foreign}&tls-verify-peer=0")), "TLS alert 48");
    let log = server.log_with("the client's certificate is not accepted");
    assert!(log.contains("refused connection") && log.contains("from a local client"), "{log}");
    // No certificate at all.
    let alone = scratch.file("alone");
    fs::create_dir(&alone).unwrap();
    fs::copy(kit.pki.join("ca-cert.pem"), alone.join("ca-cert.pem")).unwrap();
    info_fails(
        &uri("", &socket, &format!("tls-certificates={}", alone.display())),
        "TLS alert 116",
    );
    server.log_with("peer did not return a certificate");
    succeed(&["info", &with_certificates(&socket)]);
    // Without a name for a Unix socket the signature alone counts.
    succeed(&["info", &uri("", &socket, &format!("tls-certificates={pki}"))]);
}

/// With TLS 1.3 and GnuTLS, which sends no alert then, all that comes is an end.
#[test]
fn a_certificate_that_nbdkit_does_not_accept_is_thought_of() {
    let nbdkit = require_peer!("nbdkit");
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let other = scratch.file("other");
    succeed(&["tls", "init", text(&other)]);
    fs::copy(kit.pki.join("ca-cert.pem"), other.join("ca-cert.pem")).unwrap();
    let certificates = format!("--tls-certificates={}", kit.pki.display());
    let args = ["--tls=require", &certificates, "--tls-verify-peer", "memory", "1M"];
    let server = PeerServer::nbdkit(&nbdkit, &scratch.socket("s"), &args).unwrap();
    let with = |dir: &Path| uri("", server.socket(), &format!("tls-certificates={}", text(dir)));
    succeed(&["info", &with(&kit.pki)]);
    info_fails(
        &with(&other),
        "; the server may refuse the certificate or key of this client: check",
    );
}

/// Otherwise an attacker would need no key, but any certificate.
#[test]
fn a_client_with_a_key_takes_no_certificate_for_it() {
    let kit = kit();
    let server = Logged::start(&["--tls-certificates", text(&kit.pki)], "memory:1M");
    let socket = server.scratch.socket("s");
    let told = "the server does not know the key, but shows a certificate";
    for more in ["", "&tls-verify-peer=0", "&tls-hostname=localhost"] {
        info_fails(&format!("{}{more}", with_keys(&socket)), told);
    }
    server.log_with("refused connection");
    let output = run(&["copy", "--retries", "0", &with_keys(&socket), "null:"]);
    assert!(!output.status.success() && lossy(&output.stderr).contains(told), "{output:?}");
    // Neither from a peer's server.
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("n");
    let mut command = nbdkit.command();
    command.args(["-f", "--exit-with-parent", "--tls=require", "-U"]).arg(&socket);
    command.arg(format!("--tls-certificates={}", kit.pki.display())).args(["memory", "1M"]);
    let _server = PeerServer::start(command, &socket).unwrap();
    info_fails(&with_keys(&socket), told);
}

#[test]
fn expired_and_revoked_certificates_are_refused() {
    let certtool = require_peer!("certtool");
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let pki = scratch.file("pki");
    fs::create_dir(&pki).unwrap();
    for entry in fs::read_dir(&kit.pki).unwrap().flatten() {
        fs::copy(entry.path(), pki.join(entry.file_name())).unwrap();
    }
    let at = |name: &str| text(&pki.join(name)).to_string();
    // A client's certificate that was good once.
    let template = scratch.file("template");
    let old = "cn = old\ntls_www_client\nsigning_key\nactivation_date = \"2020-01-01 00:00:00\"\n\
               expiration_date = \"2021-01-01 00:00:00\"\n";
    fs::write(&template, old).unwrap();
    let expired = scratch.file("expired");
    fs::create_dir(&expired).unwrap();
    for name in ["ca-cert.pem", "client-key.pem"] {
        fs::copy(pki.join(name), expired.join(name)).unwrap();
    }
    let outfile = text(&expired.join("client-cert.pem")).to_string();
    let sign = |rest: &[&str]| {
        let mut command = certtool.command();
        let key = at("ca-key.pem");
        let authority = at("ca-cert.pem");
        command.args(["--load-ca-privkey", &key, "--load-ca-certificate", &authority]);
        done(command.arg("--template").arg(&template).args(rest));
    };
    let key = at("client-key.pem");
    sign(&["--generate-certificate", "--load-privkey", &key, "--outfile", &outfile]);

    let options = ["--tls-certificates", text(&pki), "--tls-verify-peer"];
    let server = Logged::start(&options, "memory:1M");
    let socket = server.scratch.socket("s");
    let late = uri("", &socket, &format!("tls-certificates={}", expired.display()));
    info_fails(&late, "TLS alert 45");
    server.log_with("certificate has expired");
    let good = uri("", &socket, &format!("tls-certificates={}", pki.display()));
    succeed(&["info", &good]);

    // The good one, revoked: by a list that the server has, and one that the client has.
    fs::write(&template, "crl_next_update = 100\ncrl_number = 1\n").unwrap();
    let revoke = |name: &str, into: &Path| {
        let certificate = at(name);
        let list = text(&into.join("ca-crl.pem")).to_string();
        sign(&["--generate-crl", "--load-certificate", &certificate, "--outfile", &list]);
    };
    let ours = scratch.file("ours");
    fs::create_dir(&ours).unwrap();
    fs::copy(pki.join("ca-cert.pem"), ours.join("ca-cert.pem")).unwrap();
    revoke("server-cert.pem", &ours);
    let lists = format!("tls-certificates={}", ours.display());
    info_fails(&uri("", &socket, &lists), "certificate revoked");
    revoke("client-cert.pem", &pki);
    let server = Logged::start(&options, "memory:1M");
    info_fails(&good.replace(text(&socket), text(&server.scratch.socket("s"))), "TLS alert 44");
    server.log_with("certificate revoked");
}

#[test]
fn plaintext_goes_where_it_is_allowed() {
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let keys = ["--tls", "on", "--tls-psk", text(&kit.keys), "memory:1M"];
    let server = serve(&scratch, "s", &keys);
    let plain = server.uri("");
    let secure = with_keys(&scratch.socket("s"));
    assert!(succeed(&["info", &plain]).contains("without TLS"));
    assert!(succeed(&["info", &secure]).contains("with TLS"));
    // Keys in a URI whose scheme is without TLS do not make it secret, and it is said.
    let meant = run(&["info", &secure.replace("nbds+unix", "nbd+unix")]);
    assert!(lossy(&meant.stdout).contains("without TLS"), "{meant:?}");
    assert!(lossy(&meant.stderr).contains("use nbds instead of nbd"), "{meant:?}");
    drop(server);
    // And never where it is not: the server offers none.
    let server = serve(&scratch, "t", &["--tls", "off", "memory:1M"]);
    info_fails(&with_keys(&scratch.socket("t")), "STARTTLS");
    drop(server);
    let none = run(&["serve", "--tls-psk", "/no/such", "memory:1M"]);
    assert_eq!(none.status.code(), Some(3), "{none:?}");
    assert!(lossy(&none.stderr).contains("cannot read /no/such"), "{none:?}");
}

#[test]
fn a_rejected_write_keeps_the_session() {
    let nbdsh = require_peer!("nbdsh");
    let kit = kit();
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["-r", "--tls-psk", text(&kit.keys), text(&kit.image)]);
    let script = "\
h.set_strict_mode(0)
h.connect_uri(uri)
before = h.pread(65536, 0)
for size in (1, 512, 70000, 4 << 20):
    try:
        h.pwrite(b'x' * size, 0)
        raise SystemExit('written')
    except nbd.Error as error:
        assert error.errnum == errno.EPERM, error
assert h.pread(65536, 0) == before
h.shutdown()";
    let mut command: Command = nbdsh.command();
    let begin = "import os, errno\nuri = os.environ['TEST_URI']";
    command.env("TEST_URI", with_keys(&scratch.socket("s")));
    command.args(["-c", "h.set_uri_allow_local_file(True)", "-c", begin, "-c", script]);
    done(&mut command);
    drop(server);
}

#[test]
fn a_handshake_that_stops_in_tls_is_given_up() {
    let kit = kit();
    // Longer than this client may be held up before it stops.
    let options = ["-v", "--timeout", "6s", "--tls-psk", text(&kit.keys)];
    let server = Logged::start(&options, "memory:1M");
    let mut stream = server.connect();
    begin(&mut stream, &option(STARTTLS));
    assert_eq!(answer(&mut stream), 1);
    stream.write_all(&[0x16, 3, 1]).unwrap();
    assert_eq!(rest(&mut stream), b"");
    server.log_with("no handshake within 6 s");
}

#[test]
fn tls_init_makes_nothing_over_what_is_there() {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("k");
    let made = ["tls", "init", "--psk", "a", text(&keys)];
    succeed(&made);
    let before = fs::read(&keys).unwrap();
    let output = run(&made);
    assert_eq!(output.status.code(), Some(1));
    assert!(lossy(&output.stderr).contains("has a key for user \"a\" already"), "{output:?}");
    assert_eq!(fs::read(&keys).unwrap(), before);
    // Another user is added; a file that holds something else stays.
    succeed(&["tls", "init", "--psk", "b", text(&keys)]);
    let after = fs::read(&keys).unwrap();
    assert!(after.starts_with(&before) && after[before.len()..].starts_with(b"b:"), "{after:?}");
    let other = scratch.file("other");
    fs::write(&other, "something else\n").unwrap();
    let output = run(&["tls", "init", "--psk", "a", text(&other)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(lossy(&output.stderr).contains("is no file of keys"), "{output:?}");
    assert_eq!(fs::read(&other).unwrap(), b"something else\n");
    let bad = run(&["tls", "init", "--host", "a,b", text(&scratch.file("p"))]);
    assert_eq!(bad.status.code(), Some(2), "{bad:?}");
    // Other programs read what is made.
    if let Some(certtool) = PeerProgram::require("certtool") {
        let pki = &kit().pki;
        let mut command = certtool.command();
        command.args(["--verify", "--load-ca-certificate"]).arg(pki.join("ca-cert.pem"));
        command.arg("--infile").arg(pki.join("server-cert.pem"));
        let output = bounded(&mut command, LIMIT);
        assert!(lossy(&output.stdout).contains("Verified"), "{output:?}");
    }
}
