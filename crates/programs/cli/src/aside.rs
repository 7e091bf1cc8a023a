//! Small servers beside the main work: a listener, and a thread for each of a few peers. For figures
//! (`metrics`) and for control (`serve::control`).

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two attempts to accept a peer after an error, such as too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// A socket to listen on.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

/// A connection of either kind.
pub trait Peer: Read + Write + Send {
    /// Bounds the next reads and writes.
    fn patience(&self, left: Duration) -> std::io::Result<()>;
}

impl Peer for std::net::TcpStream {
    fn patience(&self, left: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(left)).and_then(|()| self.set_write_timeout(Some(left)))
    }
}

impl Peer for UnixStream {
    fn patience(&self, left: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(left)).and_then(|()| self.set_write_timeout(Some(left)))
    }
}

impl Listener {
    /// Listens on an address.
    pub fn tcp(address: SocketAddr) -> std::io::Result<Listener> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Listener::Tcp(listener))
    }

    /// Listens on a Unix socket; as [`blockhaul_io::Listener::replace_unix`].
    pub fn unix(path: &Path) -> std::io::Result<Listener> {
        Ok(Listener::Unix(OwnedFd::from(blockhaul_io::Listener::replace_unix(path)?).into()))
    }

    fn accept(&self) -> std::io::Result<Box<dyn Peer>> {
        Ok(match self {
            Listener::Tcp(listener) => {
                let (peer, _) = listener.accept()?;
                peer.set_nonblocking(false)?;
                Box::new(peer)
            }
            Listener::Unix(listener) => {
                let (peer, _) = listener.accept()?;
                peer.set_nonblocking(false)?;
                Box::new(peer)
            }
        })
    }

    /// Serves `most` peers at a time, each on a thread of its own; more are closed at once.
    pub fn serve<F>(self, name: &'static str, most: usize, attend: F) -> std::io::Result<Serving>
    where
        F: Fn(&mut dyn Peer) + Send + Sync + 'static,
    {
        let (stop, stopped) = UnixStream::pair()?;
        let attend = Arc::new(attend);
        let work = move || {
            let busy = Arc::new(AtomicUsize::new(0));
            while self.wait_unless(&stopped) {
                let mut peer = match self.accept() {
                    Ok(peer) => peer,
                    // Another process has the peer, or it has gone.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Err(_) => {
                        std::thread::sleep(ACCEPT_AGAIN);
                        continue;
                    }
                };
                if busy.fetch_add(1, Ordering::Relaxed) >= most {
                    busy.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (attend, ended) = (attend.clone(), busy.clone());
                let attending = std::thread::Builder::new().name(name.into()).spawn(move || {
                    attend(&mut *peer);
                    ended.fetch_sub(1, Ordering::Relaxed);
                });
                if attending.is_err() {
                    busy.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(Serving { stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for a peer; false when the other end of `stopped` is closed.
    fn wait_unless(&self, stopped: &UnixStream) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let listener = match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        };
        let mut either = [
            PollFd::from_borrowed_fd(listener, PollFlags::IN),
            PollFd::new(stopped, PollFlags::IN),
        ];
        // An interruption looks like a peer that has gone.
        let _ = poll(&mut either, None);
        either[1].revents().is_empty()
    }
}

/// Accepts peers until it is dropped; those that are there are not waited for.
pub struct Serving {
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It panics in no case that is known, and the command is over in any.
            let _ = thread.join();
        }
    }
}
