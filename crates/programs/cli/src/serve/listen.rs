//! Where a server listens: Unix sockets, TCP, vsock, sockets from the service manager; what is
//! created for that is removed on exit.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use blockhaul_catalog::percent_encode;
use blockhaul_client::is_this_machine;
use blockhaul_io::Listener;
use blockhaul_os::{CleanupList, CleanupOnDrop};

use super::tls::TlsSettings;
use crate::args::{self, VsockPlace};
use crate::exit::{CommandFailure, FAILED, USAGE, plain};

/// NBD's port (its document, "Introduction").
const PORT: u16 = 10809;
/// The context ID of the machine itself (VMADDR_CID_LOCAL).
const VSOCK_LOCAL: u32 = 1;
/// First descriptor of socket activation (sd_listen_fds(3)).
const FIRST_INHERITED: i32 = 3;
/// Maximum number of inherited sockets: more indicates a wrong environment.
const INHERITED_MAX: i32 = 16;
/// Attempts to get one free port for IPv4 and IPv6 together.
const FREE_PORT_ATTEMPTS: usize = 16;

/// Sockets from the service manager (sd_listen_fds(3)); none without it.
pub fn activation() -> Result<InheritedSockets, CommandFailure> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let own = i32::try_from(std::process::id()).ok();
    if number("LISTEN_PID").is_none() || number("LISTEN_PID") != own {
        return Ok(InheritedSockets::new());
    }
    let count = number("LISTEN_FDS").unwrap_or(0);
    if !(1..=INHERITED_MAX).contains(&count) {
        let text = format!("LISTEN_FDS is not between 1 and {INHERITED_MAX}");
        return Err(wrong_environment(&text));
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let take = |fd| {
        log::debug!("socket activation: fd {fd} ({})", names.next().unwrap_or("unnamed"));
        let missing = || format!("LISTEN_FDS is {count}, but descriptor {fd} is not open");
        blockhaul_os::inherited(fd).ok_or_else(|| wrong_environment(&missing()))
    };
    (FIRST_INHERITED..FIRST_INHERITED + count).map(take).collect()
}

/// Lets the kernel end this process together with its parent.
pub fn tie_to_parent() -> Result<(), CommandFailure> {
    let signal = rustix::process::Signal::TERM;
    let tied = rustix::process::set_parent_process_death_signal(Some(signal));
    tied.map_err(|errno| {
        let why = plain(&std::io::Error::from(errno));
        CommandFailure::new(FAILED, format!("cannot watch the parent process: {why}"))
    })
}

/// Where a server should listen.
pub struct ListenConfig {
    inherited: InheritedSockets,
    unix: Vec<PathBuf>,
    /// Ports, and the addresses on which to open each of them; none for all.
    ports: Vec<u16>,
    hosts: Vec<String>,
    vsock: Vec<VsockPlace>,
    /// Exports for virtual machines, and their sockets.
    vhost: Vec<(String, PathBuf)>,
    cleanup: CleanupList,
}

/// Descriptors of inherited listening sockets.
pub type InheritedSockets = Vec<OwnedFd>;

/// Where a server listens.
pub struct BoundListeners {
    /// The sockets.
    pub listeners: Vec<Listener>,
    /// The sockets for virtual machines, and the exports that they get.
    pub vhost: Vec<(String, Listener)>,
    /// Their addresses.
    pub addresses: ListenAddresses,
    /// Removes what was created, on drop.
    pub cleanup: CleanupOnDrop,
}

/// Addresses for users and scripts.
#[derive(Debug, Default)]
pub struct ListenAddresses {
    /// The first Unix socket.
    pub unix: Option<PathBuf>,
    /// The first host and port of TCP.
    pub tcp: Option<(String, u16)>,
    /// TCP on all addresses of this machine.
    pub every_host: bool,
    /// The first vsock port, and its context ID.
    pub vsock: Option<(u32, u32)>,
    /// Ports chosen by the system.
    pub free_ports: Vec<u16>,
    /// The first socket for virtual machines.
    pub vhost: Option<PathBuf>,
    /// There is a place for NBD clients.
    pub has_nbd: bool,
}

impl ListenConfig {
    /// The addresses in the options.
    pub fn new(args: &args::ServeArgs, inherited: InheritedSockets) -> ListenConfig {
        let mut unix = args.unix.clone();
        let asked_tcp = !args.port.is_empty() || !args.ip_addr.is_empty();
        if args.run.is_some() && unix.is_empty() && !asked_tcp {
            unix.push("-".into());
        }
        let nothing = unix.is_empty()
            && inherited.is_empty()
            && args.vsock.is_empty()
            && args.vhost_places().is_empty()
            && !args.single
            && !args.waits_for_monitor();
        let mut ports = args.port.clone();
        if ports.is_empty() && (asked_tcp || nothing) {
            ports.push(PORT);
        }
        let hosts = args.ip_addr.clone();
        let vsock = args.vsock.clone();
        let vhost = args.vhost_places();
        ListenConfig {
            inherited,
            unix,
            ports,
            hosts,
            vsock,
            vhost,
            cleanup: CleanupList::default(),
        }
    }

    /// To call before this process ends in any other way.
    pub fn cleanup(&self) -> CleanupList {
        self.cleanup.clone()
    }

    /// Makes the sockets. On a worker.
    pub async fn bind(&mut self) -> Result<BoundListeners, CommandFailure> {
        let cleanup = self.cleanup.clean_on_drop();
        let mut listeners = Vec::new();
        let mut addresses = ListenAddresses::default();
        for fd in std::mem::take(&mut self.inherited) {
            let listener = Listener::new(fd);
            listeners.push(listener.map_err(|error| cannot_listen("the socket", &plain(&error)))?);
        }
        for path in &self.unix {
            let path = if path.as_os_str() == "-" {
                self.cleanup.private_dir().map_err(no_directory)?.join("s")
            } else {
                absolute(path)?
            };
            listeners.push(self.bind_unix(&path)?);
            addresses.unix.get_or_insert(path);
        }
        let hosts: Vec<_> = if self.hosts.is_empty() {
            vec![None]
        } else {
            self.hosts.drain(..).map(Some).collect()
        };
        for port in self.ports.drain(..) {
            addresses.every_host |= hosts.contains(&None);
            for host in &hosts {
                let (mut tcp, port) = bind_tcp(port, host.clone(), &mut addresses).await?;
                listeners.append(&mut tcp);
                let host = || host.clone().unwrap_or_else(|| "localhost".to_string());
                addresses.tcp.get_or_insert_with(|| (host(), port));
            }
        }
        for VsockPlace { cid, port } in self.vsock.drain(..) {
            let listener = Listener::bind_vsock(cid, port).map_err(|error| {
                let place = cid.map(|cid| format!("context {cid}, ")).unwrap_or_default();
                cannot_listen(&format!("vsock {place}port {port}"), &why_no_vsock(&error))
            })?;
            listeners.push(listener);
            addresses.vsock.get_or_insert((cid.unwrap_or(VSOCK_LOCAL), port));
        }
        addresses.has_nbd = !listeners.is_empty();
        let mut vhost = Vec::new();
        for (export, path) in &self.vhost {
            let path = absolute(path)?;
            vhost.push((export.clone(), self.bind_unix(&path)?));
            addresses.vhost.get_or_insert(path);
        }
        Ok(BoundListeners { listeners, vhost, addresses, cleanup })
    }

    pub fn bind_unix(&self, path: &Path) -> Result<Listener, CommandFailure> {
        let shown = path.display();
        let listener = Listener::replace_unix(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => cannot_listen(
                &format!("Unix socket {shown}"),
                "another program listens there: choose another path, or end that program",
            ),
            std::io::ErrorKind::NotFound => cannot_listen(
                &format!("Unix socket {shown}"),
                &format!("{}: create its directory first", plain(&error)),
            ),
            _ => cannot_listen(&format!("Unix socket {shown}"), &plain(&error)),
        })?;
        self.cleanup.remember_socket(path);
        Ok(listener)
    }
}

/// The absolute path of a socket: a background server leaves the current directory.
fn absolute(path: &Path) -> Result<PathBuf, CommandFailure> {
    std::path::absolute(path)
        .map_err(|error| cannot_listen(&path.display().to_string(), &plain(&error)))
}

/// Listens on all addresses of a host, or on all there are. Returns the port.
pub async fn bind_tcp(
    port: u16,
    host: Option<String>,
    addresses: &mut ListenAddresses,
) -> Result<(Vec<Listener>, u16), CommandFailure> {
    let found = match host {
        None => vec![IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)],
        Some(host) => {
            let name = host.clone();
            let looked_up = blockhaul_io::offload(move || {
                (name.as_str(), 0).to_socket_addrs().map(Vec::from_iter)
            })
            .await;
            let looked_up = looked_up.map_err(|lost| cannot_listen(&host, &lost.to_string()))?;
            let found = looked_up.map_err(|error| cannot_listen(&host, &plain(&error)))?;
            let mut found: Vec<IpAddr> = found.into_iter().map(|address| address.ip()).collect();
            found.dedup();
            found
        }
    };
    for attempt in 1.. {
        match bind_all(&found, port) {
            Ok((listeners, bound)) => {
                addresses.free_ports.extend((port == 0).then_some(bound));
                return Ok((listeners, bound));
            }
            // The port that was free for one family may be in use for the other.
            Err((_, error))
                if port == 0
                    && error.kind() == std::io::ErrorKind::AddrInUse
                    && attempt < FREE_PORT_ATTEMPTS => {}
            Err((address, error)) => {
                let why = match error.kind() {
                    std::io::ErrorKind::AddrInUse => {
                        "another program uses this port: choose another one with -p, or 0 for a free one"
                            .to_string()
                    }
                    std::io::ErrorKind::AddrNotAvailable => {
                        format!("{}: use an address of this machine", plain(&error))
                    }
                    std::io::ErrorKind::PermissionDenied => {
                        format!("{}: choose a port from 1024 on, or serve as root", plain(&error))
                    }
                    _ => plain(&error),
                };
                return Err(cannot_listen(&format!("{address} port {port}"), &why));
            }
        }
    }
    Err(cannot_listen("TCP", "no port is free"))
}

/// Why vsock is not available, and a remedy.
fn why_no_vsock(error: &std::io::Error) -> String {
    let advice = match error.raw_os_error() {
        // EAFNOSUPPORT.
        Some(97) => {
            ": vsock is not available; load the kernel module vhost_vsock (on the host) or vsock_loopback"
        }
        // EADDRNOTAVAIL.
        Some(99) => ": this context ID is not that of this machine; leave it out",
        // EADDRINUSE.
        Some(98) => ": choose another port",
        _ => "",
    };
    format!("{}{advice}", plain(error))
}

/// Binds one port on all these addresses. On a machine without IPv6 (or IPv4) the other suffices.
fn bind_all(
    addresses: &[IpAddr],
    wanted: u16,
) -> Result<(Vec<Listener>, u16), (IpAddr, std::io::Error)> {
    let mut listeners = Vec::new();
    let mut port = wanted;
    let mut refused = None;
    for &address in addresses {
        match Listener::bind_tcp(SocketAddr::new(address, port)) {
            Ok(listener) => {
                port = listener.local_tcp().map_or(port, |local| local.port());
                listeners.push(listener);
            }
            Err(error) => {
                let absent = matches!(
                    error.raw_os_error(),
                    // EAFNOSUPPORT, EADDRNOTAVAIL.
                    Some(97 | 99)
                );
                if !absent {
                    return Err((address, error));
                }
                refused.get_or_insert((address, error));
            }
        }
    }
    match (listeners.is_empty(), refused) {
        (true, Some(refused)) => Err(refused),
        _ => Ok((listeners, port)),
    }
}

impl BoundListeners {
    /// The URI of an export, in nbdkit's form.
    pub fn uri(&self, export: &str, tls: &TlsSettings) -> String {
        let scheme = if tls.is_required() { "nbds" } else { "nbd" };
        let mut uri = String::new();
        match (&self.addresses.unix, &self.addresses.tcp, self.addresses.vsock) {
            (None, None, Some((cid, port))) => {
                uri += &format!("{scheme}+vsock://{cid}");
                if port != u32::from(PORT) {
                    uri += &format!(":{port}");
                }
            }
            (Some(_), _, _) | (None, None, None) => uri += &format!("{scheme}+unix://"),
            (None, Some((host, port)), _) => {
                uri += &format!("{scheme}://");
                // An address of IPv6 has colons.
                if host.contains(':') {
                    uri += &format!("[{host}]");
                } else {
                    uri += host;
                }
                if *port != PORT {
                    uri += &format!(":{port}");
                }
            }
        }
        if !export.is_empty() {
            uri += &format!("/{}", percent_encode(export.as_bytes()));
        }
        let socket = self.addresses.unix.as_deref().map(|path| ("socket", path));
        let tls = if tls.is_required() { tls.parameters() } else { Vec::new() };
        for ((name, path), index) in socket.into_iter().chain(tls).zip(0..) {
            let separator = if index == 0 { '?' } else { '&' };
            uri += &format!(
                "{separator}{name}={}",
                percent_encode(path.as_os_str().as_encoded_bytes())
            );
        }
        uri
    }

    /// The URI of an export for clients that send an HTTP request first.
    pub fn http_uri(&self, export: &str, tls: &TlsSettings) -> String {
        let scheme = if tls.is_required() { "nbd+https" } else { "nbd+http" };
        let place = match (&self.addresses.unix, &self.addresses.tcp) {
            (None, Some((host, port))) if host.contains(':') => format!("[{host}]:{port}"),
            (None, Some((host, port))) => format!("{host}:{port}"),
            _ => String::new(),
        };
        let mut parameters = Vec::new();
        if !export.is_empty() {
            parameters.push(("export", export.as_bytes()));
        }
        let socket = self.addresses.unix.as_deref().map(|path| ("socket", path));
        let tls = if tls.is_required() { tls.parameters() } else { Vec::new() };
        let paths = socket.into_iter().chain(tls);
        parameters.extend(paths.map(|(name, path)| (name, path.as_os_str().as_encoded_bytes())));
        let told: Vec<_> = parameters
            .iter()
            .map(|(name, value)| format!("{name}={}", percent_encode(value)))
            .collect();
        let separator = if told.is_empty() { "" } else { "?" };
        format!("{scheme}://{place}/{separator}{}", told.join("&"))
    }
}

impl ListenAddresses {
    /// Who may connect, and with what, for the line that a server prints when it is ready.
    pub fn audience(&self, tls: &TlsSettings) -> String {
        let secured = tls.audience();
        match &self.tcp {
            Some((host, _)) if is_this_machine(host) && !self.every_host => {
                format!("to this machine, {secured}")
            }
            Some(_) if tls.is_required() => format!("to every host that reaches it, {secured}"),
            Some(_) => format!(
                "to every host that reaches it, {secured}; limit that with -i ADDRESS, -U SOCKET or \
                 --tls-psk FILE"
            ),
            None if self.vsock.is_some() => format!("to virtual machines, {secured}"),
            None => format!("to users with access to the socket, {secured}"),
        }
    }

    /// Variables for `--run`, as nbdkit names them.
    pub fn variables(&self, export: &str, uri: &str) -> Vec<(&'static str, OsString)> {
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default().into_os_string();
        let port = self.tcp.as_ref().map(|(_, port)| port.to_string());
        vec![
            ("uri", uri.into()),
            ("nbd", uri.into()),
            ("exportname", export.into()),
            ("port", port.unwrap_or_default().into()),
            ("unixsocket", path(&self.unix)),
            ("vhostsocket", path(&self.vhost)),
        ]
    }
}

fn no_directory(error: std::io::Error) -> CommandFailure {
    let base = std::env::temp_dir();
    let text = format!("cannot make a directory in {}: {}", base.display(), plain(&error));
    CommandFailure::new(FAILED, text)
}

/// A failure to listen: the arguments are valid, but the system refuses.
fn cannot_listen(place: &str, why: &str) -> CommandFailure {
    CommandFailure::new(crate::exit::OPEN, format!("cannot listen on {place}: {why}"))
}

/// A wrong environment for socket activation.
fn wrong_environment(text: &str) -> CommandFailure {
    CommandFailure::new(USAGE, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening(unix: Option<&str>, tcp: Option<(&str, u16)>) -> BoundListeners {
        let tcp = tcp.map(|(host, port)| (host.to_string(), port));
        let unix = unix.map(PathBuf::from);
        let addresses = ListenAddresses { unix, tcp, ..ListenAddresses::default() };
        let cleanup = CleanupList::default().clean_on_drop();
        BoundListeners { listeners: Vec::new(), vhost: Vec::new(), addresses, cleanup }
    }

    #[test]
    fn uris_have_nbdkits_form() {
        let secured = |keys: Option<&str>| {
            TlsSettings::new(&crate::args::serve::ServeTls {
                tls: None,
                tls_certificates: None,
                tls_psk: keys.map(PathBuf::from),
                tls_verify_peer: false,
                tls_records: None,
            })
            .unwrap()
        };
        let off = secured(None);
        let keys = secured(Some("/k&k"));
        let unix = Some("/r/s");
        let tcp = Some(("localhost", 10809));
        assert_eq!(listening(unix, None).uri("", &off), "nbd+unix://?socket=/r/s");
        assert_eq!(
            listening(Some("/r d/s"), Some(("h", 1))).uri("a b/c", &off),
            "nbd+unix:///a%20b/c?socket=/r%20d/s"
        );
        assert_eq!(listening(None, tcp).uri("", &off), "nbd://localhost");
        assert_eq!(listening(None, Some(("::1", 2))).uri("x", &off), "nbd://[::1]:2/x");
        assert_eq!(
            listening(unix, None).uri("", &keys),
            "nbds+unix://?socket=/r/s&tls-psk-file=/k%26k"
        );
        assert_eq!(listening(None, tcp).uri("", &keys), "nbds://localhost?tls-psk-file=/k%26k");
        assert_eq!(listening(None, tcp).http_uri("", &off), "nbd+http://localhost:10809/");
        assert_eq!(
            listening(None, Some(("::1", 2))).http_uri("x", &off),
            "nbd+http://[::1]:2/?export=x"
        );
        assert_eq!(
            listening(unix, None).http_uri("a b", &keys),
            "nbd+https:///?export=a%20b&socket=/r/s&tls-psk-file=/k%26k"
        );
    }
}
