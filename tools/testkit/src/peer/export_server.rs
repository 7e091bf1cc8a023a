//! The export server of KubeVirt, as far as a backup in pull mode uses it, with faults.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A disk and its map.
#[derive(Debug, Clone, Default)]
pub struct ExportedDisk {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Lengths, numbers and words of its extents, in order.
    pub map: Vec<(u64, u64, &'static str)>,
    /// The token that requests must have.
    pub token: String,
}

/// What an answer is instead of the right one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportFault {
    /// The right one.
    None,
    /// These bytes, and the end of the connection.
    Bytes(Vec<u8>),
    /// The right one, but only so many bytes of its body, and the end of the connection.
    Cut(usize),
    /// The end of the connection.
    Close,
    /// The right one, and then the end of the connection, which is not announced.
    Last,
    /// This many bytes more, or fewer, in the body.
    Length(i64),
}

/// The server: listens on loopback until it is dropped.
pub struct ExportServer {
    address: SocketAddr,
    shared: Arc<ExportServerState>,
}

type FaultChooser = dyn Fn(usize, &str) -> ExportFault + Send + Sync;

struct ExportServerState {
    disk: ExportedDisk,
    fault: Box<FaultChooser>,
    stopped: AtomicBool,
    requests: AtomicUsize,
    /// Requests under way, and the most that were.
    open: [AtomicUsize; 2],
}

impl ExportServer {
    /// Serves a disk; `fault` gets the number of each request, from 0, and its path and query.
    ///
    /// # Panics
    /// If there is no port.
    pub fn start(
        disk: ExportedDisk,
        fault: impl Fn(usize, &str) -> ExportFault + Send + Sync + 'static,
    ) -> ExportServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        let shared = Arc::new(ExportServerState {
            disk,
            fault: Box::new(fault),
            stopped: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            open: Default::default(),
        });
        let served = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if served.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let served = served.clone();
                // A client that leaves ends its thread.
                std::thread::spawn(move || drop(served.converse(stream)));
            }
        });
        ExportServer { address, shared }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the disk.
    pub fn url(&self) -> String {
        format!("http://{}/apis/ns/exports/disk0", self.address)
    }

    /// Requests so far.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// The most requests that were under way at a time.
    pub fn most_at_once(&self) -> usize {
        self.shared.open[1].load(Ordering::SeqCst)
    }
}

impl Drop for ExportServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

impl ExportServerState {
    fn converse(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                if reader.read_line(&mut head)? == 0 {
                    return Ok(());
                }
            }
            let number = self.requests.fetch_add(1, Ordering::SeqCst);
            let now = self.open[0].fetch_add(1, Ordering::SeqCst) + 1;
            self.open[1].fetch_max(now, Ordering::SeqCst);
            let target = head.split(' ').nth(1).unwrap_or_default();
            let fault = (self.fault)(number, target);
            let answer = self.answer(&head, target, &fault);
            // A client may send the next request as soon as it has the answer.
            self.open[0].fetch_sub(1, Ordering::SeqCst);
            stream.write_all(&answer)?;
            if !matches!(fault, ExportFault::None | ExportFault::Length(_)) {
                return stream.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn answer(&self, head: &str, target: &str, fault: &ExportFault) -> Vec<u8> {
        let plain = |status: &str, text: &str| {
            format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{text}", text.len())
                .into_bytes()
        };
        match fault {
            ExportFault::Bytes(bytes) => return bytes.clone(),
            ExportFault::Close => return Vec::new(),
            _ => {}
        }
        let token = head.lines().find_map(|line| line.strip_prefix("x-kubevirt-export-token: "));
        if token.unwrap_or_default() != self.disk.token {
            return plain("401 Unauthorized", "");
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let value = |key: &str| {
            let mut parts = query.split('&').filter_map(|part| part.split_once('='));
            parts.find(|part| part.0 == key).and_then(|part| part.1.parse::<u64>().ok())
        };
        let size = self.disk.bytes.len() as u64;
        let from = value("offset").unwrap_or(0);
        if from >= size {
            return plain("500 Internal Server Error", "Failed to call map for export: disk0\n");
        }
        let length = value("length").filter(|length| *length > 0).unwrap_or(size).min(size - from);
        match path {
            "/apis/ns/exports/disk0/map" => {
                let most = value("page_size").unwrap_or(512);
                plain("200 OK", &self.page(from, from + length, most))
            }
            "/apis/ns/exports/disk0/data" => {
                let mut body = self.disk.bytes[from as usize..(from + length) as usize].to_vec();
                if let ExportFault::Length(more) = fault {
                    body.resize(body.len().saturating_add_signed(*more as isize), 0);
                }
                chunked(&body, fault)
            }
            _ => plain("404 Not Found", "404 page not found\n"),
        }
    }

    fn page(&self, from: u64, to: u64, most: u64) -> String {
        let mut text = String::new();
        let mut count = 0;
        let mut at = 0;
        for (length, number, words) in &self.disk.map {
            let (start, end) = (at.max(from), (at + length).min(to));
            at += length;
            if start >= end {
                continue;
            }
            if count == most {
                return format!("{{\"extents\":[{text}],\"next_offset\":{start}}}\n");
            }
            let length = end - start;
            let comma = if count == 0 { "" } else { "," };
            text += &format!(
                "{comma}{{\"offset\":{start},\"length\":{length},\"type\":{number},\"description\":\"{words}\"}}"
            );
            count += 1;
        }
        format!("{{\"extents\":[{text}],\"next_offset\":null}}\n")
    }
}

/// A body in chunks, as the server sends data.
fn chunked(body: &[u8], fault: &ExportFault) -> Vec<u8> {
    let head = "HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut out = head.as_bytes().to_vec();
    let sent = match fault {
        ExportFault::Cut(count) => &body[..*count],
        _ => body,
    };
    for chunk in sent.chunks(10_000) {
        out.extend(format!("{:x}\r\n", chunk.len()).bytes());
        out.extend(chunk);
        out.extend(b"\r\n");
    }
    if !matches!(fault, ExportFault::Cut(_)) {
        out.extend(b"0\r\n\r\n");
    }
    out
}
