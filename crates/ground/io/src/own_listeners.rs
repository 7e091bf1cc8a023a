//! The sockets on which this process listens: a device that connects to one of them is an export of its
//! own process.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::net::SocketAddrUnix;

/// What identifies a listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListenerKey {
    /// Device and inode of a Unix socket.
    Unix(u64, u64),
    Tcp(SocketAddr),
}

static PLACES: Mutex<Vec<ListenerKey>> = Mutex::new(Vec::new());

fn places() -> MutexGuard<'static, Vec<ListenerKey>> {
    // Its state cannot be inconsistent.
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listening socket of this process, while this exists.
pub(crate) struct OwnListener(Option<ListenerKey>);

impl OwnListener {
    pub(crate) fn new(socket: impl AsFd) -> OwnListener {
        let place = ListenerKey::of(socket);
        places().extend(place);
        OwnListener(place)
    }
}

impl Drop for OwnListener {
    fn drop(&mut self) {
        let mut places = places();
        if let Some(index) = places.iter().position(|place| Some(*place) == self.0) {
            places.swap_remove(index);
        }
    }
}

impl ListenerKey {
    fn of(socket: impl AsFd) -> Option<ListenerKey> {
        let address = rustix::net::getsockname(socket).ok()?;
        if let Ok(address) = SocketAddr::try_from(address.clone()) {
            return Some(ListenerKey::Tcp(address));
        }
        let address = SocketAddrUnix::try_from(address).ok()?;
        let path = address.path_bytes()?;
        ListenerKey::at(Path::new(std::ffi::OsStr::from_bytes(path)))
    }

    fn at(path: &Path) -> Option<ListenerKey> {
        let found = std::fs::metadata(path).ok()?;
        Some(ListenerKey::Unix(found.dev(), found.ino()))
    }
}

/// Whether this process listens on the Unix socket at `path`, whatever names lead there. Blocks.
pub fn listens_on_unix(path: &Path) -> bool {
    ListenerKey::at(path).is_some_and(|place| places().contains(&place))
}

/// Whether this process listens where a connection to this address ends. Blocks.
pub fn listens_on_tcp(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    let on_port = |place: &ListenerKey| match place {
        ListenerKey::Tcp(own) if own.port() == address.port() => Some(own.ip().to_canonical()),
        _ => None,
    };
    let own: Vec<_> = places().iter().filter_map(on_port).collect();
    // A connection to no address is one to this machine; only addresses of this machine can be bound.
    let is_here = || ip.is_unspecified() || UdpSocket::bind((ip, 0)).is_ok();
    own.iter().any(|own| *own == ip || (own.is_unspecified() || ip.is_unspecified()) && is_here())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Listener;

    #[test]
    fn a_listener_is_found_by_every_name_until_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let [socket, link] = ["s", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let listener = Listener::bind_unix(&socket).unwrap();
        assert!(listens_on_unix(&socket) && listens_on_unix(&link));
        assert!(!listens_on_unix(folder.path()));
        drop(listener);
        assert!(!listens_on_unix(&socket));
        for any in ["0.0.0.0:0", "127.0.0.1:0"] {
            let listener = Listener::bind_tcp(any.parse().unwrap()).unwrap();
            let port = listener.local_tcp().unwrap().port();
            let at = |ip: &str| listens_on_tcp(SocketAddr::new(ip.parse().unwrap(), port));
            assert!(at("127.0.0.1") && at("::ffff:127.0.0.1") && at("0.0.0.0"), "{any}");
            assert_eq!(at("127.0.0.2"), any.starts_with('0'), "{any}");
            assert!(!at("192.0.2.1"), "{any}: an address of another machine");
            drop(listener);
            assert!(!at("127.0.0.1"), "{any}");
        }
    }
}
