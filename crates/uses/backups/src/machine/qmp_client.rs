//! A connection to QEMU's monitor protocol.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_io::plain;
use serde_json::{Value, json};

use super::request::refused;
use crate::error::Result;

/// Longest reply in bytes: a machine with very many nodes needs a few MiB.
const REPLY_MAX: u64 = 64 << 20;
/// Time in which QEMU replies.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to a monitor, which takes commands.
pub(super) struct QmpClient {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

impl QmpClient {
    /// Connects, and negotiates.
    pub(super) fn connect(socket: &Path) -> Result<QmpClient> {
        let opened = UnixStream::connect(socket).and_then(|stream| {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        });
        let stream = opened.map_err(|error| {
            let next = "check that the machine runs, and that no other program uses the socket";
            refused(format!("cannot connect to {}: {}: {next}", socket.display(), plain(&error)))
        })?;
        let stream = BufReader::new(stream);
        let mut client = QmpClient { socket: socket.to_path_buf(), stream };
        let greeting = client.receive()?;
        if greeting.get("QMP").is_none() {
            return Err(client.lost("it does not greet as a monitor of QEMU"));
        }
        client.run("qmp_capabilities", json!({}))?;
        Ok(client)
    }

    /// Runs a command; returns its result.
    pub(super) fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        let sent = self.stream.get_mut().write_all(line.as_bytes());
        sent.map_err(|error| self.lost(&plain(&error)))?;
        loop {
            let mut reply = self.receive()?;
            if let Some(error) = reply.get("error") {
                let said = error["desc"].as_str().unwrap_or("it refuses");
                return Err(refused(format!("{command} at {}: {said}", self.socket.display())));
            }
            // Events come in between.
            if let Some(result) = reply.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(REPLY_MAX).read_until(b'\n', &mut line);
        read.map_err(|error| self.lost(&plain(&error)))?;
        if !line.ends_with(b"\n") {
            return Err(self.lost("the connection was closed"));
        }
        serde_json::from_slice(&line).map_err(|_| self.lost("a reply is not JSON"))
    }

    fn lost(&self, why: &str) -> crate::BackupError {
        refused(format!("the monitor {}: {why}", self.socket.display()))
    }
}
