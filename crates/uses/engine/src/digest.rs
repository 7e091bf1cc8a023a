//! The digest of a whole device, as other programs compute it: read ahead, hashed in order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockhaul_catalog::Stack;
use blockhaul_io::{Data, Pool, Task};

use crate::algorithm::{BLOCK, DigestAlgorithm, Hasher};
use crate::blocks::{find, room};
use crate::engine::Engine;
use crate::error::Result;
use crate::handle::ReconnectingHandle;
use crate::options::EngineOptions;
use crate::progress::CopyProgress;
use crate::segment::RunContent;
use crate::segment_queue::SegmentQueue;
use crate::shared::EngineState;
use crate::window::RequestWindow;

/// Bytes per read.
pub(crate) const PIECE: u64 = 4 * BLOCK;
/// Minimum number of pieces to read ahead; more if reads take long.
const AHEAD: usize = 32;
/// Zeroes to hash at a time, so that the digest can be stopped.
const ZEROES: u64 = 1 << 30;

/// Reads `source` and returns its digest in hexadecimal. Holes are not read, but all algorithms
/// except blksum must hash their zeroes. Call it on a worker.
///
/// # Errors
/// Those of [`Engine::digest`].
pub async fn digest(
    source: &Stack,
    algorithm: DigestAlgorithm,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<String> {
    let mut engine = Engine::open_to_read(source, None, options, pool, progress)?;
    let digest = engine.digest(algorithm).await;
    engine.close().await;
    digest
}

/// Reads a source ahead of the hasher, over one connection.
pub(crate) struct DigestReadAhead {
    shared: Arc<EngineState>,
    source: Rc<ReconnectingHandle>,
    pool: Pool,
    window: RefCell<RequestWindow>,
    /// Number of pieces that the pool holds: the piece awaited next always has a buffer.
    fits: usize,
    since: Instant,
}

/// The offset and length of a piece, and the read that fetches it; `None`: the piece is zero.
type PieceRead = (u64, u64, Option<Task<Result<Option<Data>>>>);

impl DigestReadAhead {
    /// `most`: the maximum number of pieces in flight; `fixed`: always that many.
    pub(crate) fn new(
        shared: &Arc<EngineState>,
        source: Rc<ReconnectingHandle>,
        pool: &Pool,
        (most, fixed): (usize, bool),
    ) -> Rc<DigestReadAhead> {
        let fits = usize::try_from(pool.limit() / Pool::cost(PIECE as usize)).unwrap_or(1).max(1);
        Rc::new(DigestReadAhead {
            shared: shared.clone(),
            source,
            pool: pool.clone(),
            window: RefCell::new(RequestWindow::new(fits.min(most.max(AHEAD)), fixed)),
            fits,
            since: blockhaul_io::now(),
        })
    }

    /// Hashes all segments of a queue.
    pub(crate) async fn hash(
        self: &Rc<Self>,
        queue: &SegmentQueue,
        hasher: &mut Hasher,
    ) -> Result<()> {
        let mut out: VecDeque<PieceRead> = VecDeque::new();
        let mut result = Ok(());
        while result.is_ok()
            && let Some(segment) = queue.next().await
        {
            let mut at = segment.at;
            for run in segment.runs {
                let end = at + run.len;
                while at < end && result.is_ok() && !self.shared.stopped() {
                    while out.len() >= self.limit()
                        && result.is_ok()
                        && let Some(piece) = out.pop_front()
                    {
                        result = self.take(piece, hasher).await;
                    }
                    let piece = self.start(at, end, run.what).await;
                    at += piece.1;
                    out.push_back(piece);
                }
            }
        }
        // After an error, too, wait for the reads in flight.
        for piece in out {
            result = result.and(self.take(piece, hasher).await);
        }
        result
    }

    fn limit(&self) -> usize {
        self.window.borrow().limit().max(AHEAD).min(self.fits)
    }

    /// Starts to read the first piece of a run, when pause and rate limit allow.
    async fn start(self: &Rc<Self>, at: u64, end: u64, what: RunContent) -> PieceRead {
        if !what.is_data() {
            return (at, ZEROES.min(end - at), None);
        }
        let len = (PIECE - at % PIECE).min(end - at);
        self.shared.resolved.pace(len, || self.shared.stopped()).await;
        self.shared.begin_work().await;
        let ahead = self.clone();
        let read = blockhaul_io::start(async move {
            let started = blockhaul_io::now();
            let read = ahead.read(at, len).await;
            ahead.shared.signals.end_work();
            if len == PIECE {
                let times = (blockhaul_io::elapsed(started), blockhaul_io::elapsed(ahead.since));
                ahead.window.borrow_mut().learn(times.0, times.1);
            }
            read
        });
        (at, len, Some(read))
    }

    /// Reads a piece, with retries; `None`: all zero.
    async fn read(&self, at: u64, len: u64) -> Result<Option<Data>> {
        let mut attempts = 0;
        loop {
            let Some(room) = room(&self.pool, len).await? else { return Ok(None) };
            match find(&self.source, room, at).await {
                Ok(data) => return Ok(data),
                Err((error, generation)) => {
                    self.source.recover(error, generation, &mut attempts).await?;
                }
            }
            self.shared.rest().await;
        }
    }

    async fn take(&self, (at, len, read): PieceRead, hasher: &mut Hasher) -> Result<()> {
        let read = match read {
            Some(read) => read.await?,
            None => None,
        };
        match read {
            Some(data) => hasher.bytes(data.bytes()),
            None => hasher.zeroes(len),
        }
        self.shared.progress.add_verified(at, len);
        Ok(())
    }
}
