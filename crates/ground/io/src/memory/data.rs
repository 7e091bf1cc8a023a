//! [`Data`]: the payloads of requests and replies, shared and sliced.

use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use rustix::io::Errno;

use super::alignment::ALIGN;
use super::block::AlignedBlock;
use super::buf::Buf;
use super::park::ParkedPayload;
use super::route_counters::RouteCounters;

/// A payload: bytes that are only read from here on, shared and sliced without copying.
///
/// The bytes are in memory, or *parked* in the kernel, if the caller allowed that
/// ([`Reservation::parkable`](crate::Reservation::parkable)). Code that passes a payload on need
/// not know. Code that reads one that may be parked first copies it out ([`Data::load`]), which can
/// fail; after that, use [`Data::bytes`].
#[derive(Clone)]
pub struct Data {
    repr: Repr,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Repr {
    Shared(Arc<Buf>),
    Static(&'static [u8]),
    /// Part of a larger receive, in the receiver's memory.
    Received(Arc<Vec<u8>>),
    Parked(Arc<InKernel>),
}

/// A parked payload, and its bytes once they were read.
struct InKernel {
    parked: Mutex<Option<ParkedPayload>>,
    copied: OnceLock<Result<Buf, Errno>>,
}

impl InKernel {
    /// The bytes, copied out once. The error is one of the storage that they came from: pages that
    /// the pipe refers to may prove lost only when they are read.
    fn load(&self) -> io::Result<&[u8]> {
        let copied = self.copied.get_or_init(|| {
            let parked = self.parked.lock().expect("no panic under this lock").take();
            let parked = parked.expect("taken out only by the sole owner, or here, once");
            match parked.into_buf() {
                Ok((mut buf, len)) => {
                    buf.truncate(len);
                    Ok(buf)
                }
                Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        });
        match copied {
            Ok(buf) => Ok(buf),
            Err(errno) => Err((*errno).into()),
        }
    }
}

/// Shared zeroes: one block for all that write zeroes as data.
static ZEROES: Zeroes = Zeroes([0; Data::ZEROES_MAX]);

/// Aligned like all buffers: devices may use them for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; Data::ZEROES_MAX]);

const _: () = assert!(align_of::<Zeroes>() == ALIGN);

impl Data {
    /// Maximum length of [`Data::zeroes`].
    pub const ZEROES_MAX: usize = 256 << 10;

    /// `len` zero bytes without an allocation, aligned to [`ALIGN`]; `len` is at most
    /// [`Data::ZEROES_MAX`].
    pub fn zeroes(len: usize) -> Data {
        Data { repr: Repr::Static(&ZEROES.0[..len]), start: 0, len }
    }

    /// `len` bytes from `start` on of a receiver's memory: unaligned, and of no pool. Panics if the
    /// range exceeds it.
    pub(crate) fn received(bytes: Arc<Vec<u8>>, start: usize, len: usize) -> Data {
        assert!(start <= bytes.len() && len <= bytes.len() - start);
        Data { repr: Repr::Received(bytes), start, len }
    }

    /// A copy of `bytes` outside any pool: for tests and small payloads.
    pub fn copy_of(bytes: &[u8]) -> Data {
        let mut buf = Buf::unpooled(bytes.len());
        buf.copy_from_slice(bytes);
        Data::from(buf)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies parked bytes out, unless already done; free for a payload in memory.
    ///
    /// # Errors
    /// The storage that the bytes came from failed after all. They are lost: trying again returns
    /// the same error.
    pub fn load(&self) -> io::Result<()> {
        match &self.repr {
            Repr::Parked(kernel) => kernel.load().map(drop),
            Repr::Shared(_) | Repr::Static(_) | Repr::Received(_) => Ok(()),
        }
    }

    /// The bytes.
    ///
    /// # Panics
    /// The payload is parked, and its bytes are lost: see [`Data::load`].
    pub fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.repr {
            Repr::Shared(buf) => buf,
            Repr::Static(bytes) => bytes,
            Repr::Received(bytes) => bytes,
            Repr::Parked(kernel) => kernel.load().expect("loaded before, where it may be parked"),
        };
        &all[self.start..self.start + self.len]
    }

    /// The counters that the memory was reserved with, if the bytes are in memory.
    pub fn counters(&self) -> Option<&RouteCounters> {
        match &self.repr {
            Repr::Shared(buf) => buf.counters(),
            Repr::Static(_) | Repr::Received(_) | Repr::Parked(_) => None,
        }
    }

    /// The block that contains the bytes, if it is one of ours.
    pub(crate) fn block(&self) -> Option<&AlignedBlock> {
        match &self.repr {
            Repr::Shared(buf) => Some(buf.block()),
            Repr::Static(_) | Repr::Received(_) => None,
            Repr::Parked(kernel) => kernel.copied.get()?.as_ref().ok().map(Buf::block),
        }
    }

    /// `len` bytes from `start` on, sharing the memory. Panics if the range exceeds the payload.
    pub fn slice(&self, start: usize, len: usize) -> Data {
        let end = start.checked_add(len).expect("slice end overflows");
        assert!(end <= self.len, "slice {start}+{len} of {} bytes", self.len);
        Data { repr: self.repr.clone(), start: self.start + start, len }
    }

    /// The payload as parked in the kernel, to be moved on without a copy, if it was not read and
    /// has no other holder. Otherwise returns the payload.
    ///
    /// # Errors
    /// The payload, if it is not parked, was read, or has another holder.
    pub fn take_parked(self) -> Result<ParkedPayload, Data> {
        let Data { repr, start, len } = self;
        let Repr::Parked(kernel) = repr else { return Err(Data { repr, start, len }) };
        match Arc::try_unwrap(kernel) {
            Ok(InKernel { parked, copied }) if copied.get().is_none() => {
                let parked = parked.into_inner().expect("no panic under this lock");
                match parked {
                    Some(parked) if start == 0 && parked.held() == len => Ok(parked),
                    parked => {
                        let kernel = InKernel { parked: Mutex::new(parked), copied };
                        Err(Data { repr: Repr::Parked(Arc::new(kernel)), start, len })
                    }
                }
            }
            Ok(kernel) => Err(Data { repr: Repr::Parked(Arc::new(kernel)), start, len }),
            Err(kernel) => Err(Data { repr: Repr::Parked(kernel), start, len }),
        }
    }

    /// Whether the memory can be lent to a peer and returned ([`LentPayload`](crate::LentPayload)).
    pub(crate) fn can_be_lent(&self) -> bool {
        matches!(&self.repr, Repr::Shared(buf) if !buf.block().is_shared())
    }

    /// Frees the pages of the memory when its last holder drops it.
    pub(crate) fn retire(&self) {
        if let Repr::Shared(buf) = &self.repr {
            buf.retired.store(true, Ordering::Release);
        }
    }

    /// Whether the bytes are in the kernel: reading them costs a copy.
    pub fn is_parked(&self) -> bool {
        matches!(&self.repr, Repr::Parked(kernel) if kernel.copied.get().is_none())
    }

    /// The whole buffer if it has no other holder; used to change bytes without copying.
    ///
    /// # Errors
    /// The payload, if it is a part of a buffer, is parked, or has another holder.
    pub fn try_into_buf(self) -> Result<Buf, Data> {
        let Data { repr, start, len } = self;
        match repr {
            Repr::Shared(shared) if start == 0 => match Arc::try_unwrap(shared) {
                Ok(mut buf) if !buf.retired.load(Ordering::Acquire) => {
                    buf.truncate(len);
                    Ok(buf)
                }
                Ok(buf) => Err(Data { repr: Repr::Shared(Arc::new(buf)), start, len }),
                Err(shared) => Err(Data { repr: Repr::Shared(shared), start, len }),
            },
            repr => Err(Data { repr, start, len }),
        }
    }
}

impl From<Buf> for Data {
    fn from(buf: Buf) -> Data {
        let len = buf.len();
        Data { repr: Repr::Shared(Arc::new(buf)), start: 0, len }
    }
}

impl From<ParkedPayload> for Data {
    fn from(parked: ParkedPayload) -> Data {
        let len = parked.held();
        let kernel = InKernel { parked: Mutex::new(Some(parked)), copied: OnceLock::new() };
        Data { repr: Repr::Parked(Arc::new(kernel)), start: 0, len }
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Data({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zeroed() {
        assert_eq!(Data::zeroes(1).bytes().as_ptr().align_offset(ALIGN), 0);
        for len in [0, 1, 4095, 4096, 70_000] {
            let buf = Buf::unpooled(len);
            assert_eq!(buf.len(), len);
            assert_eq!(buf.as_ptr().align_offset(ALIGN), 0);
            assert!(buf.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn slices_share_and_unique_data_turns_back_into_a_buffer() {
        let data = Data::copy_of(b"0123456789");
        let part = data.slice(2, 5).slice(1, 3);
        assert_eq!(part.bytes(), b"345");
        let data = data.try_into_buf().unwrap_err();
        drop(part);
        assert_eq!(&*data.try_into_buf().unwrap(), b"0123456789");
    }

    #[test]
    #[should_panic(expected = "slice 8+3 of 10 bytes")]
    fn a_slice_cannot_leave_its_payload() {
        Data::copy_of(b"0123456789").slice(8, 3);
    }
}
