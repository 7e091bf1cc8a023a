//! SIGINT, SIGTERM, SIGHUP and SIGQUIT: the first requests an orderly stop, the second stops at
//! once. Commands with another use for SIGHUP keep it unless the terminal is gone.

use std::io::{ErrorKind, Read as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_catalog::Shutdown;
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Handle;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::exit::{CommandFailure, FAILED, plain};
use crate::logger;

/// Signals, and the socket that their handlers write to.
type SignalStream = SignalDelivery<UnixStream, SignalOnly>;

/// Whether storage or a gate has requested the end of this program, whether SIGTERM is handled, and
/// whether this process has sent one to itself: a second would end it at once. A process handles
/// signals in one way.
static REQUESTED: AtomicBool = AtomicBool::new(false);
static HANDLED: AtomicBool = AtomicBool::new(false);
static SENT: AtomicBool = AtomicBool::new(false);

/// The handle with which storage, gates and plugins stop this program: like a SIGTERM from outside,
/// as soon as that is handled.
pub fn shutdown() -> Shutdown {
    Shutdown::calling(|_| {
        REQUESTED.store(true, Ordering::SeqCst);
        end_if_due();
    })
}

/// Whether [`shutdown`] was used: SIGTERM then comes from within.
pub fn ends_by_itself() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

fn end_if_due() {
    let due = REQUESTED.load(Ordering::SeqCst) && HANDLED.load(Ordering::SeqCst);
    if !due || SENT.swap(true, Ordering::SeqCst) {
        return;
    }
    let this = rustix::process::getpid();
    if let Err(error) = rustix::process::kill_process(this, rustix::process::Signal::TERM) {
        log::warn!("cannot end the server: {error}");
    }
}

/// Calls `first` with the first signal's number, on a separate thread; `at_once` before the process
/// ends on the second.
pub fn on_stop(
    first: impl FnOnce(i32) + Send + 'static,
    at_once: impl FnOnce() + Send + 'static,
) -> Result<(), CommandFailure> {
    let caught = catch()?;
    let attend = move || caught.on_stop(first, at_once).wait();
    let started = std::thread::Builder::new().name("signals".into()).spawn(attend);
    started.map(drop).map_err(|error| {
        CommandFailure::new(FAILED, format!("cannot handle signals: {}", plain(&error)))
    })
}

/// Signals caught from here on, and handled by [`CaughtSignals::on_stop`].
pub struct CaughtSignals {
    signals: SignalStream,
    began_on_terminal: bool,
}

/// Catches the signals.
pub fn catch() -> Result<CaughtSignals, CommandFailure> {
    // Before a SIGHUP is caught: an earlier one ends the process as usual.
    let began_on_terminal = began_on_terminal();
    let signals = UnixStream::pair().and_then(|(read, write)| {
        let numbers = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
        SignalDelivery::with_pipe(read, write, SignalOnly, numbers)
    });
    let signals = signals.map_err(|error| {
        let text = format!("cannot handle signals: {}", plain(&error));
        CommandFailure::new(FAILED, text)
    })?;
    HANDLED.store(true, Ordering::SeqCst);
    end_if_due();
    Ok(CaughtSignals { signals, began_on_terminal })
}

impl CaughtSignals {
    /// Ends [`SignalActions::wait`] on drop, from any thread.
    pub fn until_dropped(&self) -> SignalGuard {
        SignalGuard(self.signals.handle())
    }

    /// Sets the actions for signals. A thread has to wait for them.
    pub fn on_stop<F: FnOnce(i32), G: FnOnce()>(self, first: F, at_once: G) -> SignalActions<F, G> {
        let CaughtSignals { signals, began_on_terminal } = self;
        let first = Some(first);
        let at_once = Some(at_once);
        SignalActions { signals, began_on_terminal, first, at_once, hangup: None }
    }
}

/// While it lives, signals are awaited.
pub struct SignalGuard(Handle);

impl Drop for SignalGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Signals with the actions for the first and the second.
pub struct SignalActions<F, G> {
    signals: SignalStream,
    first: Option<F>,
    at_once: Option<G>,
    began_on_terminal: bool,
    hangup: Option<Hangup>,
}

/// The action for SIGHUP.
pub type Hangup = Box<dyn FnMut()>;

/// Whether this process has a terminal that has not hung up. A process that loses its terminal gets
/// SIGHUP from the kernel or from its shell, which cannot be distinguished from others.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Whether this process began on a terminal, even if it is gone by now: the SIGHUP for that may
/// arrive a moment later, from the shell. A session leader without a terminal gets none.
fn began_on_terminal() -> bool {
    has_terminal() || (!blockhaul_os::leads_session() && is_hung_up())
}

/// Whether a standard stream is a terminal that has hung up.
fn is_hung_up() -> bool {
    use rustix::stdio::{stderr, stdin, stdout};
    let streams = [stdin(), stdout(), stderr()];
    streams.iter().any(|stream| rustix::termios::tcgetattr(stream).err() == Some(Errno::IO))
}

impl<F: FnOnce(i32), G: FnOnce()> SignalActions<F, G> {
    /// Sets the action for SIGHUP, unless the terminal on which this process began is gone.
    #[must_use]
    pub fn on_hangup(mut self, hangup: Hangup) -> Self {
        self.hangup = Some(hangup);
        self
    }

    /// Waits for signals, until a [`SignalGuard`] is dropped.
    pub fn wait(&mut self) {
        loop {
            match self.signals.poll_pending(&mut heard_of_one) {
                Ok(Some(signals)) => signals.for_each(|signal| self.heard(signal)),
                // The `SignalGuard` was dropped.
                Ok(None) => return,
                Err(error) => self.deaf(&error),
            }
        }
    }

    /// Handles pending signals without waiting; also after [`SignalActions::wait`] has ended.
    pub fn look(&mut self) {
        let signals: Vec<_> = self.signals.pending().collect();
        signals.into_iter().for_each(|signal| self.heard(signal));
    }

    /// Ends the process, as no signal could stop it any more.
    fn deaf(&mut self, error: &std::io::Error) -> ! {
        let why = plain(error);
        let text = format!(
            "cannot wait for signals any more: {why}: something in this process, possibly a plugin, has closed \
             descriptors that it does not own; exiting"
        );
        logger::failure("", &text);
        if let Some(at_once) = self.at_once.take() {
            at_once();
        }
        std::process::exit(i32::from(FAILED))
    }

    fn heard(&mut self, signal: i32) {
        if let Some(hangup) = &mut self.hangup
            && signal == SIGHUP
            && (!self.began_on_terminal || has_terminal())
        {
            return hangup();
        }
        if let Some(first) = self.first.take() {
            return first(signal);
        }
        if let Some(at_once) = self.at_once.take() {
            at_once();
        }
        std::process::exit(i32::from(status(signal)));
    }
}

/// Waits until a handler has written to the socket, or a [`SignalGuard`].
fn heard_of_one(read: &mut UnixStream) -> std::io::Result<bool> {
    loop {
        return match read.read(&mut [0]) {
            // The other end lives as long as the handlers.
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
    }
}

/// The exit status for a signal, like a shell's.
pub fn status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}
