//! Metrics for Prometheus: a page that is served over HTTP/1.1 while a command runs.
//!
//! Any client that reaches the address can read it, without a password: therefore only addresses of
//! this machine, and Unix sockets. One page, few connections, small requests, short timeouts: a
//! slow, greedy or broken peer occupies one of a few places for a few seconds.

use std::fmt::Write as _;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_io::{Listener, Remote, Stream};

use crate::aside::{self, Serving};
use crate::exit::{self, Failure, plain};

/// Where the page is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A loopback address and port; port 0 takes a free one.
    Tcp(SocketAddr),
    /// A Unix socket, removed on exit.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: requires a path, as unix:PATH".to_string()),
                path => Ok(Address::Unix(path.into())),
            };
        }
        let found = text.to_socket_addrs().map_err(|_| {
            format!("{text:?} is neither HOST:PORT, as localhost:9100, nor unix:PATH")
        })?;
        // Of a name's addresses, as of localhost, the first is sufficient.
        found.into_iter().find(|address| address.ip().is_loopback()).map(Address::Tcp).ok_or_else(
            || {
                format!(
                    "{text:?} is not a loopback address (127.0.0.1, ::1, localhost): use a proxy to serve \
                     the metrics to other machines"
                )
            },
        )
    }
}

impl Address {
    /// The same address for a process that leaves the current directory.
    pub fn absolute(self) -> std::io::Result<Address> {
        match self {
            Address::Unix(path) => std::path::absolute(path).map(Address::Unix),
            tcp => Ok(tcp),
        }
    }
}

/// Makes the page.
pub type Page = Arc<dyn Fn() -> String + Send + Sync>;

/// Longer requests are refused: those of Prometheus and browsers are much shorter.
const REQUEST_MAX: usize = 8 << 10;
/// Maximum time for a request including its reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of connections; more are closed at once.
const CONNECTIONS_MAX: usize = 8;

/// Serves a page until it is dropped.
pub struct Server {
    serving: Option<Serving>,
    address: Address,
}

impl Server {
    /// Listens, and replies in tasks of a worker.
    pub fn start(address: &Address, page: Page, worker: &Remote) -> Result<Server, Failure> {
        let cannot = |error: std::io::Error| {
            let text = format!("--metrics: cannot listen on {address}: {}", plain(&error));
            Failure::new(exit::FAILED, text)
        };
        let (listener, address) = bind(address).map_err(cannot)?;
        let attend = move |peer: Rc<Stream>| {
            let page = page.clone();
            async move {
                // A slow or disconnected peer gets no reply.
                let _ = blockhaul_io::timeout(PATIENCE, answer(&peer, page)).await;
            }
        };
        let serving = aside::serve(listener, worker, CONNECTIONS_MAX, attend);
        Ok(Server { serving: Some(serving), address })
    }

    /// The address in use, with the actual port.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

/// The socket, and its address with the actual port.
fn bind(address: &Address) -> std::io::Result<(Listener, Address)> {
    Ok(match address {
        Address::Tcp(wanted) => {
            let listener = Listener::bind_tcp(*wanted)?;
            let taken = Address::Tcp(listener.local_tcp().unwrap_or(*wanted));
            (listener, taken)
        }
        Address::Unix(path) => (Listener::replace_unix(path)?, address.clone()),
    })
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "{address}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving = None;
        if let Address::Unix(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Reads a request and replies to it.
async fn answer(peer: &Stream, page: Page) -> std::io::Result<()> {
    let mut request = Vec::new();
    let complete = loop {
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            request.truncate(end);
            break true;
        }
        if request.len() >= REQUEST_MAX {
            break false;
        }
        if !aside::receive(peer, &mut request).await? {
            return Ok(());
        }
    };
    // A page for many clients takes long: not on the worker.
    let text = blockhaul_io::offload(move || response(&request, complete, &page)).await;
    match text {
        Ok(text) => peer.send_all(text.as_bytes()).await,
        Err(lost) => Err(std::io::Error::other(lost)),
    }
}

/// The whole reply to a request, or to the beginning of one that is too long.
fn response(request: &[u8], complete: bool, page: &Page) -> String {
    let (status, head, body) = if complete {
        reply(request, page)
    } else {
        ("431 Request Header Fields Too Large", false, String::new())
    };
    let mut text = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    let kind = if status.starts_with("200") { "; version=0.0.4" } else { "" };
    let _ = write!(text, "Content-Type: text/plain{kind}; charset=utf-8\r\n");
    if status.starts_with("405") {
        text += "Allow: GET, HEAD\r\n";
    }
    let body = if body.is_empty() { format!("{status}\n") } else { body };
    let _ = write!(text, "Content-Length: {}\r\n\r\n", body.len());
    if !head {
        text += &body;
    }
    text
}

/// Status, whether only the head is requested, and the body.
fn reply(request: &[u8], page: &Page) -> (&'static str, bool, String) {
    const BAD: (&str, bool, String) = ("400 Bad Request", false, String::new());
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return BAD };
    let words: Vec<_> = line.split(' ').collect();
    let [method, target, version] = words[..] else { return BAD };
    if !version.starts_with("HTTP/1.") || target.is_empty() {
        return BAD;
    }
    let head = method == "HEAD";
    if !head && method != "GET" {
        return ("405 Method Not Allowed", false, String::new());
    }
    // The absolute form of a target, which proxies send, has the path after its host.
    let path = target
        .strip_prefix("http://")
        .map_or(target, |rest| rest.find('/').map_or("/", |start| &rest[start..]));
    match path.split('?').next() {
        Some("/" | "/metrics") => ("200 OK", head, page()),
        _ => ("404 Not Found", head, String::new()),
    }
}

/// Writes metrics in Prometheus' text format.
#[derive(Debug, Default)]
pub struct Figures {
    text: String,
    last: String,
}

impl Figures {
    /// Adds a metric. `kind` is counter or gauge; metrics of one name must be consecutive.
    pub fn add(&mut self, name: &str, kind: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        self.head(name, kind, help);
        self.line(name, labels, value);
    }

    /// Adds a histogram: counts per upper bound in `bounds`, and above; and the sum.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        labels: &[(&str, &str)],
        (bounds, classes, sum): (&[f64], &[u64], f64),
    ) {
        self.head(name, "histogram", help);
        let mut count = 0;
        for (index, class) in classes.iter().enumerate() {
            count += class;
            let bound = bounds.get(index).map_or("+Inf".to_string(), f64::to_string);
            let mut labels = labels.to_vec();
            labels.push(("le", &bound));
            self.line(&format!("{name}_bucket"), &labels, count as f64);
        }
        self.line(&format!("{name}_sum"), labels, sum);
        self.line(&format!("{name}_count"), labels, count as f64);
    }

    /// The text.
    pub fn finish(self) -> String {
        self.text
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        if self.last != name {
            let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            self.last = name.to_string();
        }
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.text += name;
        let labels: Vec<_> =
            labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        if !labels.is_empty() {
            let _ = write!(self.text, "{{{}}}", labels.join(","));
        }
        let _ = writeln!(self.text, " {value}");
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;
    use std::os::unix::net::UnixListener;

    use std::time::Instant;

    use blockhaul_io::{Config, Runtime};

    use super::*;

    /// One worker, the minimum of every command.
    fn runtime() -> Runtime {
        Runtime::start(&Config { workers: 1, ..Config::default() }).unwrap()
    }

    /// Interval of checks for what another thread has done.
    const LOOK: Duration = Duration::from_millis(50);

    fn server() -> (Runtime, Server, SocketAddr) {
        let (runtime, address) = (runtime(), "127.0.0.1:0".parse().unwrap());
        let page: Page = Arc::new(|| "up 1\n".to_string());
        let server = Server::start(&address, page, &runtime.remote()).unwrap();
        let Address::Tcp(address) = *server.address() else { panic!("{}", server.address()) };
        (runtime, server, address)
    }

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut peer = TcpStream::connect(address).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // The test is about peers that close early.
        let _ = peer.write_all(request);
        let mut answer = String::new();
        let _ = peer.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn addresses_are_of_this_machine() {
        assert_eq!("127.0.0.1:9".parse(), Ok(Address::Tcp("127.0.0.1:9".parse().unwrap())));
        assert_eq!("[::1]:9".parse(), Ok(Address::Tcp("[::1]:9".parse().unwrap())));
        assert_eq!("unix:/a:b".parse(), Ok(Address::Unix("/a:b".into())));
        for wrong in ["", "9100", "127.0.0.1", "unix:", "0.0.0.0:9", "192.0.2.1:80", "[::]:1"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_page_and_an_answer_to_everything_else() {
        let (_runtime, _server, address) = server();
        let page = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\n\r\nup 1\n"),
            "{page}"
        );
        assert!(page.contains("Content-Length: 5\r\n"), "{page}");
        assert!(page.contains("text/plain; version=0.0.4"), "{page}");
        let head = ask(address, b"HEAD / HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 5\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        let long = [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 2 * REQUEST_MAX]].concat();
        for (request, status) in [
            (b"GET /other HTTP/1.1\r\n\r\n".as_slice(), "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET / SPDY/9\r\n\r\n", "400"),
            (b"\xff\xfe\r\n\r\n", "400"),
            (b"\r\n\r\n", "400"),
            (b"GET  HTTP/1.1\r\n\r\n", "400"),
            (b"GET http://host/metrics?x HTTP/1.1\r\n\r\n", "200"),
        ] {
            let answer = ask(address, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
        }
        let answer = ask(address, &long);
        // The rest of it may be in transit when the connection is closed, which discards the reply.
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }

    #[test]
    fn the_slow_and_the_many_do_not_keep_others_out_for_long() {
        let (runtime, server, address) = server();
        let idle: Vec<_> =
            (0..CONNECTIONS_MAX + 3).map(|_| TcpStream::connect(address).unwrap()).collect();
        // Other tasks of the worker do not wait for them.
        let worked = Instant::now();
        runtime.block_on(|| async { blockhaul_io::sleep(Duration::from_millis(1)).await });
        assert!(worked.elapsed() < PATIENCE, "the worker is free");
        let began = Instant::now();
        loop {
            if ask(address, b"GET / HTTP/1.1\r\n\r\n").contains("200 OK") {
                break;
            }
            assert!(began.elapsed() < 20 * PATIENCE, "patience with the idle ends");
            std::thread::sleep(LOOK);
        }
        drop(idle);
        drop(server);
        // A process started by another test at this moment has the listener, too, until it execs.
        let began = Instant::now();
        while TcpStream::connect(address).is_ok() {
            assert!(began.elapsed() < 20 * PATIENCE, "closed");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn sockets_are_removed_and_left_ones_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        drop(UnixListener::bind(&path).unwrap());
        // A process started by another test at this moment has the listener, too, until it execs.
        let began = Instant::now();
        while std::os::unix::net::UnixStream::connect(&path).is_ok() {
            assert!(began.elapsed() < 20 * PATIENCE, "nobody listens any more");
            std::thread::sleep(LOOK);
        }
        let address = Address::Unix(path.clone());
        let page: Page = Arc::new(String::new);
        let runtime = runtime();
        let server = Server::start(&address, page.clone(), &runtime.remote()).unwrap();
        assert!(Server::start(&address, page, &runtime.remote()).is_err(), "in use");
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::write(&path, "precious").unwrap();
        let page: Page = Arc::new(String::new);
        let (runtime, address) = (runtime(), Address::Unix(path.clone()));
        let Err(refused) = Server::start(&address, page, &runtime.remote()) else {
            panic!("it listens in the place of a file");
        };
        assert!(refused.to_string().contains("no socket"), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn figures_are_in_the_text_format() {
        let mut figures = Figures::default();
        figures.add("a_total", "counter", "What.", &[("disk", "x\"y\\z\n")], 5.0);
        figures.add("a_total", "counter", "What.", &[], 1.5);
        figures.histogram("t_seconds", "Time.", &[], (&[0.1, 1.0], &[1, 2, 3], 9.5));
        let text = "# HELP a_total What.\n# TYPE a_total counter\n\
                    a_total{disk=\"x\\\"y\\\\z\\n\"} 5\na_total 1.5\n\
                    # HELP t_seconds Time.\n# TYPE t_seconds histogram\n\
                    t_seconds_bucket{le=\"0.1\"} 1\nt_seconds_bucket{le=\"1\"} 3\n\
                    t_seconds_bucket{le=\"+Inf\"} 6\nt_seconds_sum 9.5\nt_seconds_count 6\n";
        assert_eq!(figures.finish(), text);
    }
}
