//! Errors of requests, and whether a request is repeated.

use std::error::Error as StdError;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::plain;

use crate::response::PAUSE_MAX;

/// Times that a request is repeated without progress: of a device, and of one that is being opened.
pub(crate) const REPEATS_MAX: u32 = 7;
const OPENING_REPEATS_MAX: u32 = 4;
/// Pause before the first repetition; each later one is twice as long.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);
/// Received bytes after which the repetitions are counted anew.
const PROGRESS: usize = 64 << 10;

/// A request that failed.
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) next: NextStep,
}

/// The step after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextStep {
    GiveUp,
    /// The request is repeated, after this pause if the server names one.
    Repeat(Option<Duration>),
    /// The place of the object is looked up again, then the request is repeated.
    Locate,
}

impl Failure {
    /// A failure that ends the request.
    pub(crate) fn last(error: Error) -> Failure {
        Failure { error, next: NextStep::GiveUp }
    }

    /// A failure that may pass.
    pub(crate) fn passing(error: Error) -> Failure {
        Failure { error, next: NextStep::Repeat(None) }
    }

    /// A connection that cannot be made, or that ended.
    pub(crate) fn of_connection(error: &reqwest::Error) -> Failure {
        let text = first_cause(error);
        if error.is_timeout() {
            return Failure::passing(Error::new(
                Kind::TimedOut,
                "the server does not answer in time",
            ));
        }
        if !error.is_connect() {
            return Failure::passing(Error::new(
                Kind::Disconnected,
                format!("the request failed: {text}"),
            ));
        }
        if is_tls(error) {
            // Those above the error of the connection only say that a request failed.
            let inner = error.source().and_then(StdError::source).unwrap_or(error);
            let text = format!("the TLS handshake failed: {}", chain(inner));
            let remedy = "check the name in the URL and the server's certificate; name the authority that has \
                          signed it with ca=FILE";
            return Failure::last(Error::new(Kind::Refused, text).with_remedy(remedy));
        }
        let text = format!("cannot connect: {text}");
        let remedy = "check the host in the URL, and that the server runs; a proxy is taken from the environment \
                      (https_proxy, no_proxy)";
        Failure::passing(Error::new(Kind::Disconnected, text).with_remedy(remedy))
    }

    /// The error of a limit in time.
    pub(crate) fn late(doing: &str, limit: Duration) -> Failure {
        let text = format!("the server has not {doing} within {} s", limit.as_secs_f32());
        Failure::passing(Error::new(Kind::TimedOut, text))
    }
}

/// The text of the innermost cause: those above it only say that a request failed.
pub(crate) fn first_cause(error: &dyn StdError) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    plain(cause)
}

/// The texts of an error and its causes.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Whether OpenSSL is among the causes.
fn is_tls(error: &dyn StdError) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<openssl::ssl::Error>() || error.is::<openssl::error::ErrorStack>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The repetitions of one request.
pub(crate) struct Repetitions {
    count: u32,
    most: u32,
}

impl Repetitions {
    /// Those of a request of a device.
    pub(crate) fn new() -> Repetitions {
        Repetitions { count: 0, most: REPEATS_MAX }
    }

    /// Those of the first request.
    pub(crate) fn opening() -> Repetitions {
        Repetitions { count: 0, most: OPENING_REPEATS_MAX }
    }

    /// Whether the request has failed before.
    pub(crate) fn has_begun(&self) -> bool {
        self.count > 0
    }

    /// Waits before the next attempt, after one that received `received` bytes.
    ///
    /// # Errors
    /// That of the failure, if the request is not repeated.
    pub(crate) async fn wait(&mut self, failure: Failure, received: usize) -> Result<()> {
        if received >= PROGRESS {
            self.count = 0;
        }
        let asked = match failure.next {
            NextStep::Repeat(asked) if self.count < self.most => asked,
            NextStep::Locate if self.count < self.most => None,
            _ => return Err(failure.error),
        };
        log::debug!("{}; trying again", failure.error);
        let pause = if failure.next == NextStep::Locate {
            Duration::ZERO
        } else {
            PAUSE * (1 << self.count)
        };
        self.count += 1;
        tokio::time::sleep(pause.max(asked.unwrap_or_default().min(PAUSE_MAX))).await;
        Ok(())
    }
}
