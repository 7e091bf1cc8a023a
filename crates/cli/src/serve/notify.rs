//! What a service manager is told (sd_notify(3)): ready, reloading, stopping, alive.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::exit::plain;

/// The variable that names the socket of the service manager. Children must not inherit it.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// The way to the service manager, if there is one.
#[derive(Clone, Default)]
pub struct Notify(Option<SocketAddr>);

impl Notify {
    /// As the environment says.
    pub fn new() -> Notify {
        let Some(place) = std::env::var_os(VARIABLE).filter(|place| !place.is_empty()) else {
            return Notify(None);
        };
        let address = match place.as_encoded_bytes().split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&place),
        };
        if let Err(error) = &address {
            let (place, why) = (place.display(), plain(error));
            log::warn!("cannot tell the service manager anything at {VARIABLE}={place}: {why}");
        }
        Notify(address.ok())
    }

    /// The server is ready, or has reloaded.
    pub fn ready(&self, status: &str) {
        let pid = std::process::id();
        self.say(&format!("READY=1\nMAINPID={pid}\nSTATUS={}", line(status)));
    }

    /// Files are read again; [`Notify::ready`] follows.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
        let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or_default();
        let micros = seconds.saturating_mul(1_000_000).saturating_add(nanoseconds / 1000);
        self.say(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// What the server is doing.
    pub fn status(&self, status: &str) {
        self.say(&format!("STATUS={}", line(status)));
    }

    /// The server ends.
    pub fn stopping(&self, status: &str) {
        self.say(&format!("STOPPING=1\nSTATUS={}", line(status)));
    }

    /// The server is alive.
    pub fn alive(&self) {
        self.say("WATCHDOG=1");
    }

    /// How often the service manager wants to hear that the server is alive: half of what it waits.
    pub fn interval(&self) -> Option<Duration> {
        self.0.as_ref()?;
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let own = u64::from(std::process::id());
        let meant = number("WATCHDOG_PID").is_none_or(|pid| pid == own);
        let micros = number("WATCHDOG_USEC").filter(|&micros| micros > 0 && meant)?;
        Some(Duration::from_micros(micros / 2))
    }

    fn say(&self, text: &str) {
        let Some(address) = &self.0 else { return };
        let sent = UnixDatagram::unbound()
            .and_then(|socket| socket.send_to_addr(text.as_bytes(), address));
        if let Err(error) = sent {
            log::warn!("cannot tell the service manager anything: {}", plain(&error));
        }
    }
}

/// A variable's value is one line.
fn line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_sockets_hear_one_variable_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let name = format!("blockhaul-test-{}", std::process::id());
        let places = [
            SocketAddr::from_pathname(&path).unwrap(),
            SocketAddr::from_abstract_name(name).unwrap(),
        ];
        for place in places {
            let manager = UnixDatagram::bind_addr(&place).unwrap();
            let notify = Notify(Some(place));
            notify.stopping("two\nlines");
            notify.reloading();
            let mut said = [0; 256];
            let len = manager.recv(&mut said).unwrap();
            assert_eq!(&said[..len], b"STOPPING=1\nSTATUS=two lines");
            let len = manager.recv(&mut said).unwrap();
            let text = std::str::from_utf8(&said[..len]).unwrap();
            let micros = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
            assert!(micros.parse::<u64>().unwrap() > 0, "{text}");
        }
        // Nobody there is no reason to fail.
        Notify::default().ready("x");
    }
}
