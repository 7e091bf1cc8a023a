//! Files that are read, files that are refused, and the difference between two.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_server_config::{ConfigDifference, ServerConfigFile};
use proptest::prelude::*;

const FILE: &str = "\
workers = 2
[listen]
unix = '/run/disks.sock'
port = [10809]
[tls]
psk = 'keys.psk'
[limits]
connections = 100
[[export]]
name = 'root'
device = 'root.raw'
layers = ['rate?rate=10M']
[[export]]
name = 'data'
device = ['nbdkit', 'memory', '1M']
readonly = true
[[client]]
psk = 'alice'
exports = ['root']
rate = '10M'
iops = 500
[[client]]
address = ['10.0.0.0/8', '::1']
write = false
";

fn parse(text: &str) -> ServerConfigFile {
    ServerConfigFile::parse("f.toml".as_ref(), text).expect("a valid file")
}

#[test]
fn a_file_is_read_with_its_lines() {
    let file = parse(FILE);
    assert_eq!((file.workers, file.listen.ports.as_slice()), (2, &[10809][..]));
    let lines: Vec<_> = file.exports.iter().map(|one| (one.name.as_str(), one.line)).collect();
    assert_eq!(lines, [("root", 10), ("data", 14)]);
    assert!(file.exports[1].readonly && !file.exports[0].readonly);
    let alice = &file.clients[0];
    assert_eq!((alice.rate, alice.iops, alice.write), (Some(10 << 20), Some(500), true));
    assert!(alice.pattern.matches(None, None, Some("alice")));
    let other = &file.clients[1];
    assert!(!other.write && other.exports.is_none());
    assert!(other.pattern.matches("10.1.2.3".parse().ok(), None, None));
}

#[test]
fn errors_name_line_key_and_guess() {
    for (text, expected) in [
        (
            "[[export]]\ndevise = 'a'",
            "f.toml:2: key devise: unknown key; known are description, device, layers, name, readonly; did you mean device?",
        ),
        ("[[export]]\ndevice = 'a'\n[[client]]\npks = 'x'", "f.toml:4: key pks:"),
        (
            "[[exports]]\ndevice = 'a'",
            "f.toml:1: key exports: unknown key; known are bitmaps, client, export, limits, listen, metrics, tls, workers; did you mean export?",
        ),
        ("\n\n[[export]]\nname = 'a'", "f.toml:4: key device: missing"),
        ("[[export]]\ndevice = '-'", "f.toml:2: key device: a server cannot serve a pipe"),
        ("[[export]]\ndevice = []", "f.toml:2: key device: must be a device"),
        ("[[export]]\ndevice = 3", "f.toml:2: key device: must be a device"),
        (
            "[[export]]\ndevice = 'a'\nreadonly = 'yes'",
            "f.toml:3: key readonly: must be true or false",
        ),
        ("[export]\ndevice = 'a'", "f.toml:1: key export: write it as [[export]]"),
        ("[[listen]]\n[[export]]\ndevice = 'a'", "key listen: write it as [listen]"),
        (
            "[[export]]\ndevice = 'a'\n[[export]]\ndevice = 'b'",
            "f.toml:4: key name: two exports have the name \"\"",
        ),
        (
            "[[export]]\nname = 'root'\ndevice = 'a'\n[[client]]\nexports = ['rooot']",
            "f.toml:5: key exports: there is no export \"rooot\"; did you mean root?",
        ),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\naddress = 'host'",
            "f.toml:4: key address: \"host\" is not an address",
        ),
        ("[[export]]\ndevice = 'a'\n[[client]]\nrate = 0", "f.toml:4: key rate: must be above 0"),
        ("[[export]]\ndevice = 'a'\n[[client]]\niops = 'x'", "f.toml:4: key iops:"),
        ("[listen]\nport = 65536\n", "f.toml:2: key port: must be a number from 0 to 65535"),
        ("[tls]\nmode = 'maybe'", "f.toml:2: key mode: must be off, on or require"),
        (
            "[tls]\npsk = 'a'\ncertificates = 'b'",
            "f.toml:2: key psk: cannot be used with certificates",
        ),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\npsk = 'x'",
            "f.toml:4: key psk: no client can match",
        ),
        (
            "[tls]\npsk = 'k'\nmode = 'off'\n[[export]]\ndevice = 'a'\n[[client]]\npsk = 'x'",
            "f.toml:7: key psk: no client",
        ),
        (
            "[tls]\ncertificates = 'd'\n[[export]]\ndevice = 'a'\n[[client]]\ncertificate = 'CN=x'",
            "f.toml:6: key certificate: no client can match",
        ),
        ("[metrics]\npage = true", "f.toml:2: key page: requires the key address"),
        ("workers = 2000", "f.toml:1: key workers: 2000 is not a number from 0 to 1024"),
        ("", "f.toml:1: it lists no export"),
        ("bitmaps = 1", "f.toml:1: key bitmaps: must be a string"),
        (
            "[limits]\nconections = 1",
            "f.toml:2: key conections: unknown limit \"conections\"; known are connections,",
        ),
        ("[limits]\nconections = 1", "did you mean connections?"),
        ("[limits]\nconnections = 0", "f.toml:2: key connections: 0 is not between 1 and"),
        ("[limits]\npayload = '1Q'", "f.toml:2: key payload:"),
        ("[limits]\nbytes = '1M'", "f.toml:2: key bytes: the longest request needs"),
        ("[limits]\nstalled = true", "f.toml:2: key stalled: must be a string or a number"),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\nwrite = false\n[[client]]\naddress = '::1'",
            "f.toml:6: key client: no client reaches this rule: that of line 4 is about",
        ),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\naddress = '::1'\n[[client]]\naddress = '::1'",
            "f.toml:6: key client: no client reaches this rule: that of line 4 is about",
        ),
        ("a = \n", "f.toml:1:"),
        // The line is that of the key, wherever it is in its table.
        (
            "[[export]]\ndevice = 'a'\n[[export]]\ndevice = 'b'\nname = ''",
            "f.toml:5: key name: two exports",
        ),
        (
            "[[export]]\nname = 'a'\ndevice = 'a'\n[[client]]\nwrite = false\nexports = ['b']",
            "f.toml:6: key exports: there is no export \"b\"",
        ),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\nwrite = false\npsk = 'x'",
            "f.toml:5: key psk: no client can match",
        ),
        (
            "[[export]]\ndevice = 'a'\n[[client]]\nwrite = false\ncertificate = 'alice'",
            "f.toml:5: key certificate: \"alice\" has no =; write a name such as CN=alice,O=Example (RFC 4514)",
        ),
        (
            "[tls]\nverify-peer = true\ncertificates = 'd'\n[[export]]\ndevice = 'a'\n\
             [[client]]\ncertificate = 'CN=a+O=b'\n[[client]]\ncertificate = 'O=b+CN=a'",
            "f.toml:9: key client: no client reaches this rule: that of line 7 is about the same",
        ),
    ] {
        let error = ServerConfigFile::parse("f.toml".as_ref(), text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}

#[test]
fn the_difference_is_what_a_running_server_can_change() {
    let old = parse(FILE);
    // Lines and comments are no difference.
    let moved = parse(&format!("# A comment.\n\n{FILE}"));
    assert!(ConfigDifference::between(&old, &moved).unwrap().is_empty());
    let new = FILE
        .replace("name = 'data'\ndevice = ['nbdkit', 'memory', '1M']", "name = 'new'\ndevice = 'n'")
        .replace("iops = 500", "iops = 600")
        .replace("connections = 100", "connections = 50");
    let difference = ConfigDifference::between(&old, &parse(&new)).unwrap();
    let added: Vec<_> = difference.added.iter().map(|one| one.name.as_str()).collect();
    assert_eq!((added, difference.removed.as_slice()), (vec!["new"], &["data".to_string()][..]));
    assert!(difference.clients && difference.limits);
    let said = "1 export added, 1 export removed, rights of clients changed, limits changed";
    assert_eq!(difference.to_string(), said);
    assert_eq!(ConfigDifference::default().to_string(), "nothing changed in the configuration");
    // The same limit in another unit is no change.
    let limit = |value: &str| parse(&FILE.replace("connections = 100", value));
    let same = ConfigDifference::between(&limit("bytes = '256M'"), &limit("bytes = '262144k'"));
    assert!(same.unwrap().is_empty());
}

#[test]
fn what_cannot_change_is_refused_with_its_line() {
    let old = parse(FILE);
    for (from, to, expected) in [
        ("10809", "10810", "f.toml:3: key listen: cannot change"),
        ("keys.psk", "other.psk", "f.toml:6: key tls: cannot change"),
        ("workers = 2", "workers = 3", "f.toml:1: key workers: cannot change"),
        ("[limits]", "[metrics]\naddress = 'localhost:9100'\n[limits]", "f.toml:8: key metrics:"),
        ("root.raw", "other.raw", "f.toml:10: export \"root\" cannot change"),
        ("readonly = true", "readonly = false", "f.toml:14: export \"data\" cannot change"),
        ("workers = 2\n", "bitmaps = 'd'\nworkers = 2\n", "f.toml:1: key bitmaps: cannot change"),
        ("connections = 100", "bytes-all = '1G'", "f.toml:8: key bytes-all: cannot change"),
        ("connections = 100", "requests-all = 9", "f.toml:8: key requests-all: cannot change"),
        // What is gone has its line in the file before.
        (
            "[listen]\nunix = '/run/disks.sock'\nport = [10809]\n",
            "",
            "f.toml:3: key listen: cannot change while the server runs: restart it, or put back what line 3 was",
        ),
        (
            "workers = 2\n",
            "",
            "f.toml:1: key workers: cannot change while the server runs: restart it, or",
        ),
    ] {
        let new = parse(&FILE.replace(from, to));
        let error = ConfigDifference::between(&old, &new).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{to}: {error}");
    }
}

/// A part of a file may grant more than all of it.
#[test]
fn a_file_that_changes_while_it_is_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.toml");
    let text = format!("{FILE}# {}\n", "x".repeat(2 << 20));
    std::fs::write(&path, &text).unwrap();
    let ends = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            while !ends.load(Ordering::Relaxed) {
                file.write_all(b"# A comment.\n").unwrap();
                file.set_len(text.len() as u64).unwrap();
            }
        });
        let read = (0..1000).map(|_| ServerConfigFile::read(&path));
        let refused = read.filter_map(Result::err).next();
        ends.store(true, Ordering::Relaxed);
        refused.expect("one of many reads meets a change")
    });
    assert!(refused.to_string().contains("it has changed meanwhile"), "{refused}");
    assert_eq!(ServerConfigFile::read(&path).unwrap().exports.len(), 2);
}

proptest! {
    #[test]
    fn no_text_ends_in_a_panic(text in "\\PC{0,200}") {
        let _ = ServerConfigFile::parse("f".as_ref(), &text);
    }

    #[test]
    fn no_change_of_a_file_ends_in_a_panic(at in 0..FILE.len(), length in 0..40_usize, with in "[\\[\\]='a0\\n.\"]{0,8}") {
        let mut text = FILE.to_string();
        let end = (at + length).min(text.len());
        text.replace_range(at..end, &with);
        if let Ok(new) = ServerConfigFile::parse("f".as_ref(), &text) {
            let _ = ConfigDifference::between(&parse(FILE), &new);
        }
    }
}
