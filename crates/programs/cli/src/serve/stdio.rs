//! Standard input and output of a server with plugins: plugins may use them until they are ready;
//! after that they are reserved for the command of `--run` and for output, and plugins see
//! `/dev/null`.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};

use rustix::stdio::{dup2_stdin, dup2_stdout, stdin, stdout};

use crate::exit::{CommandFailure, FAILED, plain};
use crate::out;

/// The original standard input and output, once replaced.
static ASIDE: Mutex<Option<(OwnedFd, OwnedFd)>> = Mutex::new(None);

/// Detaches plugins from standard input and output when they are ready.
pub fn guard() {
    crate::plugin_host::when_ready(|| {
        if let Err(error) = set_aside() {
            log::warn!("plugins still use standard input and output: {error}");
        }
    });
}

/// Replaces them by `/dev/null`, once.
fn set_aside() -> std::io::Result<()> {
    let mut aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    if aside.is_some() {
        return Ok(());
    }
    let kept = (
        rustix::io::fcntl_dupfd_cloexec(stdin(), 3)?,
        rustix::io::fcntl_dupfd_cloexec(stdout(), 3)?,
    );
    let null = null()?;
    dup2_stdin(null.as_fd())?;
    dup2_stdout(null.as_fd())?;
    *aside = Some(kept);
    Ok(())
}

/// `/dev/null`, for reading and writing.
pub fn null() -> std::io::Result<File> {
    File::options().read(true).write(true).open("/dev/null")
}

/// Prints to the original standard output.
pub fn print(bytes: &[u8]) -> Result<(), CommandFailure> {
    let aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, output)) = &*aside else { return out::print(bytes).map(drop) };
    let printed = output.try_clone().and_then(|fd| File::from(fd).write_all(bytes));
    match printed {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CommandFailure::new(FAILED, format!("cannot print: {}", plain(&error))))
        }
        _ => Ok(()),
    }
}

/// The original streams, for a command that is started now.
pub fn original() -> std::io::Result<(Stdio, Stdio)> {
    let aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    match &*aside {
        Some((input, output)) => Ok((input.try_clone()?.into(), output.try_clone()?.into())),
        None => Ok((Stdio::inherit(), Stdio::inherit())),
    }
}

/// Closes the original streams when they are not needed any more.
pub fn let_go() {
    *ASIDE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}
