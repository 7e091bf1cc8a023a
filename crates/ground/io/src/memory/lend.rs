//! Payloads sent to a socket by reference, directly from memory (vmsplice(2)).
//!
//! The peer reads the same pages: they must not change until the peer confirms that it has them. So
//! the sender keeps a [`LentPayload`] until the reply arrives. Without a reply, the connection may be gone
//! and the peer still reading; then the pages are *retired*: when the last holder drops the
//! payload, the memory frees its pages and gets others, and a reader of the old ones still sees
//! what was sent.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::data::Data;
use super::park::ParkedPayload;
use super::route_counters::PayloadRoute;

/// A payload whose pages a peer may be reading.
#[must_use = "dropped, it retires the pages"]
#[derive(Debug)]
pub struct LentPayload(Option<Data>);

impl LentPayload {
    /// The peer has confirmed the bytes: the memory can be reused.
    pub fn returned(mut self) {
        self.0 = None;
    }
}

impl Drop for LentPayload {
    fn drop(&mut self) {
        if let Some(data) = self.0.take() {
            data.retire();
        }
    }
}

/// A payload being sent by reference.
pub(crate) struct PayloadLoan {
    data: Data,
    /// Its pages, once they are being sent.
    pipe: Option<ParkedPayload>,
}

impl PayloadLoan {
    /// Lends a payload that is large enough and can be retired; otherwise returns it.
    pub(crate) fn begin(data: Data) -> Result<(PayloadLoan, LentPayload), Data> {
        if !data.can_be_lent() || !ParkedPayload::pays(data.len()) {
            return Err(data);
        }
        let lent = LentPayload(Some(data.clone()));
        Ok((PayloadLoan { data, pipe: None }, lent))
    }

    /// Length of the payload in bytes.
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    /// The payload, to be sent as a copy.
    pub(crate) fn into_data(self) -> Data {
        self.data
    }

    /// Puts the pages into a pipe; false if that is not possible now.
    pub(crate) fn load(&mut self) -> bool {
        if self.pipe.is_none() {
            self.pipe = parked(&self.data);
        }
        self.pipe.is_some()
    }

    /// Sends what the socket takes; `WouldBlock` if it takes nothing now. After [`PayloadLoan::load`].
    pub(crate) fn drain_to_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let Some(pipe) = &mut self.pipe else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let sent = pipe.drain_to_stream(stream)?;
        if let Some(counters) = self.data.counters() {
            counters.add(PayloadRoute::Vmsplice, sent);
        }
        Ok(sent)
    }

    /// Whether everything has been sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.pipe.as_ref().is_some_and(|pipe| pipe.held() == 0)
    }
}

/// The pages of a payload in memory, by reference; `None` if that is not possible now.
fn parked(data: &Data) -> Option<ParkedPayload> {
    static REFUSED: AtomicBool = AtomicBool::new(false);
    if REFUSED.load(Ordering::Relaxed) {
        return None;
    }
    let bytes = data.bytes();
    let mut parked = ParkedPayload::empty(bytes.len())?;
    while parked.held() < bytes.len() {
        match parked.lend(&bytes[parked.held()..]) {
            Ok(lent) if lent > 0 => {}
            Err(Errno::INTR) => {}
            // The pipe is full, which is unexpected: its contents are dropped with it.
            Ok(_) | Err(Errno::AGAIN) => return None,
            Err(error) => {
                log::debug!("vmsplice is not used any more: {error}");
                REFUSED.store(true, Ordering::Relaxed);
                return None;
            }
        }
    }
    Some(parked)
}
