//! Servers and attackers that try to make a client with an `nbds` URI use plaintext, or accept
//! plaintext as data that came through TLS. Each is scripted, byte for byte. Also the messages if
//! TLS is not available.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use blockhaul_testkit::tools::{PeerServer, ScratchDir};
use blockhaul_tests::{LIMIT, lossy, run, serve, succeed, text};

const ABORT: u32 = 2;
const STARTTLS: u32 = 5;
const ACK: u32 = 1;

/// What a server does once it is connected to.
type Script = fn(&mut UnixStream);

/// A greeting of fixed newstyle.
fn greet(stream: &mut UnixStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

/// Reads an option: its number. None: the client has left.
fn option(stream: &mut UnixStream) -> Option<u32> {
    let mut head = [0; 16];
    stream.read_exact(&mut head).ok()?;
    let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
    assert_eq!(&head[..8], b"IHAVEOPT");
    stream.read_exact(&mut vec![0; word(12) as usize]).ok()?;
    Some(word(8))
}

/// An answer without data to an option.
fn reply(option: u32, kind: u32) -> Vec<u8> {
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &[0; 4]].concat()
}

/// Greets, and waits for the option that begins TLS, which has to be the first one.
fn greet_for_tls(stream: &mut UnixStream) {
    greet(stream);
    assert_eq!(option(stream), Some(STARTTLS));
}

/// Refuses TLS, and receives what the client then sends: at most the end of the session.
fn refuse(stream: &mut UnixStream, kind: u32) {
    greet_for_tls(stream);
    stream.write_all(&reply(STARTTLS, kind)).unwrap();
    while let Some(option) = option(stream) {
        assert_eq!(option, ABORT, "plaintext where TLS was asked for");
        let _ = stream.write_all(&reply(ABORT, ACK));
    }
}

/// Hears what the client says in plaintext after this: nothing, or a handshake of TLS.
fn hear_no_plaintext(stream: &mut UnixStream) {
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    for magic in [&b"IHAVEOPT"[..], b"\x25\x60\x95\x13", b"\x21\xe4\x1c\x71"] {
        assert!(!heard.windows(magic.len()).any(|part| part == magic), "{heard:x?}");
    }
}

/// Connects when dropped, as a client that never came must not keep the server waiting.
struct LastClient<'a>(&'a Path);

impl Drop for LastClient<'_> {
    fn drop(&mut self) {
        drop(UnixStream::connect(self.0));
    }
}

#[test]
fn a_client_that_wants_tls_never_goes_on_in_plaintext() {
    let cases: &[(&str, Script, &str)] = &[
        ("unsupported", |stream| refuse(stream, 0x8000_0001), "STARTTLS"),
        ("policy", |stream| refuse(stream, 0x8000_0002), "STARTTLS"),
        ("shutting down", |stream| refuse(stream, 0x8000_0007), "STARTTLS"),
        (
            "oldstyle",
            |stream| {
                let size = (1_u64 << 20).to_be_bytes();
                let greeting = [&b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53"[..], &size, &[0; 128]];
                stream.write_all(&greeting.concat()).unwrap();
                hear_no_plaintext(stream);
            },
            "TLS",
        ),
        (
            "newstyle that is not fixed",
            |stream| {
                stream.write_all(b"NBDMAGICIHAVEOPT\0\0").unwrap();
                let mut heard = Vec::new();
                let _ = stream.read_to_end(&mut heard);
                assert!(heard.len() <= 4, "{heard:x?}");
            },
            "TLS",
        ),
        (
            "bytes behind the acknowledgement, in one go with it",
            |stream| {
                greet_for_tls(stream);
                // An answer to what the client may ask next.
                let smuggled = [reply(STARTTLS, ACK), reply(11, ACK)].concat();
                stream.write_all(&smuggled).unwrap();
                hear_no_plaintext(stream);
            },
            "behind its answer to STARTTLS",
        ),
        (
            "plaintext in place of TLS",
            |stream| {
                greet_for_tls(stream);
                stream.write_all(&reply(STARTTLS, ACK)).unwrap();
                // The client has begun its handshake.
                stream.read_exact(&mut [0; 5]).unwrap();
                stream.write_all(&[reply(11, ACK), reply(7, ACK)].concat()).unwrap();
                hear_no_plaintext(stream);
            },
            "TLS",
        ),
        (
            "one that closes in place of TLS",
            |stream| {
                greet_for_tls(stream);
                stream.write_all(&reply(STARTTLS, ACK)).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                hear_no_plaintext(stream);
            },
            "during the handshake; check the user name and its key",
        ),
    ];
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("keys.psk");
    fs::write(&keys, "alice:00112233445566778899aabbccddeeff\n").unwrap();
    for (index, (name, script, words)) in cases.iter().enumerate() {
        let socket = scratch.socket(&format!("s{index}"));
        let listener = UnixListener::bind(&socket).unwrap();
        let uri =
            format!("nbds+unix://alice@/?socket={}&tls-psk-file={}", socket.display(), text(&keys));
        let output = std::thread::scope(|scope| {
            let server = scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                script(&mut stream);
            });
            let last = LastClient(&socket);
            let output = run(&["info", "--timeout", "60", &uri]);
            drop(last);
            server.join().unwrap_or_else(|_| panic!("{name}: {}", lossy(&output.stderr)));
            output
        });
        let told = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {told}");
        assert!(told.contains(words), "{name}: no {words:?} in {told}");
    }
}

/// A run that fails with one line, which holds all of the words.
#[track_caller]
fn told(args: &[&str], words: &[&str]) {
    let output = run(args);
    let said = lossy(&output.stderr);
    assert!(!output.status.success() && said.lines().count() == 1, "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?}: no {word:?} in {said}");
    }
}

#[test]
fn where_tls_cannot_be_had_it_is_told_what_to_do() {
    let scratch = ScratchDir::new().unwrap();
    let path = |name: &str| text(&scratch.file(name)).to_owned();
    let pki = path("pki");
    let other = path("other");
    let keys = path("keys");
    let empty = path("empty");
    succeed(&["tls", "init", &pki]);
    succeed(&["tls", "init", &other]);
    succeed(&["tls", "init", "--psk", "alice", &keys]);
    fs::write(&empty, "").unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o600)).unwrap();
    let plain = serve(&scratch, "plain", &["memory:1M"]);
    let keyed = serve(&scratch, "keyed", &["--tls-psk", &keys, "memory:1M"]);
    let certified = serve(&scratch, "certified", &["--tls-certificates", &pki, "memory:1M"]);
    let info = |server: &PeerServer, user: &str, parameters: &str, words: &[&str]| {
        let socket = server.socket().display();
        told(&["info", &format!("nbds+unix://{user}/?socket={socket}&{parameters}")], words);
    };
    let certificates = |dir: &str| format!("tls-certificates={dir}");
    info(
        &plain,
        "",
        &certificates(&pki),
        &["refused STARTTLS", "; give the server keys", "or use an nbd URI"],
    );
    let gave_up = "TLS: the other side gave up: ";
    info(&keyed, "", &certificates(&pki), &[gave_up, "check that the server has certificates"]);
    let psk = |file: &str| format!("tls-psk-file={file}");
    info(
        &keyed,
        "alice@",
        &psk(&empty),
        &["no key in this file: make one with blockhaul tls init"],
    );
    info(&keyed, "alice@", &psk(&pki), &["choose the file in it"]);
    info(&keyed, "carol@", &psk(&keys), &["\"carol\" has no key in it; check the name"]);
    // The client gives the reason, the server what that is about.
    info(&certified, "", &certificates(&other), &["certificate is not accepted", "; set its"]);
    certified.says("gave up: unknown ca; the client does not accept this server's").unwrap();

    let in_vain = |words: &[&str]| {
        let socket = text(&scratch.socket("none")).to_owned();
        told(&["serve", "-f", "-U", &socket, "--tls-certificates", &pki, "memory:1M"], words);
    };
    fs::copy(format!("{other}/server-key.pem"), format!("{pki}/server-key.pem")).unwrap();
    in_vain(&["server-key.pem: ", "; check that it is the key of server-cert.pem, in PEM"]);
    fs::write(format!("{pki}/server-cert.pem"), "nothing").unwrap();
    in_vain(&["server-cert.pem: ", "; check that it is a certificate, in PEM"]);
}
