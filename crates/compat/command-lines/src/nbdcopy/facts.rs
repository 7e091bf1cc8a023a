//! The facts of a side that `--verbose` prints, queried for that purpose.

use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blockhaul_client::options::{ConnectTarget, OptionSession};
use blockhaul_client::{ServerAddress, ServerProcess};
use blockhaul_wire::uri::{Transport, Uri};

use super::end::{CopyEndpoint, NULL_SIZE, STDIN};

/// The preferred block size if the other side reports none.
const PREFERRED: u64 = 4096;

/// The facts of a side that `--verbose` prints.
pub(super) struct EndpointFacts {
    operations: &'static str,
    name: String,
    /// In bytes; unknown for streams and unreachable servers.
    pub(super) size: Option<u64>,
    preferred: u64,
}

impl EndpointFacts {
    /// Queries a side. A server of `[ CMD … ]` is started for that and stored in `started`.
    pub(super) fn of(
        end: &mut CopyEndpoint,
        started: &mut Vec<Arc<ServerProcess>>,
    ) -> EndpointFacts {
        let known = |operations, name: &str, size| EndpointFacts {
            operations,
            name: name.to_string(),
            size,
            preferred: PREFERRED,
        };
        let served = |name: String, answer: Option<(u64, u64)>| EndpointFacts {
            operations: "nbd_ops",
            name,
            size: answer.map(|answer| answer.0),
            preferred: answer.map_or(PREFERRED, |answer| answer.1),
        };
        match end {
            CopyEndpoint::Null => known("null_ops", "null:", Some(NULL_SIZE)),
            CopyEndpoint::Standard => known("pipe_ops", "-", None),
            CopyEndpoint::Stream(path) => known("pipe_ops", &path.display().to_string(), None),
            CopyEndpoint::Storage(path) if path == Path::new(STDIN) => {
                known("file_ops", "-", size_of(path))
            }
            CopyEndpoint::Storage(path) => {
                known("file_ops", &path.display().to_string(), size_of(path))
            }
            CopyEndpoint::Server(uri) => {
                let answer = ConnectTarget::parse(uri).ok().and_then(ask);
                served(uri.clone(), answer)
            }
            CopyEndpoint::Command(words) => {
                let name = words.first().map(|word| word.display().to_string());
                let name = name.unwrap_or_default();
                // An error here recurs in the copy, which reports it.
                let Ok(process) = ServerProcess::start(words) else { return served(name, None) };
                let socket = process.socket().to_path_buf();
                let uri = Uri {
                    transport: Transport::Unix {
                        socket: socket.as_os_str().as_encoded_bytes().to_vec(),
                    },
                    export: String::new(),
                    tls: None,
                };
                let address = ServerAddress::Unix(socket);
                let place =
                    ConnectTarget { name: name.clone(), address, export: String::new(), tls: None };
                let answer = ask(place);
                started.push(process);
                *end = CopyEndpoint::Server(uri.to_string());
                served(name, answer)
            }
        }
    }

    pub(super) fn lines(&self, side: &str) -> String {
        let EndpointFacts { operations, name, preferred, .. } = self;
        let mut text = format!("nbdcopy: {side}: {operations} \"{name}\"\n");
        let size = match self.size {
            Some(size) => format!("{size} ({})", blockhaul_catalog::format_size(size)),
            // As in nbdcopy: -1, also printed as an unsigned number.
            None => format!("-1 ({})", u64::MAX),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "nbdcopy: {side}: size={size}, preferred block size={preferred}");
        text
    }
}

/// Size and preferred block size of an export, without opening it: the connection ends before
/// transmission, which servers for a single client do not count.
fn ask(place: ConnectTarget) -> Option<(u64, u64)> {
    let config = blockhaul_io::RuntimeConfig { workers: 1, engine: blockhaul_io::IoEngine::Auto };
    let runtime = blockhaul_io::Runtime::start(&config).ok()?;
    runtime.block_on(move || async move {
        let export = place.export.clone();
        let mut session =
            OptionSession::connect(place, &blockhaul_client::ConnectOptions::default())
                .await
                .ok()?;
        let info = session.info(&export).await.ok();
        session.abort().await;
        let info = info?;
        let preferred = info.block_sizes.map(|sizes| u64::from(sizes.preferred));
        Some((info.size, preferred.filter(|size| size.is_power_of_two()).unwrap_or(PREFERRED)))
    })
}

/// The size of a file or block device.
fn size_of(path: &Path) -> Option<u64> {
    use std::io::{Seek as _, SeekFrom};
    File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).ok()
}
