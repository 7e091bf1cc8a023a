//! A proxy in front of an HTTP server that delays requests, refuses some, and loses others or their answers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What becomes of a request.
pub enum RequestFate {
    Passed,
    /// The server carries it out, and the connection ends before its answer.
    AnswerLost,
    /// The connection ends before the server gets it.
    Lost,
    /// The answer has this status line and this text.
    Refused(&'static str, &'static str),
}

/// The fate of a request with this first line.
pub type FateOf = Box<dyn FnMut(&str) -> RequestFate + Send>;

/// A proxy, which has one request in each connection.
pub struct FaultProxy {
    port: u16,
    fate: Arc<Mutex<FateOf>>,
}

impl FaultProxy {
    /// A proxy for the server at this port of this machine. It ends with the process.
    pub fn start(server: u16, delay: Duration) -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let pass: FateOf = Box::new(|_| RequestFate::Passed);
        let fate = Arc::new(Mutex::new(pass));
        let shared = fate.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let fate = shared.clone();
                std::thread::spawn(move || relay(client, server, delay, &fate));
            }
        });
        FaultProxy { port, fate }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Sets the fate of the requests that follow.
    pub fn set(&self, fate: impl FnMut(&str) -> RequestFate + Send + 'static) {
        *self.fate.lock().unwrap() = Box::new(fate);
    }
}

/// A client that ends its connection is no failure of a test.
fn relay(client: TcpStream, server: u16, delay: Duration, fate: &Mutex<FateOf>) {
    let _ = relay_request(client, server, delay, fate);
}

fn relay_request(
    mut client: TcpStream,
    server: u16,
    delay: Duration,
    fate: &Mutex<FateOf>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap_or_default();
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap();
        }
        if !name.eq_ignore_ascii_case("connection") {
            head += &line;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    std::thread::sleep(delay);
    let fate = (fate.lock().unwrap())(head.lines().next().unwrap_or_default());
    match fate {
        RequestFate::Lost => return Ok(()),
        RequestFate::Refused(status, text) => {
            let length = text.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
            );
            return client.write_all(answer.as_bytes());
        }
        RequestFate::Passed | RequestFate::AnswerLost => {}
    }
    let mut stream = TcpStream::connect(("127.0.0.1", server))?;
    write!(stream, "{head}Connection: close\r\n\r\n")?;
    stream.write_all(&body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    match fate {
        RequestFate::AnswerLost => Ok(()),
        _ => client.write_all(&answer),
    }
}
