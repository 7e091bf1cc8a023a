//! A web server on loopback with one file, `/disk`, that knows ranges: as much as libcurl needs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The server; it stops when dropped.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    /// Connections that are open, and the most that were.
    open: Arc<[AtomicUsize; 2]>,
}

impl Server {
    /// Serves these bytes.
    pub fn start(bytes: Vec<u8>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let bytes = Arc::new(bytes);
        let open = Arc::<[AtomicUsize; 2]>::default();
        let counted = open.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let bytes = bytes.clone();
                let open = counted.clone();
                let now = open[0].fetch_add(1, Ordering::SeqCst) + 1;
                open[1].fetch_max(now, Ordering::SeqCst);
                std::thread::spawn(move || {
                    // A client that leaves in between ends its thread.
                    drop(converse(stream, &bytes));
                    open[0].fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Server { address, stop, open }
    }

    /// The most connections that were open at a time.
    pub fn most_connections(&self) -> usize {
        self.open[1].load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

fn converse(mut stream: TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut request = String::new();
        if reader.read_line(&mut request)? == 0 {
            return Ok(());
        }
        let mut range = None;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(text) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
                let (from, to) = text.trim().split_once('-').unwrap();
                range = Some((from.parse::<usize>().unwrap(), to.parse::<usize>().unwrap()));
            }
        }
        if !request.contains(" /disk ") {
            stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        let (status, part) = match range {
            None => ("200 OK", bytes),
            Some((from, to)) => ("206 Partial Content", &bytes[from..(to + 1).min(bytes.len())]),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nAccept-Ranges: bytes\r\nContent-Length: {}\r\n\r\n",
            part.len()
        );
        stream.write_all(head.as_bytes())?;
        if request.starts_with("GET") {
            stream.write_all(part)?;
        }
    }
}
