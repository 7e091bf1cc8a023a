//! Stream sockets: Unix, TCP and vsock, non-blocking, with vectored sends and receives.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown,
    SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::context::with_worker;
use crate::driver::{FileOp, Interest};
use crate::op::{file_op, ready};
use crate::own_listeners::OwnListener;
use crate::vsock;

/// Requested size of socket buffers: two of the largest common requests (256 KiB) and their
/// headers, so that one system call can take a whole one. The kernel caps it at its own maximum.
const SOCKET_BUFFER: usize = 1 << 20;
/// Pause before another look at a connection that is not established yet, where there is no event.
const CONNECT_AGAIN: std::time::Duration = std::time::Duration::from_millis(2);
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// A connected stream socket. Belongs to the worker that uses it.
pub struct Stream(Arc<OwnedFd>, CloseNotice);

/// Behind a descriptor that is closed: its peer may become ready.
struct CloseNotice;

impl Drop for CloseNotice {
    fn drop(&mut self) {
        #[cfg(feature = "simulation")]
        crate::simulation::touch();
    }
}

impl Stream {
    /// Takes ownership of a connected socket.
    ///
    /// # Errors
    /// If the descriptor cannot be made non-blocking.
    pub fn new(fd: OwnedFd) -> io::Result<Stream> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        // Larger buffers save wakeups; if they are refused, the default works.
        let _ = sockopt::set_socket_send_buffer_size(&fd, SOCKET_BUFFER);
        let _ = sockopt::set_socket_recv_buffer_size(&fd, SOCKET_BUFFER);
        // Requests are sent whole, so waiting to fill packets only adds latency. Unix sockets
        // refuse.
        // nbd: handshake.nodelay
        let _ = sockopt::set_tcp_nodelay(&fd, true);
        Ok(Stream(Arc::new(fd), CloseNotice))
    }

    /// Whether bytes have arrived and were not received yet.
    pub fn has_more(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).is_ok_and(|bytes| bytes > 0)
    }

    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// Those of connect(2). `InvalidInput` if the path is too long.
    pub async fn connect_unix(path: &Path) -> io::Result<Stream> {
        let address = SocketAddrUnix::new(path).map_err(|_| path_too_long(path))?;
        Self::connect(AddressFamily::UNIX, &address).await
    }

    /// Connects to a TCP address.
    ///
    /// # Errors
    /// Those of connect(2).
    pub async fn connect_tcp(address: SocketAddr) -> io::Result<Stream> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        Self::connect(family, &address).await
    }

    /// Connects to a port of a virtual machine, or of the host (vsock(7)).
    ///
    /// # Errors
    /// Those of socket(2) and connect(2): the kernel may lack vsock.
    pub async fn connect_vsock(cid: u32, port: u32) -> io::Result<Stream> {
        Self::connect(AddressFamily::VSOCK, &vsock::Address { cid, port }).await
    }

    async fn connect(
        family: AddressFamily,
        address: &impl rustix::net::addr::SocketAddrArg,
    ) -> io::Result<Stream> {
        #[cfg(feature = "simulation")]
        crate::simulation::dialling().await?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        loop {
            #[cfg(feature = "simulation")]
            crate::simulation::touch();
            match rustix::net::connect(&fd, address) {
                Ok(()) | Err(rustix::io::Errno::ISCONN) => break,
                Err(
                    rustix::io::Errno::INPROGRESS
                    | rustix::io::Errno::INTR
                    | rustix::io::Errno::ALREADY,
                ) => {
                    ready(&fd, Interest::Writable).await?;
                    sockopt::socket_error(&fd)??;
                    if rustix::net::getpeername(&fd).is_ok() {
                        break;
                    }
                    // A vsock is reported as writable before it is connected.
                    crate::sleep(CONNECT_AGAIN).await;
                }
                // A Unix listener's backlog is full: there is no event to wait for, so retry.
                Err(rustix::io::Errno::AGAIN) => {
                    crate::sleep(CONNECT_AGAIN).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Stream::new(fd)
    }

    /// Receives without waiting; 0: end of the stream, `WouldBlock`: no data yet.
    pub(crate) fn try_recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        #[cfg(feature = "simulation")]
        let mut part = crate::simulation::receiving(&self.0, bufs)?;
        #[cfg(feature = "simulation")]
        let bufs = part.as_mut_slice();
        let mut control = RecvAncillaryBuffer::default();
        Ok(rustix::net::recvmsg(&self.0, bufs, &mut control, RecvFlags::DONTWAIT)?.bytes)
    }

    /// Receives at least one byte; 0 is the end of the stream.
    ///
    /// # Errors
    /// Those of recvmsg(2).
    pub async fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match self.try_recv(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready(&self.0, Interest::Readable).await?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    /// Receives into `buf[start..end]` when no data has arrived yet; returns the buffer and the
    /// number of bytes, 0 at the end of the stream. Dropping the future loses the buffer, and may
    /// lose bytes.
    pub(crate) async fn recv_later(
        &self,
        mut buf: Vec<u8>,
        start: usize,
        end: usize,
    ) -> (io::Result<usize>, Vec<u8>) {
        if with_worker(|worker| worker.driver.borrow().receives()) {
            let op = FileOp::Recv { socket: self.0.clone(), buf, start, end };
            return match file_op(op).await {
                (result, Some(FileOp::Recv { buf, .. })) => (result, buf),
                (result, None) => (result, Vec::new()),
                _ => unreachable!("drivers give back the operation they were given"),
            };
        }
        let result = match self.readable().await {
            Ok(()) => self.recv(&mut [IoSliceMut::new(&mut buf[start..end])]).await,
            Err(error) => Err(error),
        };
        (result, buf)
    }

    /// Waits until there is data to receive, or the end of the stream.
    ///
    /// # Errors
    /// Those of waiting for the socket.
    pub async fn readable(&self) -> io::Result<()> {
        ready(&self.0, Interest::Readable).await
    }

    /// Waits until the socket is writable.
    ///
    /// # Errors
    /// Those of waiting for the socket.
    pub async fn writable(&self) -> io::Result<()> {
        ready(&self.0, Interest::Writable).await
    }

    /// Sends without waiting as much as the socket takes. `more`: more data follows at once, so
    /// packets need not be sent yet.
    pub(crate) fn try_send(&self, bufs: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
        #[cfg(feature = "simulation")]
        let part = crate::simulation::sending(&self.0, bufs)?;
        #[cfg(feature = "simulation")]
        let bufs = part.as_slice();
        let mut control = SendAncillaryBuffer::new(&mut [] as &mut [MaybeUninit<u8>]);
        let mut flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        flags.set(SendFlags::MORE, more);
        loop {
            match rustix::net::sendmsg(&self.0, bufs, &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// Those of sendmsg(2). A part may be sent.
    pub async fn send_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_send(&[IoSlice::new(bytes)], false) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Shuts down both directions: wakes all tasks that wait on this socket.
    pub fn shutdown(&self) {
        self.end(Shutdown::Both);
    }

    /// Shuts down the sending direction after what was sent.
    pub fn shutdown_send(&self) {
        self.end(Shutdown::Write);
    }

    /// Shuts down the receiving direction: what has arrived can still be read.
    pub fn shutdown_receive(&self) {
        self.end(Shutdown::Read);
    }

    fn end(&self, directions: Shutdown) {
        #[cfg(feature = "simulation")]
        crate::simulation::touch();
        // Fails only if the connection has already ended.
        let _ = rustix::net::shutdown(&self.0, directions);
    }

    /// The peer's address.
    pub fn peer(&self) -> PeerAddress {
        PeerAddress(rustix::net::getpeername(&self.0).ok().flatten())
    }

    /// Whether this is TCP between two programs of one machine. Pages sent by reference cost more there than
    /// copies: the kernel receives each 64 KiB of them in the sender's time and wakes the receiver for each, and
    /// the receiver reads from pages that no cache holds.
    pub fn is_local_tcp(&self) -> bool {
        let own = PeerAddress(rustix::net::getsockname(&self.0).ok());
        match (self.peer().ip(), own.ip()) {
            (Some(peer), Some(own)) => {
                let peer = peer.to_canonical();
                peer.is_loopback() || peer == own.to_canonical()
            }
            _ => false,
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.peer())
    }
}

/// The peer's address, for messages.
#[derive(Clone)]
pub struct PeerAddress(Option<SocketAddrAny>);

impl PeerAddress {
    /// The address of a TCP client.
    pub fn ip(&self) -> Option<std::net::IpAddr> {
        SocketAddr::try_from(self.0.clone()?).ok().map(|address| address.ip())
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("a closed connection"),
            Some(address) => match SocketAddr::try_from(address.clone()) {
                Ok(address) => write!(f, "{address}"),
                Err(_) => match vsock::Address::of(address) {
                    Some(vsock::Address { cid, port }) => write!(f, "vsock:{cid}:{port}"),
                    None => f.write_str("a local client"),
                },
            },
        }
    }
}

/// Maximum time to wait for the lock of a directory, in steps of [`FOLDER_AGAIN`].
const FOLDER_TIME: Duration = Duration::from_secs(2);
/// See [`FOLDER_TIME`].
const FOLDER_AGAIN: Duration = Duration::from_millis(10);
/// Interval between two checks whether a socket is dead: its program may be about to listen.
const DEAD_AGAIN: Duration = Duration::from_millis(100);

/// As often a socket must answer to be in use: the kernel may accept connections to the socket of a killed
/// program for some time on a busy machine.
const ANSWERS: u32 = 10;

/// The same for a socket whose process has ended: either another process holds it, or the kernel is about to
/// close it. With io_uring, a work queue of the kernel does that.
const ANSWERS_OF_ENDED: u32 = 100;

/// The lock of the directory of a path; `None` if it cannot be locked.
fn lock_folder(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(folder.unwrap_or(Path::new(".")), flags, Mode::empty()).ok()?;
    let begun = crate::now();
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(fd),
            Err(Errno::WOULDBLOCK | Errno::INTR) if crate::elapsed(begun) < FOLDER_TIME => {
                std::thread::sleep(FOLDER_AGAIN);
            }
            Err(_) => return None,
        }
    }
}

/// Whether the process that made `probe`'s other end listen has ended.
fn listener_has_ended(probe: &OwnedFd) -> bool {
    let listener = sockopt::socket_peercred(probe).map(|peer| peer.pid);
    listener.is_ok_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
}

/// Whether the socket at `path` has no listener: two refused connections in a row, or [`ANSWERS`] or
/// [`ANSWERS_OF_ENDED`] that are not refused, decide. The kernel may close the socket of a killed program
/// later than it reports its end.
fn is_dead(path: &Path) -> io::Result<bool> {
    let mut inode = None;
    let mut refused = 0;
    let mut answered: u32 = 0;
    loop {
        let data = std::fs::symlink_metadata(path)?;
        // Connections to other files are refused, too.
        if !data.file_type().is_socket() {
            let text = "there is something that is no socket: choose another name";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        if *inode.get_or_insert(data.ino()) != data.ino() {
            return Ok(false);
        }
        let probe = Listener::socket(AddressFamily::UNIX)?;
        let address = SocketAddrUnix::new(path).map_err(|_| path_too_long(path))?;
        // Connections to a busy server, another kind of socket, or one of another user are not
        // refused.
        if rustix::net::connect(&probe, &address) == Err(Errno::CONNREFUSED) {
            refused += 1;
            if refused == 2 {
                return Ok(true);
            }
        } else {
            (refused, answered) = (0, answered + 1);
            let enough = if listener_has_ended(&probe) { ANSWERS_OF_ENDED } else { ANSWERS };
            if answered >= enough {
                return Ok(false);
            }
        }
        std::thread::sleep(DEAD_AGAIN);
    }
}

/// A listening socket.
pub struct Listener {
    fd: OwnedFd,
    _closing: CloseNotice,
    _own: OwnListener,
}

impl From<Listener> for OwnedFd {
    fn from(listener: Listener) -> OwnedFd {
        listener.fd
    }
}

impl Listener {
    /// Takes ownership of a listening socket (socket activation).
    ///
    /// # Errors
    /// If the descriptor cannot be made non-blocking.
    pub fn new(fd: OwnedFd) -> io::Result<Listener> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Listener::over(fd))
    }

    /// Listens on a Unix socket at `path`, which must not exist yet.
    ///
    /// # Errors
    /// Those of bind(2): `AddrInUse` if something exists at the path. `InvalidInput` if the path is too long.
    pub fn bind_unix(path: &Path) -> io::Result<Listener> {
        let address = SocketAddrUnix::new(path).map_err(|_| path_too_long(path))?;
        let fd = Self::socket(AddressFamily::UNIX)?;
        rustix::net::bind(&fd, &address)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Listener::over(fd))
    }

    /// The same, replacing a socket without a listener, as a killed server leaves behind. Blocks
    /// for up to about a second, or ten if the process that listened there has ended.
    ///
    /// # Errors
    /// `AddrInUse` if a program listens or may be about to, `AlreadyExists` if the path is not a
    /// socket: both are left alone.
    pub fn replace_unix(path: &Path) -> io::Result<Listener> {
        // Held from the check of the old socket until the new one listens, so that of two servers
        // that start at the same time neither takes the other one's socket for dead.
        let folder = lock_folder(path);
        match Self::bind_unix(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
        if folder.is_none() || !is_dead(path)? {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        std::fs::remove_file(path)?;
        Self::bind_unix(path)
    }

    /// Listens on a TCP address; port 0 takes a free one. An IPv6 address takes IPv6 only.
    ///
    /// # Errors
    /// Those of bind(2): `AddrInUse` if another socket has the port.
    pub fn bind_tcp(address: SocketAddr) -> io::Result<Listener> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let fd = Self::socket(family)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        rustix::net::bind(&fd, &address)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Listener::over(fd))
    }

    /// Listens for connections between virtual machines and their host (vsock(7)): on the context
    /// ID `cid`, or on all that this machine has.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2): the kernel may lack vsock.
    pub fn bind_vsock(cid: Option<u32>, port: u32) -> io::Result<Listener> {
        let fd = Self::socket(AddressFamily::VSOCK)?;
        rustix::net::bind(&fd, &vsock::Address { cid: cid.unwrap_or(vsock::ANY), port })?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Listener::over(fd))
    }

    fn over(fd: OwnedFd) -> Listener {
        Listener { _closing: CloseNotice, _own: OwnListener::new(&fd), fd }
    }

    fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?)
    }

    /// The TCP address in use.
    pub fn local_tcp(&self) -> Option<SocketAddr> {
        SocketAddr::try_from(rustix::net::getsockname(&self.fd).ok()?).ok()
    }

    /// Waits for a connection. The descriptor may be passed to another worker.
    ///
    /// # Errors
    /// Those of accept4(2), for example if the process has too many descriptors. The next call may succeed.
    pub async fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            #[cfg(feature = "simulation")]
            crate::simulation::touch();
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => return Ok(fd),
                Err(rustix::io::Errno::AGAIN) => ready(&self.fd, Interest::Readable).await?,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn path_too_long(path: &Path) -> io::Error {
    let text =
        format!("socket path {} is longer than the 107 bytes a Unix socket allows", path.display());
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    /// A socket as a killed server leaves it.
    fn dead(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
    }

    // nbd: handshake.nodelay
    #[test]
    fn tcp_sockets_do_not_wait_for_more() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!socket.nodelay().unwrap());
        let stream = Stream::new(socket.try_clone().unwrap().into()).unwrap();
        assert!(socket.nodelay().unwrap());
        drop(stream);
    }

    #[test]
    fn a_dead_socket_is_replaced_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        dead(&path);
        let listener = Listener::replace_unix(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        let kind = |path: &Path| Listener::replace_unix(path).err().unwrap().kind();
        assert_eq!(kind(&path), io::ErrorKind::AddrInUse, "somebody listens");
        UnixStream::connect(&path).unwrap();
        drop(listener);

        let full = UnixListener::bind(dir.path().join("full")).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let _waits = UnixStream::connect(dir.path().join("full")).unwrap();
        assert_eq!(kind(&dir.path().join("full")), io::ErrorKind::AddrInUse, "busy, not dead");

        let file = dir.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert_eq!(kind(&file), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&file).unwrap(), b"kept");
        let link = dir.path().join("link");
        dead(&dir.path().join("behind"));
        std::os::unix::fs::symlink(dir.path().join("behind"), &link).unwrap();
        assert_eq!(kind(&link), io::ErrorKind::AlreadyExists, "a link is no socket");
    }

    #[test]
    fn a_socket_whose_server_is_about_to_listen_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let fd = Listener::socket(AddressFamily::UNIX).unwrap();
        rustix::net::bind(&fd, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let other =
                scope.spawn(|| Listener::replace_unix(&path).err().map(|error| error.kind()));
            std::thread::sleep(DEAD_AGAIN / 2);
            rustix::net::listen(&fd, 1).unwrap();
            assert_eq!(other.join().unwrap(), Some(io::ErrorKind::AddrInUse));
        });
    }

    #[test]
    fn a_socket_that_answers_for_a_moment_after_its_program_has_ended_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let old = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let new = scope.spawn(|| Listener::replace_unix(&path));
            for _ in 0..3 {
                old.accept().unwrap();
            }
            drop(old);
            new.join().unwrap().unwrap();
        });
    }

    #[test]
    fn of_many_servers_that_start_at_once_one_gets_the_dead_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        dead(&path);
        let started: Vec<_> = std::thread::scope(|scope| {
            let servers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| Listener::replace_unix(&path).ok())).collect();
            servers.into_iter().filter_map(|server| server.join().unwrap()).collect()
        });
        assert_eq!(started.len(), 1);
        UnixStream::connect(&path).unwrap();
        rustix::net::accept(&started[0].fd).unwrap();
    }
}
