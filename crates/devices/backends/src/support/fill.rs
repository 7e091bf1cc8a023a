//! Answers reads with bytes computed or copied on the worker itself.

use blockhaul_block::{Outcome, PendingRequest, Reply};
use blockhaul_io::{Data, Reservation};

/// Bytes produced before other tasks run: about 100 us of work, the length of a long system call,
/// so that other tasks on the worker are not delayed noticeably.
pub const SHORT: usize = 1 << 20;

/// Answers a read with `fill`, which writes every byte of a piece: `fill(offset, piece)`.
pub fn read(at: u64, room: Reservation, fill: impl Fn(u64, &mut [u8]) + 'static) -> PendingRequest {
    let mut buf = room.into_buf();
    if buf.len() <= SHORT {
        fill(at, &mut buf);
        return PendingRequest::ready(Ok(Reply::Data(buf.into())));
    }
    PendingRequest::start(async move {
        let mut next = at;
        for piece in buf.chunks_mut(SHORT) {
            fill(next, piece);
            next += piece.len() as u64;
            blockhaul_io::yield_now().await;
        }
        Outcome::Ok(Reply::Data(Data::from(buf)))
    })
}
