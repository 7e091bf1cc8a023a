//! `device SOCKET`: a disk in memory, served over NBD until a line is read from standard input.

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul::device::{
    self, Can, Device, Facts, Kind, Op, PendingRequest, Reply, Request, Stack,
};
use blockhaul::runtime::{self, Listener, Runtime};
use blockhaul::server::{Server, ServerConfig};

/// A disk in memory.
struct MemoryDisk {
    facts: Arc<Facts>,
    bytes: Mutex<Vec<u8>>,
}

impl Device for MemoryDisk {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        // The caller has checked that the range lies inside the disk.
        let range = request.at as usize..(request.at + request.len) as usize;
        let mut bytes = self.bytes.lock().expect("no panic under this lock");
        PendingRequest::ready(match request.op {
            Op::Read(memory) => {
                let mut buf = memory.into_buf();
                buf.copy_from_slice(&bytes[range]);
                Ok(Reply::Data(buf.into()))
            }
            Op::Write(data) => {
                bytes[range].copy_from_slice(data.bytes());
                Ok(Reply::Done)
            }
            // Zeroing and other requests are emulated: the facts do not list them.
            _ => Err(device::Error::new(Kind::Unsupported, "neither a read nor a write")),
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1).ok_or("usage: device SOCKET")?;
    let size = 16 << 20;
    let facts = Facts { can: Can::WRITE, ..Facts::new("memory", size) };
    let bytes = Mutex::new(vec![0; size as usize]);
    let disk = Arc::new(MemoryDisk { facts: Arc::new(facts), bytes });
    let server = Server::new(ServerConfig::new(Stack::over(disk).shared("")));
    let runtime = Runtime::start(&runtime::RuntimeConfig::default())?;
    let listening = (server.clone(), Listener::bind_unix(socket.as_ref())?);
    runtime.block_on(async move || drop(runtime::spawn(listening.0.listen(listening.1))));
    std::io::stdin().read_line(&mut String::new())?;
    runtime.block_on(async move || server.stop(Duration::from_secs(5)).await);
    Ok(std::fs::remove_file(&socket)?)
}
