//! `--config`: rights and rates of real clients, reloads while clients are connected, and errors.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::PeerProgram;
use serde_json::Value;

use super::*;

const PAGE: &str = include_str!("../../../../../../docs/serve-config.md");
const EXAMPLE: &str = include_str!("../../../../../../examples/server.toml");

/// A directory with a configuration file.
struct Config(ScratchDir);

impl Config {
    fn new(text: &str) -> Config {
        let config = Config(ScratchDir::new().unwrap());
        config.write(text);
        config
    }

    fn write(&self, text: &str) {
        fs::write(self.0.file("f.toml"), text).unwrap();
    }

    /// Runs our program in the directory.
    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(OURS);
        tools::output(command.args(args).current_dir(self.0.path()), LIMIT).unwrap()
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// A server of the file, which listens on `s` and is managed through `c`.
    fn serve(&self, more: &[&str]) -> PeerServer {
        let mut command = Command::new(OURS);
        command.args(["serve", "--foreground", "--exit-with-parent", "--config", "f.toml"]);
        command.args(["--control", "c"]).args(more).current_dir(self.0.path());
        PeerServer::start(command, &self.0.socket("s")).unwrap()
    }

    #[track_caller]
    fn reload(&self, text: &str) -> String {
        self.write(text);
        self.succeed(&["ctl", "c", "reload"])
    }

    /// A reload that is refused.
    #[track_caller]
    fn refused(&self, text: &str, words: &str) {
        self.write(text);
        let output = self.run(&["ctl", "c", "reload"]);
        let said = tools::text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(words) && said.contains("; nothing has changed"), "{said}");
    }

    /// A file that is none is refused, and does not keep later ones away.
    #[track_caller]
    fn refused_file(&self) {
        let file = self.0.file("f.toml");
        fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let output = self.run(&["ctl", "c", "reload"]);
        let said = text(&output.stderr);
        assert!(said.contains("no regular file") && said.contains("nothing has changed"), "{said}");
        fs::remove_file(&file).unwrap();
    }

    /// Names of exports that a client of this address sees; `-` after those that it cannot write.
    #[track_caller]
    fn seen(&self, uri: &str) -> Vec<String> {
        let listed = self.succeed(&["info", "--list", "--json", uri]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let exports = listed["exports"].as_array().unwrap().iter();
        let name = |export: &Value| {
            let sign = if export["is_read_only"] == true { "-" } else { "" };
            format!("{}{sign}", export["export-name"].as_str().unwrap())
        };
        exports.map(name).collect()
    }
}

/// The address of an export for the holder of a key.
fn with_key(user: &str, export: &str) -> String {
    format!("nbds+unix://{user}@/{export}?socket=s&tls-psk-file=keys.psk")
}

fn plain(export: &str) -> String {
    format!("nbd+unix:///{export}?socket=s")
}

const DISKS: &str = "\
[listen]
unix = 's'
[[export]]
name = 'root'
device = 'memory:4M'
[[export]]
name = 'data'
device = 'memory:8M'
";

#[test]
fn clients_get_the_rights_of_their_key_or_their_address() {
    let rules = "\
port = 0
ip-addr = '127.0.0.1'
[tls]
mode = 'on'
psk = 'keys.psk'
[[client]]
psk = 'alice'
[[client]]
psk = 'bob'
exports = ['data']
write = false
[[client]]
address = '127.0.0.0/8'
exports = ['root']
write = false
";
    let config = Config::new(&DISKS.replace("unix = 's'\n", &format!("unix = 's'\n{rules}")));
    for user in ["alice", "bob", "carol"] {
        config.succeed(&["tls", "init", "--psk", user, "keys.psk"]);
    }
    let _server = config.serve(&["--print-uri", "--quiet"]);
    let clients = config.succeed(&["ctl", "c", "exports", "--json"]);
    assert!(clients.contains("root"), "{clients}");
    assert_eq!(config.seen(&with_key("alice", "")), ["root", "data"]);
    assert_eq!(config.seen(&with_key("bob", "")), ["data-"]);
    assert_eq!(config.succeed(&["info", "--size", &with_key("bob", "")]).trim(), "8388608");
    config.succeed(&["copy", "--no-progress", "pattern:4M", &with_key("alice", "root")]);
    for (words, said) in [
        (vec!["info".to_string(), with_key("bob", "root")], "there is no export"),
        (vec!["copy".into(), "pattern:8M".into(), with_key("bob", "data")], "read-only"),
        // A valid key that no rule is about, and a client without an address.
        (vec!["info".into(), with_key("carol", "data")], "no rule for clients is about this one"),
        (vec!["info".into(), plain("data")], "no rule for clients is about this one"),
    ] {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let output = config.run(&words);
        assert!(!output.status.success(), "{words:?}");
        assert!(text(&output.stderr).contains(said), "{words:?}: {}", text(&output.stderr));
    }
}

/// The name in a rule is that of the key, not one that was made to be shown.
#[test]
fn names_of_keys_have_any_characters() {
    let config = Config::new(&format!(
        "{DISKS}[tls]\nmode = 'on'\npsk = 'keys.psk'\n\
         [[client]]\npsk = \"o'brien\"\nexports = ['data']\n[[client]]\n"
    ));
    config.succeed(&["tls", "init", "--psk", "o'brien", "keys.psk"]);
    let _server = config.serve(&["--quiet"]);
    assert_eq!(config.seen(&with_key("o'brien", "")), ["data"]);
}

/// A client that may not write keeps to that, whatever becomes of the layers of the export.
#[test]
fn rights_stay_when_layers_leave() {
    let config = Config::new(
        "[listen]\nunix = 's'\n[[export]]\nname = 'a'\ndevice = 'memory:1M'\nlayers = ['readonly']\n\
         [[client]]\nwrite = false\n",
    );
    let _server = config.serve(&["--quiet"]);
    config.succeed(&["ctl", "c", "layer-remove", "a", "readonly"]);
    let output = config.run(&["copy", "pattern:1M", &plain("a")]);
    assert!(text(&output.stderr).contains("read-only"), "{}", text(&output.stderr));
    config.refused_file();
}

#[test]
fn clients_get_the_rights_of_their_certificate() {
    let config = Config::new("");
    config.succeed(&["tls", "init", "--host", "localhost", "--client", "alice", "pki"]);
    config.write(&format!(
        "{DISKS}[tls]\ncertificates = 'pki'\nverify-peer = true\n\
         [[client]]\ncertificate = 'CN=bob'\n[[client]]\ncertificate = 'CN=alice'\nexports = ['data']\n"
    ));
    let _server = config.serve(&["--quiet"]);
    let uri = "nbds+unix:///?socket=s&tls-certificates=pki&tls-hostname=localhost";
    assert_eq!(config.seen(uri), ["data"]);
}

#[test]
fn programs_of_others_get_their_rights() {
    let nbdinfo = require_peer!("nbdinfo");
    let qemu_io = require_peer!("qemu-io");
    let config = Config::new(&format!(
        "{DISKS}[tls]\nmode = 'on'\npsk = 'keys.psk'\n[[client]]\npsk = 'bob'\nexports = ['data']\n\
         [[client]]\nexports = ['root']\nwrite = false\n"
    ));
    config.succeed(&["tls", "init", "--psk", "bob", "keys.psk"]);
    let server = config.serve(&["--quiet"]);
    let socket = server.socket().display().to_string();
    let run = |peer: &PeerProgram, args: &[&str]| {
        let mut command = peer.command();
        tools::output(command.args(args).current_dir(config.0.path()), LIMIT).unwrap()
    };
    let keys = config.0.file("keys.psk").display().to_string();
    let uri = format!("nbds+unix://bob@/?socket={socket}&tls-psk-file={keys}");
    let listed = run(&nbdinfo, &["--list", &uri]);
    let said = text(&listed.stdout);
    assert!(said.contains("export=\"data\"") && !said.contains("root"), "{said}");
    let root = format!("nbd+unix:///root?socket={socket}");
    let output = run(&qemu_io, &["-r", "-f", "raw", "-c", "read -P 0 0 1M", &root]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = run(&qemu_io, &["-f", "raw", "-c", "write 0 4k", &root]);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("Permission denied"), "{said}");
    let output =
        run(&qemu_io, &["-r", "-f", "raw", "-c", "read 0 4k", &root.replace("root", "data")]);
    let said = text(&output.stderr);
    assert!(said.contains("Requested export not available"), "{said}");
}

/// A rule at whose rate 8 MiB take minutes.
const SLOW: &str = "[[client]]\nrate = '64k'\n";

/// A client that reads an export; it may not connect twice.
fn reader(config: &Config, uri: &str) -> Child {
    let mut command = Command::new(OURS);
    command.args(["copy", "--no-progress", "--retries", "0", "-C", "1", "--request-size", "64k"]);
    command.args([uri, "out.raw"]).current_dir(config.0.path());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_client_reads_on_during_ten_reloads() {
    let config = Config::new(DISKS);
    let server = config.serve(&["--quiet"]);
    config.succeed(&["copy", "--no-progress", "random:8M", &plain("data")]);
    config.reload(&format!("{DISKS}{SLOW}"));
    let mut reader = reader(&config, &plain("data"));
    let connected = || config.succeed(&["ctl", "c", "clients", "--json"]);
    let numbers = |clients: &str| -> Vec<Value> {
        let value: Value = serde_json::from_str(clients).unwrap();
        value["clients"].as_array().unwrap().iter().map(|one| one["number"].clone()).collect()
    };
    tools::until("the reader is connected", || numbers(&connected()).len() == 1);
    let before = numbers(&connected());
    for turn in 0..10 {
        let more = format!(
            "{SLOW}[[export]]\nname = 'more{turn}'\ndevice = 'memory:1M'\n[limits]\nconnections = {}\n",
            50 + turn
        );
        let done = config.reload(&format!("{DISKS}{more}"));
        assert!(done.contains("1 export added"), "{done}");
        assert_eq!(done.contains("1 export removed"), turn > 0, "{done}");
        assert_eq!(size(&server.uri(&format!("more{turn}"))), "1048576");
        assert_eq!(numbers(&connected()), before, "reload {turn}");
    }
    assert!(reader.try_wait().unwrap().is_none(), "it reads");
    config.reload(&format!("{DISKS}{}", SLOW.replace("64k", "1G")));
    let status = tools::wait_within(&mut reader, LIMIT).unwrap();
    assert!(status.success());
    config.succeed(&["compare", "--no-progress", "random:8M", "out.raw"]);
    assert!(server.stop().unwrap().success());
}

#[test]
fn a_removed_export_ends_and_rights_change_for_later_clients() {
    let config = Config::new(DISKS);
    let _server = config.serve(&["--quiet"]);
    config.succeed(&["copy", "--no-progress", "random:8M", &plain("data")]);
    config.reload(&format!("{DISKS}{SLOW}"));
    let mut reader = reader(&config, &plain("data"));
    tools::until("the reader is connected", || {
        config.succeed(&["ctl", "c", "clients"]).contains("data")
    });
    let root = DISKS.split("[[export]]\nname = 'data'").next().unwrap().to_string();
    let done = config.reload(&format!("{root}{SLOW}write = false\n"));
    assert_eq!(done.trim(), "1 export removed, rights of clients changed");
    let output = config.run(&["info", &plain("data")]);
    assert!(text(&output.stderr).contains("there is no export"), "{}", text(&output.stderr));
    assert_eq!(config.seen(&plain("")), ["root-"]);
    let status = tools::wait_within(&mut reader, LIMIT).unwrap();
    assert!(!status.success(), "its requests fail");
    assert_eq!(config.reload(DISKS).trim(), "1 export added, rights of clients changed");
    assert_eq!(config.seen(&plain("")), ["root", "data"]);
    let same = "nothing changed in the configuration";
    assert_eq!(config.reload(&format!("# A comment.\n{DISKS}")).trim(), same);
}

#[test]
fn rates_are_those_of_all_connections_of_a_rule_and_change_at_once() {
    let rule = "[[client]]\niops = 40\n";
    let config = Config::new(&format!("{DISKS}{rule}"));
    let _server = config.serve(&["--quiet"]);
    let read = |connections: &str| {
        let uri = plain("root");
        let range = ["--range", "0:1M", "--request-size", "16k", "-C", connections];
        let begun = Instant::now();
        config.succeed(
            &[&["copy", "--no-progress", "--zero-all"], &range[..], &[&uri, "null:"]].concat(),
        );
        begun.elapsed()
    };
    config.succeed(&["copy", "--no-progress", "--request-size", "1M", "random:4M", &plain("root")]);
    // 64 requests, of which 4 may pass at once.
    let took = read("4");
    assert!(took >= Duration::from_millis(1400), "{took:?}");
    // At one request a second 64 requests take a minute.
    config.reload(&format!("{DISKS}{}", rule.replace("40", "1")));
    let mut reader = reader(&config, &plain("root"));
    tools::until("the reader is connected", || {
        config.succeed(&["ctl", "c", "clients"]).contains("root")
    });
    config.reload(&format!("{DISKS}{}", rule.replace("40", "100000")));
    let begun = Instant::now();
    assert!(tools::wait_within(&mut reader, LIMIT).unwrap().success());
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
}

#[test]
fn a_wrong_file_changes_nothing() {
    let keys = "[tls]\nmode = 'on'\npsk = 'keys.psk'\n";
    let config = Config::new(&format!("{DISKS}{keys}"));
    config.succeed(&["tls", "init", "--psk", "alice", "keys.psk"]);
    let server = config.serve(&["--quiet"]);
    let new = "[[export]]\nname = 'new'\ndevice = 'memory:1M'\n";
    config.refused("x", "f.toml:1: ");
    config.refused(&format!("{DISKS}{keys}{new}[[client]]\npks = 'a'\n"), "did you mean psk?");
    let other = format!("{DISKS}{keys}{new}").replace("unix = 's'", "unix = 't'");
    config.refused(&other, "f.toml:2: key listen: cannot change while the server runs: restart it");
    config.refused(
        DISKS,
        "f.toml:10: key tls: cannot change while the server runs: restart it, or put back",
    );
    config.refused(&format!("workers = 3\n{DISKS}{keys}"), "f.toml:1: key workers: cannot change");
    let device = format!("{DISKS}{keys}{new}").replace("memory:4M", "memory:5M");
    config.refused(&device, "f.toml:4: export \"root\" cannot change while the server runs");
    // The first of the new exports could be opened.
    let absent = format!("{DISKS}{keys}{new}[[export]]\nname = 'x'\ndevice = 'nowhere/x.raw'\n");
    config.refused(&absent, "f.toml:16: export \"x\":");
    config.refused(
        &format!("{DISKS}{keys}[limits]\nbytes-all = '1G'\n"),
        "f.toml:13: key bytes-all:",
    );
    assert_eq!(config.seen(&plain("")), ["root", "data"]);
    // So does SIGHUP, which says so in the log.
    config.write("y");
    kill_process(pid(server.pid()), Signal::HUP).unwrap();
    server.says("f.toml:1: key with no value, expected `=`; nothing has changed").unwrap();
    // Then it is repaired, with another key.
    config.succeed(&["tls", "init", "--psk", "bob", "keys.psk"]);
    let done = config.reload(&format!("{DISKS}{keys}{new}"));
    assert_eq!(done.trim(), "1 export added; keys and certificates reloaded");
    assert_eq!(config.seen(&with_key("bob", "")), ["root", "data", "new"]);
    assert!(server.stop().unwrap().success());
}

#[test]
fn files_of_a_directory_keep_their_names_when_exports_come_and_go() {
    let one = "[listen]\nunix = 's'\n[[export]]\nname = 'vms'\ndevice = 'dir:images'\n";
    let rule = "[[client]]\nexports = ['vms']\nwrite = false\n";
    let config = Config::new(&format!("{one}{rule}"));
    fs::create_dir(config.0.file("images")).unwrap();
    fs::write(config.0.file("images/a.img"), vec![0; 4096]).unwrap();
    let server = config.serve(&["--quiet"]);
    assert_eq!(config.seen(&plain("")), ["vms/a.img-"]);
    config.reload(&format!("{one}[[export]]\nname = 'b'\ndevice = 'memory:1M'\n{rule}"));
    assert_eq!(config.seen(&plain("")), ["vms/a.img-"]);
    let output = config.run(&["info", &plain("b")]);
    assert!(text(&output.stderr).contains("there is no export"), "{}", text(&output.stderr));
    assert!(server.stop().unwrap().success());
}

/// Runs a script of nbdsh in the directory, and returns what it prints.
fn script(config: &Config, nbdsh: &PeerProgram, words: &str) -> String {
    let mut command = nbdsh.command();
    command.env("OURS", OURS).args(["-c", words]).current_dir(config.0.path());
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// A client that is connected while a layer leaves the export, and while the export itself leaves.
#[test]
fn a_connected_client_keeps_its_rights_when_layers_and_exports_leave() {
    let nbdsh = require_peer!("nbdsh");
    let other = "[listen]\nunix = 's'\n[[export]]\nname = 'b'\ndevice = 'memory:1M'\n";
    let own = "[[export]]\nname = 'a'\ndevice = 'memory:1M'\n";
    let rule = "[[client]]\nwrite = false\n";
    let config = Config::new(&format!("{other}{own}layers = ['readonly']\n{rule}"));
    fs::write(config.0.file("without.toml"), format!("{other}{rule}")).unwrap();
    fs::write(config.0.file("writable.toml"), format!("{other}{own}")).unwrap();
    let _server = config.serve(&["--quiet"]);
    let said = script(
        &config,
        &nbdsh,
        "
import os
def write():
    try:
        h.pwrite(bytes(range(256)) * 2, 0)
        print('written')
    except nbd.Error as error:
        print(error.errno)
def ctl(words):
    assert os.system(os.environ['OURS'] + ' ctl c ' + words + ' >&2') == 0
h.set_strict_mode(0)
h.set_export_name('a')
h.connect_unix('s')
write()
ctl('layer-remove a readonly')
write()
for file in ['without.toml', 'writable.toml']:
    os.replace(file, 'f.toml')
    ctl('reload')
    write()
",
    );
    assert_eq!(said.lines().collect::<Vec<_>>(), ["EPERM"; 4]);
    config.succeed(&["compare", "--no-progress", "memory:1M", &plain("a")]);
    config.succeed(&["copy", "--no-progress", "random:1M", &plain("a")]);
}

/// An answer from before TLS is not one for the client that TLS has authenticated.
#[test]
fn tls_changes_what_was_refused_before_it() {
    let nbdsh = require_peer!("nbdsh");
    let config = Config::new(&format!(
        "{DISKS}[tls]\nmode = 'on'\npsk = 'keys.psk'\n[[client]]\npsk = 'alice'\n"
    ));
    config.succeed(&["tls", "init", "--psk", "alice", "keys.psk"]);
    let _server = config.serve(&["--quiet"]);
    let said = script(
        &config,
        &nbdsh,
        "
h.set_opt_mode(True)
h.set_tls_psk_file('keys.psk')
h.set_tls_username('alice')
h.set_export_name('data')
h.connect_unix('s')
try:
    h.opt_set_meta_context_queries([nbd.CONTEXT_BASE_ALLOCATION], lambda name: 0)
except nbd.Error as error:
    print('refused')
assert h.opt_starttls()
h.set_request_meta_context(False)
h.opt_go()
print(h.get_size())
",
    );
    assert_eq!(said.lines().collect::<Vec<_>>(), ["refused", "8388608"]);
}

/// Clients of a rule have its rate together, and none of them keeps the others from it.
#[test]
fn a_client_with_long_requests_keeps_nobody_of_its_rule_waiting() {
    let nbdsh = require_peer!("nbdsh");
    let config = Config::new(&format!("{DISKS}[[client]]\nrate = '640k'\niops = 1000\n"));
    let _server = config.serve(&["--quiet"]);
    // 64 requests, for which the rate is 13 minutes.
    let said = script(
        &config,
        &nbdsh,
        "
import os, time
def read():
    begun = time.monotonic()
    other = nbd.NBD()
    other.set_export_name('root')
    other.connect_unix('s')
    other.pread(64 << 10, 0)
    other.shutdown()
    return time.monotonic() - begun
h.set_export_name('data')
h.connect_unix('s')
for _ in range(64):
    h.aio_zero(8 << 20, 0)
while h.aio_get_direction() & 2:
    h.poll(100)
beside = read()
h.aio_disconnect()
del h
after = read()
print('ok' if beside < 10 and after < 10 else (beside, after))
",
    );
    assert_eq!(said.trim(), "ok");
}

/// What a client has written before it left is carried out, whatever its rate is.
// nbd: disc.finish
#[test]
fn writes_of_a_client_that_leaves_are_carried_out() {
    let nbdsh = require_peer!("nbdsh");
    let disks = DISKS.replace("memory:8M", "disk.raw");
    let config = Config::new(&format!("{disks}[[client]]\nrate = '1M'\n"));
    fs::File::create(config.0.file("disk.raw")).unwrap().set_len(8 << 20).unwrap();
    let server = config.serve(&["--quiet"]);
    script(
        &config,
        &nbdsh,
        "
h.set_export_name('data')
h.connect_unix('s')
for number in range(8):
    h.aio_pwrite(bytes([number + 1]) * (128 << 10), number * (128 << 10))
while h.aio_get_direction() & 2:
    h.poll(100)
h.aio_disconnect()
del h
",
    );
    assert!(server.stop().unwrap().success());
    let disk = fs::read(config.0.file("disk.raw")).unwrap();
    for (number, piece) in disk[..1 << 20].chunks(128 << 10).enumerate() {
        assert!(piece.iter().all(|byte| usize::from(*byte) == number + 1), "piece {number}");
    }
}

/// A file that keeps its reader waiting is refused, at the start and when files are read again.
#[test]
fn files_that_are_no_regular_ones_keep_no_server_waiting() {
    let config = Config::new(&format!("{DISKS}[tls]\nmode = 'on'\npsk = 'keys.psk'\n"));
    let pipe = |name: &str| {
        let _ = fs::remove_file(config.0.file(name));
        assert!(Command::new("mkfifo").arg(config.0.file(name)).status().unwrap().success());
    };
    pipe("keys.psk");
    let output = config.run(&["serve", "--config", "f.toml"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("key tls: cannot offer TLS: cannot read"), "{said}");
    assert!(said.contains("keys.psk: it is no regular file"), "{said}");
    fs::remove_file(config.0.file("keys.psk")).unwrap();
    config.succeed(&["tls", "init", "--psk", "alice", "keys.psk"]);
    let server = config.serve(&["--quiet"]);
    pipe("keys.psk");
    let output = config.run(&["ctl", "c", "reload"]);
    assert!(text(&output.stderr).contains("it is no regular file"), "{}", text(&output.stderr));
    assert_eq!(config.seen(&plain("")), ["root", "data"]);
    assert!(server.stop().unwrap().success());
    config.succeed(&["tls", "init", "--host", "localhost", "--client", "alice", "pki"]);
    config.write(&format!("{DISKS}[tls]\ncertificates = 'pki'\nverify-peer = true\n"));
    for name in ["server-key.pem", "server-cert.pem", "ca-cert.pem", "ca-crl.pem"] {
        let (path, aside) = (config.0.file(&format!("pki/{name}")), config.0.file("aside"));
        let _ = fs::rename(&path, &aside);
        pipe(&format!("pki/{name}"));
        let output = config.run(&["serve", "--config", "f.toml", "--check-config"]);
        assert!(
            text(&output.stderr).contains("it is no regular file"),
            "{name}: {}",
            text(&output.stderr)
        );
        fs::remove_file(&path).unwrap();
        let _ = fs::rename(&aside, &path);
    }
    config.succeed(&["serve", "--config", "f.toml", "--check-config"]);
}

/// The name of a file is bytes, and need not be text.
#[test]
fn a_file_whose_name_is_no_text_is_read_again() {
    let config = Config::new(DISKS);
    let name = std::ffi::OsStr::from_bytes(b"f\xff.toml");
    fs::rename(config.0.file("f.toml"), config.0.path().join(name)).unwrap();
    let mut command = Command::new(OURS);
    command.args(["serve", "--foreground", "--exit-with-parent", "--quiet", "--control", "c"]);
    command.arg("--config").arg(name).current_dir(config.0.path());
    let server = PeerServer::start(command, &config.0.socket("s")).unwrap();
    let more = "[[export]]\nname = 'new'\ndevice = 'memory:1M'\n";
    fs::write(config.0.path().join(name), format!("{DISKS}{more}")).unwrap();
    assert_eq!(config.succeed(&["ctl", "c", "reload"]).trim(), "1 export added");
    assert!(server.stop().unwrap().success());
}

/// An export that cannot be opened at the start has its line.
#[test]
fn an_export_that_cannot_be_opened_has_its_line() {
    let config = Config::new(&DISKS.replace("memory:8M", "nbd+unix:///?socket=nowhere"));
    let output = config.run(&["serve", "--config", "f.toml", "--foreground"]);
    let said = text(&output.stderr);
    assert!(said.contains("f.toml:7: export \"data\": cannot open the device"), "{said}");
    assert!(said.contains("nowhere"), "{said}");
}

/// An export that is being opened hides no other one, whatever their names are.
#[test]
fn an_export_that_is_being_opened_takes_no_name_from_others() {
    let one = "[listen]\nunix = 's'\n[[export]]\nname = 'images/a'\ndevice = 'memory:1M'\n";
    let config = Config::new(one);
    let _server = config.serve(&["--quiet"]);
    let words = format!("while [ ! -e go ]; do sleep 0.05; done; exec {OURS} serve memory:2M");
    let slow = format!("[[export]]\nname = 'images'\ndevice = ['sh', '-c', '{words}']\n");
    config.write(&format!("{one}{slow}"));
    let mut reload = Command::new(OURS);
    reload.args(["ctl", "c", "reload"]).current_dir(config.0.path());
    let mut reload = reload.stdout(Stdio::null()).spawn().unwrap();
    for _ in 0..5 {
        assert_eq!(config.seen(&plain("")), ["images/a"]);
        assert_eq!(config.succeed(&["info", "--size", &plain("images/a")]).trim(), "1048576");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(reload.try_wait().unwrap().is_none(), "it waits for the device");
    fs::write(config.0.file("go"), "").unwrap();
    assert!(tools::wait_within(&mut reload, LIMIT).unwrap().success());
    assert_eq!(config.seen(&plain("")), ["images/a", "images"]);
}

#[test]
fn a_killed_server_serves_what_the_file_says_then() {
    let config = Config::new(&DISKS.replace("memory:4M", "root.raw"));
    fs::write(config.0.file("root.raw"), vec![0; 1 << 20]).unwrap();
    let server = config.serve(&["--quiet"]);
    config.succeed(&["copy", "--no-progress", "random:1M", &plain("root")]);
    config.reload(&format!(
        "{}[[export]]\nname = 'new'\ndevice = 'memory:1M'\n",
        DISKS.replace("memory:4M", "root.raw")
    ));
    kill_process(pid(server.pid()), Signal::KILL).unwrap();
    drop(server);
    // The kernel may close the sockets of a killed server later.
    fs::remove_file(config.0.file("s")).unwrap();
    let server = config.serve(&["--quiet"]);
    assert_eq!(config.seen(&plain("")), ["root", "data", "new"]);
    config.succeed(&["compare", "--no-progress", "random:1M", &plain("root")]);
    assert!(server.stop().unwrap().success());
}

#[test]
fn a_check_opens_nothing_and_says_what_is_wrong() {
    let config = Config::new(DISKS);
    let check = |text: &str, more: &[&str]| {
        config.write(text);
        config.run(&[&["serve", "--config", "f.toml", "--check-config"], more].concat())
    };
    let output = check(DISKS, &[]);
    assert_eq!(text(&output.stdout), "f.toml: valid, exports: 2, rules for clients: 0\n");
    assert!(!config.0.file("s").exists());
    for (change, status, words) in [
        ("memory:4M", 3, "f.toml:4: export \"root\": nowhere.raw: No such file or directory"),
        (
            "memory:8M",
            3,
            "f.toml:7: export \"data\": unknown scheme \"memry\"; did you mean memory?",
        ),
    ] {
        let with = if change == "memory:4M" { "nowhere.raw" } else { "memry:8M" };
        let output = check(&DISKS.replace(change, with), &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(words), "{said}");
    }
    for (more, status, words) in [
        ("[tls]\npsk = 'nowhere.psk'\n", 3, "f.toml:10: key tls: cannot offer TLS:"),
        ("[metrics]\naddress = 'example.org:1'\n", 2, "f.toml:10: key address:"),
        (
            "[[client]]\nexports = ['dta']\n",
            2,
            "f.toml:10: key exports: there is no export \"dta\"; did you mean data?",
        ),
    ] {
        let output = check(&format!("{DISKS}{more}"), &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(words), "{said}");
        let output = check(&format!("{DISKS}{more}"), &["--json"]);
        assert_eq!(output.status.code(), Some(status));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(value["error"].as_str().unwrap().contains(words), "{value}");
    }
    assert_fails(&["serve", "--config", "/nowhere.toml"], 3, &["/nowhere.toml: cannot read"]);
    for option in [&["-U", "s"][..], &["--limit", "connections=1"], &["-r"], &["memory:1M"]] {
        let output = config.run(&[&["serve", "--config", "f.toml"], option].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option:?}: {said}");
        assert!(said.contains("cannot be used with"), "{option:?}: {said}");
    }
}

#[test]
fn the_page_and_the_example_are_valid() {
    let blocks = PAGE.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    for block in blocks {
        let config = Config::new(&block.replace("disks.sock", "s"));
        for user in ["alice", "bob"] {
            config.succeed(&["tls", "init", "--psk", user, "keys.psk"]);
        }
        fs::write(config.0.file("system.raw"), vec![0; 4096]).unwrap();
        let server = config.serve(&["--quiet"]);
        assert_eq!(config.seen(&with_key("alice", "")), ["system", "data"]);
        assert_eq!(config.seen(&with_key("bob", "")), ["data-"]);
        assert!(server.stop().unwrap().success());
    }
    // The example with files of this directory, and then each name that it has.
    let example = EXAMPLE.replace("/etc/blockhaul/", "").replace("/srv/disks/", "");
    let config = Config::new(&example.replace("'192.0.2.10', ", "").replace("10809", "0"));
    config.write(
        &fs::read_to_string(config.0.file("f.toml"))
            .unwrap()
            .replace("/run/blockhaul/disks.sock", "s"),
    );
    for user in ["web", "backup"] {
        config.succeed(&["tls", "init", "--psk", user, "keys.psk"]);
    }
    fs::create_dir(config.0.file("images")).unwrap();
    for file in ["web.raw", "database.raw", "images/a.img"] {
        fs::write(config.0.file(file), vec![0; 4096]).unwrap();
    }
    config.succeed(&["serve", "--config", "f.toml", "--check-config"]);
    let server = config.serve(&["--quiet"]);
    assert_eq!(config.seen(&with_key("web", "")), ["web", "images/a.img-"]);
    assert_eq!(config.seen(&with_key("backup", "")), ["web-", "database-", "images/a.img-"]);
    assert!(server.stop().unwrap().success());
}
