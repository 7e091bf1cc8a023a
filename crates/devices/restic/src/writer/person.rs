//! Host and user that locks, keys and snapshots name.

use rustix::process::{getgid, getuid};
use rustix::system::uname;

/// A user on a host.
#[derive(Debug, Clone)]
pub(crate) struct Person {
    pub(crate) host: String,
    pub(crate) user: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Person {
    /// The user of this process on this machine.
    pub(crate) fn here() -> Person {
        let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
        let host = uname().nodename().to_string_lossy().into_owned();
        let named = ["USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
        let user = named.filter(|_| uid != 0);
        let user = user.unwrap_or_else(|| if uid == 0 { "root".into() } else { uid.to_string() });
        Person { host, user, uid, gid }
    }
}
