//! Verification: both ends are read again and compared; the digest says what was found.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use block::{Device, Error, Kind, Reply, Request, Result, Stack};
use io::{Data, Pool, Remote};

use crate::end::{End, Retries, Side};
use crate::manifest::{Digest, Manifest};
use crate::options::{Options, SEGMENT};
use crate::progress::Progress;
use crate::zeroes::is_zero;

/// Bytes of a digest block. Part of the digest's definition: do not change.
const BLOCK: u64 = 256 << 10;
/// Blocks that one walker has in flight.
const IN_FLIGHT: usize = 8;

/// What a verification found to be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Bytes compared.
    pub bytes: u64,
    /// Digest of the content, in hexadecimal: BLAKE3 over the size (8 bytes, big-endian) and, for each
    /// segment of 128 MiB, the BLAKE3 of the BLAKE3s of its blocks of 256 KiB.
    pub digest: String,
}

/// Reads `source` and the start of `target` again and compares them. An error of kind `Io` names the
/// first offset that differs. Call it on a worker after the writes have completed.
pub async fn verify(
    source: &Stack,
    target: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Verified> {
    let (manifest, differs_at) = walk(source, Some(target), options, pool, progress).await?;
    if differs_at != u64::MAX {
        let text = format!(
            "source and target differ, first at offset {differs_at}: the source changed during the \
             copy, or one of them returns wrong data; copy again"
        );
        return Err(Error::new(Kind::Io, text).on(&target.device().facts().name));
    }
    Ok(Verified { bytes: manifest.size, digest: manifest.digest() })
}

/// Reads `source` and returns the digests of its segments. Call it on a worker.
pub async fn manifest(
    source: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Manifest> {
    Ok(walk(source, None, options, pool, progress).await?.0)
}

/// Reads one or two devices: the digests of the first, and where they first differ.
async fn walk(
    source: &Stack,
    target: Option<&Stack>,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<(Manifest, u64)> {
    let size = source.device().facts().size;
    let segments = size.div_ceil(SEGMENT);
    let count = usize::try_from(segments).map_err(|error| {
        Error::new(Kind::TooLarge, "too large to be verified here").because(error)
    })?;
    let walk = Arc::new(Walk {
        source: source.clone(),
        target: target.cloned(),
        retries: Retries::new(options, progress),
        size,
        next: AtomicU64::new(0),
        differs_at: AtomicU64::new(u64::MAX),
        digests: Mutex::new(vec![None; count]),
        source_pool: pool.clone(),
        // A pool of its own: nobody waits for a buffer of the pool that they hold one of.
        target_pool: Pool::new(pool.limit()),
        zero_block: blake3::hash(&vec![0; BLOCK as usize]).into(),
        progress: progress.clone(),
    });
    let walkers: Vec<_> = (0..options.connections.max(1))
        .map(|index| {
            let walk = walk.clone();
            Remote::to(index).spawn(move || walk.walk())
        })
        .collect();
    let mut result = Ok(());
    for walker in walkers {
        let ended = walker.await.map_err(|lost| Error::new(Kind::Io, "verify").because(lost));
        result = result.and(ended.and_then(|walked| walked));
    }
    result?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the verification"));
    }
    let digests = std::mem::take(&mut *walk.digests.lock().expect("no panic under this lock"));
    let manifest = Manifest { size, segments: digests.into_iter().flatten().collect() };
    Ok((manifest, walk.differs_at.load(Ordering::Relaxed)))
}

struct Walk {
    source: Stack,
    target: Option<Stack>,
    retries: Arc<Retries>,
    size: u64,
    next: AtomicU64,
    differs_at: AtomicU64,
    digests: Mutex<Vec<Option<Digest>>>,
    source_pool: Pool,
    target_pool: Pool,
    zero_block: Digest,
    progress: Arc<Progress>,
}

impl Walk {
    async fn walk(self: Arc<Self>) -> Result<()> {
        let end = |side, stack: &Stack| {
            let device = stack.device().clone();
            Rc::new(End::new(side, stack.clone(), device, self.retries.clone()))
        };
        let source = end(Side::Source, &self.source);
        let target = self.target.as_ref().map(|target| end(Side::Target, target));
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(start) = index.checked_mul(SEGMENT).filter(|&start| start < self.size) else {
                return Ok(());
            };
            let behind = start > self.differs_at.load(Ordering::Relaxed);
            if behind || self.progress.is_cancelled() {
                return Ok(());
            }
            let digest = self.clone().segment(&source, &target, start).await?;
            if let Ok(index) = usize::try_from(index) {
                self.digests.lock().expect("no panic under this lock")[index] = Some(digest);
            }
        }
    }

    async fn segment(
        self: Arc<Self>,
        source: &Rc<End>,
        target: &Option<Rc<End>>,
        start: u64,
    ) -> Result<Digest> {
        let end = (start + SEGMENT).min(self.size);
        let mut hasher = blake3::Hasher::new();
        let mut out = VecDeque::new();
        let mut at = start;
        loop {
            while at < end && out.len() < IN_FLIGHT {
                let len = BLOCK.min(end - at);
                out.push_back(io::start(self.clone().block(
                    source.clone(),
                    target.clone(),
                    at,
                    len,
                )));
                at += len;
            }
            match out.pop_front() {
                None => return Ok(hasher.finalize().into()),
                Some(block) => {
                    hasher.update(&block.await?);
                }
            }
        }
    }

    /// Compares one block and returns its digest.
    async fn block(
        self: Arc<Self>,
        source: Rc<End>,
        target: Option<Rc<End>>,
        at: u64,
        len: u64,
    ) -> Result<Digest> {
        let source = read(&source, &self.source_pool, at, len).await?;
        if let Some(target) = target {
            let target = read(&target, &self.target_pool, at, len).await?;
            let same = match (&source, &target) {
                (None, None) => true,
                (Some(a), Some(b)) => a.bytes() == b.bytes(),
                (Some(data), None) | (None, Some(data)) => is_zero(data.bytes()),
            };
            if !same {
                let first = first_difference(source.as_ref(), target.as_ref());
                self.differs_at.fetch_min(at + first, Ordering::Relaxed);
            }
        }
        self.progress.add_verified(len);
        Ok(match source {
            None if len == BLOCK => self.zero_block,
            None => blake3::hash(&vec![0; len as usize]).into(),
            Some(data) => blake3::hash(data.bytes()).into(),
        })
    }
}

pub(crate) fn first_difference(a: Option<&Data>, b: Option<&Data>) -> u64 {
    let position = match (a, b) {
        (Some(a), Some(b)) => a.bytes().iter().zip(b.bytes()).position(|(a, b)| a != b),
        (Some(data), None) | (None, Some(data)) => data.bytes().iter().position(|&byte| byte != 0),
        (None, None) => None,
    };
    position.unwrap_or(0) as u64
}

/// Reads a block, again where that may help; `None`: all zero.
pub(crate) async fn read(end: &End, pool: &Pool, at: u64, len: u64) -> Result<Option<Data>> {
    let mut attempts = 0;
    loop {
        let generation = end.generation();
        match try_read(&end.device(), pool, at, len).await {
            Ok(data) => return Ok(data),
            Err(error) => end.recover(error, generation, &mut attempts).await?,
        }
    }
}

/// Reads a block, in pieces where the device takes no more at once; `None`: all zero.
async fn try_read(
    device: &Arc<dyn Device>,
    pool: &Pool,
    at: u64,
    len: u64,
) -> Result<Option<Data>> {
    let facts = device.facts();
    let minimum = facts.block.minimum.max(1);
    let most = u64::from((facts.block.maximum - facts.block.maximum % minimum).max(minimum));
    let no_room = |error: io::TooLarge| Error::new(Kind::NoMemory, "no buffer").because(error);
    let room = pool.reserve(len as usize).await.map_err(no_room)?;
    if len <= most {
        return match device.submit(Request::read(at, room)).await? {
            Reply::Data(data) => Ok(Some(data)),
            _ => Ok(None),
        };
    }
    let mut whole = room.into_buf();
    whole.fill(0);
    let mut start = 0;
    while start < len {
        let part = most.min(len - start);
        // Small, and in sequence: outside of the pool, which this block holds a buffer of.
        let room = io::Room::unpooled(part as usize);
        if let Reply::Data(data) = device.submit(Request::read(at + start, room)).await? {
            whole[start as usize..(start + part) as usize].copy_from_slice(data.bytes());
        }
        start += part;
    }
    Ok(Some(Data::from(whole)))
}
