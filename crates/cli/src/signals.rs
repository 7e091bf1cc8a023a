//! SIGINT, SIGTERM, SIGHUP and SIGQUIT: the first asks for an orderly stop, the second stops at once.

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::exit::{FAILED, Failure};

/// Calls `first` with the first signal's number, on a thread of its own; `at_once` before the process
/// ends on the second.
pub fn on_stop(
    first: impl FnOnce(i32) + Send + 'static,
    at_once: impl FnOnce() + Send + 'static,
) -> Result<(), Failure> {
    catch()?.spawn(first, at_once)
}

/// Signals that are caught from here on, and looked at by [`Caught::spawn`].
pub struct Caught(Signals);

/// Catches the signals.
pub fn catch() -> Result<Caught, Failure> {
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT]);
    let signals = signals.map_err(|error| {
        let text = format!("cannot handle signals: {}", crate::exit::plain(&error));
        Failure::new(FAILED, text)
    })?;
    Ok(Caught(signals))
}

impl Caught {
    /// As [`on_stop`].
    pub fn spawn(
        self,
        first: impl FnOnce(i32) + Send + 'static,
        at_once: impl FnOnce() + Send + 'static,
    ) -> Result<(), Failure> {
        let attend = move || self.attend(first, at_once);
        let started = std::thread::Builder::new().name("signals".into()).spawn(attend);
        started.map(drop).map_err(|error| {
            Failure::new(FAILED, format!("cannot handle signals: {}", crate::exit::plain(&error)))
        })
    }

    fn attend(mut self, first: impl FnOnce(i32), at_once: impl FnOnce()) {
        let mut signals = self.0.forever();
        let Some(signal) = signals.next() else { return };
        first(signal);
        let Some(signal) = signals.next() else { return };
        at_once();
        std::process::exit(i32::from(status(signal)));
    }
}

/// The exit status that tells of a signal, as a shell does.
pub fn status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}
