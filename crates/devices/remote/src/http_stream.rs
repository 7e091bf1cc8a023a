//! A resource of a server without ranges, read in one pass from its beginning. The last bytes that were received
//! are kept, for requests that come a little out of order.

use std::collections::VecDeque;

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, Result};
use bytes::Bytes;
use reqwest::{Method, Response};
use tokio::sync::Mutex;

use crate::device::RemoteObject;
use crate::failure::{Failure, Repetitions};
use crate::http_object::{HttpResource, PIECE};
use crate::response::{ObjectVersion, changed, refusal};

/// Bytes that are kept: twice the longest request.
const WINDOW: u64 = 64 << 20;
/// Passes over the object.
const PASSES_MAX: u32 = 8;

/// An object that is read in one pass.
pub(crate) struct HttpStream {
    resource: HttpResource,
    size: u64,
    version: ObjectVersion,
    pass: Mutex<Pass>,
}

/// A pass over the object.
struct Pass {
    response: Option<Response>,
    /// Received parts, in order, up to `end`.
    kept: VecDeque<Bytes>,
    begin: u64,
    end: u64,
    number: u32,
}

impl HttpStream {
    /// With the response of the first request.
    pub(crate) fn new(
        resource: HttpResource,
        response: Response,
        size: u64,
        version: ObjectVersion,
    ) -> HttpStream {
        let pass =
            Pass { response: Some(response), kept: VecDeque::new(), begin: 0, end: 0, number: 1 };
        HttpStream { resource, size, version, pass: Mutex::new(pass) }
    }

    /// Begins the next pass.
    async fn restart(&self, pass: &mut Pass) -> Result<(), Failure> {
        if pass.number == PASSES_MAX {
            let text = format!("the disk was read {PASSES_MAX} times from its beginning");
            return Err(Failure::last(without_ranges(text)));
        }
        let number = pass.number + 1;
        *pass = Pass { response: None, kept: VecDeque::new(), begin: 0, end: 0, number };
        let fields = Default::default();
        let (response, place) =
            self.resource.get(&Method::GET, &self.resource.url, &fields).await?;
        if !response.status().is_success() {
            return Err(refusal(response, place != self.resource.url).await);
        }
        if !self.version.fits(&ObjectVersion::of(response.headers()))
            || response.content_length() != Some(self.size)
        {
            return Err(Failure::last(changed()));
        }
        pass.response = Some(response);
        Ok(())
    }

    /// Receives until `end`; forgets what is too old.
    async fn receive(&self, pass: &mut Pass, end: u64) -> Result<(), Failure> {
        let mut piece = 0;
        let mut due = self.resource.due();
        while pass.end < end {
            let Some(response) = &mut pass.response else { return Err(cut()) };
            let received = self.resource.chunk(response, due).await;
            let Ok(Some(more)) = received else {
                pass.response = None;
                return Err(received.err().unwrap_or_else(cut));
            };
            piece += more.len();
            pass.keep(more);
            if piece >= PIECE {
                (piece, due) = (0, self.resource.due());
            }
        }
        Ok(())
    }

    async fn fill(&self, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        let mut pass = self.pass.lock().await;
        let end = at + buf.len() as u64;
        let is_lost = pass.response.is_none() && pass.end < end;
        if is_lost || (at == 0 && pass.begin > 0) {
            if is_lost && pass.end > 0 && self.version.is_unknown() {
                let text =
                    "the connection ended, and nothing tells whether the object is still the same";
                return Err(Failure::last(without_ranges(text.to_owned())));
            }
            self.restart(&mut pass).await?;
        }
        if at < pass.begin {
            let text = format!("the bytes at offset {at} have already passed");
            return Err(Failure::last(without_ranges(text)));
        }
        self.receive(&mut pass, end).await?;
        pass.copy(at, buf);
        Ok(())
    }
}

impl Pass {
    fn keep(&mut self, more: Bytes) {
        self.end += more.len() as u64;
        self.kept.push_back(more);
        while let Some(first) = self.kept.front()
            && self.end - self.begin - first.len() as u64 >= WINDOW
        {
            self.begin += first.len() as u64;
            self.kept.pop_front();
        }
    }

    /// Copies bytes that are kept.
    fn copy(&self, at: u64, buf: &mut [u8]) {
        let mut place = self.begin;
        let end = at + buf.len() as u64;
        for part in &self.kept {
            let next = place + part.len() as u64;
            let (from, to) = (place.max(at), next.min(end));
            if from < to {
                // Both are inside the part and the buffer.
                let inside = |offset: u64, base: u64| usize::try_from(offset - base).unwrap_or(0);
                buf[inside(from, at)..inside(to, at)]
                    .copy_from_slice(&part[inside(from, place)..inside(to, place)]);
            }
            place = next;
        }
    }
}

fn cut() -> Failure {
    let text = "the server closed the connection within the object";
    Failure::passing(Error::new(Kind::Disconnected, text))
}

/// The error of a request that needs ranges.
fn without_ranges(text: String) -> Error {
    let text = format!("the server has no ranges, and {text}");
    let remedy = "read the disk once from its beginning, as a copy does: copy it to a file first";
    Error::new(Kind::Unsupported, text).with_remedy(remedy)
}

#[async_trait]
impl RemoteObject for HttpStream {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_stream(&self) -> bool {
        true
    }

    async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let mut repetitions = Repetitions::new();
        while let Err(failure) = self.fill(at, buf).await {
            repetitions.wait(failure, 0).await?;
        }
        Ok(())
    }
}
