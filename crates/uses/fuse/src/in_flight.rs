//! Requests that the kernel may interrupt: those that change nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::channel::Channel;
use crate::protocol::KernelErrno;

/// Maximum number of interrupts that are kept for requests that are not there yet. Most kept ones are for
/// requests that are answered already, or cannot be interrupted.
const EARLY_MAX: usize = 256;

/// Requests in flight on all channels that may be answered early. An interrupt can come through another
/// channel than its request, and be read before the worker of the request has got as far as to add it. The
/// kernel sends one interrupt only, whatever signals follow.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<InFlightState>);

#[derive(Default)]
struct InFlightState {
    /// By number.
    requests: HashMap<u64, Arc<Channel>>,
    /// Numbers of interrupted requests that were not in flight.
    early: VecDeque<u64>,
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, InFlightState> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The request may be answered early from here on. If it has been interrupted, it is answered now.
    pub(crate) fn add(&self, unique: u64, channel: &Arc<Channel>) {
        let mut state = self.lock();
        let early = state.early.iter().position(|number| *number == unique);
        if let Some(place) = early {
            state.early.remove(place);
            drop(state);
            return channel.fail(unique, KernelErrno::INTR);
        }
        state.requests.insert(unique, channel.clone());
    }

    /// Takes the request out, in order to answer it. Returns false if it was interrupted: it is answered then.
    pub(crate) fn take(&self, unique: u64) -> bool {
        self.lock().requests.remove(&unique).is_some()
    }

    /// Answers the request that the kernel has interrupted, now or when it is added.
    pub(crate) fn interrupt(&self, unique: u64) {
        let mut state = self.lock();
        if let Some(channel) = state.requests.remove(&unique) {
            drop(state);
            return channel.fail(unique, KernelErrno::INTR);
        }
        if state.early.len() == EARLY_MAX {
            state.early.pop_front();
        }
        state.early.push_back(unique);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Seek as _};

    use super::*;
    use crate::protocol::reply_header;

    /// A channel, and what is written to it.
    fn channel() -> (Arc<Channel>, File) {
        let file = tempfile::tempfile().unwrap();
        (Arc::new(Channel::new(file.try_clone().unwrap().into())), file)
    }

    fn written(mut file: File) -> Vec<u8> {
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_request_is_answered_once_whenever_its_interrupt_comes() {
        let all = InFlight::default();
        let (channel, answers) = channel();
        all.add(2, &channel);
        all.interrupt(2);
        assert!(!all.take(2), "it was answered");
        all.interrupt(4);
        all.add(4, &channel);
        assert!(!all.take(4), "it was answered");
        all.add(6, &channel);
        assert!(all.take(6));
        let interrupted = [2, 4].map(|unique| reply_header(unique, Err(KernelErrno::INTR)));
        assert_eq!(written(answers), interrupted.concat());
    }

    #[test]
    fn interrupts_of_requests_that_never_come_are_forgotten() {
        let all = InFlight::default();
        (0..=EARLY_MAX as u64).for_each(|unique| all.interrupt(unique));
        let (channel, answers) = channel();
        all.add(0, &channel);
        assert!(all.take(0));
        all.add(EARLY_MAX as u64, &channel);
        assert_eq!(written(answers), reply_header(EARLY_MAX as u64, Err(KernelErrno::INTR)));
    }
}
