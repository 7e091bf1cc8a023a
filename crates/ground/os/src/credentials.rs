//! The peer of a Unix socket, and whether a process leads its session: process numbers are 0 if the
//! process is in a PID namespace that this one cannot see (pid_namespaces(7)), as between
//! containers. rustix does not allow that value.
#![expect(unsafe_code, reason = "system calls with results in memory")]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::net::{AddressFamily, sockopt};

/// The process that made a connection over a Unix socket, as it was then (SO_PEERCRED in unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process ID, unless it is in a PID namespace that this process cannot see.
    pub pid: Option<u32>,
    /// The user ID, in this process's user namespace.
    pub uid: u32,
    /// The group ID, likewise.
    pub gid: u32,
}

impl PeerCredentials {
    /// The peer of `socket`; none if this is not a Unix socket.
    pub fn of_peer(socket: impl AsFd) -> io::Result<Option<PeerCredentials>> {
        let socket = socket.as_fd();
        if sockopt::socket_domain(socket)? != AddressFamily::UNIX {
            return Ok(None);
        }
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = libc::socklen_t::try_from(size_of_val(&found)).expect("three numbers");
        // SAFETY: the pointers are to live memory with space for `len` bytes, of numbers for which
        // every value is valid.
        let status = unsafe {
            let out = (&raw mut found).cast();
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                out,
                &raw mut len,
            )
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        let pid = u32::try_from(found.pid).ok().filter(|&pid| pid != 0);
        Ok(Some(PeerCredentials { pid, uid: found.uid, gid: found.gid }))
    }
}

/// Whether this process leads its session (setsid(2)): it then has a terminal only if it opened
/// one.
pub fn leads_session() -> bool {
    // SAFETY: these calls take and return numbers.
    unsafe { libc::getsid(0) == libc::getpid() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let found = PeerCredentials::of_peer(&one).unwrap().unwrap();
        assert_eq!(found.pid, Some(std::process::id()));
        assert_eq!(found.uid, rustix::process::getuid().as_raw());
        assert_eq!(found.gid, rustix::process::getgid().as_raw());
    }

    #[test]
    fn there_are_no_credentials_over_tcp_and_none_of_a_file() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(PeerCredentials::of_peer(&listener).unwrap(), None);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(PeerCredentials::of_peer(&file).is_err());
    }
}
