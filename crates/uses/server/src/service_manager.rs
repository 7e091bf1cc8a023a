//! Messages to a service manager (sd_notify(3)): ready, reloading, stopping, alive.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_io::plain;
use rustix::time::{ClockId, clock_gettime};

/// Maximum number of messages for a service manager that does not read; beyond, the second oldest
/// is dropped.
const WAITING_MAX: usize = 16;

/// The connection to the service manager, if there is one.
#[derive(Clone, Default)]
pub struct ServiceNotifier(Option<Arc<NotifySocket>>);

struct NotifySocket {
    address: SocketAddr,
    waiting: Mutex<NotifyQueue>,
}

/// Messages that the service manager has not received yet.
#[derive(Default)]
struct NotifyQueue {
    texts: VecDeque<String>,
    /// A thread is sending them.
    sending: bool,
    /// The problem has been logged.
    complained: bool,
}

impl ServiceNotifier {
    /// The environment variable that names the socket of the service manager. Children must not
    /// inherit it.
    pub const VARIABLE: &str = "NOTIFY_SOCKET";

    /// The connection that the environment names.
    pub fn new() -> ServiceNotifier {
        let Some(place) = std::env::var_os(Self::VARIABLE).filter(|place| !place.is_empty()) else {
            return ServiceNotifier(None);
        };
        let address = match place.as_encoded_bytes().split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&place),
        };
        if let Err(error) = &address {
            let place = place.display();
            let why = plain(error);
            log::warn!("cannot notify the service manager at {}={place}: {why}", Self::VARIABLE);
        }
        address.map_or(ServiceNotifier(None), ServiceNotifier::to)
    }

    fn to(address: SocketAddr) -> ServiceNotifier {
        ServiceNotifier(Some(Arc::new(NotifySocket { address, waiting: Mutex::default() })))
    }

    /// The server is ready, or has reloaded.
    pub fn ready(&self, status: &str) {
        let pid = std::process::id();
        self.say(&format!("READY=1\nMAINPID={pid}\nSTATUS={}", line(status)));
    }

    /// Files are being reloaded; [`ServiceNotifier::ready`] follows.
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
        self.say(ALIVE);
    }

    /// How often to report that the server is alive: half of the watchdog's timeout.
    pub fn interval(&self) -> Option<Duration> {
        self.0.as_ref()?;
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let own = u64::from(std::process::id());
        let meant = number("WATCHDOG_PID").is_none_or(|pid| pid == own);
        let micros = number("WATCHDOG_USEC").filter(|&micros| micros > 0 && meant)?;
        Some(Duration::from_micros(micros / 2))
    }

    fn say(&self, text: &str) {
        if let Some(way) = &self.0 {
            NotifySocket::say(way, text);
        }
    }
}

/// The watchdog message.
const ALIVE: &str = "WATCHDOG=1";

impl NotifySocket {
    /// Sends a message without waiting: a worker must not block if the service manager does not
    /// read. What cannot be sent at once is sent later, in order: a server that is never ready
    /// would be killed.
    fn say(self: &Arc<Self>, text: &str) {
        let mut waiting = self.waiting();
        if waiting.sending {
            // A late watchdog message is useless.
            if text != ALIVE {
                waiting.texts.push_back(text.to_string());
                // The first may be the ready message.
                if waiting.texts.len() > WAITING_MAX {
                    waiting.texts.remove(1);
                }
            }
            return;
        }
        match self.send(text, false) {
            Ok(()) => waiting.complained = false,
            Err(error) if error.kind() == ErrorKind::WouldBlock && text != ALIVE => {
                waiting.complain("it does not read; the message is sent when it does");
                waiting.texts.push_back(text.to_string());
                let way = self.clone();
                let thread = std::thread::Builder::new().name("notify".into());
                waiting.sending = thread.spawn(move || way.send_waiting()).is_ok();
            }
            Err(error) => waiting.complain(&plain(&error)),
        }
    }

    /// Sends the waiting messages, however long that takes.
    fn send_waiting(&self) {
        loop {
            let mut waiting = self.waiting();
            let Some(text) = waiting.texts.pop_front() else {
                (waiting.sending, waiting.complained) = (false, false);
                return;
            };
            drop(waiting);
            if let Err(error) = self.send(&text, true) {
                log::warn!("cannot notify the service manager: {}", plain(&error));
            }
        }
    }

    fn send(&self, text: &str, waits: bool) -> std::io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(!waits)?;
        socket.send_to_addr(text.as_bytes(), &self.address).map(drop)
    }

    fn waiting(&self) -> MutexGuard<'_, NotifyQueue> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NotifyQueue {
    /// Logs the problem, once until it works again.
    fn complain(&mut self, why: &str) {
        if !std::mem::replace(&mut self.complained, true) {
            log::warn!("cannot notify the service manager: {why}");
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
            let notify = ServiceNotifier::to(place);
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
        // Without a service manager, nothing fails.
        ServiceNotifier::default().ready("x");
    }

    #[test]
    fn a_manager_that_does_not_read_is_told_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let manager = UnixDatagram::bind(&path).unwrap();
        let mut full = 0;
        let mut fillers = Vec::new();
        // A sender has a limit of its own: the receiver is full when a new one cannot send anything.
        loop {
            let fill = UnixDatagram::unbound().unwrap();
            fill.set_nonblocking(true).unwrap();
            let before = full;
            while fill.send_to(b"x", &path).is_ok() {
                full += 1;
            }
            fillers.push(fill);
            if full == before {
                break;
            }
        }
        let notify = ServiceNotifier::to(SocketAddr::from_pathname(&path).unwrap());
        // It would wait here for ever.
        notify.ready("a");
        let waiting = || notify.0.as_ref().unwrap().waiting();
        // The thread has taken it.
        while !waiting().texts.is_empty() {
            std::thread::yield_now();
        }
        notify.alive();
        (0..2 * WAITING_MAX).for_each(|nth| notify.status(&nth.to_string()));
        notify.stopping("b");
        let mut said = [0; 256];
        let mut heard = || {
            let len = manager.recv(&mut said).unwrap();
            String::from_utf8(said[..len].to_vec()).unwrap()
        };
        (0..full).for_each(|_| assert_eq!(heard(), "x"));
        assert!(heard().starts_with("READY=1\n"));
        let rest: Vec<_> = (0..WAITING_MAX).map(|_| heard()).collect();
        assert_eq!(rest.last().unwrap(), "STOPPING=1\nSTATUS=b");
        // From then on as before.
        while waiting().sending {
            std::thread::yield_now();
        }
        notify.alive();
        assert_eq!(heard(), ALIVE);
    }
}
