//! `--qmp`, `--qmp-client` and `--qmp-run`: the connections of QEMU's monitor protocol, whose commands the
//! crate `blockhaul_qmp` carries out.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_qmp::{ListenerFuture, Monitor, MonitorConfig, MonitorHost};

use super::control::Operations;
use super::listen::{self, ListenAddresses};
use super::single::{PendingOutput, SingleClient};
use super::stop::{StopReason, Stopper};
use crate::args::QmpClient;
use crate::exit::{CommandFailure, FAILED, plain};

/// A connection to a client from the beginning: the server connects, or got it from its parent.
pub struct MonitorConnection {
    pub socket: OwnedFd,
    /// Output still in transit to standard output.
    pub rest: Option<PendingOutput>,
}

impl MonitorConnection {
    /// Connects to a client, or takes the connection.
    pub fn open(client: &QmpClient) -> Result<MonitorConnection, CommandFailure> {
        let socket = match client {
            QmpClient::Unix(path) => {
                let connected = UnixStream::connect(path).map_err(|error| {
                    let path = path.display();
                    let text = format!("Failed to connect to '{path}': {}", plain(&error));
                    CommandFailure::new(FAILED, text)
                });
                connected?.into()
            }
            QmpClient::Descriptor(number) => {
                let socket = blockhaul_os::inherited(*number)
                    .filter(|fd| rustix::net::sockopt::socket_type(fd).is_ok());
                let wrong =
                    || CommandFailure::usage(format!("descriptor {number} is not a socket"));
                socket.ok_or_else(wrong)?
            }
            QmpClient::Stdio => {
                let (socket, rest) = SingleClient::take_any()?.split();
                return Ok(MonitorConnection { socket, rest: Some(rest) });
            }
        };
        Ok(MonitorConnection { socket, rest: None })
    }
}

/// The monitor of a server, after the commands of the command line.
pub async fn start(
    operations: &Operations,
    listens_anyway: bool,
    first_commands: &[String],
) -> Result<Arc<Monitor>, CommandFailure> {
    let monitor = Monitor::new(MonitorConfig {
        server: operations.server.clone(),
        table: operations.table.clone(),
        jobs: operations.jobs.clone(),
        listens_anyway,
        host: Box::new(ServeHost(operations.stopper.clone())),
    });
    for command in first_commands {
        let done = monitor.run(command).await;
        done.map_err(|error| CommandFailure::usage(error.to_string()))?;
    }
    Ok(monitor)
}

/// `serve` as a monitor needs it.
struct ServeHost(Stopper);

impl MonitorHost for ServeHost {
    fn stop(&self) {
        self.0.stop(StopReason::Asked);
    }

    fn bind_tcp(&self, host: Option<String>, port: u16) -> ListenerFuture {
        Box::pin(async move {
            let bound = listen::bind_tcp(port, host, &mut ListenAddresses::default()).await;
            let bound =
                bound.map_err(|failure| Error::new(Kind::Refused, failure.facts().to_string()));
            bound.map(|(listeners, _)| listeners)
        })
    }
}
