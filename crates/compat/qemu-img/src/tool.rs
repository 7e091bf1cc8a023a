//! The emulation and its host.

use std::io::{ErrorKind, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_catalog::Registry;
use blockhaul_io::{Runtime, RuntimeConfig, plain};
use blockhaul_transfer::{CopyControl, lines};

use crate::error::{QemuImgStatus, Result, failure};

/// Maximum time to connect to a server that has an image.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The parts of a program that the emulation uses.
pub struct QemuImgHost {
    /// Makes the registry of the devices that images may be on, and that are in images. Its connections are
    /// dropped after this time without a byte, and ask their servers for these metadata contexts, besides
    /// `base:allocation`.
    pub registry: Box<RegistrySource>,
    /// Standard output. A closed pipe is no failure.
    pub output: Box<dyn Write + Send>,
    /// Standard error, for warnings and the faults that `check` finds.
    pub messages: Box<dyn Write + Send>,
    /// Takes the control of a copy before the copy begins, so that a signal may cancel it. The text of an error
    /// is that of the command, and nothing is copied then.
    pub on_copy: Box<CopyObserver>,
}

/// The type of [`QemuImgHost::registry`].
pub type RegistrySource = dyn Fn(Duration, &[String]) -> Registry;
/// The type of [`QemuImgHost::on_copy`].
pub type CopyObserver = dyn Fn(&CopyControl) -> Result<(), String>;

/// qemu-img, for any number of commands.
pub struct QemuImg {
    registry: Box<RegistrySource>,
    on_copy: Box<CopyObserver>,
    messages: Mutex<Box<dyn Write + Send>>,
    output: OutputStream,
}

impl QemuImg {
    /// The emulation in this host.
    pub fn new(host: QemuImgHost) -> QemuImg {
        let QemuImgHost { registry, output, messages, on_copy } = host;
        let (output, messages) = (OutputStream::new(output), Mutex::new(messages));
        QemuImg { registry, on_copy, messages, output }
    }

    /// Everything that can be opened for this command.
    pub(crate) fn registry(&self, timeout: Duration, contexts: &[String]) -> Registry {
        (self.registry)(timeout, contexts).for_command()
    }

    /// Tells the host that a copy begins.
    pub(crate) fn announce(&self, copy: &CopyControl) -> Result<()> {
        (self.on_copy)(copy).map_err(failure)
    }

    /// Standard output.
    pub(crate) fn output(&self) -> &OutputStream {
        &self.output
    }

    /// Prints on standard output.
    pub(crate) fn print(&self, text: &str) -> Result<QemuImgStatus> {
        self.output.print(text)?;
        Ok(QemuImgStatus::Success)
    }

    /// Prints lines on standard error, of which only the newlines affect a terminal.
    pub(crate) fn tell(&self, text: &str) {
        let mut messages = self.messages.lock().expect("no panic under this lock");
        // If that fails, there is no other place to report it.
        let _ = messages.write_all(lines(text).as_bytes());
    }

    /// Runs `work` on a worker.
    pub(crate) fn on_worker<T, F>(
        &self,
        work: impl FnOnce(Registry) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.on_worker_asking(&[], work)
    }

    /// Runs `work` on a worker; servers are asked for these metadata contexts, too.
    pub(crate) fn on_worker_asking<T, F>(
        &self,
        contexts: &[String],
        work: impl FnOnce(Registry) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let registry = self.registry(TIMEOUT, contexts);
        Ok(workers(1)?.block_on(move || work(registry)))
    }
}

/// Starts workers; 0: one for each core.
pub(crate) fn workers(workers: usize) -> Result<Runtime> {
    let started = Runtime::start(&RuntimeConfig { workers, ..RuntimeConfig::default() });
    started.map_err(|error| failure(format!("cannot start workers: {}", plain(&error))))
}

/// Standard output, for any thread.
#[derive(Clone)]
pub(crate) struct OutputStream(Arc<Mutex<Box<dyn Write + Send>>>);

impl OutputStream {
    pub(crate) fn new(output: Box<dyn Write + Send>) -> OutputStream {
        OutputStream(Arc::new(Mutex::new(output)))
    }

    /// Prints a text.
    pub(crate) fn print(&self, text: &str) -> Result<()> {
        let mut output = self.0.lock().expect("no panic under this lock");
        match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(failure(format!("cannot write to standard output: {}", plain(&error))))
            }
            _ => Ok(()),
        }
    }
}
