//! Requests on their way to the server.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::{Arc, Condvar};
use std::time::Duration;

use blockhaul_wire::HeaderBytes;

use super::connection::{BlockingConnection, BlockingRequest};
use super::receiver::SilenceTimer;
use super::replies::ReceiveTurn;
use super::stop::{CallStop, ContinueCallback, LOOK};
use crate::device::RequestMessage;
use crate::link::refused;

/// Longest wait for room in the socket while another thread receives: that may end.
const SHORT: Duration = Duration::from_millis(10);

impl BlockingConnection {
    /// Sends a request; returns its cookie.
    pub(super) fn start(
        &self,
        owner: &Arc<Condvar>,
        message: RequestMessage,
        payload: &[u8],
        go_on: ContinueCallback<'_>,
    ) -> Result<u64, CallStop> {
        let (cookie, encoded) = self.register(owner, message)?;
        self.send_started(&[cookie], &encoded, payload, go_on)?;
        Ok(cookie)
    }

    /// Sends requests without payload at once; returns their cookies.
    pub(super) fn start_all(
        &self,
        owner: &Arc<Condvar>,
        requests: impl IntoIterator<Item = RequestMessage>,
        go_on: ContinueCallback<'_>,
    ) -> Result<Vec<u64>, CallStop> {
        let mut message = Vec::new();
        let mut cookies = Vec::new();
        for request in requests {
            match self.register(owner, request) {
                Ok((cookie, encoded)) => {
                    message.extend_from_slice(&encoded);
                    cookies.push(cookie);
                }
                Err(stop) => {
                    self.withdraw(&cookies);
                    return Err(stop);
                }
            }
        }
        self.send_started(&cookies, &message, &[], go_on)?;
        Ok(cookies)
    }

    /// Sends the message of requests that are registered.
    fn send_started(
        &self,
        cookies: &[u64],
        message: &[u8],
        payload: &[u8],
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        match self.send(message, payload, go_on) {
            Ok(()) => {
                self.traffic.sent(message.len() + payload.len());
                Ok(())
            }
            Err((stop, begun)) => {
                if let CallStop::Failed(error) = &stop {
                    self.break_off(error);
                }
                if begun {
                    self.abandon(cookies.iter().copied());
                } else {
                    self.withdraw(cookies);
                }
                Err(stop)
            }
        }
    }

    /// Registers a request; returns its cookie and its header.
    fn register(
        &self,
        owner: &Arc<Condvar>,
        message: RequestMessage,
    ) -> Result<(u64, HeaderBytes), CallStop> {
        let mut state = self.lock();
        if state.retired {
            return Err(CallStop::Retired);
        }
        if let Some(error) = state.broken.as_ref().or(state.refused.as_ref()) {
            return Err(error.clone().into());
        }
        let RequestMessage { header, contexts, facts, .. } = message;
        let slot = BlockingRequest { facts, owner: owner.clone(), stored: None, abandoned: false };
        let begun = state.transmission.begin(header, contexts, slot);
        Ok(begun.map_err(|(_, error)| refused(&error))?)
    }

    /// Forgets requests that were not sent.
    fn withdraw(&self, cookies: &[u64]) {
        let mut state = self.lock();
        for cookie in cookies {
            drop(state.transmission.withdraw(*cookie));
        }
    }

    /// Sends a message, after what an earlier sender has left. After a failure: whether a part of it was
    /// sent; if so, the next sender sends the rest.
    pub(super) fn send(
        &self,
        head: &[u8],
        payload: &[u8],
        go_on: ContinueCallback<'_>,
    ) -> Result<(), (CallStop, bool)> {
        let mut before = self.sending.lock().expect("no panic under this lock");
        while !before.is_empty() {
            let sent = self.send_some(&before, &[], go_on).map_err(|stop| (stop, false))?;
            before.drain(..sent);
        }
        let mut head = head;
        let mut payload = payload;
        let mut begun = false;
        while !head.is_empty() || !payload.is_empty() {
            match self.send_some(head, payload, go_on) {
                Ok(sent) => {
                    begun = true;
                    let of_head = sent.min(head.len());
                    (head, payload) = (&head[of_head..], &payload[sent - of_head..]);
                }
                Err(stop) => {
                    if begun {
                        before.extend_from_slice(head);
                        before.extend_from_slice(payload);
                    }
                    return Err((stop, begun));
                }
            }
        }
        Ok(())
    }

    /// Sends at least one byte.
    fn send_some(
        &self,
        head: &[u8],
        payload: &[u8],
        go_on: ContinueCallback<'_>,
    ) -> Result<usize, CallStop> {
        let mut patience = SilenceTimer::new(self.socket.timeout);
        loop {
            let sent = self.socket.send(&[IoSlice::new(head), IoSlice::new(payload)])?;
            if sent > 0 {
                return Ok(sent);
            }
            if self.receive_meanwhile(go_on)? {
                patience = SilenceTimer::new(self.socket.timeout);
            } else {
                patience.check()?;
            }
            if !go_on() {
                return Err(CallStop::Interrupted);
            }
        }
    }

    /// Waits for room in the socket, or takes in a message: there are servers that read nothing before they
    /// have sent their replies. Returns whether it was a message.
    fn receive_meanwhile(&self, go_on: ContinueCallback<'_>) -> Result<bool, CallStop> {
        let Some(receiver) = self.lock().receiver.take() else {
            self.socket.wait_to_send(false, SHORT)?;
            return Ok(false);
        };
        let mut turn = ReceiveTurn::new(self, receiver);
        let ready = !turn.receiver().bytes().is_empty() || self.socket.wait_to_send(true, LOOK)?;
        if ready {
            self.message(turn.receiver(), &mut VecDeque::new(), go_on)?;
        }
        Ok(ready)
    }

    /// Sends the disconnect request, if the socket takes it without waiting.
    pub(super) fn say_goodbye(&self) {
        let unsent = self.sending.lock().is_ok_and(|unsent| !unsent.is_empty());
        if let Ok(encoded) = self.lock().transmission.disconnect()
            && !unsent
        {
            self.traffic.sent(encoded.len());
            // A failure means that the server has disconnected first.
            let _ = self.socket.send(&[IoSlice::new(&encoded)]);
        }
    }
}
