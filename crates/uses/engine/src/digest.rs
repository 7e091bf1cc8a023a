//! The digest of a whole device, as other programs compute it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Data, Pool, Task};

use crate::algorithm::{Algorithm, BLOCK, Hasher};
use crate::handle::{Handle, Retries};
use crate::options::{Options, SEGMENT};
use crate::progress::Progress;
use crate::segment::What;
use crate::segment_maker::{Making, make};
use crate::segment_queue::SegmentQueue;
use crate::side::Side;
use crate::verify::read;
use crate::window::Window;

/// Bytes per read.
const PIECE: u64 = 4 * BLOCK;
/// Minimum number of pieces to read ahead; more if reads take long.
const AHEAD: usize = 32;
/// Zeroes to hash at a time, so that the digest can be stopped.
const ZEROES: u64 = 1 << 30;

/// Reads `source` and returns its digest in hexadecimal. Holes are not read, but all algorithms
/// except blksum must hash their zeroes. Call it on a worker.
pub async fn digest(
    source: &Stack,
    algorithm: Algorithm,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<String> {
    let retries = Retries::new(options, progress);
    let end = Handle::new(Side::Source, source.clone(), source.device().clone(), retries);
    let (end, size) = (Rc::new(end), source.device().facts().size);
    let queue = Arc::new(SegmentQueue::new());
    let making = blockhaul_io::spawn(make(
        queue.clone(),
        Making {
            extents: options.extents,
            grain: PIECE,
            whole: (true, true),
            ..Making::of(end.clone(), SEGMENT, progress)
        },
    ));
    let mut hasher = Hasher::new(algorithm);
    // One task reads for all connections.
    let most = options.requests.saturating_mul(options.connections.max(1));
    let window = (most, !options.adaptive);
    let result = read_all(&queue, &end, (pool, window), progress, &mut hasher).await;
    queue.stop();
    let made = making.await;
    result?;
    made?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the digest"));
    }
    Ok(hasher.finish(size))
}

/// The offset and length of a piece, and the read that fetches it; `None`: the piece is zero.
type Piece = (u64, u64, Option<Task<Result<Option<Data>>>>);

async fn read_all(
    queue: &SegmentQueue,
    end: &Rc<Handle>,
    (pool, (most, fixed)): (&Pool, (usize, bool)),
    progress: &Progress,
    hasher: &mut Hasher,
) -> Result<()> {
    // Limited to what the pool holds, so that the piece awaited next always has a buffer.
    let fits = usize::try_from(pool.limit() / Pool::cost(PIECE as usize)).unwrap_or(1).max(1);
    let window = Rc::new(RefCell::new(Window::new(fits.min(most.max(AHEAD)), fixed)));
    let since = blockhaul_io::now();
    let mut out: VecDeque<Piece> = VecDeque::new();
    let mut result = Ok(());
    while let Some(segment) = queue.next().await {
        let mut at = segment.at;
        for run in segment.runs {
            let run_end = at + run.len;
            while at < run_end && result.is_ok() && !progress.is_cancelled() {
                while out.len() >= window.borrow().limit().max(AHEAD).min(fits)
                    && result.is_ok()
                    && let Some(piece) = out.pop_front()
                {
                    result = take(piece, hasher, progress).await;
                }
                let (most, zero) = match run.what {
                    What::Data | What::New => (PIECE - at % PIECE, false),
                    What::Zero | What::Clean => (ZEROES, true),
                };
                let len = most.min(run_end - at);
                let (end, pool, window) = (end.clone(), pool.clone(), window.clone());
                let read = async move {
                    let started = blockhaul_io::now();
                    let read = read(&end, &pool, at, len).await;
                    if len == PIECE {
                        window
                            .borrow_mut()
                            .learn(blockhaul_io::elapsed(started), blockhaul_io::elapsed(since));
                    }
                    read
                };
                out.push_back((at, len, (!zero).then(|| blockhaul_io::start(read))));
                at += len;
            }
        }
    }
    // After an error, too, wait for the reads in flight.
    for piece in out {
        result = result.and(take(piece, hasher, progress).await);
    }
    result
}

async fn take((at, len, piece): Piece, hasher: &mut Hasher, progress: &Progress) -> Result<()> {
    let read = match piece {
        Some(piece) => piece.await?,
        None => None,
    };
    match read {
        Some(data) => hasher.bytes(data.bytes()),
        None => hasher.zeroes(len),
    }
    progress.add_verified(at, len);
    Ok(())
}
