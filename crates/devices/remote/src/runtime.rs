//! The thread that carries out the requests of this crate, with tokio's runtime. All other devices do without one.

use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use tokio::runtime::{Builder, Handle};

/// Threads for work that blocks: resolving names of hosts, files.
const THREADS_MAX: usize = 16;

/// Starts `work` on the thread of requests, which is started first if there is none.
///
/// # Errors
/// The system has no thread or no descriptors left.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    handle()?.spawn(work);
    Ok(())
}

/// The result of `work`, which the thread of requests carries out. Work that panics is an error.
///
/// # Errors
/// Those of `work`, and of [`spawn`].
pub(crate) async fn run<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (completer, ticket) = blockhaul_io::ticket();
    spawn(async move { completer.complete(work.await) })?;
    ticket.await.unwrap_or_else(|_| Err(lost()))
}

/// The result of `work`, which the thread of requests carries out. Blocks: call it on threads that may wait. Work that
/// panics is an error.
///
/// # Errors
/// Those of `work`, and of [`spawn`].
pub(crate) fn wait<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (done, ended) = mpsc::channel();
    spawn(async move {
        // The one that waits is there.
        let _ = done.send(work.await);
    })?;
    ended.recv().unwrap_or_else(|_| Err(lost()))
}

/// Carries out `work`, and waits for it at most this long: behind it the process may end. Call it elsewhere than on
/// the thread of requests. False: it has not ended.
pub(crate) fn finish(most: Duration, work: impl Future<Output = ()> + Send + 'static) -> bool {
    let (done, ended) = mpsc::channel();
    let started = spawn(async move {
        work.await;
        // Nobody may wait any more.
        let _ = done.send(());
    });
    // Work that takes longer goes on while the process does.
    started.is_ok() && ended.recv_timeout(most).is_ok()
}

/// The result of `work`, which blocks, on a thread of its own. Call it on the thread of requests.
///
/// # Errors
/// Those of `work`.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|lost| {
        Err(Error::new(Kind::Io, "work with a file has failed (a bug in the program)")
            .because(lost))
    })
}

/// The error of a request whose task has ended without a result.
fn lost() -> Error {
    Error::new(Kind::Io, "the request ended without a result (a bug in the program)")
}

fn handle() -> Result<&'static Handle> {
    static HANDLE: OnceLock<std::io::Result<Handle>> = OnceLock::new();
    let started = HANDLE.get_or_init(start);
    started.as_ref().map_err(|error| {
        let again = std::io::Error::new(error.kind(), error.to_string());
        Error::system("cannot start the thread of remote requests", again)
    })
}

fn start() -> std::io::Result<Handle> {
    let runtime =
        Builder::new_current_thread().enable_all().max_blocking_threads(THREADS_MAX).build()?;
    let handle = runtime.handle().clone();
    let work = move || runtime.block_on(std::future::pending::<()>());
    thread::Builder::new().name("remote".to_owned()).spawn(work)?;
    Ok(handle)
}

/// The result of `work`, for tests: it blocks.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    handle().unwrap().block_on(work)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn work_that_panics_is_an_error_and_the_thread_goes_on() {
        let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default());
        runtime.unwrap().block_on(|| async {
            let failed = run(async { if true { panic!("on purpose") } else { Ok(()) } }).await;
            assert_eq!(failed.unwrap_err().kind(), Kind::Io);
            assert_eq!(run(async { Ok(7) }).await.unwrap(), 7);
        });
    }
}
