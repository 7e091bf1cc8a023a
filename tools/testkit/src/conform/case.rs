//! The device of one check, its known contents, and short helpers to use it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{Can, Device, Facts, Outcome, PendingRequest, Reply, Request, RequestFlags};
use blockhaul_catalog::Stack;
use blockhaul_io::Data;

use super::options::{ConformOptions, InitialContent};
use super::subject::Subject;
use crate::arbitrary::WriteFill;
use crate::rng::Rng;

/// Devices up to this size are checked as a whole, larger ones only at some places.
pub(super) const WHOLE_MAX: u64 = 64 << 20;

/// Length of the places that are checked: a few of the largest common requests.
const WINDOW: u64 = 1 << 20;

/// Maximum bytes that the helpers here read or write at once.
const CHUNK: u64 = 1 << 20;

pub(super) struct CheckCase {
    pub device: Arc<dyn Device>,
    pub facts: Arc<Facts>,
    pub options: Arc<ConformOptions>,
    pub subject: Subject,
    pub seed: u64,
    rng: RefCell<Rng>,
}

impl CheckCase {
    pub fn new(
        subject: Subject,
        options: Arc<ConformOptions>,
        seed: u64,
    ) -> Result<CheckCase, String> {
        let device = match &subject.stack {
            Some(stack) => stack.device().clone(),
            None => cover(subject.device.clone(), &options)?,
        };
        let facts = device.facts();
        let rng = RefCell::new(Rng::new(seed));
        Ok(CheckCase { device, facts, options, subject, seed, rng })
    }

    /// Another handle to the same storage, fenced; `None` if the subject offers none.
    pub async fn another(&self) -> Result<Option<Arc<dyn Device>>, String> {
        let named = |error: blockhaul_block::Error| format!("cannot open another handle: {error}");
        match (&self.subject.stack, &self.subject.more) {
            (Some(stack), _) if stack.has_more() => Ok(Some(stack.another().await.map_err(named)?)),
            (None, Some(more)) => {
                Ok(Some(cover(more.another().await.map_err(named)?, &self.options)?))
            }
            _ => Ok(None),
        }
    }

    pub fn random(&self, bound: u64) -> u64 {
        self.rng.borrow_mut().below(bound)
    }

    pub fn shuffle<T>(&self, items: &mut [T]) {
        self.rng.borrow_mut().shuffle(items);
    }

    pub fn can(&self, can: Can) -> bool {
        self.facts.can.contains(can)
    }

    /// Whether the device can be written, and keeps what was written.
    pub fn keeps(&self) -> bool {
        self.can(Can::WRITE) && self.options.keeps_writes
    }

    pub fn minimum(&self) -> u64 {
        u64::from(self.facts.block.minimum.max(1))
    }

    /// The size without a tail shorter than the minimum block, which only a request that ends there
    /// reaches.
    pub fn reach(&self) -> u64 {
        self.down(self.facts.size)
    }

    /// Maximum read or write here.
    pub fn chunk(&self) -> u64 {
        self.down(CHUNK.min(self.facts.block.maximum.into())).max(self.minimum())
    }

    /// Rounded down to the minimum block.
    pub fn down(&self, bytes: u64) -> u64 {
        bytes - bytes % self.minimum()
    }

    /// Rounded up to the minimum block.
    pub fn up(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.minimum())
    }

    /// The places that are checked, aligned and disjoint: all of a small device, the start, the
    /// middle and the end of a larger one.
    pub fn windows(&self) -> Vec<Range<u64>> {
        let reach = self.reach();
        if reach == 0 {
            return Vec::new();
        }
        if reach <= 4 * WINDOW {
            let whole = 0..reach;
            return vec![whole];
        }
        let middle = self.down(reach / 2);
        vec![0..WINDOW, middle..middle + WINDOW / 2, self.down(reach - WINDOW)..reach]
    }

    /// All of the device up to 64 MiB, else its windows.
    pub fn most(&self) -> Vec<Range<u64>> {
        let whole = 0..self.reach();
        if self.reach() <= WHOLE_MAX { vec![whole] } else { self.windows() }
    }

    /// `count` disjoint ranges of `len` bytes (rounded up to the minimum block), fewer if there is
    /// not enough space; spread over the windows, in random order.
    pub fn places(&self, count: usize, len: u64) -> Vec<Range<u64>> {
        let len = self.up(len);
        let mut places = Vec::new();
        for window in self.windows() {
            let mut at = window.start;
            while at + len <= window.end {
                places.push(at..at + len);
                at += len;
            }
        }
        self.shuffle(&mut places);
        places.truncate(count);
        places
    }

    /// Awaits the outcome, which must come in time.
    pub async fn wait(&self, pending: PendingRequest, what: &str) -> Result<Outcome, String> {
        let limit = self.options.request_timeout;
        let outcome = blockhaul_io::timeout(limit, pending).await;
        outcome.map_err(|_| format!("{what} did not complete within {limit:?}"))
    }

    /// Submits, awaits, and requires success.
    pub async fn ok(&self, request: Request) -> Result<Reply, String> {
        self.ok_on(&self.device, request).await
    }

    pub async fn ok_on(&self, device: &dyn Device, request: Request) -> Result<Reply, String> {
        let what = format!("{} {}+{}", request.kind(), request.at, request.len);
        let outcome = self.wait(device.submit(request), &what).await?;
        outcome.map_err(|error| format!("{what} failed: {error}"))
    }

    /// The bytes of a range, however long.
    pub async fn read(&self, range: Range<u64>) -> Result<Vec<u8>, String> {
        self.read_on(&self.device, range, self.chunk()).await
    }

    /// The bytes of a range, read in pieces of `chunk` bytes.
    pub async fn read_on(
        &self,
        device: &dyn Device,
        range: Range<u64>,
        chunk: u64,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let len = chunk.min(range.end - at) as usize;
            let reply = self
                .ok_on(device, Request::read(at, blockhaul_io::Reservation::unpooled(len)))
                .await?;
            bytes.extend_from_slice(&read_bytes(reply, len)?);
            at += len as u64;
        }
        Ok(bytes)
    }

    /// Writes bytes, however many.
    pub async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.write_on(&self.device, at, bytes, RequestFlags::empty()).await
    }

    pub async fn write_on(
        &self,
        device: &dyn Device,
        mut at: u64,
        bytes: &[u8],
        flags: RequestFlags,
    ) -> Result<(), String> {
        for piece in bytes.chunks(self.chunk() as usize) {
            self.ok_on(device, Request::write(at, Data::copy_of(piece)).with(flags)).await?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Random bytes, none of them zero.
    pub fn noise(&self, len: u64) -> Vec<u8> {
        WriteFill::Random(self.random(u64::MAX)).bytes(len as usize)
    }

    /// The initial contents of the device, if known.
    pub fn initial_content(&self, range: Range<u64>) -> Option<Vec<u8>> {
        match &self.options.content {
            InitialContent::Any if self.facts.zeroed => {
                Some(vec![0; (range.end - range.start) as usize])
            }
            InitialContent::Any => None,
            InitialContent::Zeroes => Some(vec![0; (range.end - range.start) as usize]),
            InitialContent::Oracle(byte) => Some(range.map(|at| byte(at)).collect()),
        }
    }
}

/// The device with the emulation and fence of callers.
fn cover(device: Arc<dyn Device>, options: &ConformOptions) -> Result<Arc<dyn Device>, String> {
    if !options.emulate {
        return Ok(blockhaul_block::fence(device));
    }
    let stack = Stack::over(device);
    Ok(stack.device().clone())
}

/// The bytes of a reply to a read of `len` bytes.
pub(super) fn read_bytes(reply: Reply, len: usize) -> Result<Vec<u8>, String> {
    match reply {
        Reply::Hole => Ok(vec![0; len]),
        Reply::Data(data) if data.len() == len => Ok(data.bytes().to_vec()),
        Reply::Data(data) => Err(format!("a read of {len} bytes gave {}", data.len())),
        other => Err(format!("a read was answered by {other:?}")),
    }
}

/// Ok if both are the same, else where they first differ and how. `at` is the offset of both.
pub(super) fn same(at: u64, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{} bytes instead of {}", found.len(), expected.len()));
    }
    // Most ranges are equal, and are compared at once.
    if found == expected {
        return Ok(());
    }
    let first = found.iter().zip(expected).take_while(|(a, b)| a == b).count();
    let count = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let offset = at + first as u64;
    let found = found[first];
    let expected = expected[first];
    Err(format!("byte {offset} is {found:#04x} instead of {expected:#04x} ({count} bytes differ)"))
}
