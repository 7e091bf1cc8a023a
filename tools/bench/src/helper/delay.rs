//! A TCP proxy that delays all bytes, as the way to a distant server does.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use blockhaul_measure::{MeasureError, Result};

/// Bytes that are read at a time, and pieces on the way in one direction: 128 MiB, more than a fast way of 100 ms holds.
const PIECE: usize = 128 << 10;
const PIECES: usize = 1024;

/// Passes connections from one port of the loopback address to another until it is killed. A request and its response
/// together take `delay` longer, and so does a new connection.
pub fn serve(port: u16, to: u16, delay: Duration) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .map_err(|error| MeasureError::new(format!("cannot listen on port {port}: {error}")))?;
    run(&listener, to, delay);
    Ok(())
}

fn run(listener: &TcpListener, to: u16, delay: Duration) {
    for near in listener.incoming().flatten() {
        // A server that is gone ends the connection.
        let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else { continue };
        // The handshake is one way there and back.
        let _ = pass(&near, &far, delay / 2, delay)
            .and_then(|()| pass(&far, &near, delay / 2, Duration::ZERO));
    }
}

/// Passes what `from` sends to `to`, each piece after `delay`, and the first one after `first` more.
fn pass(from: &TcpStream, to: &TcpStream, delay: Duration, first: Duration) -> std::io::Result<()> {
    to.set_nodelay(true)?;
    let (from, to) = (from.try_clone()?, to.try_clone()?);
    let (sender, receiver) = mpsc::sync_channel(PIECES);
    thread::Builder::new().spawn(move || receive(from, &sender, delay, first))?;
    thread::Builder::new().spawn(move || send(to, &receiver))?;
    Ok(())
}

/// A piece, and the time at which it arrives.
type DelayedPiece = (Instant, Vec<u8>);

fn receive(
    mut from: TcpStream,
    sender: &SyncSender<DelayedPiece>,
    delay: Duration,
    first: Duration,
) {
    let mut earliest = Instant::now() + first;
    let mut buf = vec![0; PIECE];
    while let Ok(len @ 1..) = from.read(&mut buf) {
        let due = Instant::now().max(earliest) + delay;
        earliest = due - delay;
        if sender.send((due, buf[..len].to_vec())).is_err() {
            return;
        }
    }
}

fn send(mut to: TcpStream, receiver: &Receiver<DelayedPiece>) {
    while let Ok((due, piece)) = receiver.recv() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            return;
        }
    }
    // The other side may be gone.
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_come_later_and_bytes_stay_in_order() {
        let delay = Duration::from_millis(60);
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (to, address) = (server.local_addr().unwrap().port(), proxy.local_addr().unwrap());
        // Both end with the test program.
        thread::spawn(move || run(&proxy, to, delay));
        thread::spawn(move || {
            for mut stream in server.incoming().flatten() {
                let mut copy = stream.try_clone().unwrap();
                std::io::copy(&mut stream, &mut copy).unwrap();
                copy.shutdown(Shutdown::Write).unwrap();
            }
        });
        let begun = Instant::now();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"a").unwrap();
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        // The handshake, and the request.
        assert!(begun.elapsed() >= 2 * delay, "{:?}", begun.elapsed());
        let begun = Instant::now();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at >> 7) as u8).collect();
        let sent = bytes.clone();
        let mut writer = stream.try_clone().unwrap();
        let writing = thread::spawn(move || {
            writer.write_all(&sent).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        writing.join().unwrap();
        assert!(received == bytes);
        assert!(begun.elapsed() >= delay, "{:?}", begun.elapsed());
        // Bytes on the way do not wait for those before them to arrive.
        assert!(begun.elapsed() < 20 * delay, "{:?}", begun.elapsed());
    }
}
