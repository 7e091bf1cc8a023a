//! Reads by ranges: what servers do in the wild.

use std::time::{Duration, Instant};

use blockhaul_block::Kind;
use blockhaul_testkit::conform;

use super::*;

#[test]
fn the_device_fulfils_the_contract() {
    let bytes = content(1, SIZE);
    let server = faulty(object(), &[]);
    let url = server.url("/disk.raw");
    conform::check(
        "http",
        conform::ConformOptions::default()
            .content(conform::InitialContent::oracle(move |at| bytes[at as usize])),
        move || {
            let url = url.clone();
            async move { open(&url).await }
        },
    );
}

#[test]
fn faults_that_pass_leave_no_wrong_bytes() {
    for fault in [
        Fault::None,
        Fault::Cut(10_000),
        Fault::Cut(0),
        Fault::Shorter(20_000),
        Fault::Drop,
        Fault::Chunked,
        Fault::Http10,
        Fault::Close,
        Fault::Endless,
        Fault::Fields("Content-Encoding: identity\r\n".to_owned()),
        Fault::Status(500, String::new()),
        Fault::Status(429, "Retry-After: 0\r\n".to_owned()),
        Fault::Status(416, String::new()),
        Fault::NoRanges,
        Fault::NoSize,
    ] {
        let server = faulty(object(), &vec![fault.clone(); 5]);
        let found =
            all_of(server.url("/disk.raw")).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert!(found == content(1, SIZE), "{fault:?}");
    }
}

#[test]
fn a_server_that_closes_each_connection_is_read() {
    let server = ObjectServer::start(object(), |_, _, _| Fault::Close);
    assert!(all_of(server.url("/")).unwrap() == content(1, SIZE));
    assert_eq!(server.connections(), server.requests().len());
}

#[test]
fn connections_are_kept_and_bounded() {
    let server = faulty(object(), &[]);
    let url = server.url("/#connections=2");
    on_a_worker(move || async move {
        let stack = open(&url).await.unwrap();
        for _ in 0..5 {
            assert!(read_all(&stack).await.unwrap() == content(1, SIZE));
        }
    });
    assert!(server.connections() <= 3, "{}", server.connections());
}

#[test]
fn the_size_needs_no_head_request() {
    let server = ObjectServer::start(object(), |_, request, _| {
        if request.method == "HEAD" { Fault::Status(405, String::new()) } else { Fault::None }
    });
    assert!(all_of(server.url("/")).unwrap() == content(1, SIZE));
    assert!(server.requests().iter().all(|request| request.method == "GET"));
    // Only where the range does not tell it.
    let server = ObjectServer::start(object(), |_, _, _| Fault::NoSize);
    assert!(all_of(server.url("/")).unwrap() == content(1, SIZE));
    assert!(server.requests().iter().any(|request| request.method == "HEAD"));
}

#[test]
fn empty_objects_are_empty_disks() {
    let server = faulty(ServedObject::new(Vec::new()), &[]);
    let url = server.url("/");
    let size = on_a_worker(move || async move { open(&url).await.unwrap().device().facts().size });
    assert_eq!(size, 0);
}

#[test]
fn an_object_that_is_replaced_is_never_mixed() {
    for (etag, modified, by) in [
        (Some("\"one\""), None, "If-Match"),
        (Some("W/\"one\""), Some("Sun, 06 Nov 1994 08:49:37 GMT"), "If-Unmodified-Since"),
        (Some("W/\"one\""), None, "comparison"),
        (None, Some("Sun, 06 Nov 1994 08:49:37 GMT"), "If-Unmodified-Since"),
        (None, None, "size"),
    ] {
        let object = ServedObject {
            etag: etag.map(str::to_owned),
            modified: modified.map(str::to_owned),
            ..object()
        };
        let server = ObjectServer::start(object, |number, _, object| {
            if number == 2 {
                let mut object = object.lock().unwrap();
                let size = if object.etag.is_none() && object.modified.is_none() {
                    SIZE - 1
                } else {
                    SIZE
                };
                object.bytes = content(2, size).into();
                object.etag = object.etag.as_ref().map(|etag| etag.replace("one", "two"));
                object.modified = object.modified.as_ref().map(|time| time.replace("1994", "1995"));
            }
            Fault::None
        });
        let error = refused(server.url("/#connections=1"));
        assert_eq!(error.kind(), Kind::NotFound, "{by}: {error}");
        assert!(error.to_string().contains("replaced or changed"), "{by}: {error}");
    }
}

#[test]
fn redirects_are_resolved_once_and_again_when_the_place_expires() {
    let far = ObjectServer::start(object(), |number, request, _| {
        assert_eq!(request.field("x-secret"), None, "another server got the field");
        // The second signature is the one that is valid.
        let is_expired = number >= 4 && request.target.ends_with("sig=0");
        if is_expired { Fault::Status(403, String::new()) } else { Fault::None }
    });
    let place = far.url("/real?sig=");
    let near = ObjectServer::start(object(), move |number, request, _| {
        assert_eq!(request.field("x-secret"), Some("1"));
        Fault::Status(302, format!("Location: {place}{}\r\n", number.min(1)))
    });
    let fields = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(fields.path(), "X-Secret: 1\n\n").unwrap();
    let found =
        all_of(near.url(&format!("/a#connections=1&header-file={}", fields.path().display())));
    assert!(found.unwrap() == content(1, SIZE));
    assert_eq!(near.requests().len(), 2, "redirects are resolved once");
    assert_eq!(far.requests().len(), 1 + 5 + 1);
}

#[test]
fn redirects_without_end_and_to_other_schemes_are_refused() {
    let server =
        ObjectServer::start(object(), |_, _, _| Fault::Status(301, "Location: /b\r\n".to_owned()));
    let error = refused(server.url("/a"));
    assert!(error.to_string().contains("redirects more than 10 times"), "{error}");
    for (place, why) in [
        ("ftp://h/a", "the scheme \"ftp\""),
        ("", "redirects more than"),
        ("http://[", "names no place"),
    ] {
        let field = format!("Location: {place}\r\n");
        let server =
            ObjectServer::start(object(), move |_, _, _| Fault::Status(308, field.clone()));
        let error = refused(server.url("/a"));
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn refusals_name_a_remedy() {
    for (status, kind) in [
        (400, Kind::Unsupported),
        (401, Kind::Refused),
        (403, Kind::Refused),
        (404, Kind::NotFound),
        (407, Kind::Refused),
        (410, Kind::NotFound),
        (507, Kind::NoSpace),
        (204, Kind::Unsupported),
        (304, Kind::Unsupported),
    ] {
        let server =
            ObjectServer::start(object(), move |_, _, _| Fault::Status(status, String::new()));
        let error = all_of(server.url("/a?sig=secret")).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        let said = error.to_string();
        assert!(said.contains(&status.to_string()) && !said.contains("secret"), "{said}");
    }
}

#[test]
fn a_disk_that_disappears_is_an_error() {
    for status in [404, 403, 410] {
        let server = faulty(object(), &vec![Fault::Status(status, String::new()); 99]);
        refused(server.url("/"));
    }
}

#[test]
fn bodies_that_are_not_the_disk_are_refused() {
    for encoding in ["gzip", "br", "deflate", "x"] {
        let field = format!("Content-Encoding: {encoding}\r\n");
        let server = ObjectServer::start(object(), move |_, _, _| Fault::Fields(field.clone()));
        let error = refused(server.url("/disk.raw"));
        assert!(error.to_string().contains("Content-Encoding"), "{error}");
    }
    // A file that is stored so.
    let field = "Content-Encoding: gzip\r\n".to_owned();
    let server = ObjectServer::start(object(), move |_, _, _| Fault::Fields(field.clone()));
    assert!(all_of(server.url("/disk.raw.gz")).unwrap() == content(1, SIZE));
    let server = faulty(object(), &[Fault::Shifted(1)]);
    let error = refused(server.url("/"));
    assert!(error.to_string().contains("another range"), "{error}");
}

#[test]
fn what_is_no_response_is_an_error() {
    for text in [
        "",
        "HTTP/1.1 abc\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/1.1 206 x\r\nContent-Range: bytes 5-1/0\r\n\r\n",
        "HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/99999999999999999999\r\nContent-Length: 1\r\n\r\nx",
        "HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/18446744073709551615\r\nContent-Length: 1\r\n\r\nx",
        "HTTP/1.1 200 x\r\nContent-Length: 18446744073709551615\r\n\r\n",
        "HTTP/1.1 206 x\r\nContent-Length: 1\r\n\r\nx",
    ] {
        let bytes = text.as_bytes().to_vec();
        let server = ObjectServer::start(object(), move |_, _, _| Fault::Bytes(bytes.clone()));
        all_of(server.url("/")).unwrap_err();
    }
    // Fields without end, in bounded memory.
    let bytes = [b"HTTP/1.1 200 OK\r\n".to_vec(), b"a: b\r\n".repeat(100_000)].concat();
    let server = ObjectServer::start(object(), move |_, _, _| Fault::Bytes(bytes.clone()));
    all_of(server.url("/")).unwrap_err();
}

#[test]
fn silent_and_slow_servers_are_given_up() {
    let limit = Duration::from_millis(100);
    let late = |fault: Fault| {
        let server = faulty(object(), &vec![fault; 20]);
        let url = server.url("/");
        let begun = Instant::now();
        let error = on_a_worker(move || async move {
            let stack = open_within(&url, limit).await.unwrap();
            read(&stack, 0, 200_000).await.unwrap_err()
        });
        assert_eq!(error.kind(), Kind::TimedOut, "{error}");
        assert!(begun.elapsed() < Duration::from_secs(60));
    };
    late(Fault::Silent(Duration::from_secs(20)));
    late(Fault::Slow(1, Duration::from_millis(1)));
}

#[test]
fn a_server_that_asks_for_a_pause_gets_one() {
    let server = faulty(object(), &[Fault::Status(503, "Retry-After: 1\r\n".to_owned())]);
    let begun = Instant::now();
    assert!(all_of(server.url("/#connections=1")).unwrap() == content(1, SIZE));
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn no_server_is_an_error_at_once() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let begun = Instant::now();
    let error = refused(format!("http://{address}/disk?sig=secret"));
    assert!(begun.elapsed() < Duration::from_millis(700));
    let said = error.to_string();
    assert!(
        said.contains("cannot connect: Connection refused") && !said.contains("secret"),
        "{said}"
    );
    let error = refused("http://host.invalid/disk".to_owned()).to_string();
    assert!(error.contains("cannot connect: ") && !error.contains("(Connect)"), "{error}");
}

#[test]
fn descriptions_are_checked() {
    for (spec, why) in [
        ("http:", "no host"),
        ("http:/a", "no host"),
        ("https://", "not a URL"),
        ("http://a:99999/", "not a URL"),
        ("http://u:word@h/a", "a password in a URL"),
        ("http://h/a#ca=x", "ca is for https"),
        ("http://h/a#password-file=x", "no user"),
        ("http://h/a#connections=0", "connections may be 1 to 64"),
        ("http://h/a#connections=65", "connections may be 1 to 64"),
        ("http://h/a#other=1", "unknown option"),
        ("http://h/a#part", "has no value"),
        ("http://h/a#header-file=/nonexistent", "cannot read /nonexistent"),
        ("https://h/a#ca=/dev/null", "holds no certificate"),
        ("https://h/a#ca=/dev/zero", "it is no regular file"),
    ] {
        let spec = spec.to_owned();
        let error = on_a_worker(move || async move { open(&spec).await.map(drop).unwrap_err() });
        let said = error.to_string();
        assert!(said.contains(why) && !said.contains("u:word"), "{said}");
    }
}

#[test]
fn users_and_fields_are_sent_and_bad_files_are_named() {
    let server = ObjectServer::start(object(), |_, request, _| {
        let is_known = request.field("authorization") == Some("Basic bWU6dyBvcmQ=");
        if is_known { Fault::None } else { Fault::Status(401, String::new()) }
    });
    let password = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(password.path(), "w ord\n").unwrap();
    let url = |user: &str| {
        format!("http://{user}@{}/#password-file={}", server.address(), password.path().display())
    };
    assert!(all_of(url("me")).unwrap() == content(1, SIZE));
    assert_eq!(refused(url("you")).kind(), Kind::Refused);
    let fields = tempfile::NamedTempFile::new().unwrap();
    for text in ["no field\n", "a b: c\n", "a: \u{1}\n", ": x\n"] {
        std::fs::write(fields.path(), text).unwrap();
        let error = refused(server.url(&format!("/#header-file={}", fields.path().display())));
        assert!(error.to_string().contains("line 1: not a field"), "{error}");
    }
}
