//! Page blobs, at a small server that is late and loses responses.

use std::io::Write as _;
use std::sync::{Arc, Mutex};

use blockhaul_block::Kind;
use blockhaul_catalog::Preparation;
use blockhaul_testkit::rng::{self, Rng};

use super::http_server::{HttpAnswer, HttpServer, answer, read_body, response_bytes};
use super::*;

const PAGES: u64 = 64;
const BYTES: usize = 64 * 512;

/// A blob, with writes that the server has not carried out yet.
struct ServedBlob {
    rng: Rng,
    /// None: it does not exist.
    bytes: Option<Vec<u8>>,
    lease: Option<String>,
    late: Vec<LateWrite>,
    has_faults: bool,
    /// Number of writes.
    version: u64,
    /// Another program writes before the first lease.
    has_race: bool,
}

#[derive(Clone)]
struct LateWrite {
    lease: String,
    at: usize,
    bytes: Vec<u8>,
}

fn refused(status: u16, code: &str) -> HttpAnswer {
    (status, format!("x-ms-error-code: {code}\r\n"), Vec::new())
}

impl ServedBlob {
    fn carry_out(&mut self, write: &LateWrite) -> HttpAnswer {
        if self.lease.as_ref() != Some(&write.lease) {
            return refused(412, "LeaseIdMismatchWithBlobOperation");
        }
        let bytes = self.bytes.as_mut().unwrap();
        bytes[write.at..write.at + write.bytes.len()].copy_from_slice(&write.bytes);
        self.version += 1;
        answer(201)
    }

    /// None: the connection ends.
    fn serve(&mut self, request: &HttpRequest, body: Vec<u8>) -> Option<HttpAnswer> {
        if self.rng.chance(8) && !self.late.is_empty() {
            let late = self.late.remove(0);
            self.carry_out(&late);
        }
        let field = |name: &str| request.field(&format!("x-ms-{name}")).map(str::to_owned);
        let component =
            request.target.split(['?', '&']).find_map(|pair| pair.strip_prefix("comp="));
        Some(match (request.method.as_str(), component) {
            ("PUT", None) => {
                assert_eq!(field("blob-type").as_deref(), Some("PageBlob"));
                assert_eq!(request.field("if-none-match"), Some("*"));
                if self.bytes.is_some() {
                    return Some(refused(409, "BlobAlreadyExists"));
                }
                self.bytes = Some(vec![0; field("blob-content-length")?.parse().unwrap()]);
                (201, format!("ETag: \"{}\"\r\n", self.version), Vec::new())
            }
            _ if self.bytes.is_none() => refused(404, "BlobNotFound"),
            ("HEAD", None) => {
                let fields = format!("x-ms-blob-type: PageBlob\r\nETag: \"{}\"\r\n", self.version);
                (200, fields, self.bytes.clone()?)
            }
            ("GET", None) => {
                let (first, last) = request.range()?;
                let bytes = self.bytes.as_ref()?;
                let fields = format!(
                    "ETag: \"e\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
                     Content-Range: bytes {first}-{last}/{}\r\n",
                    bytes.len()
                );
                (206, fields, bytes[first as usize..=last as usize].to_vec())
            }
            ("PUT", Some("lease")) => {
                let action = field("lease-action")?;
                let proposed = field("proposed-lease-id");
                let is_own = self.lease.is_some() && self.lease == field("lease-id");
                match action.as_str() {
                    "acquire" if self.lease.is_some() && self.lease != proposed => {
                        return Some(refused(409, "LeaseAlreadyPresent"));
                    }
                    "acquire" => {
                        self.version += u64::from(self.has_race);
                        self.lease = proposed;
                    }
                    "change" if is_own || self.lease == proposed => self.lease = proposed,
                    "renew" if is_own => {}
                    "release" if is_own => self.lease = None,
                    _ => return Some(refused(409, "LeaseIdMismatchWithLeaseOperation")),
                }
                if self.has_faults && self.rng.chance(20) {
                    return None;
                }
                answer(200)
            }
            ("PUT", Some("page")) => {
                let range = field("range")?;
                let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
                let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
                assert!(first.is_multiple_of(512) && (last + 1).is_multiple_of(512), "{range}");
                let bytes = match field("page-write").as_deref() {
                    Some("clear") => vec![0; last + 1 - first],
                    _ => body,
                };
                assert_eq!(bytes.len(), last + 1 - first);
                let write = LateWrite { lease: field("lease-id")?, at: first, bytes };
                if !self.has_faults {
                    return Some(self.carry_out(&write));
                }
                match self.rng.below(16) {
                    0 => {
                        self.carry_out(&write);
                        return None;
                    }
                    1 | 2 => {
                        self.late.push(write);
                        return None;
                    }
                    3 => answer(503),
                    4 => {
                        self.late.push(write);
                        answer(500)
                    }
                    _ => self.carry_out(&write),
                }
            }
            other => panic!("{other:?}"),
        })
    }
}

fn start(blob: ServedBlob) -> (HttpServer, Arc<Mutex<ServedBlob>>) {
    let blob = Arc::new(Mutex::new(blob));
    let shared = blob.clone();
    let server = HttpServer::start(None, move |_, request, stream| {
        let body = read_body(stream, request, usize::MAX)?;
        let answer = shared.lock().unwrap().serve(request, body)?;
        stream.get_mut().write_all(&response_bytes(request, &answer)).ok()
    });
    (server, blob)
}

fn served(seed: u64) -> ServedBlob {
    ServedBlob {
        rng: Rng::new(seed),
        bytes: None,
        lease: None,
        late: Vec::new(),
        has_faults: false,
        version: 0,
        has_race: false,
    }
}

fn spec(server: &HttpServer) -> String {
    let address = server.address;
    format!(
        "az://c/disk?account=a&anonymous=on&blob-type=PageBlob&connections=4&endpoint=http://{address}"
    )
}

async fn open_blob(spec: &str, intent: Intent) -> Result<(Stack, Preparation)> {
    let limit = Duration::from_secs(10);
    let options = RemoteOptions { connect_timeout: limit, timeout: limit };
    let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
    registry.open_target(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), intent).await
}

fn write(at: u64, bytes: &[u8]) -> Request {
    let mut room = Reservation::unpooled(bytes.len()).into_buf();
    room.copy_from_slice(bytes);
    Request::write(at, room.into())
}

#[test]
fn a_new_blob_that_another_program_has_written_is_not_taken() {
    let (server, blob) = start(ServedBlob { has_race: true, ..served(1) });
    let spec = spec(&server);
    let refused = on_a_worker(move || async move {
        let (_stack, preparation) = open_blob(&spec, Intent::target(BYTES as u64)).await.unwrap();
        preparation.run().await.unwrap_err()
    });
    assert_eq!(refused.kind(), Kind::InUse, "{refused}");
    assert!(blob.lock().unwrap().lease.is_none(), "the lease stays");
}

/// Writes random pages, a few at a time, and reads them again.
fn round(seed: u64) {
    let (server, blob) = start(served(seed));
    let spec = spec(&server);
    let faults = blob.clone();
    let is_written = on_a_worker(move || async move {
        let mut rng = Rng::new(seed ^ 1);
        let (stack, preparation) = open_blob(&spec, Intent::target(BYTES as u64)).await.unwrap();
        preparation.run().await.unwrap();
        faults.lock().unwrap().has_faults = true;
        let mut model = vec![0; BYTES];
        let mut is_written = true;
        for _ in 0..8 {
            let mut pending = Vec::new();
            // Requests that overlap have no order.
            for quarter in 0..4 {
                let first = quarter * PAGES / 4 + rng.below(8);
                let (at, len) = (first * 512, (1 + rng.below(8)) * 512);
                let range = at as usize..(at + len) as usize;
                let request = if rng.chance(25) {
                    model[range].fill(0);
                    Request::zero(at, len)
                } else {
                    let mut bytes = vec![0; len as usize];
                    rng.fill(&mut bytes);
                    model[range].copy_from_slice(&bytes);
                    write(at, &bytes)
                };
                pending.push(stack.device().submit(request));
            }
            for request in pending {
                // Many faults in a row are an error, too: the bytes are unknown then.
                if let Err(error) = request.await {
                    println!("seed {seed:#x}: {error}");
                    is_written = false;
                }
            }
            if !is_written {
                break;
            }
            let bytes = read(&stack, 0, BYTES).await.unwrap();
            assert!(bytes == model, "seed {seed:#x}: wrong bytes");
        }
        faults.lock().unwrap().has_faults = false;
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
        is_written
    });
    let blob = blob.lock().unwrap();
    assert!(!is_written || blob.lease.is_none(), "seed {seed:#x}: the lease was not released");
}

#[test]
fn late_writes_do_not_overwrite_later_ones() {
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 4 };
    let first = rng::seed() % (u64::MAX / 2);
    println!("BLOCKHAUL_SEED={first:#x}, {rounds} rounds");
    for seed in first..first + rounds {
        round(seed);
    }
}

#[test]
fn a_writer_that_has_lost_the_lease_changes_nothing() {
    let (server, blob) = start(served(1));
    let spec = spec(&server);
    let other = blob.clone();
    on_a_worker(move || async move {
        let (stack, preparation) = open_blob(&spec, Intent::target(BYTES as u64)).await.unwrap();
        preparation.run().await.unwrap();
        let write = |at| write(at, &[7; 512]);
        stack.device().submit(write(0)).await.unwrap();
        other.lock().unwrap().lease = Some("other".to_owned());
        for at in [512, 1024] {
            let error = stack.device().submit(write(at)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::InUse, "{error}");
            assert!(error.to_string().contains("has taken the lease"), "{error}");
        }
        assert!(read(&stack, 0, 1024).await.unwrap() == [vec![7; 512], vec![0; 512]].concat());
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
    });
    assert_eq!(blob.lock().unwrap().lease.as_deref(), Some("other"), "it was not released");
}

#[test]
fn sizes_and_names_are_checked_before_anything_is_made() {
    let (server, blob) = start(served(2));
    let spec = spec(&server);
    on_a_worker(move || async move {
        for (intent, kind, why) in [
            (Intent::target(1000), Kind::Unsupported, "a multiple of 512 bytes, not 1000"),
            (Intent::target(0), Kind::Unsupported, "a multiple of 512"),
            (Intent::READ, Kind::NotFound, "there is no such blob"),
        ] {
            let error = open_blob(&spec, intent).await.map(drop).unwrap_err();
            assert!(error.kind() == kind && error.to_string().contains(why), "{error}");
            assert!(error.is_complete(), "{error}");
        }
        // A target that is not prepared is not made.
        drop(open_blob(&spec, Intent::target(512)).await.unwrap());
    });
    assert!(blob.lock().unwrap().bytes.is_none());
    assert!(server.requests().iter().all(|request| request.method == "HEAD"));
}
