//! Disks of a small export server with the faults of a large one.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use blockhaul_block::{Device as _, Kind, Reply, Request, Result, ZERO};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::Reservation;
use blockhaul_kubevirt::{DIRTY, KubeVirtOptions};
use blockhaul_testkit::conform;
use blockhaul_testkit::peer::{ExportFault as Fault, ExportServer, ExportedDisk};

const SIZE: usize = (1 << 20) + 512;
const TOKEN: &str = "secret-1";

fn content(at: u64) -> u8 {
    // Zeroes where the map says so.
    if (100_000..300_000).contains(&at) { 0 } else { (at % 251) as u8 + 1 }
}

fn disk() -> ExportedDisk {
    let bytes = (0..SIZE as u64).map(content).collect();
    let map =
        vec![(100_000, 0, "data"), (200_000, 3, "hole,zero"), (SIZE as u64 - 300_000, 0, "data")];
    ExportedDisk { bytes, map, token: TOKEN.to_owned() }
}

fn options() -> KubeVirtOptions {
    KubeVirtOptions { connect_timeout: Duration::from_secs(10), timeout: Duration::from_secs(10) }
}

async fn open(spec: &str) -> Result<Stack> {
    let registry = Registry { backends: blockhaul_kubevirt::all(options()), ..Registry::default() };
    registry.open(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), Intent::READ).await
}

/// A file with the token.
fn token_file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{TOKEN}\n")).unwrap();
    file
}

fn spec(server: &ExportServer, token: &tempfile::NamedTempFile) -> String {
    format!("kubevirt:{}?token-file={}", server.url(), token.path().display())
}

fn on_a_worker<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap().block_on(work)
}

async fn read(stack: &Stack, at: u64, len: usize) -> Result<Vec<u8>> {
    let request = Request::read(at, Reservation::unpooled(len));
    match stack.device().submit(request).await? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        other => panic!("{other:?}"),
    }
}

fn wanted(at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(content).collect()
}

/// Opens the disk of a server with these faults, and reads the same place twice.
fn twice(fault: impl Fn(usize, &str) -> Fault + Send + Sync + 'static) -> [Result<Vec<u8>>; 2] {
    let server = ExportServer::start(disk(), fault);
    let token = token_file();
    let spec = spec(&server, &token);
    on_a_worker(move || async move {
        let stack = open(&spec).await.unwrap();
        [read(&stack, 5, 50_000).await, read(&stack, 5, 50_000).await]
    })
}

/// The fault for the first request for data.
fn first_data(fault: Fault) -> impl Fn(usize, &str) -> Fault + Send + Sync + 'static {
    let done = AtomicBool::new(false);
    move |_, target| {
        if target.contains("/data?") && !done.swap(true, Ordering::SeqCst) {
            fault.clone()
        } else {
            Fault::None
        }
    }
}

fn bytes(text: &str) -> Fault {
    Fault::Bytes(text.as_bytes().to_vec())
}

/// Why a disk cannot be opened; the text has none of the token.
#[track_caller]
fn unopened(
    disk: ExportedDisk,
    more: &str,
    fault: impl Fn(usize, &str) -> Fault + Send + Sync + 'static,
) -> (Kind, String) {
    let server = ExportServer::start(disk, fault);
    let token = token_file();
    let spec = spec(&server, &token) + more;
    let error = on_a_worker(move || async move { open(&spec).await.map(drop).unwrap_err() });
    let said = error.to_string();
    assert!(said.starts_with("kubevirt:http://127.0.0.1:") && !said.contains(TOKEN), "{said}");
    assert!(!said.contains('\n') && said.len() < 2000, "{said}");
    (error.kind(), said)
}

#[test]
fn the_device_fulfils_the_contract() {
    for fault in [Fault::None, Fault::Last] {
        let server = ExportServer::start(disk(), move |_, _| fault.clone());
        let token = token_file();
        let spec = spec(&server, &token);
        conform::check(
            "kubevirt",
            conform::ConformOptions::default().content(conform::InitialContent::oracle(content)),
            move || {
                let spec = spec.clone();
                async move { open(&spec).await }
            },
        );
    }
}

#[test]
fn what_has_changed_is_a_context_of_incremental_backups_only() {
    let incremental = ExportedDisk {
        map: vec![
            (4096, 0, "clean"),
            (8192, 1, "dirty"),
            (100_000, 2, "zero"),
            (SIZE as u64 - 112_288, 3, "dirty,zero"),
        ],
        ..disk()
    };
    for (disk, contexts) in
        [(disk(), vec!["base:allocation"]), (incremental, vec!["base:allocation", DIRTY])]
    {
        let server = ExportServer::start(disk, |_, _| Fault::None);
        let token = token_file();
        let spec = spec(&server, &token);
        on_a_worker(move || async move {
            let stack = open(&spec).await.unwrap();
            let facts = stack.device().facts();
            assert_eq!(
                (facts.size, &facts.contexts[..]),
                (
                    SIZE as u64,
                    &contexts.iter().map(|name| name.to_string()).collect::<Vec<_>>()[..]
                )
            );
            let Some(dirty) = facts.context(DIRTY) else { return };
            let request = Request::extents(0, facts.size, dirty.with(0));
            let Reply::Extents(lists) = stack.device().submit(request).await.unwrap() else {
                panic!()
            };
            let runs = |index: usize| {
                lists[index].runs().iter().map(|run| (run.len, run.state)).collect::<Vec<_>>()
            };
            let rest = facts.size - 112_288;
            assert_eq!(runs(0), [(12_288, 0), (facts.size - 12_288, ZERO)]);
            assert_eq!(runs(1), [(4096, 0), (8192, 1), (100_000, 0), (rest, 1)]);
        });
    }
}

#[test]
fn a_map_of_many_pages_is_read() {
    let map: Vec<_> = (0..20_000)
        .map(|index| if index % 2 == 0 { (50, 0, "data") } else { (2, 1, "hole") })
        .collect();
    let bytes: Vec<u8> = vec![7; map.iter().map(|extent| extent.0 as usize).sum()];
    let pages = Arc::new(AtomicUsize::new(0));
    let counted = pages.clone();
    // One of them fails for a moment.
    let server = ExportServer::start(
        ExportedDisk { bytes, map, token: TOKEN.into() },
        move |number, target| {
            assert!(target.contains("/map?"), "{target}");
            if number == 1 {
                return bytes_503();
            }
            counted.fetch_add(1, Ordering::SeqCst);
            Fault::None
        },
    );
    let token = token_file();
    let spec = spec(&server, &token);
    let size = on_a_worker(move || async move { open(&spec).await.unwrap().device().facts().size });
    assert_eq!((size, pages.load(Ordering::SeqCst)), (520_000, 3));
}

fn bytes_503() -> Fault {
    bytes("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nwait")
}

#[test]
fn what_goes_wrong_with_a_read_is_an_error_and_the_next_one_works() {
    let head = "HTTP/1.1 206 x\r\n";
    for (fault, kind, words) in [
        (
            bytes("HTTP/1.1 500 Oh\r\nContent-Length: 99\r\n\r\nno \x1b[1m\n"),
            Kind::Io,
            "answers \"HTTP/1.1 500 Oh\": \"no \\u{1b}[1m\"",
        ),
        (bytes_503(), Kind::Io, "not connected to the machine"),
        (Fault::Cut(20_000), Kind::Disconnected, "within an answer"),
        (Fault::Cut(0), Kind::Disconnected, "within an answer"),
        (Fault::Length(-1), Kind::Io, "49999 bytes instead of 50000"),
        (Fault::Length(1), Kind::Io, "more than the 50000 bytes"),
        (
            bytes(&format!("{head}Content-Length: 50001\r\n\r\n{}", "x".repeat(50_001))),
            Kind::Io,
            "more than",
        ),
        (bytes(&format!("{head}Content-Length: 3\r\n\r\nabc")), Kind::Io, "3 bytes instead"),
        (
            bytes(&format!("{head}Content-Length: 50000\r\n\r\nabc")),
            Kind::Disconnected,
            "within an answer",
        ),
        (bytes(&format!("{head}\r\nabc")), Kind::Io, "3 bytes instead"),
        (
            bytes(&format!("{head}Content-Range: bytes 5-50004/9999999\r\n\r\nabc")),
            Kind::Invalid,
            "the disk has 9999999 bytes (Content-Range), and its map ends at 1049088",
        ),
        (
            bytes(&format!("{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff0\r\n")),
            Kind::Io,
            "length of a chunk",
        ),
        (
            bytes(&format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n")),
            Kind::Io,
            "longer than it says",
        ),
        (bytes("HTTP/1.1 204 No Content\r\n\r\n"), Kind::Unsupported, "204 No Content"),
        (bytes("garbage\r\n\r\n"), Kind::Invalid, "not HTTP/1.1"),
    ] {
        let [first, second] = twice(first_data(fault.clone()));
        let error = first.unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(words), "{fault:?}: {error}");
        assert_eq!(second.unwrap(), wanted(5, 50_000), "{fault:?}");
    }
}

#[test]
fn a_connection_that_was_closed_while_idle_is_replaced() {
    for fault in [Fault::Last, Fault::Close] {
        // The first connection has answered requests for the map.
        let [first, second] = twice(first_data(fault));
        assert_eq!(first.unwrap(), wanted(5, 50_000));
        assert_eq!(second.unwrap(), wanted(5, 50_000));
    }
}

#[test]
fn why_a_disk_cannot_be_opened_is_said() {
    let other = || ExportedDisk { token: "other".into(), ..disk() };
    let (kind, said) = unopened(other(), "", |_, _| Fault::None);
    assert!(
        kind == Kind::Refused && said.contains("401 Unauthorized") && said.contains("token-file"),
        "{said}"
    );
    // Nobody else gets the token.
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let place = format!("http://{}/map", elsewhere.local_addr().unwrap());
    let answer = format!("HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n");
    let (kind, said) = unopened(disk(), "", move |_, _| bytes(&answer));
    assert!(
        kind == Kind::Unsupported && said.contains(&place) && said.contains("not followed"),
        "{said}"
    );
    assert!(elsewhere.accept().is_err());
    for (fault, kind, words) in [
        (
            bytes("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
            Kind::NotFound,
            "check the URL",
        ),
        (
            bytes("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<htm"),
            Kind::Io,
            "not what KubeVirt sends",
        ),
        (
            bytes("HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n{"),
            Kind::Disconnected,
            "within an answer",
        ),
        (
            bytes(&format!("HTTP/1.1 200 OK\r\n\r\n{}", " ".repeat(5 << 20))),
            Kind::TooLarge,
            "more than 4194304 bytes",
        ),
        (
            bytes(
                "HTTP/1.1 200 OK\r\nContent-Length: 35\r\n\r\n{\"extents\":null,\"next_offset\":null}",
            ),
            Kind::Io,
            "is empty",
        ),
        (Fault::Close, Kind::Disconnected, "before it answered"),
    ] {
        let (found, said) = unopened(disk(), "", move |_, _| fault.clone());
        assert!(found == kind && said.contains(words), "{words}: {found:?} {said}");
    }
    let overlapping = ExportedDisk { map: vec![(SIZE as u64, 7, "unknown")], ..disk() };
    let (kind, said) = unopened(overlapping, "", |_, _| Fault::None);
    assert!(kind == Kind::Io && said.contains("does not know"), "{said}");
}

#[test]
fn requests_are_under_way_together_but_not_more_than_wanted() {
    // The first requests for data are answered when three have come.
    let gate = Arc::new((Mutex::new(0), Condvar::new()));
    let shared = gate.clone();
    let server = ExportServer::start(disk(), move |_, target| {
        if target.contains("/data?") {
            let (count, changed) = &*shared;
            let mut count = count.lock().unwrap();
            *count += 1;
            changed.notify_all();
            let waited =
                changed.wait_timeout_while(count, Duration::from_secs(20), |count| *count < 3);
            assert!(!waited.unwrap().1.timed_out(), "three requests were not under way");
        }
        Fault::None
    });
    let token = token_file();
    let spec = spec(&server, &token) + "&connections=3";
    on_a_worker(move || async move {
        let stack = open(&spec).await.unwrap();
        let started: Vec<_> = (0..30)
            .map(|index| {
                stack.device().submit(Request::read(index * 1000, Reservation::unpooled(1000)))
            })
            .collect();
        for (index, pending) in started.into_iter().enumerate() {
            let Reply::Data(data) = pending.await.unwrap() else { panic!() };
            assert_eq!(data.bytes(), wanted(index as u64 * 1000, 1000));
        }
    });
    assert_eq!(server.most_at_once(), 3);
    assert_eq!(gate.0.lock().map(|count| *count).unwrap(), 30);
}

#[test]
fn what_was_typed_is_checked() {
    let server = ExportServer::start(disk(), |_, _| Fault::None);
    let url = server.url();
    let token = token_file();
    let empty = tempfile::NamedTempFile::new().unwrap();
    let empty = empty.path().display();
    // The URL of the map, or of the data, is that of the disk.
    for end in ["", "/", "/map", "/data", "/data/"] {
        let spec = format!("kubevirt:{url}{end}?token-file={}", token.path().display());
        on_a_worker(move || async move { open(&spec).await.map(drop) }).unwrap();
    }
    for (spec, words) in [
        ("kubevirt:ftp://h/x".to_owned(), "write kubevirt:https://"),
        ("kubevirt:/exports/x".to_owned(), "write kubevirt:https://"),
        (format!("kubevirt:{url}%3foffset=0"), "leave out the query"),
        (format!("kubevirt:{url}?ca=x"), "for https"),
        (format!("kubevirt:{url}?connections=0"), "1 to 64"),
        (format!("kubevirt:{url}?token=x"), "token-file"),
        (format!("kubevirt:{url}?token-file={empty}"), "holds no token"),
        (format!("kubevirt:{url}?token-file=/nonexistent"), "/nonexistent"),
        ("kubevirt:https://h/x?ca=/nonexistent".to_owned(), "/nonexistent"),
    ] {
        let error = on_a_worker(move || async move { open(&spec).await.map(drop) }).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    let writing = format!("kubevirt:{url}");
    let error = on_a_worker(move || async move {
        let registry =
            Registry { backends: blockhaul_kubevirt::all(options()), ..Registry::default() };
        registry
            .open(&DeviceSpec::parse(writing.as_ref()).unwrap(), Vec::new(), Intent::WRITE)
            .await
            .map(drop)
    });
    assert!(error.unwrap_err().to_string().contains("read-only"));
}
