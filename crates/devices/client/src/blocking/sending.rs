//! Requests on their way to the server.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::{Arc, Condvar};
use std::time::Duration;

use blockhaul_wire::request::Header;
use blockhaul_wire::{Command, CommandFlags, HeaderBytes};

use super::connection::{Blocking, Part, Slot};
use super::receiver::Patience;
use super::replies::{Turn, slot};
use super::stop::{GoOn, LOOK, Stop};
use crate::link::refused;

/// Longest wait for room in the socket while another thread receives: that may end.
const SHORT: Duration = Duration::from_millis(10);

impl Blocking {
    /// Sends a request; returns its cookie.
    pub(super) fn start(
        &self,
        owner: &Arc<Condvar>,
        header: Header,
        payload: &[u8],
        part: Part,
        go_on: GoOn<'_>,
    ) -> Result<u64, Stop> {
        let (encoded, cookie) = self.encode(owner, header, part)?;
        self.send_started(&[cookie], &encoded, payload, go_on)?;
        Ok(cookie)
    }

    /// Sends requests without payload at once; returns their cookies.
    pub(super) fn start_all(
        &self,
        owner: &Arc<Condvar>,
        requests: impl IntoIterator<Item = (Header, Part)>,
        go_on: GoOn<'_>,
    ) -> Result<Vec<u64>, Stop> {
        let mut message = Vec::new();
        let mut cookies = Vec::new();
        for (header, part) in requests {
            match self.encode(owner, header, part) {
                Ok((encoded, cookie)) => {
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

    /// Registers a request; returns its message without the payload, and its cookie.
    fn encode(
        &self,
        owner: &Arc<Condvar>,
        mut header: Header,
        part: Part,
    ) -> Result<(HeaderBytes, u64), Stop> {
        header.cookie = self.register(owner, part)?;
        let cookie = header.cookie;
        match header.encode(self.export.headers) {
            Ok(encoded) => Ok((encoded, cookie)),
            Err(error) => {
                self.withdraw(&[cookie]);
                Err(refused(&error).into())
            }
        }
    }

    /// Sends the message of requests that are registered.
    fn send_started(
        &self,
        cookies: &[u64],
        message: &[u8],
        payload: &[u8],
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        match self.send(message, payload, go_on) {
            Ok(()) => {
                self.traffic.sent(message.len() + payload.len());
                Ok(())
            }
            Err((stop, begun)) => {
                if let Stop::Failed(error) = &stop {
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

    // nbd: transmission.cookies-differ
    fn register(&self, owner: &Arc<Condvar>, part: Part) -> Result<u64, Stop> {
        let mut state = self.lock();
        if state.retired {
            return Err(Stop::Retired);
        }
        if let Some(error) = state.broken.as_ref().or(state.refused.as_ref()) {
            return Err(error.clone().into());
        }
        state.generation = state.generation.wrapping_add(1);
        let generation = u64::from(state.generation) << 32;
        let entry = state.in_flight.vacant_entry();
        // Slots are few, so 32 bits hold them.
        let cookie = entry.key() as u64 | generation;
        let owner = owner.clone();
        let part = Some(part);
        entry.insert(Slot { cookie, owner, part, done: false, abandoned: false });
        Ok(cookie)
    }

    /// Forgets requests that were not sent.
    fn withdraw(&self, cookies: &[u64]) {
        let mut state = self.lock();
        for cookie in cookies {
            let _ = state.in_flight.try_remove(slot(*cookie));
        }
    }

    /// Sends a message, after what an earlier sender has left. After a failure: whether a part of it was
    /// sent; if so, the next sender sends the rest.
    pub(super) fn send(
        &self,
        head: &[u8],
        payload: &[u8],
        go_on: GoOn<'_>,
    ) -> Result<(), (Stop, bool)> {
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
    fn send_some(&self, head: &[u8], payload: &[u8], go_on: GoOn<'_>) -> Result<usize, Stop> {
        let mut patience = Patience::new(self.socket.timeout);
        loop {
            let sent = self.socket.send(&[IoSlice::new(head), IoSlice::new(payload)])?;
            if sent > 0 {
                return Ok(sent);
            }
            if self.receive_meanwhile(go_on)? {
                patience = Patience::new(self.socket.timeout);
            } else {
                patience.check()?;
            }
            if !go_on() {
                return Err(Stop::Interrupted);
            }
        }
    }

    /// Waits for room in the socket, or takes in a message: there are servers that read nothing before they
    /// have sent their replies. Returns whether it was a message.
    fn receive_meanwhile(&self, go_on: GoOn<'_>) -> Result<bool, Stop> {
        let Some(receiver) = self.lock().receiver.take() else {
            self.socket.wait_to_send(false, SHORT)?;
            return Ok(false);
        };
        let mut turn = Turn::new(self, receiver);
        let ready = !turn.receiver().is_empty() || self.socket.wait_to_send(true, LOOK)?;
        if ready {
            self.message(turn.receiver(), &mut VecDeque::new(), go_on)?;
        }
        Ok(ready)
    }

    // nbd: disc.zero
    /// Sends the disconnect request, if the socket takes it without waiting.
    pub(super) fn say_goodbye(&self) {
        let unsent = self.sending.lock().is_ok_and(|unsent| !unsent.is_empty());
        let goodbye = Header {
            flags: CommandFlags::NONE,
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        if let Ok(encoded) = goodbye.encode(self.export.headers)
            && !unsent
        {
            self.traffic.sent(encoded.len());
            // A failure means that the server has disconnected first.
            let _ = self.socket.send(&[IoSlice::new(&encoded)]);
        }
    }
}
