//! Files of WebDAV servers that are written as a whole.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Op, RequestFlags};
use blockhaul_catalog::Preparation;

use super::dav_server::{DavFault, DavFiles, DavServer};
use super::*;

/// Longer than what a socket holds.
const LONG: usize = (9 << 20) + 5;

async fn open_target(spec: &str, intent: Intent) -> Result<(Stack, Preparation)> {
    let timeout = Duration::from_secs(10);
    let options = RemoteOptions { connect_timeout: timeout, timeout };
    let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
    registry.open_target(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), intent).await
}

async fn write(stack: &Stack, at: u64, bytes: &[u8]) -> Result<()> {
    let mut room = Reservation::unpooled(bytes.len()).into_buf();
    room.copy_from_slice(bytes);
    let op = Op::Write(room.into());
    let len = bytes.len() as u64;
    let request = Request { op, at, len, flags: RequestFlags::empty() };
    stack.device().submit(request).await.map(drop)
}

/// Writes all of `bytes` in pieces, of which each second one comes before its neighbour, and flushes.
async fn write_all(stack: &Stack, bytes: &[u8]) -> Result<()> {
    const PIECE: usize = 400_000;
    let pieces: Vec<_> = bytes.chunks(PIECE).enumerate().collect();
    for pair in pieces.chunks(2) {
        for (number, piece) in pair.iter().rev() {
            write(stack, (number * PIECE) as u64, piece).await?;
        }
    }
    stack.device().submit(Request::flush()).await.map(drop)
}

/// Copies `bytes` to a target.
fn copy_to(spec: &str, bytes: Vec<u8>, intent: Intent) -> Result<()> {
    let spec = spec.to_owned();
    on_a_worker(move || async move {
        let (stack, preparation) = open_target(&spec, intent).await?;
        let copied = match preparation.run().await {
            Ok(()) => write_all(&stack, &bytes).await,
            Err(error) => Err(error),
        };
        // As a copy does: closing may wait.
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
        copied
    })
}

fn copy(spec: &str, bytes: &[u8]) -> Result<()> {
    copy_to(spec, bytes.to_vec(), Intent::target(bytes.len() as u64))
}

#[track_caller]
fn fails(server: &DavServer, path: &str, kind: Kind, why: &str) -> Error {
    let error = copy(&server.url(path), &content(1, LONG)).unwrap_err();
    let said = error.to_string();
    assert!(error.kind() == kind && said.contains(why), "{:?}: {said}", error.kind());
    assert!(error.is_complete() && !said.contains('\n'), "no remedy: {said}");
    let files = server.files();
    let left: Vec<_> =
        files.names().into_iter().filter(|name| name.contains(".blockhaul-")).collect();
    assert!(left.is_empty(), "{left:?}");
    error
}

fn put_fault(fault: DavFault) -> DavServer {
    DavServer::start(
        move |_, request, _| {
            if request.method == "PUT" { fault.clone() } else { DavFault::None }
        },
    )
}

fn methods(server: &DavServer) -> Vec<String> {
    server.requests().into_iter().map(|request| request.method).collect()
}

#[test]
fn a_file_is_written_as_a_whole_and_replaced_as_a_whole() {
    let server = DavServer::plain();
    for size in [LONG, 0, 1, 5000] {
        let bytes = content(size as u64, size);
        copy(&server.url("/d/disk.raw"), &bytes).unwrap();
        assert!(*server.bytes("/d/disk.raw").unwrap() == bytes, "{size}");
        assert_eq!(server.files().names(), ["/d/disk.raw"]);
    }
    let put = server.requests().into_iter().find(|request| request.method == "PUT").unwrap();
    assert_eq!(put.field("content-length"), Some(LONG.to_string().as_str()));
    let moved: Vec<_> = server.requests().into_iter().filter(|one| one.method == "MOVE").collect();
    assert_eq!(moved[0].field("overwrite"), Some("F"));
    assert_eq!(moved[1].field("overwrite"), Some("T"));
    let condition = format!("<http://{}/d/disk.raw> ([\"v1\"])", server.address());
    assert_eq!(moved[1].field("if"), Some(condition.as_str()));
}

#[test]
fn what_is_not_written_is_zeroes_and_the_file_is_read_after_the_copy() {
    let server = DavServer::plain();
    let url = server.url("/disk.raw");
    on_a_worker(move || async move {
        let (stack, preparation) = open_target(&url, Intent::target(1 << 20)).await.unwrap();
        preparation.run().await.unwrap();
        write(&stack, 600_000, b"data").await.unwrap();
        assert_eq!(read(&stack, 0, 1).await.unwrap_err().kind(), Kind::Unsupported);
        stack.device().submit(Request::zero(0, 500_000)).await.unwrap();
        let again = stack.device().submit(Request::zero(499_999, 2)).await;
        assert_eq!(again.unwrap_err().kind(), Kind::Unsupported);
        stack.device().submit(Request::flush()).await.unwrap();
        stack.device().submit(Request::flush()).await.unwrap();
        let found = read(&stack, 0, 1 << 20).await.unwrap();
        let mut bytes = vec![0; 1 << 20];
        bytes[600_000..600_004].copy_from_slice(b"data");
        assert!(found == bytes);
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
    });
    assert_eq!(server.bytes("/disk.raw").unwrap().len(), 1 << 20);
}

#[test]
fn a_file_of_unknown_length_is_as_long_as_what_was_written() {
    let server = DavServer::plain();
    let bytes = content(3, LONG);
    copy_to(&server.url("/d/x"), bytes.clone(), Intent::growing(1 << 60)).unwrap();
    assert!(*server.bytes("/d/x").unwrap() == bytes);
    let put = server.requests().into_iter().find(|request| request.method == "PUT").unwrap();
    assert_eq!(put.field("transfer-encoding"), Some("chunked"));
    let error = copy_to(&server.url("/d/x"), Vec::new(), Intent::growing(1 << 60)).unwrap_err();
    assert!(error.to_string().contains("the source is empty"), "{error}");
    assert!(*server.bytes("/d/x").unwrap() == bytes);
    copy_to(&server.url("/d/new"), Vec::new(), Intent::growing(1 << 60)).unwrap();
    assert_eq!(server.bytes("/d/new").unwrap().len(), 0);
    let server = put_fault(DavFault::Status(411, String::new()));
    let error = copy_to(&server.url("/d/x"), bytes, Intent::growing(1 << 60)).unwrap_err();
    assert!(error.to_string().contains("copy to a file first"), "{error}");
}

#[test]
fn names_are_encoded_as_the_user_writes_them() {
    let server = DavServer::plain();
    let long = "n".repeat(250);
    for (typed, name) in [
        ("/d/a b.raw", "/d/a b.raw"),
        ("/d/%25%23%3F%20x", "/d/%#? x"),
        ("/d/é", "/d/é"),
        (&format!("/d/{long}"), &format!("/d/{long}")),
    ] {
        copy(&server.url(typed), b"data").unwrap();
        assert_eq!(**server.bytes(name).unwrap(), *b"data", "{typed}");
    }
    for request in server.requests().iter().filter(|request| request.method == "PUT") {
        assert!(request.target.rsplit('/').next().unwrap().len() < 100, "{}", request.target);
    }
}

#[test]
fn targets_that_cannot_be_files_are_refused_before_anything_is_written() {
    let server = DavServer::start(|_, request, _| {
        let is_slow = request.target == "/redirected" && request.method != "OPTIONS";
        let place = "Location: /redirected/\r\n".to_owned();
        if is_slow { DavFault::Status(301, place) } else { DavFault::None }
    });
    server.files().make_directory("/redirected");
    server.files().lock("/locked");
    server.files().put("/locked", vec![1]);
    for (path, kind, why) in [
        ("/d", Kind::Unsupported, "is a directory"),
        ("/redirected", Kind::Unsupported, "is a directory"),
        ("/d/", Kind::Usage, "ends with /"),
        ("/d/x?v=1", Kind::Usage, "a query"),
        ("/none/x", Kind::NotFound, "directory of the target does not exist"),
        ("/locked", Kind::InUse, "locked by someone (urn:uuid:7)"),
    ] {
        fails(&server, path, kind, why);
    }
    assert!(!methods(&server).iter().any(|method| method == "PUT" || method == "MOVE"));
    // What is not written as a whole.
    for intent in [
        Intent::WRITE,
        Intent::TARGET,
        Intent { extends: true, ..Intent::target(9) },
        Intent { image: true, ..Intent::growing(9) },
    ] {
        let error = copy_to(&server.url("/d/x"), Vec::new(), intent).unwrap_err();
        assert!(error.to_string().contains("as a whole"), "{error}");
    }
    let http = server.url("/d/x").replace("dav:", "http:");
    let error = copy(&http, b"data").unwrap_err();
    assert!(error.to_string().contains("write davs:// or dav://"), "{error}");
}

#[test]
fn servers_without_writes_are_refused_before_data_is_sent() {
    let options = |status: u16, fields: &'static str, moves: u16| {
        DavServer::start(move |_, request, _| match request.method.as_str() {
            "OPTIONS" => DavFault::Status(status, fields.to_owned()),
            "PROPFIND" => DavFault::Status(405, String::new()),
            "MOVE" => DavFault::Status(moves, String::new()),
            "PUT" => DavFault::Status(405, String::new()),
            _ => DavFault::None,
        })
    };
    let server = options(200, "Allow: GET, HEAD\r\n", 404);
    fails(&server, "/d/x", Kind::Unsupported, "its methods are GET, HEAD");
    assert!(!methods(&server).iter().any(|method| method == "PUT"));
    let server = options(405, "", 405);
    fails(&server, "/d/x", Kind::Unsupported, "cannot rename files");
    assert!(!methods(&server).iter().any(|method| method == "PUT"));
    let server = options(405, "", 404);
    fails(&server, "/d/x", Kind::Unsupported, "405 Method Not Allowed");
}

#[test]
fn a_refusal_before_the_data_keeps_the_data_back() {
    for (status, kind, why) in [
        (401, Kind::Refused, "401"),
        (403, Kind::Refused, "check the permissions of the directory"),
        (405, Kind::Unsupported, "Dav On"),
        (409, Kind::NotFound, "curl -X MKCOL"),
        (413, Kind::NoSpace, "client_max_body_size"),
        (423, Kind::InUse, "locked"),
        (507, Kind::NoSpace, "free some space"),
    ] {
        let server = put_fault(DavFault::Status(status, String::new()));
        fails(&server, "/d/x", kind, why);
        assert!(server.files().names().is_empty());
    }
}

#[test]
fn a_refusal_within_the_data_is_reported_and_not_the_broken_connection() {
    for within in [1000, 1 << 20, 5 << 20] {
        for _ in 0..3 {
            let server = put_fault(DavFault::StatusWithin(507, within));
            fails(&server, "/d/x", Kind::NoSpace, "507");
            assert!(server.files().names().is_empty());
        }
    }
    // A connection that is closed before its response is read: the request is sent again without the file.
    for within in [1000, 5 << 20] {
        let is_first = AtomicBool::new(true);
        let server = DavServer::abrupt(move |_, request, _| match request.method.as_str() {
            "PUT" if is_first.swap(false, Ordering::SeqCst) => DavFault::StatusWithin(413, within),
            "PUT" => DavFault::Status(413, String::new()),
            _ => DavFault::None,
        });
        fails(&server, "/d/x", Kind::NoSpace, "413");
    }
}

#[test]
fn bytes_that_the_server_lost_are_noticed_and_the_target_stays() {
    let server = put_fault(DavFault::Shortened(LONG - 1));
    server.files().put("/d/x", b"before".to_vec());
    let error = fails(&server, "/d/x", Kind::Io, "has stored 9437188 bytes instead of 9437189");
    assert!(error.to_string().ends_with("; the target is as it was before"), "{error}");
    assert_eq!(**server.bytes("/d/x").unwrap(), *b"before");
    assert!(!methods(&server).iter().any(|method| method == "MOVE"));
}

#[test]
fn a_lost_connection_is_no_success_unless_the_server_confirms() {
    for fault in [DavFault::Mute, DavFault::Cut(5 << 20)] {
        let server = put_fault(fault);
        server.files().put("/d/x", b"before".to_vec());
        let error = copy(&server.url("/d/x"), &content(1, LONG)).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert!(error.is_complete(), "{error}");
        assert_eq!(server.files().names(), ["/d/x"]);
        assert_eq!(**server.bytes("/d/x").unwrap(), *b"before");
    }
    // The response to the last step is lost, once it is done, and once it is not.
    for is_done in [true, false] {
        let is_first = AtomicBool::new(true);
        let server = DavServer::start(move |_, request, _| {
            let is_move = request.method == "MOVE" && is_first.swap(false, Ordering::SeqCst);
            match is_move {
                false => DavFault::None,
                true if is_done => DavFault::Mute,
                true => DavFault::Status(503, String::new()),
            }
        });
        copy(&server.url("/d/x"), &content(1, LONG)).unwrap();
        assert!(*server.bytes("/d/x").unwrap() == content(1, LONG));
        assert_eq!(server.files().names(), ["/d/x"]);
    }
}

#[test]
fn an_old_target_of_the_same_size_is_no_success_when_the_last_response_is_lost() {
    for has_tags in [true, false] {
        let server = DavServer::start(move |_, request, files: &Mutex<DavFiles>| {
            files.lock().unwrap().has_tags = has_tags;
            if request.method == "MOVE" {
                files.lock().unwrap().files.retain(|name, _| !name.contains(".blockhaul-"));
                return DavFault::Mute;
            }
            DavFault::None
        });
        server.files().put("/d/x", vec![7; LONG]);
        fails(&server, "/d/x", Kind::Io, "nothing shows that the target is the new file");
        assert!(*server.bytes("/d/x").unwrap() == vec![7; LONG]);
    }
    // The file was moved, and the server says which version it is.
    for (has_tags, old) in [(true, LONG), (true, 1), (false, 1)] {
        let server = DavServer::start(move |_, request, files: &Mutex<DavFiles>| {
            files.lock().unwrap().has_tags = has_tags;
            if request.method == "MOVE" { DavFault::Mute } else { DavFault::None }
        });
        server.files().put("/d/x", vec![7; old]);
        copy(&server.url("/d/x"), &content(1, LONG)).unwrap();
        assert!(*server.bytes("/d/x").unwrap() == content(1, LONG));
    }
}

#[test]
fn refusals_name_the_temporary_file_which_begins_with_the_name_of_the_target() {
    let server = put_fault(DavFault::Status(403, String::new()));
    let error = fails(&server, "/d/x", Kind::Refused, "403").to_string();
    assert!(error.contains(&format!(" for http://{}/d/x.blockhaul-", server.address())), "{error}");
    // As nginx does when the directory does not exist.
    let server = put_fault(DavFault::Status(500, String::new()));
    fails(&server, "/d/x", Kind::Io, "check that the directory of the target exists");
}

/// The response of Apache when the directory is locked.
fn part_of(status: &str) -> DavFault {
    DavFault::Body(
        207,
        format!(
            "<D:multistatus xmlns:D=\"DAV:\"><D:response><D:href>/d/</D:href><D:status>HTTP/1.1 {status}</D:status>\
             </D:response></D:multistatus>"
        ),
    )
}

#[test]
fn a_lock_on_the_directory_is_reported_before_and_after_the_file_is_sent() {
    let server = DavServer::plain();
    server.files().lock("/d/");
    let why = "the directory of the target is locked by someone (urn:uuid:7)";
    fails(&server, "/d/x", Kind::InUse, why);
    assert!(!methods(&server).iter().any(|method| method == "PUT"));
    let server = put_fault(part_of("423 Locked"));
    fails(&server, "/d/x", Kind::InUse, "or its directory is locked");
    let server = put_fault(part_of("424 Failed Dependency"));
    fails(&server, "/d/x", Kind::Io, "424 for one of its parts");
    let server = DavServer::start(|_, request, files: &Mutex<DavFiles>| {
        if request.method != "MOVE" {
            return DavFault::None;
        }
        files.lock().unwrap().lock("/d/");
        part_of("423 Locked")
    });
    server.files().put("/d/x", b"before".to_vec());
    let error = fails(&server, "/d/x", Kind::InUse, why).to_string();
    assert!(error.ends_with("until the lock expires; the target is as it was before"), "{error}");
    assert_eq!(**server.bytes("/d/x").unwrap(), *b"before");
}

/// Changes the files once the file was sent.
fn changed_meanwhile(
    change: impl Fn(&mut DavFiles) + Send + Sync + 'static,
    ignores_conditions: bool,
) -> DavServer {
    DavServer::start(move |_, request, files: &Mutex<DavFiles>| {
        if request.method == "PUT" {
            change(&mut files.lock().unwrap());
        }
        let is_conditional = request.method == "MOVE" && request.field("if").is_some();
        // As servers that know locks only as conditions.
        if is_conditional && ignores_conditions {
            DavFault::Status(412, String::new())
        } else {
            DavFault::None
        }
    })
}

#[test]
fn a_target_that_others_change_meanwhile_is_left_to_them() {
    let replaced = |files: &mut DavFiles| files.put("/d/x", b"other".to_vec());
    let removed = |files: &mut DavFiles| drop(files.files.remove("/d/x"));
    for ignores in [false, true] {
        for removes in [false, true] {
            let change =
                move |files: &mut DavFiles| if removes { removed(files) } else { replaced(files) };
            let server = changed_meanwhile(change, ignores);
            server.files().put("/d/x", b"before".to_vec());
            fails(&server, "/d/x", Kind::InUse, "replaced or removed by others");
            let left = server.bytes("/d/x").map(|bytes| bytes.to_vec());
            assert_eq!(left, (!removes).then(|| b"other".to_vec()));
        }
    }
    // A directory of the name is not replaced, as MOVE does.
    let server = changed_meanwhile(|files| files.make_directory("/d/x"), false);
    fails(&server, "/d/x", Kind::InUse, "made, replaced or removed");
    assert!(server.files().directories.contains("/d/x"));
    let server = changed_meanwhile(|files| files.lock("/d/x"), false);
    server.files().put("/d/x", b"before".to_vec());
    fails(&server, "/d/x", Kind::InUse, "locked by someone");
    // A server that does not know the condition.
    let server = changed_meanwhile(|_| {}, true);
    server.files().put("/d/x", b"before".to_vec());
    copy(&server.url("/d/x"), b"data").unwrap();
    assert_eq!(**server.bytes("/d/x").unwrap(), *b"data");
}

#[test]
fn a_change_behind_the_last_look_is_refused_by_the_condition() {
    for (before, status) in [(true, "T"), (false, "F")] {
        let server = DavServer::start(move |_, request, files: &Mutex<DavFiles>| {
            if request.method == "MOVE" && request.field("overwrite") == Some(status) {
                files.lock().unwrap().put("/d/x", b"other".to_vec());
            }
            DavFault::None
        });
        if before {
            server.files().put("/d/x", b"before".to_vec());
        }
        fails(&server, "/d/x", Kind::InUse, "by others");
        assert_eq!(**server.bytes("/d/x").unwrap(), *b"other");
    }
}

#[test]
fn two_copies_to_one_target_use_two_temporary_files() {
    let server = DavServer::plain();
    for _ in 0..2 {
        copy(&server.url("/d/x"), b"data").unwrap();
    }
    let puts: Vec<_> = server.requests().into_iter().filter(|one| one.method == "PUT").collect();
    assert_ne!(puts[0].target, puts[1].target);
}

#[test]
fn the_data_goes_where_the_server_redirects_and_secrets_do_not() {
    for status in [301, 302, 307, 308] {
        let far = DavServer::start(|_, request, _| {
            assert_eq!(request.field("x-secret"), None, "another server got the field");
            DavFault::None
        });
        let place = format!("http://{}", far.address());
        let stored = std::sync::Arc::new(far);
        let other = stored.clone();
        let near = DavServer::start(move |_, request, files| {
            assert_eq!(request.field("x-secret"), Some("1"));
            if request.method == "PUT" {
                return DavFault::Status(status, format!("Location: {place}/d/pool\r\n"));
            }
            // The pool of the server has the file now.
            if let Some(bytes) = other.bytes("/d/pool")
                && request.method == "PROPFIND"
                && request.target.contains(".blockhaul-")
            {
                files.lock().unwrap().put(&request.target, bytes.to_vec());
            }
            DavFault::None
        });
        let fields = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(fields.path(), "X-Secret: 1\n").unwrap();
        let url = near.url(&format!("/d/x#header-file={}", fields.path().display()));
        copy(&url, &content(1, LONG)).unwrap();
        assert!(*near.bytes("/d/x").unwrap() == content(1, LONG), "{status}");
        assert_eq!(stored.requests().len(), 1);
    }
    for place in ["ftp://h/x", "http://["] {
        let server = put_fault(DavFault::Status(307, format!("Location: {place}\r\n")));
        fails(&server, "/d/x", Kind::Unsupported, "");
    }
    let server = put_fault(DavFault::Status(307, "Location: /d/again\r\n".to_owned()));
    fails(&server, "/d/x", Kind::Unsupported, "redirects more than 10 times");
}

#[test]
fn a_server_that_knows_no_expectations_gets_the_file() {
    let server = DavServer::start(|_, request, _| {
        let is_asked = request.method == "PUT" && request.field("expect").is_some();
        if is_asked { DavFault::Status(417, String::new()) } else { DavFault::None }
    });
    copy(&server.url("/d/x"), &content(1, LONG)).unwrap();
    assert!(*server.bytes("/d/x").unwrap() == content(1, LONG));
}

#[test]
fn a_copy_that_is_given_up_leaves_nothing() {
    let server = DavServer::plain();
    let url = server.url("/d/x");
    on_a_worker(move || async move {
        let (stack, preparation) = open_target(&url, Intent::target(LONG as u64)).await.unwrap();
        preparation.run().await.unwrap();
        write(&stack, 0, &content(1, 3 << 20)).await.unwrap();
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
        // Nothing is sent for a target that is only looked at.
        drop(open_target(&url, Intent::target(5)).await.unwrap());
    });
    assert!(server.files().names().is_empty());
    assert_eq!(methods(&server).iter().filter(|method| *method == "PUT").count(), 1);
    assert_eq!(methods(&server).iter().filter(|method| *method == "MOVE").count(), 0);
}

#[test]
fn what_nothing_continues_has_no_journal() {
    let limit = Duration::from_secs(1);
    let options = RemoteOptions { connect_timeout: limit, timeout: limit };
    let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
    for (spec, expected) in [
        ("dav://h/d/x", false),
        ("DAVS://h/d/x", false),
        ("s3://b/x", true),
        ("chunks:az://c/x", true),
    ] {
        let spec = DeviceSpec::parse(spec.as_ref()).unwrap();
        assert_eq!(registry.can_have_journal(&spec), expected, "{spec}");
    }
}

#[test]
fn a_server_that_takes_nothing_is_given_up() {
    let (listener, begun) = (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), Instant::now());
    let near = {
        let place = format!("Location: http://{}/x\r\n", listener.local_addr().unwrap());
        put_fault(DavFault::Status(307, place))
    };
    let spec = near.url("/d/x");
    let error = on_a_worker(move || async move {
        let limit = Duration::from_millis(300);
        let options = RemoteOptions { connect_timeout: limit, timeout: limit };
        let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
        let spec = DeviceSpec::parse(spec.as_ref()).unwrap();
        let intent = Intent::target(64 << 20);
        let (stack, preparation) = registry.open_target(&spec, Vec::new(), intent).await.unwrap();
        preparation.run().await.unwrap();
        let error = write_all(&stack, &content(1, 64 << 20)).await.unwrap_err();
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
        error
    });
    assert!(error.kind() == Kind::Io && error.to_string().contains("within 0.3 s"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(20));
    drop(listener);
}
