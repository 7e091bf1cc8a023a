//! Parts of virtual disks that do not change: partition tables, file systems made from a directory,
//! and the zeroes between them.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, PendingRequest, Reply,
    Request, ZERO,
};
use blockhaul_io::is_zero;

use blockhaul_backends::support::fill;

/// A device of these bytes. Only the same bytes can be written again.
pub(crate) fn bytes(name: &str, bytes: Vec<u8>) -> Arc<dyn Device> {
    let facts = facts(name, bytes.len() as u64);
    Arc::new(ConstantDevice { facts, bytes: Some(bytes.into()) })
}

/// A device of zeroes. Only zeroes can be written.
pub(crate) fn zeroes(name: &str, len: u64) -> Arc<dyn Device> {
    Arc::new(ConstantDevice { facts: facts(name, len), bytes: None })
}

fn facts(name: &str, len: u64) -> Arc<Facts> {
    Arc::new(Facts {
        can: Can::all(),
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(name, len)
    })
}

struct ConstantDevice {
    facts: Arc<Facts>,
    /// All bytes; none: zeroes.
    bytes: Option<Arc<[u8]>>,
}

impl ConstantDevice {
    /// The outcome of a write to this range: `same` bytes succeed, others fail.
    fn keep(&self, same: bool) -> PendingRequest {
        if same {
            return PendingRequest::ready(Ok(Reply::Done));
        }
        let text = format!("{} cannot be changed", self.facts.name);
        Error::new(Kind::Io, text).into()
    }

    fn part(&self, at: u64, len: u64) -> Option<&[u8]> {
        self.bytes.as_ref().map(|bytes| &bytes[at as usize..(at + len) as usize])
    }
}

impl Device for ConstantDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, .. } = request;
        match op {
            Op::Read(room) => match &self.bytes {
                None => PendingRequest::ready(Ok(Reply::Hole)),
                Some(bytes) => {
                    let bytes = bytes.clone();
                    fill::read(at, room, move |at, out| {
                        out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                    })
                }
            },
            Op::Write(data) => {
                let same = match self.part(at, len) {
                    Some(bytes) => bytes == data.bytes(),
                    None => is_zero(data.bytes()),
                };
                self.keep(same)
            }
            Op::Zero => self.keep(self.part(at, len).is_none_or(is_zero)),
            Op::Trim | Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Extents(contexts) => {
                let flags = if self.bytes.is_some() { 0 } else { HOLE | ZERO };
                let lists = contexts.iter().map(|_| Extents::one(len, flags)).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
        }
    }
}
