//! Volumes behind an HTTP server that differs from the pages of its makers: methods that are not there, a second
//! connection that breaks the export, failures in the middle.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

use crate::served_disk::{LIMIT, OURS, blockhaul, succeed};

const UPGRADED: &str =
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: nbd\r\nConnection: Upgrade\r\n\r\n";

/// The reply to a request: `None` goes on with NBD.
type Replies = dyn Fn(&Request) -> Option<String> + Send + Sync;

/// A request, with what the server knows when it comes.
struct Request<'a> {
    method: &'a str,
    /// Number of the request, from 0.
    number: usize,
    /// NBD connections that are open.
    open: usize,
    /// A second NBD connection was open at some time.
    is_broken: bool,
}

/// An HTTP server of one volume, whose export does not promise multi-conn.
struct Volume {
    http: String,
    scratch: ScratchDir,
    shared: Arc<Shared>,
    _server: PeerServer,
}

struct Shared {
    nbd: String,
    replies: Box<Replies>,
    state: Mutex<State>,
    /// The first NBD connection ends after this number of bytes to the client.
    cut: Option<u64>,
}

#[derive(Default)]
struct State {
    methods: Vec<String>,
    /// NBD connections: open, at most open at a time, and in all.
    open: usize,
    most: usize,
    count: usize,
}

impl Volume {
    fn start(
        cut: Option<u64>,
        replies: impl Fn(&Request) -> Option<String> + Send + Sync + 'static,
    ) -> Volume {
        let scratch = ScratchDir::new().unwrap();
        let disk = scratch.file("disk").display().to_string();
        succeed(&["copy", "random:64M?seed=1", &disk]);
        let layers = ["--layer", "multi-conn?mode=disable", "--layer", "delay?read=10ms"];
        let args = [&["-r"], &layers[..], &[&disk]].concat();
        let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
        let nbd = server.socket().display().to_string();
        let shared =
            Arc::new(Shared { nbd, replies: Box::new(replies), state: Mutex::default(), cut });
        let listener = UnixListener::bind(scratch.socket("http")).unwrap();
        let served = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let served = served.clone();
                // A client that has gone ends its thread.
                std::thread::spawn(move || drop(client.map(|client| served.serve(client))));
            }
        });
        let http = scratch.socket("http").display().to_string();
        Volume { http, scratch, shared, _server: server }
    }

    fn uri(&self, more: &str) -> String {
        format!("nbd+http://incus/1.0/volumes/v/nbd?project=p{more}&socket={}", self.http)
    }

    /// The methods of the requests since the last call.
    fn methods(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state.lock().unwrap().methods)
    }

    /// The most NBD connections at a time.
    fn most(&self) -> usize {
        self.shared.state.lock().unwrap().most
    }

    fn file(&self, name: &str) -> String {
        self.scratch.file(name).display().to_string()
    }

    #[track_caller]
    fn copies(&self, more: &[&str]) -> String {
        let target = self.file("target");
        let output = blockhaul(&[&["copy", &self.uri(""), &target], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(fs::read(&target).unwrap() == fs::read(self.file("disk")).unwrap());
        text(&output.stderr)
    }

    /// The message of a command that fails.
    #[track_caller]
    fn refusal(&self, more: &str) -> String {
        let output = blockhaul(&["info", &self.uri(more)]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.lines().count() == 1 && !said.contains('{'), "{said}");
        said
    }
}

impl Shared {
    fn serve(&self, mut client: UnixStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let method = head.split(' ').next().unwrap();
        let reply = {
            let mut state = self.settled();
            let (number, open, is_broken) = (state.methods.len(), state.open, state.most > 1);
            state.methods.push(method.to_owned());
            let reply = (self.replies)(&Request { method, number, open, is_broken });
            if reply.is_none() {
                state.open += 1;
                state.most = state.most.max(state.open);
                state.count += 1;
            }
            reply
        };
        if let Some(reply) = reply {
            return client.write_all(reply.as_bytes());
        }
        let result = self.relay(&mut client, &mut reader);
        self.state.lock().unwrap().open -= 1;
        result
    }

    /// The state when a connection that its client has ended is counted as closed.
    fn settled(&self) -> std::sync::MutexGuard<'_, State> {
        let due = Instant::now() + Duration::from_secs(1);
        loop {
            let state = self.state.lock().unwrap();
            if state.open == 0 || Instant::now() > due {
                return state;
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn relay(
        &self,
        client: &mut UnixStream,
        reader: &mut BufReader<UnixStream>,
    ) -> std::io::Result<()> {
        client.write_all(UPGRADED.as_bytes())?;
        let mut server = UnixStream::connect(&self.nbd)?;
        let is_first = self.state.lock().unwrap().count == 1;
        let most = self.cut.filter(|_| is_first).unwrap_or(u64::MAX);
        let mut back = server.try_clone()?.take(most);
        let mut to_client = client.try_clone()?;
        let answers = std::thread::spawn(move || {
            let _ = std::io::copy(&mut back, &mut to_client);
            let _ = back.get_ref().shutdown(Shutdown::Both);
            to_client.shutdown(Shutdown::Both)
        });
        let _ = std::io::copy(reader, &mut server);
        let _ = server.shutdown(Shutdown::Both);
        let _ = answers.join();
        Ok(())
    }
}

/// A reply as that of Incus.
fn error(status: &str, text: &str) -> Option<String> {
    let code = status.split(' ').next().unwrap();
    let body = format!(
        "{{\"type\":\"error\",\"status\":\"\",\"error_code\":{code},\"error\":\"{text}\",\"metadata\":null}}"
    );
    let mut reply = String::new();
    let length = body.len();
    write!(reply, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    Some(reply)
}

#[test]
fn get_follows_post_once_where_the_server_has_no_post() {
    for status in ["501 Not Implemented", "405 Method Not Allowed", "404 Not Found"] {
        let volume = Volume::start(None, move |request| match request.method {
            "GET" => None,
            _ => error(status, "not implemented"),
        });
        succeed(&["info", &volume.uri("")]);
        let methods = volume.methods();
        assert_eq!(methods[..2], ["POST", "GET"], "{status}");
        assert!(methods[2..].iter().all(|method| method == "GET"), "{methods:?}");
        volume.copies(&["--multi-conn=always", "--rate", "32M"]);
        assert!(volume.most() > 1);
        let methods = volume.methods();
        assert_eq!(methods.iter().filter(|method| *method == "POST").count(), 1, "{methods:?}");
        succeed(&["info", &volume.uri("&method=get")]);
        assert!(!volume.methods().contains(&"POST".to_owned()));
        // A method that is named is the only one.
        let said = volume.refusal("&method=POST");
        assert_eq!(volume.methods(), ["POST"]);
        assert!(said.contains(status), "{said}");
        assert!(said.contains("method=GET") != status.starts_with("404"), "{said}");
    }
}

#[test]
fn the_answer_to_the_method_that_the_server_has_is_reported() {
    let missing = || error("501 Not Implemented", "not implemented");
    let volume = Volume::start(None, move |request| match request.method {
        "GET" => error("404 Not Found", "Storage pool volume not found"),
        _ => missing(),
    });
    let said = volume.refusal("");
    assert!(said.contains("404 Not Found\": \"Storage pool volume not found\""), "{said}");
    assert!(said.ends_with("; check the path and query of the URI\n"), "{said}");
    let volume = Volume::start(None, move |request| match request.method {
        "POST" => error("404 Not Found", "no such snapshot"),
        _ => missing(),
    });
    assert!(volume.refusal("").contains("no such snapshot"));
    let volume = Volume::start(None, move |_| missing());
    assert!(volume.refusal("").ends_with("; check the path of the URI, or add method=GET to it\n"));
    // Only the server knows whether another method would do the same.
    for (status, remedy) in [
        ("403 Forbidden", "trusts the client's certificate"),
        ("400 Bad Request", "no other client is connected"),
        ("500 Internal Server Error", "see the log of the server"),
        ("503 Service Unavailable", "try again"),
    ] {
        let volume = Volume::start(None, move |_| error(status, "Timeout waiting"));
        let said = volume.refusal("");
        assert_eq!(volume.methods(), ["POST"]);
        assert!(said.contains("\": \"Timeout waiting\"") && said.contains(remedy), "{said}");
    }
}

/// As Incus: after two connections at a time the volume can no longer be read.
fn breaks(request: &Request) -> Option<String> {
    match request {
        Request { method: "POST", .. } => error("501 Not Implemented", "not implemented"),
        Request { is_broken: true, open: 0, .. } => {
            error("500 Internal Server Error", "Timeout waiting for qemu-nbd socket")
        }
        _ => None,
    }
}

#[test]
fn copies_pulls_and_comparisons_use_one_connection() {
    let volume = Volume::start(None, breaks);
    for _ in 0..3 {
        let said = volume.copies(&["--verify"]);
        assert!(!said.contains("fewer connections"), "{said}");
        succeed(&["info", &volume.uri("")]);
        succeed(&["compare", &volume.uri(""), &volume.file("target")]);
        succeed(&["copy", "--source-layer", "cow", &volume.uri(""), "null:"]);
    }
    let job = format!("[[disk]]\nname = 'a'\nsource = '{}'\nstore = 'store'\n", volume.uri(""));
    fs::write(volume.file("job.toml"), job).unwrap();
    for line in
        [&["pull", "--full", "job.toml", "--point", "one"][..], &["restore", "store", "back"]]
    {
        let mut command = Command::new(OURS);
        command.args(line).current_dir(volume.scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{line:?}: {}", text(&output.stderr));
    }
    succeed(&["compare", "--strict", &volume.file("disk"), &volume.file("back")]);
    assert_eq!(volume.most(), 1);
    // A number that the user names is used.
    volume.copies(&["-C", "2", "--multi-conn=always", "--rate", "32M"]);
    assert_eq!(volume.most(), 2);
    assert!(volume.refusal("").contains("\"Timeout waiting for qemu-nbd socket\""));
}

#[test]
fn a_copy_goes_on_when_the_server_is_back() {
    let volume = Volume::start(Some(20 << 20), |request| match request.number {
        0 => None,
        1 => error("502 Bad Gateway", "no daemon"),
        2 => error("500 Internal Server Error", "starting"),
        _ => None,
    });
    volume.copies(&["--retry-delay", "100ms"]);
    assert_eq!(volume.methods().len(), 4);
    let volume = Volume::start(Some(20 << 20), |request| match request.number {
        0 => None,
        _ => error("500 Internal Server Error", "starting"),
    });
    let target = volume.file("target");
    let output =
        blockhaul(&["copy", "--retries", "2", "--retry-delay", "10ms", &volume.uri(""), &target]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("starting") && !said.contains('{'), "{said}");
}
