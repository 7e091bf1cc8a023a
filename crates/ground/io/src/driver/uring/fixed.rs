//! Memory registered with the ring (`IORING_REGISTER_BUFFERS2`): the kernel pins its pages once,
//! instead of for each operation. That pays if a device transfers the pages directly: direct reads
//! of 1 MiB took 62 us of processor time instead of 171, of 256 KiB 33 instead of 58 (fio, medians
//! of 3). No difference was seen with 4 KiB, and none with registered files.

use std::sync::{Arc, Weak};

use io_uring::Submitter;

use crate::memory::{AlignedBlock, PageOwner};

/// Maximum number of registered blocks.
const MOST: usize = 64;
/// Maximum registered bytes: they count against the limit of locked memory (RLIMIT_MEMLOCK), and
/// stay when the pool would free them.
const MOST_BYTES: usize = 16 << 20;

/// Blocks of memory that one ring has registered.
#[derive(Default)]
pub(super) struct FixedBuffers {
    /// By index in the ring's own table.
    registered: Vec<Option<RegisteredBlock>>,
    bytes: usize,
    state: RegistrationState,
}

#[derive(Default, PartialEq)]
enum RegistrationState {
    #[default]
    New,
    Usable,
    /// The kernel has refused: no more attempts.
    Refused,
}

struct RegisteredBlock {
    /// Refers to the pages that the kernel holds. Not alive if the block is freed or has other
    /// pages.
    pages: Weak<PageOwner>,
    bytes: usize,
}

impl FixedBuffers {
    /// The index of a block in the ring's table; registers the block if necessary.
    pub(super) fn number(&mut self, ring: &Submitter<'_>, block: &AlignedBlock) -> Option<u16> {
        let pages = block.pages()?;
        if self.state == RegistrationState::Refused {
            return None;
        }
        let is_it = |registered: &Option<RegisteredBlock>| {
            registered
                .as_ref()
                .is_some_and(|registered| registered.pages.as_ptr() == Arc::as_ptr(pages))
        };
        let number = match self.registered.iter().position(is_it) {
            Some(number) => number,
            None => self.learn(ring, block, pages)?,
        };
        u16::try_from(number).ok()
    }

    /// Registers the block, if there is a free index.
    fn learn(
        &mut self,
        ring: &Submitter<'_>,
        block: &AlignedBlock,
        pages: &Arc<PageOwner>,
    ) -> Option<usize> {
        if self.state == RegistrationState::New {
            let table = ring.register_buffers_sparse(u32::try_from(MOST).ok()?);
            self.note(table)?;
            self.registered.resize_with(MOST, || None);
        }
        self.forget_lost(ring)?;
        let place = self.registered.iter().position(Option::is_none)?;
        if self.bytes + block.size() > MOST_BYTES {
            return None;
        }
        self.note(tell(ring, place, block.memory()))?;
        self.bytes += block.size();
        self.registered[place] =
            Some(RegisteredBlock { pages: Arc::downgrade(pages), bytes: block.size() });
        Some(place)
    }

    /// Unregisters pages that no block has any more.
    fn forget_lost(&mut self, ring: &Submitter<'_>) -> Option<()> {
        for place in 0..self.registered.len() {
            let lost = |registered: &mut RegisteredBlock| registered.pages.strong_count() == 0;
            let Some(registered) = self.registered[place].take_if(lost) else { continue };
            self.bytes -= registered.bytes;
            self.note(tell(ring, place, NOTHING))?;
        }
        Some(())
    }

    /// After a refusal, stop registering: most likely the limit of locked memory is reached.
    fn note(&mut self, result: std::io::Result<()>) -> Option<()> {
        self.state = match &result {
            Ok(()) => RegistrationState::Usable,
            Err(error) => {
                log::debug!("the ring learns no memory: {}", crate::plain(error));
                RegistrationState::Refused
            }
        };
        result.ok()
    }
}

const NOTHING: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Sets an index of the ring's table to this memory, or to nothing.
fn tell(ring: &Submitter<'_>, place: usize, memory: libc::iovec) -> std::io::Result<()> {
    let place = u32::try_from(place).expect("far fewer places");
    // SAFETY: the kernel takes hold of the pages behind the memory now, and does not use its
    // address later. An operation names the index only while its block has these very pages
    // (`FixedBuffers::number`).
    unsafe { ring.register_buffers_update(place, &[memory], None) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;

    use io_uring::{IoUring, opcode, types};

    use super::*;
    use crate::memory::Pool;
    use crate::memory::{Buf, Data};

    /// Reads a file of this content into the pages registered under an index.
    fn read_into(ring: &mut IoUring, number: u16, buf: &mut Buf, content: &[u8]) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(content, 0).unwrap();
        let len = u32::try_from(content.len()).unwrap();
        let fd = types::Fd(file.as_raw_fd());
        let entry = opcode::ReadFixed::new(fd, buf.as_mut_ptr(), len, number);
        // SAFETY: the buffer outlives the call below, which waits for the completion.
        unsafe { ring.submission().push(&entry.build()) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        let completion = ring.completion().next().unwrap();
        assert_eq!(usize::try_from(completion.result()), Ok(content.len()));
        assert_eq!(&buf[..content.len()], content);
    }

    #[test]
    fn a_block_is_registered_until_it_has_other_pages() {
        // Needs io_uring; the other driver has its own tests.
        let Ok(mut ring) = IoUring::new(8) else { return };
        let mut fixed = FixedBuffers::default();
        let small = Buf::unpooled(4096);
        assert_eq!(fixed.number(&ring.submitter(), small.block()), None, "no gain by small ones");

        let pool = Pool::new(64 << 10);
        let buf = || pool.try_reserve(64 << 10).unwrap().into_buf();
        let mut first = buf();
        let number = fixed.number(&ring.submitter(), first.block()).expect("there is room");
        read_into(&mut ring, number, &mut first, &[7; 5000]);
        drop(first);
        let mut same = buf();
        assert_eq!(fixed.number(&ring.submitter(), same.block()), Some(number));
        read_into(&mut ring, number, &mut same, &[8; 5000]);

        // Its block returns with other pages.
        let data = Data::from(same);
        data.retire();
        drop(data);
        let mut other = buf();
        let number = fixed.number(&ring.submitter(), other.block()).expect("there is room again");
        assert_eq!(fixed.bytes, 64 << 10, "the pages of before are let go");
        read_into(&mut ring, number, &mut other, &[9; 5000]);
        drop(other);

        pool.keep_idle(0);
        let larger = Buf::unpooled(128 << 10);
        assert!(fixed.number(&ring.submitter(), larger.block()).is_some());
        assert_eq!(fixed.bytes, 128 << 10);
    }

    #[test]
    fn no_more_is_registered_than_may_be() {
        let Ok(ring) = IoUring::new(8) else { return };
        let mut fixed = FixedBuffers::default();
        for (count, size) in [(MOST, 64 << 10), (4, MOST_BYTES / 4)] {
            let blocks: Vec<_> = (0..=count).map(|_| AlignedBlock::new(size)).collect();
            let mut number = |block| fixed.number(&ring.submitter(), block);
            assert_eq!(blocks.iter().filter(|&block| number(block).is_some()).count(), count);
            assert_eq!(fixed.bytes, count * size);
        }
    }
}
