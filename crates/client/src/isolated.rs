//! A kind of storage in a process of its own: this program serves it again, on a private socket, and is
//! the client of itself. A crash there ends that process, and is an error here.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{
    Access, Backend, BlockSizes, Client, Device, Error, Exports, Facts, FileRange, Kind, Listed,
    Opened, Opening, Param, Pending, Request, Result, Target, Visit,
};

use crate::connect::{Address, Connected, Options, connect_keeping};
use crate::options::{OptionSession, Place};
use crate::{ServerProcess, connect};

/// Time that a process has to be gone once its connections are.
const END: Duration = Duration::from_secs(2);
/// Pause between looks at it.
const LOOK: Duration = Duration::from_millis(5);

/// The same kind of storage, each device of it in a process of its own.
pub fn isolated(inner: &'static dyn Backend) -> &'static dyn Backend {
    // A program makes its registry once and keeps it to its end.
    Box::leak(Box::new(Isolated(inner)))
}

struct Isolated(&'static dyn Backend);

impl Backend for Isolated {
    fn schemes(&self) -> &'static [&'static str] {
        self.0.schemes()
    }

    fn operand(&self) -> &'static str {
        self.0.operand()
    }

    fn summary(&self) -> &'static str {
        self.0.summary()
    }

    fn example(&self) -> &'static str {
        self.0.example()
    }

    fn params(&self) -> &'static [Param] {
        self.0.params()
    }

    fn raw(&self) -> bool {
        self.0.raw()
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            let visit = Arc::new(Apart::start(&target).await?);
            Ok(Opened::from(visit.device("", false).await?))
        })
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            Ok(Arc::new(IsolatedExports(Arc::new(Apart::start(&target).await?)))
                as Arc<dyn Exports>)
        }))
    }
}

/// A process, and what is known of it.
struct Apart {
    process: Arc<ServerProcess>,
    /// What runs there, without its parameters, which may be secret.
    name: String,
    /// Its end was reported.
    reported: AtomicBool,
}

impl Apart {
    /// Starts a process, and waits until it serves.
    async fn start(target: &Target) -> Result<Apart> {
        // Block sizes are told as the plugin tells them, and what does not keep to them is let through:
        // that is decided on this side.
        let words = ["blockhaul", "serve", "--exit-with-parent", "--no-block-sizes"];
        let mut words: Vec<OsString> = words.map(OsString::from).to_vec();
        words.push("--limit=payload=64M".into());
        if !target.intent.write {
            words.push("--readonly".into());
        }
        if log::log_enabled!(log::Level::Debug) {
            words.push("--verbose".into());
        }
        let mut device = OsString::from(&target.scheme);
        device.push(":");
        device.push(&target.rest);
        let shown = device.display().to_string();
        let name = shown.split('?').next().unwrap_or_default().to_string();
        words.push(device);
        let process = ServerProcess::start(&words)?;
        let apart = Apart { process, name, reported: AtomicBool::new(false) };
        apart.options().await?.abort().await;
        Ok(apart)
    }

    fn address(&self) -> Address {
        Address::Unix(self.process.socket().to_path_buf())
    }

    /// A connection to ask questions.
    async fn options(&self) -> Result<OptionSession> {
        let (name, address) = (self.name.clone(), self.address());
        let place = Place { name, address, export: String::new(), tls: None };
        match OptionSession::connect(place, &how()).await {
            Ok(session) => Ok(session),
            Err(error) => Err(self.explained(error).await),
        }
    }

    /// An export as a device; for a server's clients block sizes are told, not kept to, as without
    /// isolation.
    async fn device(self: Arc<Self>, export: &str, served: bool) -> Result<Arc<dyn Device>> {
        let process = Some(self.process.clone());
        match connect_keeping(process, &self.name, &self.address(), export, &how()).await {
            Ok(Connected { device: inner, negotiated }) => {
                let mut facts = Facts::clone(&inner.facts());
                if let Some(sizes) = negotiated.info.block_sizes.filter(|_| served) {
                    let wire::BlockSizes { minimum, preferred, maximum } = sizes;
                    facts.told = Some(BlockSizes { minimum, preferred, maximum });
                    facts.block.minimum = 1;
                }
                if served {
                    facts.block.maximum = BlockSizes::default().maximum;
                }
                Ok(Arc::new(IsolatedDevice { inner, facts: Arc::new(facts), apart: self }))
            }
            Err(error) => Err(self.explained(error).await),
        }
    }

    /// The error, or what is behind it: the end of the process.
    async fn explained(&self, error: Error) -> Error {
        // What it refuses in words has other kinds; nobody at its socket is an input/output error.
        let lost = matches!(error.kind(), Kind::Disconnected | Kind::Io);
        let mut patience = if lost { END } else { Duration::ZERO };
        loop {
            if let Some(how) = self.process.status() {
                let text = format!("{}: its process has ended with {how}", self.name);
                if !self.reported.swap(true, Ordering::Relaxed) {
                    log::error!("{text}; it is not started again, and its clients get errors");
                }
                return Error::new(Kind::Io, text);
            }
            if patience.is_zero() {
                return error;
            }
            io::sleep(LOOK).await;
            patience = patience.saturating_sub(LOOK);
        }
    }
}

/// How to connect. A process nearby is there or gone: it may take its time.
fn how() -> Options {
    Options {
        connect_timeout: Duration::ZERO,
        timeout: Duration::ZERO,
        full_info: true,
        ..connect::Options::default()
    }
}

/// What runs in a process, for the clients of a server: each has connections of its own to it.
struct IsolatedExports(Arc<Apart>);

impl Exports for IsolatedExports {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let visit = IsolatedVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct IsolatedVisit(Arc<Apart>);

impl Visit for IsolatedVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let apart = self.0.clone();
        Box::pin(async move {
            let mut session = apart.options().await?;
            let listed = session.list().await;
            session.abort().await;
            let listed = match listed {
                Ok(listed) => listed,
                Err(error) => return Err(apart.explained(error).await),
            };
            let listed = listed
                .into_iter()
                .map(|entry| Listed { name: entry.name, description: entry.description });
            Ok(listed.collect())
        })
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Arc<dyn Device>> {
        let (apart, name) = (self.0.clone(), name.to_string());
        Box::pin(async move { apart.device(&name, true).await })
    }
}

/// A device in another process; the loss of the connection is the end of that process.
struct IsolatedDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    apart: Arc<Apart>,
}

impl Device for IsolatedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let pending = match self.inner.submit(request).now() {
            Ok(Err(error)) if error.kind() == Kind::Disconnected => Err(error).into(),
            Ok(outcome) => return outcome.into(),
            Err(pending) => pending,
        };
        let apart = self.apart.clone();
        Pending::start(async move {
            match pending.await {
                Err(error) if error.kind() == Kind::Disconnected => {
                    Err(apart.explained(error).await)
                }
                outcome => outcome,
            }
        })
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
