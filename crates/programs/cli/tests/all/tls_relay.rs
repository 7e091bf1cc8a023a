//! A program that takes TLS off connections, as the proxies of platforms do.

use std::path::Path;

use blockhaul_testkit::tools::{PeerProgram, PeerServer};

/// Clients must choose HTTP/1.1 by ALPN. `target`: a Unix socket, or a port. With `certificates` clients need one.
/// With `log` it carries out an upgrade of HTTP, and writes the request and what TLS agreed on to this file.
const SCRIPT: &str = r#"
import socket, ssl, sys, threading
listen, target, pki, certificates, log = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(pki + "/server-cert.pem", pki + "/server-key.pem")
context.load_verify_locations(pki + "/ca-cert.pem")
if certificates == "yes":
    context.verify_mode = ssl.CERT_REQUIRED
context.set_alpn_protocols(["h2", "http/1.1"])
names = []
context.sni_callback = lambda connection, name, context: names.append(name)
server = socket.socket(socket.AF_UNIX)
server.bind(listen)
server.listen(16)

def pump(take, give, end):
    try:
        while data := take(65536):
            give(data)
        end()
    except OSError:
        pass

def upgrade(client):
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    with open(log, "ab") as file:
        file.write(head + f"{client.selected_alpn_protocol()} {names[-1]}\n".encode())
    client.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    client.sendall(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: NBD\r\nconnection: upgrade\r\n\r\n")

def serve(accepted):
    try:
        client = context.wrap_socket(accepted, server_side=True)
        if client.selected_alpn_protocol() != "http/1.1":
            return client.close()
        if log:
            upgrade(client)
    except OSError:
        return accepted.close()
    if target.isdigit():
        back = socket.create_connection(("127.0.0.1", int(target)))
    else:
        back = socket.socket(socket.AF_UNIX)
        back.connect(target)
    end = lambda: back.shutdown(socket.SHUT_WR)
    threading.Thread(target=pump, args=(client.recv, back.sendall, end), daemon=True).start()
    pump(back.recv, client.sendall, lambda: client.shutdown(socket.SHUT_RDWR))

while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"#;

/// Whose clients may connect.
#[derive(Clone, Copy, PartialEq)]
pub enum Clients {
    All,
    WithCertificates,
}

/// Starts it on the Unix socket `listen`, in front of `target`, with the keys in the directory `pki`.
pub fn start(
    python: &PeerProgram,
    listen: &Path,
    target: &str,
    pki: &str,
    clients: Clients,
    log: Option<&Path>,
) -> PeerServer {
    let mut command = python.tied_command();
    let certificates = if clients == Clients::WithCertificates { "yes" } else { "no" };
    command.args(["-c", SCRIPT]).arg(listen).args([target, pki, certificates]);
    command.arg(log.unwrap_or(Path::new("")));
    PeerServer::start(command, listen).unwrap()
}
