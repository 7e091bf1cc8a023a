//! A request in flight, and its reply so far.

use super::coverage::Coverage;
use super::event::ReplyError;
use crate::reply::{ErrorChunk, ReplyChunk};
use crate::status::StatusPayload;
use crate::{CommandCode, Errno, ProtocolError, limits, request};

/// A request in flight, and its reply so far.
#[derive(Debug)]
pub(super) struct ReplyState<T> {
    pub(super) request: request::RequestHeader,
    /// The error that is the outcome.
    error: Option<ReplyError>,
    chunks: u32,
    coverage: Coverage,
    /// The contexts that were asked for, and the block status of each.
    contexts: Vec<(u32, Option<StatusPayload>)>,
    pub(super) with: T,
}

impl<T> ReplyState<T> {
    pub(super) fn new(
        request: request::RequestHeader,
        contexts: Vec<u32>,
        with: T,
    ) -> ReplyState<T> {
        let contexts = match &*contexts {
            // As of most requests.
            [] => Vec::new(),
            ids => ids.iter().map(|id| (*id, None)).collect(),
        };
        let coverage = Coverage::default();
        ReplyState { request, error: None, chunks: 0, coverage, contexts, with }
    }

    /// Checks a chunk against the request.
    pub(super) fn check(&self, chunk: &ReplyChunk) -> Result<(), ProtocolError> {
        if self.chunks >= limits::CHUNKS {
            return Err(violation("a reply in too many chunks"));
        }
        // nbd: extended.offset-checked
        if chunk.offset.is_some_and(|offset| offset != self.request.offset) {
            return Err(violation("a reply with another offset than the request's"));
        }
        Ok(())
    }

    /// Counts a chunk.
    pub(super) fn count(&mut self) {
        self.chunks += 1;
    }

    /// Adds `len` bytes at `at` in the export to the reply; returns their offset in the request.
    pub(super) fn data(&mut self, at: u64, len: u64) -> Result<u64, ProtocolError> {
        let start = self.place(at, len).ok_or_else(|| violation("data outside of the request"))?;
        self.cover(start, len, "data in reply to another command than read")
    }

    /// The same for zeroes that do not come.
    pub(super) fn hole(&mut self, at: u64, len: u64) -> Result<u64, ProtocolError> {
        let start =
            self.place(at, len).ok_or_else(|| violation("a hole outside of the request"))?;
        self.cover(start, len, "a hole in reply to another command than read")
    }

    /// All data of a simple reply; returns its length.
    pub(super) fn all_data(&mut self) -> u64 {
        self.coverage.add(0, self.request.length);
        self.request.length
    }

    /// The position of a range in the request, if it is inside and not empty.
    fn place(&self, at: u64, len: u64) -> Option<u64> {
        let start = at.checked_sub(self.request.offset)?;
        let end = start.checked_add(len)?;
        (end <= self.request.length && len > 0).then_some(start)
    }

    fn cover(
        &mut self,
        start: u64,
        len: u64,
        otherwise: &'static str,
    ) -> Result<u64, ProtocolError> {
        if self.request.command != CommandCode::Read {
            return Err(violation(otherwise));
        }
        self.coverage.add(start, len);
        Ok(start)
    }

    /// A simple reply has this error.
    pub(super) fn fail(&mut self, error: Errno) {
        self.error = Some(ReplyError::Server { error, text: String::new(), at: None });
    }

    // nbd: error.unknown
    /// A chunk has an error; the first one is the outcome.
    pub(super) fn failure(&mut self, failure: &ErrorChunk<'_>) {
        let ErrorChunk { error, at, .. } = *failure;
        self.error.get_or_insert_with(|| ReplyError::Server { error, text: failure.text(), at });
    }

    /// Adds block status. A context that was negotiated, but not asked for, is ignored.
    pub(super) fn status(&mut self, status: StatusPayload) -> Result<(), ProtocolError> {
        if self.request.command != CommandCode::BlockStatus {
            return Err(violation("extents in reply to another command than block status"));
        }
        let id = status.status().context();
        if let Some((_, found)) = self.contexts.iter_mut().find(|context| context.0 == id) {
            *found = Some(status);
        }
        Ok(())
    }

    /// The outcome when the reply is complete.
    pub(super) fn finish(mut self) -> (T, Result<Vec<StatusPayload>, ReplyError>) {
        let result = self.outcome();
        (self.with, result)
    }

    fn outcome(&mut self) -> Result<Vec<StatusPayload>, ReplyError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let is_read = self.request.command == CommandCode::Read;
        if is_read && !self.coverage.is_whole(self.request.length) {
            return Err(ReplyError::Incomplete);
        }
        if self.contexts.is_empty() {
            return Ok(Vec::new());
        }
        let contexts = std::mem::take(&mut self.contexts).into_iter();
        contexts.map(|(_, status)| status.ok_or(ReplyError::NoContext)).collect()
    }
}

// nbd: error.inconsistent
/// A violation of the protocol: later data cannot be trusted.
pub(super) fn violation(what: &str) -> ProtocolError {
    ProtocolError::Unexpected { what: what.to_owned() }
}
