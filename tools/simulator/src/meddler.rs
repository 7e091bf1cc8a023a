//! Stands between clients and a server, and changes what one side sends.

use std::io::IoSliceMut;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use blockhaul_io::simulation::{choose, random};
use blockhaul_io::{Listener, Stream};

/// Most bytes that are received at once.
const CHUNK: u64 = 4096;
/// Longest garbage in bytes.
const GARBAGE: u64 = 200;

/// Whose bytes are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    /// What clients send.
    Server,
    /// What the server sends.
    Client,
}

/// What a meddler does.
#[derive(Clone)]
pub(crate) struct MeddlerConfig {
    /// Where it listens.
    pub(crate) socket: PathBuf,
    /// The server's socket.
    pub(crate) server: PathBuf,
    pub(crate) victim: Victim,
    /// Changes in 100,000 received chunks.
    pub(crate) rate: u64,
}

/// Starts to listen on this worker.
pub(crate) fn start(meddling: MeddlerConfig) -> Result<(), String> {
    let listener = Listener::bind_unix(&meddling.socket).map_err(|error| error.to_string())?;
    drop(blockhaul_io::spawn(async move {
        while let Ok(client) = listener.accept().await {
            let meddling = meddling.clone();
            drop(blockhaul_io::spawn(async move {
                // A connection that fails is over for both sides.
                let _ = relay(client, meddling).await;
            }));
        }
    }));
    Ok(())
}

async fn relay(client: std::os::fd::OwnedFd, meddling: MeddlerConfig) -> std::io::Result<()> {
    let client = Rc::new(Stream::new(client)?);
    let server = Rc::new(Stream::connect_unix(&meddling.server).await?);
    let rate = |victim| if meddling.victim == victim { meddling.rate } else { 0 };
    let up = pass(client.clone(), server.clone(), rate(Victim::Server));
    let down = pass(server, client, rate(Victim::Client));
    drop(blockhaul_io::spawn(up));
    down.await;
    Ok(())
}

/// Passes bytes on until one side ends; then both do.
async fn pass(from: Rc<Stream>, to: Rc<Stream>, rate: u64) {
    let mut space = vec![0; CHUNK as usize];
    loop {
        let most = 1 + random(CHUNK) as usize;
        let received = from.recv(&mut [IoSliceMut::new(&mut space[..most])]).await;
        let Ok(received @ 1..) = received else { break };
        let mut bytes = space[..received].to_vec();
        if rate > 0 && choose("changed bytes", rate) && !change(&mut bytes).await {
            break;
        }
        if to.send_all(&bytes).await.is_err() {
            break;
        }
    }
    from.shutdown();
    to.shutdown();
}

/// Changes a chunk; false if the connection ends instead.
async fn change(bytes: &mut Vec<u8>) -> bool {
    let at = random(bytes.len() as u64) as usize;
    let garbage = || (0..1 + random(GARBAGE)).map(|_| random(256) as u8);
    match random(9) {
        0 | 1 => bytes[at] ^= 1 << random(8),
        2 => bytes[at] = 0xff,
        3 => bytes.truncate(at),
        4 => drop(bytes.splice(at..at, garbage())),
        5 => {
            let end = bytes.len().min(at + 8);
            bytes[at..end].fill(if random(2) == 0 { 0 } else { 0xff });
        }
        6 => bytes.extend_from_within(at..),
        7 => blockhaul_io::sleep(Duration::from_secs(random(200))).await,
        _ => return false,
    }
    true
}
