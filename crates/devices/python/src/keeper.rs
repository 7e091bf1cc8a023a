//! Keeps a plugin available for clients: starts it again when its process has ended, with a pause
//! after repeated early ends.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::Shutdown;
use blockhaul_io::FifoLock;

use crate::host::PythonHost;
use crate::settings::PythonSettings;

/// A process that has run for this long is restarted at once.
const STEADY: Duration = Duration::from_secs(30);
/// Pause before the next start after two early ends in a row; doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Maximum pause: a broken plugin costs two starts a minute, and only while clients connect.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Keeps a plugin available for clients. Cloning shares it.
#[derive(Clone)]
pub(crate) struct HostKeeper(Arc<KeeperShared>);

struct KeeperShared {
    settings: PythonSettings,
    /// The working directory of the first start: a background server changes it later, but file
    /// names are relative to it.
    folder: Option<PathBuf>,
    shutdown: Shutdown,
    /// Held while a process is started.
    starting: Arc<FifoLock>,
    state: Mutex<KeeperState>,
}

struct KeeperState {
    host: Option<Arc<PythonHost>>,
    begun: Instant,
    /// Number of processes that were started.
    starts: u64,
    /// Number of early ends in a row, up to the last.
    young: u32,
    /// When the next may start; `None`: at once.
    not_before: Option<Instant>,
}

impl HostKeeper {
    /// Starts the first process, and waits until the plugin is ready.
    pub(crate) async fn start(settings: PythonSettings, shutdown: Shutdown) -> Result<HostKeeper> {
        let folder = std::env::current_dir().ok();
        let host = PythonHost::start(&settings, folder.as_deref(), shutdown.clone()).await?;
        let state = KeeperState {
            host: Some(host),
            begun: blockhaul_io::now(),
            starts: 1,
            young: 0,
            not_before: None,
        };
        let starting = Arc::default();
        let state = Mutex::new(state);
        Ok(HostKeeper(Arc::new(KeeperShared { settings, folder, shutdown, starting, state })))
    }

    /// The plugin, in a new process if the last has ended; an error says when to expect one.
    pub(crate) async fn present(&self) -> Result<Arc<PythonHost>> {
        let kept = &self.0;
        let _turn = kept.starting.lock().await;
        if let Some(host) = self.running()? {
            return Ok(host);
        }
        let started =
            PythonHost::start(&kept.settings, kept.folder.as_deref(), kept.shutdown.clone()).await;
        let mut state = self.state();
        state.begun = blockhaul_io::now();
        match started {
            Ok(host) => {
                state.starts += 1;
                state.host = Some(host.clone());
                drop(state);
                let name = &host.inner.shown;
                let process = host.inner.process.id();
                let text = format!("{name}: restarted as process {process}");
                // With several, the line about the end announces it.
                match kept.settings.host.processes {
                    1 => log::warn!("{text}; its data in memory is lost"),
                    _ => log::info!("{text}"),
                }
                Ok(host)
            }
            Err(error) => {
                state.ended(Duration::ZERO);
                Err(error)
            }
        }
    }

    /// The plugin, if its process runs; `None`: another may be started now.
    fn running(&self) -> Result<Option<Arc<PythonHost>>> {
        let mut state = self.state();
        if let Some(host) = state.host.clone() {
            if !host.is_gone() {
                return Ok(Some(host));
            }
            state.host = None;
            let lived = blockhaul_io::elapsed(state.begun);
            state.ended(lived);
        }
        let left = state.not_before.map(|time| time.saturating_duration_since(blockhaul_io::now()));
        match left {
            Some(left) if !left.is_zero() => {
                let name = self.0.settings.shown();
                let left = left.as_secs_f32();
                let text =
                    format!("{name}: its process ended early; it can be restarted in {left:.1} s");
                Err(Error::new(Kind::Io, text).complete())
            }
            _ => Ok(None),
        }
    }

    /// The state of the process, for users: `process 77, started 2 times`.
    pub(crate) fn state_text(&self) -> String {
        let state = self.state();
        let times = state.starts;
        let starts = if times > 1 { format!(", started {times} times") } else { String::new() };
        match &state.host {
            Some(host) if !host.is_gone() => format!("process {}{starts}", host.inner.process.id()),
            _ => format!("down{starts}"),
        }
    }

    fn state(&self) -> MutexGuard<'_, KeeperState> {
        self.0.state.lock().expect("no panic under this lock")
    }
}

impl KeeperState {
    /// A process has ended, or did not start, after running for `lived`.
    fn ended(&mut self, lived: Duration) {
        self.young = if lived < STEADY { self.young.saturating_add(1) } else { 0 };
        let pause = pause(self.young);
        self.not_before = (!pause.is_zero()).then(|| blockhaul_io::now() + pause);
    }
}

/// The pause after this many early ends in a row. A single one may be an accident.
fn pause(young: u32) -> Duration {
    match young {
        0 | 1 => Duration::ZERO,
        more => PAUSE.saturating_mul(1 << (more - 2).min(16)).min(PAUSE_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_begin_with_the_second_early_end_and_end_growing() {
        assert_eq!((pause(0), pause(1)), (Duration::ZERO, Duration::ZERO));
        let pauses: Vec<_> = (2..5).map(pause).collect();
        assert_eq!(pauses, [PAUSE, PAUSE * 2, PAUSE * 4]);
        assert_eq!((pause(12), pause(u32::MAX)), (PAUSE_MAX, PAUSE_MAX));
    }
}
