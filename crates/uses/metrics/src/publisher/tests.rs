use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::tools::until;
use serde_json::json;

use super::*;
use crate::events;
use crate::http::REQUEST_MAX;

/// One worker, the minimum of every command.
fn runtime() -> Runtime {
    Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap()
}

fn up() -> TextSource {
    Arc::new(|mut figures| {
        figures.add("up", "gauge", "What.", &[], 1.0);
        figures.finish()
    })
}

/// Counts its snapshots.
fn counting() -> StateSource {
    let count = AtomicU64::new(0);
    Arc::new(move || json!({ "count": count.fetch_add(1, Ordering::Relaxed), "text": "a\nb" }))
}

fn server(status: Option<StateSource>) -> (Runtime, MetricsServer, SocketAddr) {
    let runtime = runtime();
    let address = "127.0.0.1:0".parse().unwrap();
    let server = MetricsServer::start(&address, up(), status, &runtime.remote()).unwrap();
    let ScrapeAddress::Tcp { address, .. } = server.address else { panic!("{}", server.address) };
    (runtime, server, address)
}

fn connect(address: SocketAddr, request: &[u8]) -> TcpStream {
    let mut peer = TcpStream::connect(address).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // Some tests are about peers that are refused early.
    let _ = peer.write_all(request);
    peer
}

fn ask(address: SocketAddr, request: &[u8]) -> String {
    let mut answer = String::new();
    let _ = connect(address, request).read_to_string(&mut answer);
    answer
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
}

/// A viewer of events that has read the head of the reply.
fn viewer(address: SocketAddr) -> (String, BufReader<TcpStream>) {
    let peer = connect(address, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let mut reader = BufReader::new(peer);
    (block(&mut reader), reader)
}

/// The lines up to the next empty one.
fn block(reader: &mut impl std::io::BufRead) -> String {
    let mut text = String::new();
    loop {
        let start = text.len();
        if reader.read_line(&mut text).unwrap() == 0 || text[start..].trim().is_empty() {
            return text;
        }
    }
}

#[test]
fn one_page_and_an_answer_to_everything_else() {
    let (_runtime, _server, address) = server(None);
    let page = get(address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\nup 1\n"), "{page}");
    let len = page.split_once("\r\n\r\n").unwrap().1.len();
    assert!(page.contains(&format!("Content-Length: {len}\r\n")), "{page}");
    assert!(page.contains("text/plain; version=0.0.4"), "{page}");
    let head = ask(address, b"HEAD / HTTP/1.0\r\n\r\n");
    assert!(head.contains(&format!("Content-Length: {len}\r\n")), "{head}");
    assert!(head.ends_with("\r\n\r\n"), "{head}");
    let long = [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 2 * REQUEST_MAX]].concat();
    for (request, status) in [
        (b"GET /other HTTP/1.0\r\n\r\n".as_slice(), "404"),
        (b"GET /status.json HTTP/1.0\r\n\r\n", "404"),
        (b"GET /events HTTP/1.0\r\n\r\n", "404"),
        (b"GET /page.js HTTP/1.0\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "405"),
        (b"GET / SPDY/9\r\n\r\n", "400"),
        (b"GET / HTTP/1.1\r\n\r\n", "400"),
        (b"\xff\xfe\r\n\r\n", "400"),
        (b"\r\n\r\n", "400"),
        (b"GET  HTTP/1.1\r\n\r\n", "400"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", "421"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "421"),
        (b"GET http://localhost/metrics?x HTTP/1.1\r\nHost: a\r\n\r\n", "200"),
    ] {
        let answer = ask(address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
        assert!(answer.contains("\r\nX-Content-Type-Options: nosniff\r\n"), "{answer}");
    }
    let answer = ask(address, &long);
    // The rest of it may be in transit when the connection is closed, which discards the reply.
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
}

#[test]
fn the_page_and_its_files_have_strict_headers() {
    let (_runtime, _server, address) = server(Some(counting()));
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/icon.svg", "image/svg+xml"),
        ("/uplot.js", "text/javascript"),
        ("/uplot.css", "text/css"),
        ("/uplot-license.txt", "text/plain"),
        ("/status.json", "application/json"),
        ("/metrics", "text/plain"),
    ] {
        let answer = get(address, path);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(!body.is_empty(), "{path}");
        for header in [
            &format!("Content-Type: {kind}"),
            "Content-Security-Policy: default-src 'self'; ",
            "X-Content-Type-Options: nosniff\r\n",
            "Cache-Control: no-store\r\n",
            "Referrer-Policy: no-referrer\r\n",
            "Cross-Origin-Resource-Policy: same-origin\r\n",
        ] {
            assert!(head.contains(&format!("\r\n{header}")), "{path}: {header}: {head}");
        }
        assert!(!head.contains("Access-Control"), "{path}: {head}");
    }
    assert!(get(address, "/../page.js").starts_with("HTTP/1.1 404 "));
    assert!(get(address, "/metrics").ends_with("\nup 1\n"));
    let head = ask(address, b"HEAD /events HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
}

#[test]
fn events_are_snapshots_and_the_last_one_says_so() {
    let (runtime, server, address) = server(Some(counting()));
    let (head, mut events) = viewer(address);
    assert!(head.contains("\r\nContent-Type: text/event-stream\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Security-Policy: default-src 'self'; "), "{head}");
    assert_eq!(block(&mut events), "retry: 2000\n\n");
    assert_eq!(block(&mut events), "data: {\"count\":0,\"text\":\"a\\nb\"}\n\n");
    let begun = Instant::now();
    assert_eq!(block(&mut events), "data: {\"count\":1,\"text\":\"a\\nb\"}\n\n");
    assert!(begun.elapsed() >= Duration::from_millis(500), "one a second: {:?}", begun.elapsed());
    assert!(get(address, "/status.json").ends_with("\r\n\r\n{\"count\":2,\"text\":\"a\\nb\"}\n"));
    let publisher = Publisher { server: Some(server), file: None };
    let (sender, ended) = std::sync::mpsc::channel();
    let ending = std::thread::spawn(move || {
        runtime.block_on(|| publisher.end());
        sender.send(()).unwrap();
    });
    let last = loop {
        let event = block(&mut events);
        match event.strip_prefix("event: end\n") {
            Some(last) => break last.to_string(),
            None => assert!(event.starts_with("data: {\"count\":"), "{event}"),
        }
    };
    assert!(last.starts_with("data: {\"count\":"), "{last}");
    assert_eq!(block(&mut events), "", "the stream ends");
    ended.recv_timeout(Duration::from_secs(60)).unwrap();
    ending.join().unwrap();
}

#[test]
fn viewers_are_limited_and_slow_ones_are_dropped() {
    // More than sockets take in, so that a viewer that reads nothing blocks the first event.
    let big: StateSource = Arc::new(|| json!({ "x": "y".repeat(16 << 20) }));
    let (_runtime, _server, address) = server(Some(big));
    let held: Vec<_> = (0..events::VIEWERS_MAX).map(|_| viewer(address)).collect();
    let (head, _refused) = viewer(address);
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    // Others are still answered.
    assert!(get(address, "/metrics").ends_with("\nup 1\n"));
    until("patience with the slow ends", || viewer(address).0.starts_with("HTTP/1.1 200 "));
    drop(held);
}

#[test]
fn the_slow_and_the_many_do_not_keep_others_out_for_long() {
    let (runtime, server, address) = server(None);
    let idle: Vec<_> =
        (0..CONNECTIONS_MAX + 3).map(|_| TcpStream::connect(address).unwrap()).collect();
    // Other tasks of the worker do not wait for them.
    let worked = Instant::now();
    runtime.block_on(|| async { blockhaul_io::sleep(Duration::from_millis(1)).await });
    assert!(worked.elapsed() < PATIENCE, "the worker is free");
    until("patience with the idle ends", || get(address, "/").contains("200 OK"));
    drop(idle);
    drop(server);
    // A process started by another test at this moment has the listener, too, until it execs.
    until("it is closed", || TcpStream::connect(address).is_err());
}

#[test]
fn sockets_are_removed_and_left_ones_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m");
    drop(UnixListener::bind(&path).unwrap());
    // A process started by another test at this moment has the listener, too, until it execs.
    until("nobody listens any more", || std::os::unix::net::UnixStream::connect(&path).is_err());
    let address = ScrapeAddress::Unix(path.clone());
    let runtime = runtime();
    let server = MetricsServer::start(&address, up(), None, &runtime.remote()).unwrap();
    assert!(MetricsServer::start(&address, up(), None, &runtime.remote()).is_err(), "in use");
    drop(server);
    assert!(!path.exists());
}

#[test]
fn what_is_no_socket_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, "precious").unwrap();
    let runtime = runtime();
    let address = ScrapeAddress::Unix(path.clone());
    let Err(refused) = MetricsServer::start(&address, up(), None, &runtime.remote()) else {
        panic!("it listens in the place of a file");
    };
    assert!(refused.to_string().contains("no socket"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}
