//! Standard input and output of a server with plugins: theirs until they are ready, then kept for the
//! command of `--run` and for what is printed; plugins see `/dev/null`, and cannot disturb either.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};

use rustix::stdio::{dup2_stdin, dup2_stdout, stdin, stdout};

use crate::exit::{FAILED, Failure, plain};
use crate::out;

/// Standard input and output as they came, where they were set aside.
static ASIDE: Mutex<Option<(OwnedFd, OwnedFd)>> = Mutex::new(None);

/// Has plugins lose standard input and output when they are ready.
pub fn guard() {
    crate::plugin_host::when_ready(|| {
        if let Err(error) = set_aside() {
            log::warn!("plugins keep standard input and output: {error}");
        }
    });
}

/// Puts `/dev/null` in their place, once.
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

/// Prints to what was standard output at first.
pub fn print(bytes: &[u8]) -> Result<(), Failure> {
    let aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, output)) = &*aside else { return out::print(bytes).map(drop) };
    let printed = output.try_clone().and_then(|fd| File::from(fd).write_all(bytes));
    match printed {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(FAILED, format!("cannot print: {}", plain(&error))))
        }
        _ => Ok(()),
    }
}

/// What a command gets that is started now: what was there at first.
pub fn original() -> std::io::Result<(Stdio, Stdio)> {
    let aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    match &*aside {
        Some((input, output)) => Ok((input.try_clone()?.into(), output.try_clone()?.into())),
        None => Ok((Stdio::inherit(), Stdio::inherit())),
    }
}

/// Closes what was set aside: nobody needs it any more.
pub fn let_go() {
    *ASIDE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}
