//! A web server for files: GET and HEAD with one range, connections that stay open, sendfile.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use blockhaul_measure::{MeasureError, Result};

/// A request with a longer line or more lines is not one of ours.
const LINE_MAX: u64 = 8192;
const LINES_MAX: usize = 100;
/// Clients at a time.
const CLIENTS_MAX: usize = 1024;

/// Serves the files of a directory on the loopback address until it is killed.
pub fn serve(dir: &Path, port: u16) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .map_err(|error| MeasureError::new(format!("cannot listen on port {port}: {error}")))?;
    run(&listener, dir);
    Ok(())
}

fn run(listener: &TcpListener, dir: &Path) {
    let dir: Arc<Path> = dir.into();
    let clients = Arc::new(());
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        if Arc::strong_count(&clients) > CLIENTS_MAX {
            continue;
        }
        let dir = dir.clone();
        let mark = clients.clone();
        // Without a thread, the connection is closed.
        std::thread::Builder::new()
            .spawn(move || {
                // A client that breaks off wants no more.
                client(stream, &dir).ok();
                drop(mark);
            })
            .ok();
    }
}

fn client(stream: TcpStream, dir: &Path) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let Some(first) = line(&mut reader)? else { return Ok(()) };
        let mut range = None;
        let mut close = first.ends_with("HTTP/1.0");
        for number in 0.. {
            let Some(field) = line(&mut reader)? else { return Ok(()) };
            if field.is_empty() {
                break;
            }
            if number == LINES_MAX {
                return Ok(());
            }
            let (name, value) = field.split_once(':').unwrap_or((&field, ""));
            match name.to_ascii_lowercase().as_str() {
                "range" => range = Some(value.trim().to_owned()),
                "connection" => close |= value.trim().eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
        let mut words = first.split(' ');
        let method = words.next().unwrap_or("");
        let path = words.next().unwrap_or("");
        let name = path.trim_start_matches('/');
        // One directory only: no name leads out of it.
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let good = !name.is_empty() && !name.starts_with('.') && name.chars().all(plain);
        let file = if good { File::open(dir.join(name)).ok() } else { None };
        match (method, file) {
            ("GET" | "HEAD", Some(file)) => {
                answer(&mut out, file, range.as_deref(), method == "GET")?;
            }
            ("GET" | "HEAD", None) => empty(&mut out, "404 Not Found", "")?,
            _ => empty(&mut out, "405 Method Not Allowed", "Allow: GET, HEAD\r\n")?,
        }
        if close {
            return Ok(());
        }
    }
}

/// A line without its end; None at the end of the connection, and for one that is too long.
fn line(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<String>> {
    let mut text = String::new();
    let read = reader.take(LINE_MAX).read_line(&mut text)?;
    let whole = read > 0 && text.ends_with('\n');
    Ok(whole.then(|| text.trim_end_matches(['\r', '\n']).to_owned()))
}

fn empty(out: &mut TcpStream, status: &str, more: &str) -> std::io::Result<()> {
    out.write_all(format!("HTTP/1.1 {status}\r\n{more}Content-Length: 0\r\n\r\n").as_bytes())
}

fn answer(
    out: &mut TcpStream,
    mut file: File,
    range: Option<&str>,
    body: bool,
) -> std::io::Result<()> {
    let size = file.metadata()?.len();
    let (status, at, len, more) = match range.map(|range| parse(range, size)) {
        None => ("200 OK", 0, size, String::new()),
        Some(Some((at, len))) => {
            let range = format!("Content-Range: bytes {at}-{}/{size}\r\n", at + len - 1);
            ("206 Partial Content", at, len, range)
        }
        Some(None) => {
            let more = format!("Content-Range: bytes */{size}\r\n");
            return empty(out, "416 Range Not Satisfiable", &more);
        }
    };
    let head =
        format!("HTTP/1.1 {status}\r\nAccept-Ranges: bytes\r\n{more}Content-Length: {len}\r\n\r\n");
    out.write_all(head.as_bytes())?;
    if body {
        file.seek(SeekFrom::Start(at))?;
        // The standard library lets the kernel do this.
        std::io::copy(&mut file.take(len), out)?;
    }
    Ok(())
}

/// `bytes=FIRST-LAST` as offset and length, cut off at the end of the file.
fn parse(range: &str, size: u64) -> Option<(u64, u64)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let first: u64 = first.parse().ok()?;
    let last = match last {
        "" => u64::MAX,
        last => last.parse().ok()?,
    };
    let end = last.saturating_add(1).min(size);
    (first < end).then(|| (first, end - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_ranges_are_served_over_one_connection() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("disk.raw"), b"0123456789").unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let folder = dir.path().to_owned();
        // It ends with the test program.
        std::thread::spawn(move || run(&listener, &folder));
        let mut stream = TcpStream::connect(address).unwrap();
        let cases = [
            ("GET /disk.raw HTTP/1.1\r\nRange: bytes=2-4\r\n\r\n", "206", "234"),
            ("HEAD /disk.raw HTTP/1.1\r\n\r\n", "200", ""),
            ("GET /disk.raw HTTP/1.1\r\n\r\n", "200", "0123456789"),
            ("GET /disk.raw HTTP/1.1\r\nrange: bytes=10-\r\n\r\n", "416", ""),
            ("GET /../secret HTTP/1.1\r\n\r\n", "404", ""),
            ("PUT /disk.raw HTTP/1.1\r\n\r\n", "405", ""),
            (
                "GET /disk.raw HTTP/1.1\r\nRange: bytes=8-99\r\nConnection: close\r\n\r\n",
                "206",
                "89",
            ),
        ];
        let mut all = String::new();
        for (request, ..) in cases {
            stream.write_all(request.as_bytes()).unwrap();
        }
        stream.read_to_string(&mut all).unwrap();
        let answers: Vec<&str> = all.split("HTTP/1.1 ").skip(1).collect();
        assert_eq!(answers.len(), cases.len(), "{all}");
        for (answer, (request, status, body)) in answers.iter().zip(cases) {
            assert!(answer.starts_with(status), "{request}: {answer}");
            assert!(answer.ends_with(&format!("\r\n\r\n{body}")), "{request}: {answer}");
        }
    }
}
