//! The body of a request that sends a file while it is written. Bytes that come out of order wait for those before
//! them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use bytes::Bytes;
use tokio::sync::Notify;

/// Bytes in order that wait for the connection before writers wait, too.
const AHEAD: u64 = 16 << 20;
/// Bytes out of order that wait for those before them.
const EARLY_MAX: u64 = 64 << 20;
/// Bytes that the connection takes at a time: between two pieces it looks for a response, because a server that
/// refuses the rest closes the connection.
const PIECE: usize = 64 << 10;
static ZEROES: [u8; PIECE] = [0; PIECE];

/// Bytes on their way from writers to a connection.
pub(crate) struct PutBody {
    /// Bytes of the file; none: it ends where the writers end.
    size: Option<u64>,
    state: Mutex<BodyState>,
    /// Something was added, or the body has ended.
    added: Notify,
    /// Something was taken, or the upload has failed.
    taken: Notify,
}

struct BodyState {
    /// Offset behind the bytes that have come without a gap.
    arrived: u64,
    /// Offset behind the bytes that the connection has taken.
    sent: u64,
    /// The pieces between both.
    queue: VecDeque<BodyPiece>,
    /// Pieces behind a gap, by their offsets.
    early: BTreeMap<u64, BodyPiece>,
    early_bytes: u64,
    is_ended: bool,
    failed: Option<Error>,
    /// The time at which the connection took bytes, or at which there were bytes again.
    moved: Instant,
}

#[derive(Debug, Clone)]
enum BodyPiece {
    Bytes(Bytes),
    Zeroes(u64),
}

impl BodyPiece {
    fn len(&self) -> u64 {
        match self {
            BodyPiece::Bytes(bytes) => bytes.len() as u64,
            BodyPiece::Zeroes(len) => *len,
        }
    }

    /// Bytes of memory.
    fn cost(&self) -> u64 {
        match self {
            BodyPiece::Bytes(bytes) => bytes.len() as u64,
            BodyPiece::Zeroes(_) => 0,
        }
    }
}

impl PutBody {
    /// The body of a file of `size` bytes; none: of a file that ends where its writers end.
    pub(crate) fn new(size: Option<u64>) -> PutBody {
        let state = BodyState {
            arrived: 0,
            sent: 0,
            queue: VecDeque::new(),
            early: BTreeMap::new(),
            early_bytes: 0,
            is_ended: false,
            failed: None,
            moved: blockhaul_io::now(),
        };
        PutBody { size, state: Mutex::new(state), added: Notify::new(), taken: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, BodyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes at offset `at`, or `len` zeroes. Whether the writer waits for [`PutBody::room`] first before it
    /// writes more.
    ///
    /// # Errors
    /// The bytes were written before, too many are written out of order, or the upload has failed.
    pub(crate) fn put(&self, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<bool> {
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if len == 0 {
            return Ok(false);
        }
        if state.is_ended || !state.is_free(at, len) {
            return Err(written_once());
        }
        let piece = bytes.map_or(BodyPiece::Zeroes(len), |bytes| {
            BodyPiece::Bytes(Bytes::copy_from_slice(bytes))
        });
        if at > state.arrived {
            state.early_bytes += piece.cost();
            state.early.insert(at, piece);
            if state.early_bytes > EARLY_MAX {
                let text = format!(
                    "more than {} MiB are written behind a part that was not",
                    EARLY_MAX >> 20
                );
                let remedy = "copy with one connection (-C 1), and without --target-is-zero";
                return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
            }
            return Ok(false);
        }
        if state.queue.is_empty() {
            state.moved = blockhaul_io::now();
        }
        state.append(piece);
        let waits = state.arrived - state.sent > AHEAD;
        drop(state);
        self.added.notify_one();
        Ok(waits)
    }

    /// Waits until the connection has taken most of what was written.
    ///
    /// # Errors
    /// The upload has failed.
    pub(crate) async fn room(&self) -> Result<()> {
        loop {
            let taken = self.taken.notified();
            tokio::pin!(taken);
            // Before the look: nothing is missed.
            taken.as_mut().enable();
            {
                let state = self.lock();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                if state.arrived - state.sent <= AHEAD {
                    return Ok(());
                }
            }
            taken.await;
        }
    }

    /// Ends the body: what was not written is zeroes. Its length.
    ///
    /// # Errors
    /// The upload has failed.
    pub(crate) fn end(&self) -> Result<u64> {
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        while let Some((&at, _)) = state.early.first_key_value() {
            let gap = at - state.arrived;
            state.append(BodyPiece::Zeroes(gap));
        }
        if let Some(rest) = self.size.map(|size| size - state.arrived).filter(|rest| *rest > 0) {
            state.append(BodyPiece::Zeroes(rest));
        }
        state.is_ended = true;
        let len = state.arrived;
        drop(state);
        self.added.notify_one();
        Ok(len)
    }

    /// Ends the upload with an error, unless it has failed before.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().failed.get_or_insert(error);
        self.added.notify_one();
        self.taken.notify_waiters();
    }

    /// The error that has ended the upload.
    pub(crate) fn failed(&self) -> Option<Error> {
        self.lock().failed.clone()
    }

    /// Whether the connection has taken the whole file.
    pub(crate) fn is_sent(&self) -> bool {
        let state = self.lock();
        self.size.map_or(state.is_ended && state.queue.is_empty(), |size| state.sent == size)
    }

    /// The time since the connection took bytes, while there are some for it.
    pub(crate) fn idle(&self) -> Duration {
        let state = self.lock();
        if state.queue.is_empty() { Duration::ZERO } else { blockhaul_io::elapsed(state.moved) }
    }

    /// The next bytes for the connection; none at the end of the body.
    ///
    /// # Errors
    /// The upload has failed.
    pub(crate) async fn next(&self) -> Result<Option<Bytes>> {
        let next = loop {
            {
                let mut state = self.lock();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                if let Some(next) = state.take() {
                    drop(state);
                    self.taken.notify_waiters();
                    break next;
                }
                if state.is_ended || self.size == Some(state.sent) {
                    return Ok(None);
                }
            }
            // One connection waits: a notification before this one is kept.
            self.added.notified().await;
        };
        tokio::task::yield_now().await;
        Ok(Some(next))
    }
}

impl BodyState {
    /// Whether nothing of a range was written.
    fn is_free(&self, at: u64, len: u64) -> bool {
        let before = self.early.range(..at.saturating_add(len)).next_back();
        at >= self.arrived && before.is_none_or(|(begin, piece)| begin + piece.len() <= at)
    }

    /// Adds a piece where the bytes without a gap end, and pieces that follow it.
    fn append(&mut self, piece: BodyPiece) {
        self.arrived += piece.len();
        self.queue.push_back(piece);
        while let Some(next) = self.early.remove(&self.arrived) {
            self.early_bytes -= next.cost();
            self.arrived += next.len();
            self.queue.push_back(next);
        }
    }

    fn take(&mut self) -> Option<Bytes> {
        let next = match self.queue.pop_front()? {
            BodyPiece::Bytes(mut bytes) => {
                let rest = bytes.split_off(bytes.len().min(PIECE));
                if !rest.is_empty() {
                    self.queue.push_front(BodyPiece::Bytes(rest));
                }
                bytes
            }
            BodyPiece::Zeroes(len) => {
                let now = usize::try_from(len).unwrap_or(ZEROES.len()).min(ZEROES.len());
                if len > now as u64 {
                    self.queue.push_front(BodyPiece::Zeroes(len - now as u64));
                }
                Bytes::from_static(&ZEROES[..now])
            }
        };
        self.sent += next.len() as u64;
        self.moved = blockhaul_io::now();
        Some(next)
    }
}

fn written_once() -> Error {
    let text = "the file cannot be written at random places: this part of it was already written";
    Error::new(Kind::Unsupported, text)
        .with_remedy("write to a local file, and copy that to the server")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;
    use crate::runtime::block_on;

    fn rest(body: &PutBody) -> Vec<u8> {
        block_on(async {
            let mut all = Vec::new();
            while let Some(next) = body.next().await.unwrap() {
                all.extend_from_slice(&next);
            }
            all
        })
    }

    #[test]
    fn bytes_are_put_in_order_and_gaps_are_zeroes() {
        let body = PutBody::new(Some(12));
        for (at, bytes) in [(4, &b"ef"[..]), (0, b"ab"), (9, b"j"), (2, b"cd")] {
            assert!(!body.put(at, bytes.len() as u64, Some(bytes)).unwrap());
        }
        body.put(6, 1, None).unwrap();
        for (at, len) in [(0, 1), (3, 2), (8, 2), (9, 1), (5, 9)] {
            assert_eq!(body.put(at, len, None).unwrap_err().kind(), Kind::Unsupported, "{at}");
        }
        assert_eq!(body.end().unwrap(), 12);
        assert_eq!(rest(&body), b"abcdef\0\0\0j\0\0");
        assert!(body.is_sent() && body.put(11, 1, None).is_err());
    }

    #[test]
    fn a_body_of_unknown_length_ends_with_its_writers() {
        let body = PutBody::new(None);
        body.put(3, 2, Some(b"de")).unwrap();
        body.put(0, 1, Some(b"a")).unwrap();
        assert_eq!(body.end().unwrap(), 5);
        assert_eq!(rest(&body), b"a\0\0de");
        let zeroes = PutBody::new(None);
        zeroes.put(0, 600_000, None).unwrap();
        zeroes.end().unwrap();
        assert!(rest(&zeroes) == vec![0; 600_000]);
        let empty = PutBody::new(None);
        assert_eq!((empty.end().unwrap(), rest(&empty).len()), (0, 0));
    }

    #[test]
    fn writers_wait_for_the_connection_and_memory_is_bounded() {
        let body = PutBody::new(None);
        let part = vec![1; 1 << 20];
        let put = |number: u64| body.put(number << 20, 1 << 20, Some(&part));
        assert!((0..16).all(|number| !put(number).unwrap()));
        assert!(put(16).unwrap());
        block_on(async {
            let waits = tokio::time::timeout(Duration::from_millis(20), body.room());
            assert!(waits.await.is_err());
            let take = async {
                for _ in 0..(1 << 20) / PIECE {
                    body.next().await.unwrap();
                }
            };
            let (room, ()) = tokio::join!(body.room(), take);
            room.unwrap();
        });
        // Behind a gap nobody waits, so that those who fill it are not held up.
        assert!((20..84).all(|number| !put(number).unwrap()));
        assert_eq!(put(84).unwrap_err().kind(), Kind::Unsupported);
        body.fail(Error::new(Kind::NoSpace, "full"));
        assert_eq!(put(17).unwrap_err().kind(), Kind::NoSpace);
        assert_eq!(block_on(body.next()).unwrap_err().kind(), Kind::NoSpace);
        assert!(body.end().is_err());
    }
}
